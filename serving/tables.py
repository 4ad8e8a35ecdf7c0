"""Holds one table in memory for lookups only, as values or as codes that lookups decode."""

from __future__ import annotations

from collections.abc import Mapping
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
from recpoint.format.first_values import FirstValueRule
from recpoint.format.manifest import CODE_BITS
from recpoint.kernels import bit_packing, quantize, row_gather
from recpoint.serving.rows_beside import RowsBeside

__all__ = ["CodedTable", "FloatTable", "RowTable", "coded_bytes"]

#: Bytes copied or converted at once when that needs temporary memory.
_PASS_BYTES: Final = 8 << 20
#: Bits of the codes that are kept beside narrower ones.
_WIDEST: Final = max(CODE_BITS)
#: Bytes of such a row's id and parameters.
_BESIDE_BYTES: Final = 16


class FloatTable:
    """Holds a table as decoded rows.

    Args:
        values: [rows, dim] of the table's dtype, contiguous, on any device; may be a model's
            weight.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @classmethod
    def empty(cls, table: LogicalTable, device: torch.device) -> FloatTable:
        """Make one for a checkpoint's table, with uninitialised values in new memory."""
        dtype = torch_dtype(table.dtype)
        return cls(torch.empty(table.rows, table.dim, dtype=dtype, device=device))

    def empty_like(self) -> FloatTable:
        """Return a table for as many rows, in memory of its own and without their values."""
        return FloatTable(torch.empty_like(self.values))

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

    Most codes have `bits` bits; widening a narrower row changes no code. Wider rows are kept beside
    them in 8 bits, with scale infinity, and exact rows with scale NaN; no stored row has either. If
    the wider rows would take less memory among the others, all rows get 8 bits. Rows with their
    first values are computed when they are looked up: their scale is minus infinity, and their
    offset says by which of the rules.

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
        self._exact = RowsBeside(torch.empty(0, table.dim, dtype=self._dtype, device="cpu"))
        one_value = torch.empty(0, dtype=torch.float32, device="cpu")
        codes = torch.empty(0, table.dim, dtype=torch.uint8, device="cpu")
        self._wider = RowsBeside(codes, one_value, one_value)
        self._rules: list[FirstValueRule] = []

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
        return coded + self._exact.nbytes + self._wider.nbytes

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
        self._exact.drop_added()
        self._wider.drop_added()
        return self

    def take(self, stored: StoredRows, positions: Tensor | None) -> None:
        """Take stored rows over; see `catalog.restore.target.RowSink.take`."""
        if positions is not None and positions.numel() == 0:
            return
        ids = _ids(stored.rows, positions)
        if stored.first is not None:
            if stored.first not in self._rules:
                self._rules = [*self._rules, stored.first]
            self._scale[ids] = -torch.inf
            self._offset[ids] = float(self._rules.index(stored.first))
            return
        if stored.scheme == "exact":
            values = stored.values if positions is None else stored.values[positions]
            self._exact.add(ids, values.clone())
            self._scale[ids] = torch.nan
            return
        if stored.bits > self.bits:
            chosen_rows = slice(None) if positions is None else positions
            codes = bit_packing.unpack(
                stored.values[chosen_rows].contiguous(), dim=self._spec.dim, bits=stored.bits
            )
            scale, offset = stored.scale[chosen_rows], stored.offset[chosen_rows]
            self._wider.add(ids, codes.clone(), scale.clone(), offset.clone())
            self._scale[ids] = torch.inf
            return
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
        """Sort the rows beside the codes, once every row of a chain has been taken."""
        self.changed = None
        self._exact.finish(self._scale.isnan())
        self._wider.finish(self._scale.isposinf())
        widened_bytes = self._spec.rows * (self._spec.dim - self._codes.shape[1])
        if self._wider.nbytes > widened_bytes:
            self._widen()

    def copy_rows(self, source: CodedTable, ids: Tensor | None) -> None:
        """Copy rows `ids`, int64 [n], from another copy of the table; None: all rows."""
        if ids is None:
            ids = torch.arange(self._spec.rows, device="cpu")
            if self.bits != source.bits:
                self.bits, self._codes = source.bits, torch.empty_like(source._codes)
        elif self.bits < source.bits:
            self._widen()  # so that each row fits that was kept beside the others
        for part in ids.split(_pass_rows(self._codes)):
            codes = self._repacked(source._codes[part], source.bits)
            row_gather.scatter(codes, part, self._codes)
        row_gather.move(source._scale, ids, self._scale, ids)
        row_gather.move(source._offset, ids, self._offset, ids)
        self._exact.share(source._exact)
        self._wider.share(source._wider)
        self._rules = source._rules

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
        is_wider = scale.isposinf()
        if bool(is_wider.any()):
            codes, *parameters = self._wider.find(flat[is_wider])
            values[is_wider] = quantize.dequantize(codes, *parameters).to(self._dtype)
        is_exact = scale.isnan()
        if bool(is_exact.any()):
            (values[is_exact],) = self._exact.find(flat[is_exact])
        is_first = scale.isneginf()
        if bool(is_first.any()):
            values[is_first] = self._first_values(flat[is_first])
        return values.reshape(*ids.shape, self._spec.dim)

    def _first_values(self, ids: Tensor) -> Tensor:
        (piece,) = self._spec.pieces  # tables in pieces are not kept as codes
        numbers = self._offset[ids]
        values = torch.empty(len(ids), self._spec.dim, dtype=self._dtype, device="cpu")
        for number, rule in enumerate(self._rules):
            is_of_rule = numbers == number
            values[is_of_rule] = rule.rows(piece.spec, ids[is_of_rule])
        return values

    def _widen(self) -> None:
        """Give all codes the most bits, those of the rows beside them too."""
        narrow, from_bits = self._codes, self.bits
        self.bits = _WIDEST
        self._codes = torch.empty(
            self._spec.rows, _width(self._spec.dim, _WIDEST), dtype=torch.uint8, device="cpu"
        )
        step = _pass_rows(self._codes)
        for start in range(0, self._spec.rows, step):
            part = slice(start, start + step)
            self._codes[part] = self._repacked(narrow[part], from_bits)
        ids = self._wider.ids[self._scale[self._wider.ids].isposinf()]
        for places in ids.split(step):
            codes, scale, offset = self._wider.find(places)
            row_gather.scatter(self._repacked(codes, _WIDEST), places, self._codes)
            self._scale[places], self._offset[places] = scale, offset
        self._wider.finish(torch.zeros(self._spec.rows, dtype=torch.bool, device="cpu"))

    def _repacked(self, codes: Tensor, bits: int) -> Tensor:
        """Return the same codes in `self.bits` bits each, contiguous."""
        if bits == self.bits:
            return codes.contiguous()
        return bit_packing.pack(bit_packing.unpack(codes, dim=self._spec.dim, bits=bits), self.bits)


RowTable = FloatTable | CodedTable


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


def coded_bytes(rows_of_bits: Mapping[int, int], dim: int, bits: int) -> int:
    """Return the memory of codes if most rows have `bits` bits and wider rows lie beside them.

    Args:
        rows_of_bits: rows by the bits of their codes.
        dim: values of a row.
        bits: width of most rows' codes.
    """
    wider = sum(rows for width, rows in rows_of_bits.items() if width > bits)
    return sum(rows_of_bits.values()) * _width(dim, bits) + wider * (dim + _BESIDE_BYTES)
