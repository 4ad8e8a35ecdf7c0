"""A restored checkpoint as the state of a model, without the code that built it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from recpoint.catalog.chunks.dense_shards import dense_shards, join_shards
from recpoint.catalog.restoring.memory_target import MemoryTarget

__all__ = ["dense_tensors", "extra_states", "model_tensors", "weight_name"]


def model_tensors(target: MemoryTarget) -> dict[str, torch.Tensor]:
    """Tables and the rest of the model by parameter name, as in `Module.state_dict`."""
    tensors = dense_tensors(target.state)
    for name, table in target.tables.items():
        tensors[weight_name(name)] = table.values
    return tensors


def weight_name(table: str) -> str:
    """The parameter's full name of a table; of a model that is one itself, both are `weight`."""
    return table if table == "weight" else f"{table}.weight"


def dense_tensors(state: Mapping[int, object]) -> dict[str, torch.Tensor]:
    """Parameters and buffers but for the tables, by name, whole; of the state tree of each rank.

    What several ranks hold a piece of each comes in fresh memory. Of what each has of its own
    (buffers) that of the lowest rank counts, as for a rank that the checkpoint does not have.

    Raises:
        MalformedObject: the pieces of one do not make it up.
    """
    tensors: dict[str, torch.Tensor] = {}
    pieces = dense_shards(state)
    for rank in sorted(state, reverse=True):
        dense = _at(_at(state[rank], "model"), "tensors")
        if isinstance(dense, Mapping):
            tensors.update((n, t) for n, t in dense.items() if isinstance(t, torch.Tensor))
    for name, shards in pieces.items():
        tensors[name] = join_shards(shards, name=name)
    return tensors


def extra_states(state: Mapping[int, object]) -> dict[str, object]:
    """What modules gave with `get_extra_state`, by the module's name; of the lowest rank."""
    found: dict[str, object] = {}
    for rank in sorted(state, reverse=True):
        extra = _at(_at(state[rank], "model"), "extra")
        if isinstance(extra, Mapping):
            found.update((str(name), value) for name, value in extra.items())
    return found


def _at(tree: object, key: str) -> object:
    return tree.get(key) if isinstance(tree, Mapping) else None
