"""Holds one table in memory for lookups only, as values or as codes that lookups decode."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from recpoint.catalog.restore.chunks import StoredRows
from recpoint.catalog.restore.rows import LogicalTable
from recpoint.catalog.restore.target import mark_rows
from recpoint.embeddings.tables.tables import refuse_ids_outside
from recpoint.errors import IncompatibleModel
from recpoint.format.dtypes import torch_dtype
from recpoint.kernels import bit_packing, quantize, row_gather

__all__ = ["CodedTable", "FloatTable", "ServedTable"]

#: Bytes copied or converted at once when that needs temporary memory.
_PASS_BYTES: Final = 8 << 20


class FloatTable:
    """Holds a table as decoded rows.

    Args:
        values: [rows, dim] of the table's dtype, contiguous, on any device; may be a model's
            weight.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @classmethod
    def empty(cls, table: LogicalTable) -> FloatTable:
        """Make one for a checkpoint's table, with uninitialised values in new CPU memory."""
        return cls(torch.empty(table.rows, table.dim, dtype=torch_dtype(table.dtype), device="cpu"))

    @property
    def rows(self) -> int:
        """Number of rows of the table."""
        return len(self.values)

    @property
    def form(self) -> tuple[object, ...]:
        """Equal for two tables if `copy_rows` can copy rows between them."""
        return "float", self.values.shape, self.values.dtype

    @property
    def nbytes(self) -> int:
        """Memory of the table, in bytes."""
        return self.values.nbytes

    def fits(self, table: LogicalTable) -> bool:
        """Whether this can hold the rows of a checkpoint's table."""
        shape = tuple(self.values.shape)
        return shape == (table.rows, table.dim) and self.values.dtype == torch_dtype(table.dtype)

    def finish(self) -> None:
        """Do nothing: rows are complete as soon as a chain has been read into `values`."""

    def copy_rows(self, source: FloatTable, ids: Tensor | None) -> None:
        """Copy rows `ids`, int64 [n], from another copy of the table; None: all rows."""
        if ids is None:
            self.values.copy_(source.values)
        elif self.values.is_cpu:
            row_gather.move(source.values, ids, self.values, ids)
        else:
            for part in ids.to(self.values.device).split(_pass_rows(self.values)):
                self.values.index_copy_(0, part, source.values.index_select(0, part))

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`.

        Args:
            ids: int32 or int64, any shape [...].

        Returns:
            [..., dim] of the table's dtype, on the device of `values`.

        Raises:
            IndexError: an id is out of range.
        """
        return F.embedding(ids, self.values)


class CodedTable:
    """Holds a table as it is stored: packed codes with scale and offset, decoded when looked up.

    All codes have as many bits as the widest row's; widening a narrower row changes no code. Rows
    that are stored exactly are kept beside the codes, with scale NaN, which no stored row has.

    Args:
        table: the table of a checkpoint.
        bits: bits of each code, one of `BITS`.
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
        # Replaced, never written to, because two copies of a table share these tensors.
        self._exact_ids = torch.empty(0, dtype=torch.int64, device="cpu")
        self._exact = torch.empty(0, table.dim, dtype=self._dtype, device="cpu")
        self._new: list[tuple[Tensor, Tensor]] = []

    @property
    def rows(self) -> int:
        """Number of rows of the table."""
        return self._spec.rows

    @property
    def wanted(self) -> None:
        """None: all rows are wanted; see `catalog.restore.target.RowSink`."""
        return None

    @property
    def form(self) -> tuple[object, ...]:
        """Equal for two tables if `copy_rows` can copy rows between them."""
        return "coded", self._spec.rows, self._spec.dim, self._dtype

    def empty_like(self) -> CodedTable:
        """Return a table for the same rows, in memory of its own and without their values."""
        return CodedTable(self._spec, self.bits)

    @property
    def nbytes(self) -> int:
        """Memory of the table, in bytes."""
        coded = self._codes.nbytes + self._scale.nbytes + self._offset.nbytes
        return coded + self._exact_ids.nbytes + self._exact.nbytes

    def fits(self, table: LogicalTable) -> bool:
        """Whether this can hold the rows of a checkpoint's table."""
        own_form = (self._spec.rows, self._spec.dim, self._spec.dtype)
        return own_form == (table.rows, table.dim, table.dtype)

    def into(self, table: LogicalTable, changed: Tensor | None) -> CodedTable:
        """Prepare to read a chain into this table, and return it.

        Args:
            table: the table of the checkpoint that is read.
            changed: bitmap in which `mark` sets the rows that are read; None: no bitmap.

        Raises:
            IncompatibleModel: the table has another shape or dtype.
        """
        if not self.fits(table):
            raise IncompatibleModel(
                f"table {table.name!r}",
                found=f"{table.rows} rows of {table.dim} {table.dtype}",
                expected=f"{self._spec.rows} rows of {self._spec.dim} {self._spec.dtype}",
                next_step="restart the serving process",
            )
        self.changed = changed
        self._new.clear()
        return self

    def take(self, stored: StoredRows, positions: Tensor | None) -> None:
        """Take stored rows over; see `catalog.restore.target.RowSink.take`."""
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
            places = ids[part]
            chosen = part if positions is None else positions[part]
            codes = stored.values[chosen]
            row_gather.scatter(self._repacked(codes, stored.bits), places, self._codes)
            self._scale[places] = stored.scale[chosen]
            self._offset[places] = stored.offset[chosen]

    def mark(self, rows: range | Tensor) -> None:
        """Set rows in the bitmap of changed rows; see `catalog.restore.target.RowSink.mark`."""
        mark_rows(self.changed, rows, of=self._spec.rows)

    def finish(self) -> None:
        """Sort the exact rows for lookups, once every row of a chain has been taken."""
        self.changed = None
        ids = torch.cat([self._exact_ids, *(ids for ids, _ in self._new)])
        values = torch.cat([self._exact, *(values for _, values in self._new)])
        old = torch.arange(ids.numel(), device="cpu") < self._exact_ids.numel()
        new_ids = ids[~old]
        # An old exact row stays if the row is still exact and the chain brought no new value.
        keep = self._scale[ids].isnan() & ~(old & torch.isin(ids, new_ids))
        ids, values = ids[keep], values[keep]
        order = ids.argsort()
        self._exact_ids, self._exact = ids[order], values[order]
        self._new.clear()

    def copy_rows(self, source: CodedTable, ids: Tensor | None) -> None:
        """Copy rows `ids`, int64 [n], from another copy of the table; None: all rows."""
        self._new.clear()
        if self.bits < source.bits:
            self._widen(source.bits)
        if ids is None:
            ids = torch.arange(self._spec.rows, device="cpu")
        for part in ids.split(_pass_rows(self._codes)):
            codes = self._repacked(source._codes[part], source.bits)
            row_gather.scatter(codes, part, self._codes)
        row_gather.move(source._scale, ids, self._scale, ids)
        row_gather.move(source._offset, ids, self._offset, ids)
        self._exact_ids, self._exact = source._exact_ids, source._exact

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, decoded.

        Args:
            ids: int32 or int64, any shape [...], on the CPU.

        Returns:
            [..., dim] of the table's dtype, on the CPU.

        Raises:
            IndexError: an id is out of range.
            TypeError: ids have another dtype; converting them could round them.
        """
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"table {self._spec.name!r}: found ids of {ids.dtype}, expected int32 or int64"
            )
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
        """Return the same codes in `self.bits` bits each, contiguous."""
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
