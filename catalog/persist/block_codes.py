"""Writes the codes of a block's rows to the spool, each form of them by itself, in their order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.persist.plan import (
    StoredForm,
    chunk_numbers,
    rows_of_chunk,
    stored_forms,
)
from recpoint.catalog.persist.spool import SpoolFile
from recpoint.catalog.staging.slot_reading import Extent
from recpoint.format.dtypes import Dtype, torch_dtype
from recpoint.format.job import StagedTable
from recpoint.kernels.quantize import PackedRows

__all__ = ["CODED_ARRAYS", "BlockCodes", "FormOfRow", "Positions", "positions_of_chunks"]

#: The arrays of a chunk of codes, without the row states.
CODED_ARRAYS = ("codes", "scale", "offset")

Positions = np.ndarray[Any, np.dtype[np.int64]]
#: Index of each row's form among the forms of its table.
FormOfRow = np.ndarray[Any, np.dtype[np.uint8]]


class BlockCodes:
    """The codes of a block: which form each row has, and where in the spool its codes are.

    Args:
        forms: the forms of the table; rows without codes have the last one until another is set.
        rows: rows of the block.
        spool: takes the codes.

    Attributes:
        form_of_row: index of the form of each row, u8 [rows].
        extents: for each form but the last, where each of `CODED_ARRAYS` is.
    """

    def __init__(self, forms: Sequence[StoredForm], rows: int, spool: SpoolFile) -> None:
        self._forms, self._spool = forms, spool
        self._exact_form = len(forms) - 1
        self.form_of_row: FormOfRow = np.full(rows, self._exact_form, np.uint8)
        self.extents = [self._no_extents() for _ in forms[:-1]]

    def write(
        self, rows: range, positions: Positions | None, bits: int, packed: PackedRows
    ) -> None:
        """Write quantized rows that come after those of the same form that were written before.

        Rows that could not be quantized keep their form.

        Args:
            rows: positions of a pass in the block.
            positions: of the quantized rows in the pass, ascending; None: all of them.
            bits: width of the codes.
            packed: the quantized rows.

        Raises:
            StagingFull: there is no room in the spool.
        """
        of_pass = self.form_of_row[rows.start : rows.stop]
        for parameters, mask in _masks(packed):
            form = self._forms.index(StoredForm(bits, parameters))
            arrays = _chosen(mask, packed, torch_dtype(parameters))
            for name, array in zip(CODED_ARRAYS, arrays, strict=True):
                self.extents[form][name].append(self._spool.append(array.contiguous().numpy()))
            if positions is None:
                of_pass[slice(None) if mask is None else mask.numpy()] = form
            else:
                of_pass[positions if mask is None else positions[mask.numpy()]] = form

    def discard(self, bits: Collection[int]) -> None:
        """Forget the codes of some widths, whose rows are written anew."""
        for index, form in enumerate(self._forms):
            if form.parameters is not None and form.bits in bits:
                self.form_of_row[self.form_of_row == index] = self._exact_form
                self.extents[index] = self._no_extents()

    def _no_extents(self) -> dict[str, list[Extent]]:
        return {name: [] for name in CODED_ARRAYS}


def _masks(packed: PackedRows) -> list[tuple[Dtype, Tensor | None]]:
    """Return the dtypes of parameters, and of which rows; None: of all, as nearly always."""
    if not bool((packed.exact | packed.wide).any()):
        return [("F16", None)]
    wide = packed.wide & ~packed.exact
    masks: list[tuple[Dtype, Tensor]] = [("F16", ~(packed.exact | wide)), ("F32", wide)]
    return [(dtype, mask) for dtype, mask in masks if bool(mask.any())]


def _chosen(
    mask: Tensor | None, packed: PackedRows, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows that `mask` chooses (None: all), their parameters converted to `dtype`."""
    codes, scale, offset = packed.packed, packed.scale, packed.offset
    if mask is not None:
        codes, scale, offset = codes[mask], scale[mask], offset[mask]
    return codes, scale.to(dtype), offset.to(dtype)


def positions_of_chunks(
    table: StagedTable, form_of_row: FormOfRow
) -> Iterator[tuple[int, int, int, Positions]]:
    """Yield each chunk of a block: index of its form, its number, rows before, and positions.

    The rows before it are those of the same form. Positions are those of its rows in the block,
    int64 [n], ascending.
    """
    forms = zip(stored_forms(table), chunk_numbers(table), strict=True)
    for index, (form, numbers) in enumerate(forms):
        positions = np.flatnonzero(form_of_row == index)
        rows_each = rows_of_chunk(table, form)
        starts = range(0, len(positions), rows_each)
        for number, start in zip(numbers, starts, strict=False):
            yield index, number, start, positions[start : start + rows_each]
