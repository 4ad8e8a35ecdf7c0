"""Names the tensors of the state trees in a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import torch

from recpoint.catalog.restore.restore import dense_tensors, state_dict, transient_buffers

__all__ = [
    "Include",
    "collect_tensors",
    "model_name",
    "state_tensors",
    "transient_tensors",
    "without_model",
]


#: What files hold of a checkpoint: what `Module.load_state_dict` takes, or everything stored.
Include = Literal["model", "all"]


def state_tensors(state: Mapping[int, object], include: Include) -> dict[str, torch.Tensor]:
    """Return the tensors of the state trees by their names in a file; all are dense.

    Args:
        state: the state tree of each rank.
        include: with `model` the names are those of `Module.state_dict`. With `all` they are
            model/NAME for these, buffers/NAME for the buffers that are not persistent, and
            ranks/RANK/… for everything else.
    """
    named: dict[str, torch.Tensor] = {}
    for name, value in state_dict(state, {}).items():
        if isinstance(value, torch.Tensor | np.ndarray):  # an extra state may have any type
            collect_tensors(named, model_name(name, include), value, "/")
    if include == "all":
        collect_tensors(named, "buffers", transient_tensors(state), "/")
        collect_tensors(named, "ranks", without_model(state), "/")
    return named


def model_name(name: str, include: Include) -> str:
    """Return the name in a file of the tensor that `Module.state_dict` calls `name`."""
    return name if include == "model" else f"model/{name}"


def transient_tensors(state: Mapping[int, object]) -> dict[str, torch.Tensor]:
    """Return by name the buffers that `Module.state_dict` leaves out."""
    transient = transient_buffers(state)
    return {name: t for name, t in dense_tensors(state).items() if name in transient}


def without_model(state: Mapping[int, object]) -> dict[int, object]:
    """Return the state trees without the model."""
    return {
        rank: {key: value for key, value in tree.items() if key != "model"}
        if isinstance(tree, Mapping)
        else tree
        for rank, tree in state.items()
    }


def collect_tensors(
    tensors: dict[str, torch.Tensor], name: str, value: object, separator: str
) -> None:
    """Add each tensor of a tree to `tensors` under its path; a sparse one as indices and values."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            coalesced = value.coalesce()
            items = (("indices", coalesced.indices()), ("values", coalesced.values()))
        else:
            tensors[name] = value
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        collect_tensors(tensors, f"{name}{separator}{key}", item, separator)
