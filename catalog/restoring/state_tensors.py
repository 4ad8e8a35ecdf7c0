"""Names for every tensor of the state trees, as files of named tensors need them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from recpoint.catalog.restoring.restored_model import dense_tensors

__all__ = ["collect_tensors", "state_tensors", "without_model"]


def state_tensors(state: Mapping[int, object]) -> dict[str, torch.Tensor]:
    """All tensors of the state tree of each rank: model/NAME, ranks/RANK/…; dense ones."""
    named: dict[str, torch.Tensor] = {}
    collect_tensors(named, "model", dense_tensors(state), "/")
    collect_tensors(named, "ranks", without_model(state), "/")
    return named


def without_model(state: Mapping[int, object]) -> dict[int, object]:
    """The state trees without what `dense_tensors` takes from them."""
    return {
        rank: {key: value for key, value in tree.items() if key != "model"}
        if isinstance(tree, Mapping)
        else tree
        for rank, tree in state.items()
    }


def collect_tensors(
    into: dict[str, torch.Tensor], name: str, value: object, separator: str
) -> None:
    """Put every dense tensor of a tree into `into`, under its path."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            coalesced = value.coalesce()
            items = (("indices", coalesced.indices()), ("values", coalesced.values()))
        else:
            into[name] = value
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        collect_tensors(into, f"{name}{separator}{key}", item, separator)
