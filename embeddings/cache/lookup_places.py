"""Says where one lookup of a cached table reads its rows, and where its gradient goes."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.residents import CachedRows
from recpoint.embeddings.keyed.slot_memory import LookupRows

__all__ = ["rows_of_lookup"]


def rows_of_lookup(
    cache: Cache, name: str, ids: Tensor, *, trains: bool, sparse: bool, is_bag: bool
) -> LookupRows:
    """Bring the rows that a lookup reads, and return where they are.

    The padding row's place is `LookupRows.padding`.

    Args:
        cache: the cache.
        name: name of the table in it.
        ids: int32 or int64, any shape, on any device: rows of the table.
        trains: gradients flow to the rows.
        sparse: whether the gradient is sparse.
        is_bag: whether the rows are summed in bags.

    Raises:
        IndexError, SettingsError, HomeError: see `Cache.slots_of`.
    """
    rows = cache.tables[name]
    if trains and is_bag and not sparse:
        return _own_rows(cache, rows, ids)
    padding = None if rows.slots.padding_row is None else rows.slots.padding
    places = cache.slots_of(name, ids, trains=trains)
    weight = _weight(rows, sparse=sparse) if trains else rows.slots.weight
    return LookupRows(places, weight, padding)


def _own_rows(cache: Cache, rows: CachedRows, ids: Tensor) -> LookupRows:
    """Return a weight of the lookup's rows alone, in the order of their ids.

    For dense gradients of bags, torch sorts the ids and sums gradients in that order. The sort is
    not stable, so that sums of slots would differ from sums of rows in their last bits. Places
    among the rows sort as the ids do.
    """
    padding_row, looked_up = rows.slots.padding_row, ids
    if padding_row is not None:
        # Also if the lookup does not read it: with a padding row, torch adds in another way.
        looked_up = torch.cat([ids.reshape(-1), ids.new_tensor([padding_row])])
    own_ids, places = torch.unique(looked_up, return_inverse=True)
    own_slots = cache.slots_of(rows.slots.name, own_ids, trains=True)
    weight = _weight(rows, sparse=False).index_select(0, own_slots)
    padding = None
    if padding_row is not None:
        padding, places = int(places[-1]), places[:-1].view(ids.shape)
    return LookupRows(places.to(ids.dtype), weight, padding)


def _weight(rows: CachedRows, *, sparse: bool) -> Tensor:
    weight: Tensor = rows.slots.weight
    if not weight.requires_grad:  # a frozen table, with trained weights of samples
        return weight
    return rows.gradients.weight_of_lookup(sparse=sparse)
