"""Adds residuals to the rows of the full that they are stored against (format §3.7).

The codes of the full's rows stay in memory, for one table or part of it, until its residuals are
decoded: for rows of 2 to 4 bits that is about a tenth of the rows' memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from recpoint.catalog.restore.chunks import StoredRows
from recpoint.catalog.restore.row_places import RowPlaces
from recpoint.catalog.run.lineage import Representation
from recpoint.errors import MalformedObject
from recpoint.format.dtypes import item_bytes, torch_dtype
from recpoint.format.manifest import ChunkEntry, Manifest, TableSpec
from recpoint.kernels import quantize, row_gather

__all__ = ["BaseRows", "base_entries", "decoded_values", "sum_of"]

#: Decoded bytes at once: few enough to fit the caches and to bound the memory.
_PASS_BYTES: Final = 8 << 20


def base_entries(base: Manifest, table: int, wanted_rows: range) -> list[ChunkEntry]:
    """Return the chunks of a full that may hold wanted rows of a table, in the manifest's order."""
    return [
        entry
        for entry in base.chunks
        if entry.table == table
        and entry.first_row is not None
        and entry.last_row is not None
        and entry.first_row < wanted_rows.stop
        and entry.last_row >= wanted_rows.start
    ]


def decoded_values(stored: StoredRows, spec: TableSpec) -> Tensor:
    """Return rows that are no residuals, [n, dim] of the table's dtype (format §3.2)."""
    if stored.scheme == "exact":
        return stored.values
    rows = quantize.dequantize_packed(
        stored.values, stored.scale, stored.offset, dim=spec.dim, bits=stored.bits
    )
    return rows.to(torch_dtype(spec.dtype))  # rounds


def sum_of(base: Tensor, residuals: Tensor) -> Tensor:
    """Return base rows plus decoded residuals, f32 [n, dim], rounded to the dtype of `base`."""
    return (base.to(torch.float32) + residuals).to(base.dtype)


class BaseRows:
    """Rows of one table as the base of a chain has them, for the residuals of the chain.

    Args:
        base: the full's own manifest.
        table: index of the table.
        wanted_rows: rows that may be asked for; ids are counted from its start.
    """

    def __init__(self, base: Manifest, table: int, wanted_rows: range) -> None:
        self._base = base
        self._spec = base.tables[table]
        self._wanted_rows = wanted_rows
        self._parts: list[StoredRows] = []
        self._places = RowPlaces(len(wanted_rows))

    def add(self, stored: StoredRows) -> None:
        """Keep the values of one of the full's chunks; its memory may be used again."""
        part = stored.within(self._wanted_rows)
        if not len(part.rows):
            return
        self._places.add(part.rows)
        # First values are computed again when they are asked for.
        kept = part.values if part.first is None else part.values[:0]
        values, scale, offset = (t.clone() for t in (kept, part.scale, part.offset))
        self._parts.append(
            replace(
                part,
                rows=range(len(part.rows)),  # the map knows them
                values=values,
                scale=scale,
                offset=offset,
                row_states=(),
            )
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in memory."""
        kept = (t for part in self._parts for t in (part.values, part.scale, part.offset))
        return self._places.nbytes + sum(tensor.nbytes for tensor in kept)

    def values_of(self, ids: Tensor) -> Tensor:
        """Return rows decoded: [n, dim], of the table's dtype.

        Args:
            ids: int64 [n], ascending, without duplicates, counted from `wanted_rows.start`.

        Raises:
            MalformedObject: the full lacks a row.
        """
        dtype = torch_dtype(self._spec.dtype)
        values = torch.empty(ids.numel(), self._spec.dim, dtype=torch.float32, device="cpu")
        rows_added = 0
        for number, own_ids, positions in self._places.find(ids):
            part = self._parts[number]
            rows_added += own_ids.numel()
            if part.first is None and part.scheme != "exact":
                quantize.dequantize_rows(
                    part.values,
                    part.scale,
                    part.offset,
                    values,
                    own_ids,
                    bits=part.bits,
                    positions=positions,
                )
            elif part.first is None:
                exact = part.values.new_empty(own_ids.numel(), self._spec.dim)
                row_gather.gather(part.values, positions, exact)
                row_gather.scatter(exact.to(torch.float32), own_ids, values)
            else:
                row_ids = ids[own_ids] + self._wanted_rows.start
                first = part.first.rows(self._spec, row_ids).to(torch.float32)
                row_gather.scatter(first.contiguous(), own_ids, values)
        if rows_added != ids.numel():
            raise MalformedObject(
                Representation.of(self._base).key,
                found=f"{rows_added} of {ids.numel()} rows of table {self._spec.name!r:.80}",
                expected="each row that a residual is stored of",
                next_step="restore an older checkpoint: recpoint list URL",
            )
        return values.to(dtype)  # rounds what was decoded, and nothing else

    def restored(self, stored: StoredRows, positions: Tensor | None) -> Iterator[StoredRows]:
        """Yield residuals as rows of scheme `exact`, a few MiB at a time, in their order.

        Args:
            stored: a chunk of residuals; ids counted from `wanted_rows.start`.
            positions: positions of the rows in the chunk, int64 [m], ascending; None: all.
        """
        count = len(stored.rows) if positions is None else positions.numel()
        rows_each = max(1, _PASS_BYTES // (self._spec.dim * 4))
        for first in range(0, count, rows_each):
            stop = min(first + rows_each, count)
            chosen = (
                torch.arange(first, stop, device="cpu")
                if positions is None
                else positions[first:stop]
            )
            rows = stored.chosen(chosen)
            assert isinstance(rows.rows, Tensor)  # chosen by positions
            values = sum_of(self.values_of(rows.rows), self.residuals(rows))
            yield replace(
                rows,
                scheme="exact",
                bits=8 * item_bytes(self._spec.dtype),
                values=values,
                scale=values.new_empty(0, dtype=torch.float32),
                offset=values.new_empty(0, dtype=torch.float32),
            )

    def residuals(self, stored: StoredRows) -> Tensor:
        """Return the residuals of a chunk decoded: f32 [n, dim]."""
        return quantize.dequantize_packed(
            stored.values, stored.scale, stored.offset, dim=self._spec.dim, bits=stored.bits
        )
