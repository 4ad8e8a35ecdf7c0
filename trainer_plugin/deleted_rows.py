"""Rows named by hand: which of them are here, and zeros for those that are not in use any more."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from recpoint.trainer_plugin.table import Table

__all__ = ["held_ids", "zero_rows"]


def zero_rows(table: Table, row_states: Iterable[Tensor], ids: Tensor) -> None:
    """Set rows, and their entries of each row state, to zero.

    Args:
        table: whose rows.
        row_states: [rows, ...] each.
        ids: int64 [n], positions in the weight, as `held_ids` returns them.
    """
    with torch.no_grad():
        for tensor in (table.weight, *row_states):
            tensor.index_fill_(0, ids.to(tensor.device), 0)


def held_ids(table: Table, ids: Tensor) -> Tensor:
    """Those of some rows that this process holds.

    Args:
        table: whose rows.
        ids: int32 or int64, any shape: positions in the whole table.

    Returns:
        int64 [n], on the weight's device: positions in the weight.

    Raises:
        TypeError: ids are no tensor.
        ValueError: ids are of another dtype.
        IndexError: an id is out of range.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids: found {type(ids).__name__}, expected a tensor of int32 or int64")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids of {ids.dtype}, expected int32 or int64")
    flat = ids.reshape(-1).to(device=table.weight.device, dtype=torch.int64)
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < table.table_rows:
        raise IndexError(f"table {table.name!r}: a row outside 0 … {table.table_rows - 1}")
    if table.rows == table.table_rows:
        return flat
    local = flat - table.first_row
    return local[(local >= 0) & (local < table.rows)]
