"""Holds one table in memory for lookups alone: values, or codes that lookups decode."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from recpoint.catalog.restore.chunks import StoredRows
from recpoint.catalog.restore.rows import LogicalTable
from recpoint.catalog.restore.target import mark_rows
from recpoint.embeddings.tables import refuse_ids_outside
from recpoint.errors import IncompatibleModel
from recpoint.format.dtypes import torch_dtype
from recpoint.kernels import bit_packing, quantize, row_gather

__all__ = ["CodedTable", "FloatTable", "ServedTable"]

#: Bytes that are copied or converted at once where that needs memory of its own.
_PASS_BYTES: Final = 8 << 20


class FloatTable:
    """Decoded rows.

    Args:
        values: [rows, dim] of the table's dtype, contiguous, on any device; a model's weight, say.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @classmethod
    def empty(cls, table: LogicalTable) -> FloatTable:
        """Of a table of a checkpoint, in fresh memory of the CPU."""
        return cls(torch.empty(table.rows, table.dim, dtype=torch_dtype(table.dtype), device="cpu"))

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return len(self.values)

    @property
    def form(self) -> tuple[object, ...]:
        """Equal for tables between which rows can be copied."""
        return "float", self.values.shape, self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.values.nbytes

    def fits(self, table: LogicalTable) -> bool:
        """Whether rows of this table go in here."""
        shape = tuple(self.values.shape)
        return shape == (table.rows, table.dim) and self.values.dtype == torch_dtype(table.dtype)

    def finish(self) -> None:
        """Every row of a chain is here."""

    def copy_rows(self, other: FloatTable, ids: Tensor | None) -> None:
        """Take over rows int64 [n] of another copy of the table, or all."""
        if ids is None:
            self.values.copy_(other.values)
        elif self.values.is_cpu:
            row_gather.move(other.values, ids, self.values, ids)
        else:
            for part in ids.to(self.values.device).split(_pass_rows(self.values)):
                self.values.index_copy_(0, part, other.values.index_select(0, part))

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows of `ids`, int32 or int64 of any shape [...]: [..., dim] of the table's dtype.

        Raises:
            IndexError: an id is out of range.
        """
        return F.embedding(ids, self.values)


class CodedTable:
    """Rows as they are stored: packed codes with scale and offset, decoded when looked up.

    Rows of fewer bits are kept in as many as the widest has, which changes no code. Rows that are
    stored exactly are kept beside the codes; their scale is NaN, which no stored one is.

    Args:
        table: of a checkpoint.
        bits: 2, 3, 4 or 8.
    """

    def __init__(self, table: LogicalTable, bits: int) -> None:
        self._spec = table
        self.bits = bits
        self.changed: Tensor | None = None
        self._codes = torch.zeros(
            table.rows, _width(table.dim, bits), dtype=torch.uint8, device="cpu"
        )
        self._scale = torch.zeros(table.rows, dtype=torch.float32, device="cpu")
        self._offset = torch.zeros(table.rows, dtype=torch.float32, device="cpu")
        self._dtype = torch_dtype(table.dtype)
        # Replaced, never written to: two copies of a table share them.
        self._exact_ids = torch.empty(0, dtype=torch.int64, device="cpu")
        self._exact = torch.empty(0, table.dim, dtype=self._dtype, device="cpu")
        self._new: list[tuple[Tensor, Tensor]] = []

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self._spec.rows

    @property
    def wanted(self) -> None:
        """See `catalog.restore.target.RowSink`: all rows."""
        return None

    @property
    def form(self) -> tuple[object, ...]:
        """Equal for tables between which rows can be copied."""
        return "coded", self._spec.rows, self._spec.dim, self._dtype

    def empty_like(self) -> CodedTable:
        """For the same rows, in memory of its own."""
        return CodedTable(self._spec, self.bits)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        coded = self._codes.nbytes + self._scale.nbytes + self._offset.nbytes
        return coded + self._exact_ids.nbytes + self._exact.nbytes

    def fits(self, table: LogicalTable) -> bool:
        """Whether rows of this table go in here."""
        ours = (self._spec.rows, self._spec.dim, self._spec.dtype)
        return ours == (table.rows, table.dim, table.dtype)

    def into(self, table: LogicalTable, changed: Tensor | None) -> CodedTable:
        """Where a chain is read into: itself."""
        if not self.fits(table):
            raise IncompatibleModel(
                f"table {table.name!r}",
                found=f"{table.rows} rows of {table.dim} {table.dtype}",
                expected=f"{self._spec.rows} rows of {self._spec.dim} {self._spec.dtype}",
                next_step="start the serving process anew",
            )
        self.changed = changed
        self._new.clear()
        return self

    def take(self, stored: StoredRows, positions: Tensor | None) -> None:
        """See `catalog.restore.target.RowSink.take`."""
        if positions is not None and positions.numel() == 0:
            return
        ids = _ids(stored.rows, positions)
        if stored.scheme == "exact":
            values = stored.values if positions is None else stored.values[positions]
            self._new.append((ids, values.clone()))
            self._scale[ids] = torch.nan
            return
        if stored.bits > self.bits:
            self._widen(stored.bits)
        for start in range(0, ids.numel(), _pass_rows(self._codes)):
            part = slice(start, start + _pass_rows(self._codes))
            at = ids[part]
            chosen = part if positions is None else positions[part]
            codes = stored.values[chosen]
            row_gather.scatter(self._repacked(codes, stored.bits), at, self._codes)
            self._scale[at] = stored.scale[chosen]
            self._offset[at] = stored.offset[chosen]

    def mark(self, rows: range | Tensor) -> None:
        """See `catalog.restore.target.RowSink.mark`."""
        mark_rows(self.changed, rows, of=self._spec.rows)

    def finish(self) -> None:
        """Every row of a chain is here."""
        self.changed = None
        ids = torch.cat([self._exact_ids, *(ids for ids, _ in self._new)])
        values = torch.cat([self._exact, *(values for _, values in self._new)])
        old = torch.arange(ids.numel(), device="cpu") < self._exact_ids.numel()
        new_ids = ids[~old]
        # An old one counts if the row is still exact and was not brought anew.
        keep = self._scale[ids].isnan() & ~(old & torch.isin(ids, new_ids))
        ids, values = ids[keep], values[keep]
        order = ids.argsort()
        self._exact_ids, self._exact = ids[order], values[order]
        self._new.clear()

    def copy_rows(self, other: CodedTable, ids: Tensor | None) -> None:
        """Take over rows int64 [n] of another copy of the table, or all."""
        self._new.clear()
        if self.bits < other.bits:
            self._widen(other.bits)
        if ids is None:
            ids = torch.arange(self._spec.rows, device="cpu")
        for part in ids.split(_pass_rows(self._codes)):
            codes = self._repacked(other._codes[part], other.bits)
            row_gather.scatter(codes, part, self._codes)
        row_gather.move(other._scale, ids, self._scale, ids)
        row_gather.move(other._offset, ids, self._offset, ids)
        self._exact_ids, self._exact = other._exact_ids, other._exact

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows of `ids`, int32 or int64 of any shape [...]: [..., dim] of the table's dtype.

        Raises:
            IndexError: an id is out of range.
            TypeError: ids of another dtype, which would be rounded.
        """
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"table {self._spec.name!r}: ids of {ids.dtype}, not int32 or int64")
        flat = ids.reshape(-1).to(torch.int64)
        refuse_ids_outside(self._spec.name, flat, rows=self._spec.rows)
        scale = self._scale[flat]
        values = quantize.dequantize_packed(
            self._codes[flat], scale, self._offset[flat], dim=self._spec.dim, bits=self.bits
        ).to(self._dtype)
        exact = scale.isnan()
        if bool(exact.any()):
            values[exact] = self._exact[torch.searchsorted(self._exact_ids, flat[exact])]
        return values.reshape(*ids.shape, self._spec.dim)

    def _widen(self, bits: int) -> None:
        narrow, from_bits = self._codes, self.bits
        self.bits = bits
        self._codes = torch.empty(
            self._spec.rows, _width(self._spec.dim, bits), dtype=torch.uint8, device="cpu"
        )
        step = _pass_rows(self._codes)
        for start in range(0, self._spec.rows, step):
            part = slice(start, start + step)
            self._codes[part] = self._repacked(narrow[part], from_bits)

    def _repacked(self, codes: Tensor, bits: int) -> Tensor:
        """The same codes in `self.bits` bits each, contiguous."""
        if bits == self.bits:
            return codes.contiguous()
        return bit_packing.pack(bit_packing.unpack(codes, dim=self._spec.dim, bits=bits), self.bits)


ServedTable = FloatTable | CodedTable


def _ids(rows: range | Tensor, positions: Tensor | None) -> Tensor:
    if isinstance(rows, range):
        return (
            torch.arange(rows.start, rows.stop, device="cpu")
            if positions is None
            else positions + rows.start
        )
    return rows if positions is None else rows[positions]


def _width(dim: int, bits: int) -> int:
    return -(-dim * bits // 8)


def _pass_rows(table: Tensor) -> int:
    return max(1, _PASS_BYTES // max(1, table.nbytes // max(1, len(table))))
