"""The state trees of all ranks of a checkpoint, as one of the ranks that restore it needs them.

Dense parameters that every rank has, and what optimizers have of them, are in the tree of rank 0
alone (`replicas.py`). Of the others each has what is its own: pieces of dense tensors, buffers,
extra states, hyperparameters, schedulers, generators, reader, extras, the state of its tables.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from recpoint.catalog.chunks.dense_shards import dense_shards, is_shard, parse_shard

__all__ = ["nearest", "optimizers_for", "own_part", "tree_for"]

_WHOLE = frozenset(("model", "optimizers"))


def own_part(tree: Mapping[str, Any], *, alike: Collection[str]) -> dict[str, Any]:
    """What a rank other than 0 stores of its whole tree.

    Args:
        tree: as `training_state.TrainingState` captures it; pieces of tensors as pieces.
        alike: names of the tensors that are the same on all ranks; so is what the optimizers have
            of them.
    """
    tensors = {name: t for name, t in tree["model"]["tensors"].items() if name not in alike}
    optimizers = []
    for one in tree["optimizers"]:
        state = {
            name: _pieces(entry) if name in alike else entry for name, entry in one["state"].items()
        }
        optimizers.append({**one, "state": state})
    return {**tree, "model": {**tree["model"], "tensors": tensors}, "optimizers": optimizers}


def _pieces(entry: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in entry["values"].items() if is_shard(value)}
    return {**entry, "values": values}


def tree_for(
    state: Mapping[int, object], rank: int, count: int, stored: int
) -> dict[str, Any] | None:
    """One tree for a rank, of those of a checkpoint; None: they hold no training state.

    Pieces of dense tensors are lists of `DenseShard`, of all ranks whose trees are whole. `rng` is
    None where no rank of this number was there; `other_optimizers` are those of the trees of other
    ranks, as far as they were read; `readers` are the states of all ranks' readers,
    None of those that were not read; `reader` is that of this one, None where the number of ranks
    is another.

    Args:
        state: rank -> its tree, as restored: of rank 0 and of this one, where it was there, whole;
            of others whole, in part, or not at all.
        rank: of this process.
        count: of ranks now.
        stored: of ranks of the checkpoint.

    Raises:
        MalformedObject: a piece that is none.
    """
    trees: dict[int, dict[str, Any]] = {
        number: tree for number, tree in sorted(state.items()) if isinstance(tree, dict)
    }
    if len(trees) < len(state):
        return None
    whole: dict[int, Any] = {n: tree for n, tree in trees.items() if _is_whole(tree)}
    if 0 not in whole or (rank in state and rank not in whole):
        return None
    first, own = whole[0], whole.get(rank)
    readers = [trees[n].get("reader") if n in trees else None for n in range(stored)]
    sources: dict[str, list[Any]] = {}
    for tree in trees.values():
        for name, value in tree.get("sources", {}).items():
            sources.setdefault(name, []).append(value)
    return {
        **first,
        "model": _model(first["model"], None if own is None else own["model"], dense_shards(whole)),
        "optimizers": optimizers_for(whole, first if own is None else own),
        "other_optimizers": [
            tree["optimizers"]
            for number, tree in trees.items()
            if number != (0 if own is None else rank) and "optimizers" in tree
        ],
        "schedulers": own["schedulers"] if own and own["schedulers"] else first["schedulers"],
        "reader": readers[rank] if stored == count else None,
        "readers": readers,
        "extras": first.get("extras") if own is None else own.get("extras"),
        "sources": sources,
        "rng": None if own is None else own.get("rng"),
    }


def _is_whole(tree: object) -> bool:
    return isinstance(tree, dict) and tree.keys() >= _WHOLE


def nearest(rank: int, count: int, stored: int, known: Mapping[int, object]) -> set[int]:
    """Ranks of a checkpoint that are likely to have the pieces which one of now lacks.

    Libraries cut tensors in the order of ranks, so those come first whose share lies where this
    rank's does; each time that it is asked with the trees of all these, twice as many beside them.

    Args:
        rank, count: of this process, and how many there are.
        stored: how many the checkpoint has.
        known: the trees that are there, whole or in part.
    """
    have = {number for number, tree in known.items() if _is_whole(tree)}
    first, end = rank * stored // count, -(-(rank + 1) * stored // count)
    reach = 0
    while True:
        near = set(range(max(0, first - reach), min(stored, end + reach)))
        if len(near) == stored or not near <= have:
            return near
        reach = max(1, 2 * reach)


def _model(
    first: Mapping[str, Any], own: Mapping[str, Any] | None, pieces: Mapping[str, Any]
) -> dict[str, Any]:
    """The model of a rank that was there, else with the buffers and extra states of rank 0."""
    if own is None:
        return {**first, "tensors": first["tensors"] | pieces}
    return {**own, "tensors": first["tensors"] | own["tensors"] | pieces}


def optimizers_for(trees: Mapping[int, Any], own: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The optimizers of a rank, of the trees of several.

    Args:
        trees: whole ones, by rank.
        own: of the rank whose hyperparameters they have, and that has no state of tables which only
            others hold; None: they have the state of all, and are no rank's.
    """
    saved = [tree["optimizers"] for tree in trees.values()]
    return [
        _optimizer(
            [one[number] for one in saved], None if own is None else own["optimizers"][number]
        )
        for number in range(min(map(len, saved), default=0))
    ]


def _optimizer(saved: list[Any], own: Mapping[str, Any] | None) -> dict[str, Any]:
    others = {name for one in saved for name in _trained(one)}
    elsewhere = others - set(_trained(own)) if own is not None else set()
    entries: dict[str, Any] = {}
    for one in saved:
        for name, entry in one["state"].items():
            if name in elsewhere:
                continue
            found = entries.setdefault(name, {**entry, "values": {}})
            for key, value in entry["values"].items():
                if is_shard(value):
                    shard = parse_shard(value, name=f"{name}, {key}")
                    found["values"].setdefault(key, []).append(shard)
                else:
                    found["values"].setdefault(key, value)
    return {**(saved[0] if own is None else own), "state": entries}


def _trained(one: Mapping[str, Any]) -> list[str]:
    return [name for group in one["groups"] for name in group["params"]]
