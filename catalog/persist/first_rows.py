"""Finds the rows of a block that nothing has changed since a rule gave their values (format §3.9).

Bits are compared, and nothing is tracked: a row whose values and row states are those of the rule
comes back the same, whatever has happened to it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.persist.block_rows import BlockRows, passes
from recpoint.catalog.persist.plan import RowBlock, stored_row_bytes
from recpoint.catalog.persist.residuals import staged_ids
from recpoint.catalog.staging.job import StagedJob, state_name, values_name

__all__ = ["first_rows"]

_Flags = np.ndarray[Any, np.dtype[np.bool_]]

#: What a chunk costs beside its rows: its header, its entry in manifests, and a request. Rows that
#: would cost less as codes get no chunk of their own.
_CHUNK_COST_BYTES: Final = 4096


def first_rows(staged: StagedJob, block: RowBlock) -> _Flags | None:
    """Return which rows of a block have their first values and equal row states: bool [rows].

    None if there is no rule, or if there are so few that a chunk of them would save nothing.

    Raises:
        MalformedObject, StagingError: the slot is damaged, or cannot be read.
    """
    table = staged.job.tables[block.table]
    rule, spec = table.first_values, table.spec
    if rule is None:
        return None
    values = BlockRows(staged, block, values_name(block.table))
    states = [
        BlockRows(staged, block, state_name(block.table, number))
        for number in range(len(spec.row_states))
    ]
    is_first = np.zeros(block.rows, np.bool_)
    entry: Tensor | None = None  # bytes of the row states that all of these rows have
    for rows in passes(staged, block):
        span = range(block.first + rows.start, block.first + rows.stop)
        ids, stored = staged_ids(staged, block.table, [span]), values.read(rows)
        # Nearly all trained rows differ in the first value.
        places = _equal(rule.rows(spec, ids, values=1), stored[:, :1]).nonzero().view(-1)
        places = places[_equal(rule.rows(spec, ids[places]), stored[places])]
        if not len(places):
            continue
        none = torch.empty(len(places), 0, dtype=torch.uint8, device="cpu")
        of_states = torch.cat(
            [none, *(_bytes(state.read(rows)[places]) for state in states)], dim=1
        )
        if entry is None:
            entry = _most_common(of_states)
        is_same = _equal(entry.expand_as(of_states), of_states)
        is_first[rows.start : rows.stop][places[is_same].numpy()] = True
    if int(is_first.sum()) * stored_row_bytes(table) < _CHUNK_COST_BYTES:
        return None
    return is_first


def _equal(first: Tensor, stored: Tensor) -> Tensor:
    """Tell which rows have the same bits: bool [n]."""
    return (_words(_bytes(first)) == _words(_bytes(stored))).all(dim=1)


def _most_common(rows: Tensor) -> Tensor:
    """Return the row that most rows are equal to, u8 [b], of u8 [n, b].

    Rows that were trained without a change of their values, as with a learning rate of zero, may
    come first.
    """
    if 2 * int(_equal(rows[:1].expand_as(rows), rows).sum()) >= len(rows):
        return rows[0]
    entries = np.ascontiguousarray(rows.numpy()).view(f"V{rows.shape[1]}")[:, 0]
    _, positions, counts = np.unique(entries, return_index=True, return_counts=True)
    return rows[int(positions[counts.argmax()])]


def _bytes(rows: Tensor) -> Tensor:
    """Return rows [n, …] as bytes, u8 [n, bytes]."""
    return rows.unsqueeze(1).flatten(1).contiguous().view(torch.uint8)


def _words(rows: Tensor) -> Tensor:
    """Return rows as the longest integers that divide them, to compare fewer."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if rows.shape[1] and rows.shape[1] % dtype.itemsize == 0:
            return rows.view(dtype)
    return rows
