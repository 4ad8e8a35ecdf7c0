"""The state trees of all ranks of a checkpoint, as one of the ranks that restore it needs them.

What is the same on every rank is in the tree of rank 0 alone. Of the others each has what is its
own: pieces of dense tensors, generators, reader, extras, the state of its tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recpoint.catalog.dense_shards import dense_shards, is_shard, parse_shard

__all__ = ["own_part", "tree_for"]

_SHARED = ("schedulers",)


def own_part(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank other than 0 stores of its whole tree.

    Args:
        tree: as `training_state.TrainingState` captures it; pieces of tensors as pieces.
    """
    model = {name: value for name, value in tree["model"]["tensors"].items() if is_shard(value)}
    optimizers = []
    for one in tree["optimizers"]:
        state = {name: _pieces(entry) for name, entry in one["state"].items()}
        optimizers.append({**one, "state": state, "other": {}})
    return {
        **tree,
        "model": {"tensors": model, "extra": {}},
        "optimizers": optimizers,
        **{key: None for key in _SHARED},
    }


def _pieces(entry: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in entry["values"].items() if is_shard(value)}
    return {**entry, "values": values}


def tree_for(state: Mapping[int, object], rank: int, count: int) -> dict[str, Any] | None:
    """One tree for a rank, of those of a checkpoint; None: they hold no training state.

    Pieces of dense tensors are lists of `DenseShard`, of all ranks. `rng` is None where no rank of
    this number was there; `readers` are the states of all ranks' readers, `reader` is that of this
    one, None where the number of ranks is another.

    Args:
        state: rank -> its tree, as restored.
        rank: of this process.
        count: of ranks now.

    Raises:
        MalformedObject: a piece that is none.
    """
    trees = [state[number] for number in sorted(state)]
    if not all(isinstance(tree, dict) and {"model", "optimizers"} <= tree.keys() for tree in trees):
        return None
    first: Any = trees[0]
    own: Any = state.get(rank)
    tensors = {**first["model"]["tensors"], **dense_shards(state)}
    readers = [tree.get("reader") for tree in trees]  # type: ignore[attr-defined]
    sources: dict[str, list[Any]] = {}
    for tree in trees:
        for name, value in tree.get("sources", {}).items():  # type: ignore[attr-defined]
            sources.setdefault(name, []).append(value)
    return {
        **first,
        "model": {**first["model"], "tensors": tensors},
        "optimizers": [
            _optimizer([tree["optimizers"][number] for tree in trees])  # type: ignore[index]
            for number in range(len(first["optimizers"]))
        ],
        "reader": readers[rank] if len(trees) == count else None,
        "readers": readers,
        "extras": first.get("extras") if own is None else own.get("extras"),
        "sources": sources,
        "rng": None if own is None else own.get("rng"),
    }


def _optimizer(saved: list[Any]) -> dict[str, Any]:
    """One optimizer, of the trees of all ranks."""
    entries: dict[str, Any] = {}
    for one in saved:
        for name, entry in one["state"].items():
            found = entries.setdefault(name, {**entry, "values": {}})
            for key, value in entry["values"].items():
                if is_shard(value):
                    shard = parse_shard(value, name=f"{name}, {key}")
                    found["values"].setdefault(key, []).append(shard)
                else:
                    found["values"].setdefault(key, value)
    return {**saved[0], "state": entries}
