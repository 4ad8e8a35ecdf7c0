"""Restores a cached table: its rows go to their home, and no row is in a slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from recpoint.catalog.restore.chunks import StoredRows
from recpoint.catalog.restore.placement import place
from recpoint.catalog.restore.rows import LogicalTable
from recpoint.catalog.restore.target import TableTarget, mark_rows
from recpoint.embeddings.cached_tables import CachedTable
from recpoint.embeddings.slots import RecordLayout
from recpoint.format.dtypes import torch_dtype

__all__ = ["HomeSink", "columns_differ", "state_tensors"]

_ROWS_AT_A_TIME: Final = 65_536


def columns_differ(table: CachedTable, stored: LogicalTable) -> list[str]:
    """Return why the rows of a checkpoint cannot go to a home, one sentence for each reason."""
    if len(stored.pieces) == 1:
        return []
    return [
        f"table {table.name!r} is cached here, and the checkpoint has it in {len(stored.pieces)} "
        "pieces by columns: restore it into a model without a cache, take a checkpoint there, and "
        "restore that"
    ]


def state_tensors(table: CachedTable, stored: LogicalTable) -> dict[str, Tensor]:
    """Return zeroed row states of the slots, [slots, …] each, as the checkpoint names them."""
    weight = table.weight
    return {
        state.name: torch.zeros(
            (weight.shape[0], *state.shape), dtype=torch_dtype(state.dtype), device=weight.device
        )
        for state in stored.row_states
    }


class HomeSink:
    """Writes one table's rows to its home; a `RowSink`.

    Args:
        table: the table; its cache has been emptied (`Cache.restored`).
        stored: the table in the checkpoint, in one piece.
        states: name -> row state of the slots, as `state_tensors` returns them.
        changed: bitmap of the rows that increments held; None: nobody asks.
    """

    wanted = None

    def __init__(
        self,
        table: CachedTable,
        stored: LogicalTable,
        states: Mapping[str, Tensor],
        changed: Tensor | None,
    ) -> None:
        self._cache = table.cache
        self._name = table.key_in_cache
        self._rows = stored.rows
        self._changed = changed
        slots = table.cached_rows.slots
        slots.states = dict(states)
        self._layout: RecordLayout = slots.fix_layout()

    def take(self, stored: StoredRows, positions: Tensor | None) -> None:
        """See `RowSink.take`."""
        count = len(stored.rows) if positions is None else positions.numel()
        for first in range(0, count, _ROWS_AT_A_TIME):
            last = min(first + _ROWS_AT_A_TIME, count)
            if positions is None:
                at = torch.arange(first, last, dtype=torch.int64, device="cpu")
            else:
                at = positions[first:last]
            self._take(stored, at)

    def _take(self, stored: StoredRows, at: Tensor) -> None:
        rows = stored.rows
        ids = at + rows.start if isinstance(rows, range) else rows[at]
        quantized = stored.scheme != "exact"
        part = replace(
            stored,
            rows=range(at.numel()),
            values=stored.values[at],
            scale=stored.scale[at] if quantized else stored.scale,
            offset=stored.offset[at] if quantized else stored.offset,
            row_states=tuple(state[at] for state in stored.row_states),
        )
        arrays = [
            torch.empty((at.numel(), *field.shape), dtype=field.dtype, device="cpu")
            for field in self._layout.fields
        ]
        place(part, None, TableTarget(values=arrays[0], row_states=tuple(arrays[1:])))
        records = torch.empty(at.numel(), self._layout.size_bytes, dtype=torch.uint8, device="cpu")
        for field, array in zip(self._layout.fields, arrays, strict=True):
            self._layout.put(records, field, array)
        self._cache.write_home(self._name, ids.contiguous(), records)

    def mark(self, rows: range | Tensor) -> None:
        """See `RowSink.mark`."""
        mark_rows(self._changed, rows, of=self._rows)
