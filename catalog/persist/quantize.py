"""Runs the first step of a persist: quantizes the rows of a group (format §3.2, §3.3).

The rows of a block are read twice if each has a width of its own: `row_widths` chooses the widths
of all of them, and then each piece of the block is quantized in its widths. Rows that the trainer
has quantized are read from the slot and checked (`staged_codes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.persist.block_rows import BlockRows, passes
from recpoint.catalog.persist.first_rows import first_rows
from recpoint.catalog.persist.plan import (
    FIRST,
    ChunkGroup,
    RowBlock,
    StoredForm,
    stored_forms,
)
from recpoint.catalog.persist.quantizer_choice import Choice, choose_quantizer
from recpoint.catalog.persist.residuals import BlockResiduals, ResidualRows
from recpoint.catalog.persist.row_widths import RowWidths, row_widths
from recpoint.catalog.persist.spool import (
    SpoolFile,
    extent_list,
    load_result,
    result_path,
    save_result,
)
from recpoint.catalog.persist.staged_codes import exact_span, staged_codes
from recpoint.catalog.staging.job import StagedJob, values_name
from recpoint.catalog.staging.slot_reading import Extent
from recpoint.format.dtypes import Dtype, torch_dtype
from recpoint.format.manifest import CODE_BITS, Quantizer
from recpoint.kernels import row_gather
from recpoint.kernels.allocation import EXACT
from recpoint.kernels.implementation import on_cpu
from recpoint.kernels.quantize import Method, PackedRows, quantize_packed

__all__ = ["CODED_ARRAYS", "Quantization", "quantization_of", "quantize_group"]

#: The arrays of a chunk of codes, without the row states.
CODED_ARRAYS = ("codes", "scale", "offset")
_MOST_TEXT = 255


class Quantization(NamedTuple):
    """How the rows of a checkpoint were quantized, as its manifest records it."""

    quantizers: tuple[Quantizer, ...]
    implementation: str


class _CodedRows(NamedTuple):
    """Some rows of a pass, quantized to one width.

    Attributes:
        positions: int64 [n], ascending, positions in the pass; None: all rows of the pass.
        bits: width of the codes.
        packed: the n rows.
    """

    positions: Tensor | None
    bits: int
    packed: PackedRows


def quantize_group(
    staged: StagedJob,
    group: ChunkGroup,
    chosen: dict[int, Choice],
    residuals: ResidualRows | None = None,
) -> str:
    """Quantize and pack the group's rows into the spool.

    Rows that cannot be quantized are left out and noted in the result; the next step stores them
    exactly. Rows that the trainer has quantized are only checked and sorted by their form.

    Args:
        staged: the job.
        group: one of its groups.
        chosen: the choice of each table's method, by table index; tables that no earlier group had
            are added.
        residuals: has the rows to which tables with residuals have them; None: there are none.

    Returns:
        Path of the result, a JSON file that names extents of the spool.

    Raises:
        MalformedObject: the slot has codes that no quantization yields.
        StagingError: the slot cannot be read.
        RecpointError: as `ResidualRows.of`.
    """
    path = result_path(staged, group.index, "quantized")
    if load_result(path, staged) is None:
        blocks = [
            block
            for block in group.blocks
            if isinstance(block, RowBlock) and staged.job.tables[block.table].is_quantized
        ]
        tables = sorted({block.table for block in blocks})
        for table in tables:
            if table not in chosen:
                chosen[table] = choose_quantizer(staged, table, residuals)
        with SpoolFile(path.with_suffix(".bin")) as spool:
            quantized = [
                _quantize_block(staged, block, chosen[block.table][1], spool, residuals)
                for block in blocks
            ]
        result = {
            "blocks": quantized,
            "quantizers": [chosen[table][0].model_dump() for table in tables],
            "implementation": _implementation(staged, tables),
        }
        save_result(path, staged, result)
    return str(path)


def quantization_of(staged: StagedJob, groups: Sequence[ChunkGroup]) -> Quantization:
    """Return what the groups of a job were quantized with; all of them must be quantized."""
    quantizers: dict[int, Quantizer] = {}
    implementations: set[str] = set()
    for group in groups:
        result = load_result(result_path(staged, group.index, "quantized"), staged)
        if result is None:
            continue
        implementations.add(result["implementation"])
        for fields in result["quantizers"]:
            quantizer = Quantizer.model_validate(fields)
            quantizers[quantizer.table] = quantizer
    in_order = tuple(quantizers[table] for table in sorted(quantizers))
    return Quantization(in_order, "; ".join(sorted(implementations))[:_MOST_TEXT])


def _quantize_block(
    staged: StagedJob,
    block: RowBlock,
    method: Method,
    spool: SpoolFile,
    residuals: ResidualRows | None,
) -> dict[str, Any]:
    """Write the block's codes to the spool, and the index of each row's form in `stored_forms`."""
    table = staged.job.tables[block.table]
    forms = stored_forms(table)
    exact_form = len(forms) - 1
    extents: list[dict[str, list[Extent]]] = [
        {name: [] for name in CODED_ARRAYS} for _ in forms[:-1]
    ]
    form_of_row = torch.full((block.rows,), exact_form, dtype=torch.uint8, device="cpu")
    is_first = first_rows(staged, block)
    if is_first is not None:
        form_of_row[torch.from_numpy(is_first)] = forms.index(FIRST)
    for rows, coded_rows in _coded(staged, block, method, residuals, is_first):
        of_pass = form_of_row[rows.start : rows.stop]
        for positions, bits, packed in coded_rows:
            wide = packed.wide & ~packed.exact
            masks: dict[Dtype, Tensor] = {"F16": ~(packed.exact | wide), "F32": wide}
            for parameters, mask in masks.items():
                if not bool(mask.any()):
                    continue
                form = forms.index(StoredForm(bits, parameters))
                # Nearly always all rows are chosen, and nothing is copied.
                chosen = None if bool(mask.all()) else mask
                arrays = _chosen(chosen, packed, torch_dtype(parameters))
                for name, array in zip(CODED_ARRAYS, arrays, strict=True):
                    extents[form][name].append(spool.append(array.contiguous().numpy()))
                if positions is None:
                    of_pass[mask] = form
                else:
                    of_pass[positions if chosen is None else positions[chosen]] = form
    return {
        "table": block.table,
        "number": block.number,
        "exact_first": exact_span(staged, block)[0] if table.codes else 0,
        "forms": extent_list((spool.append(form_of_row.numpy()),))[0],
        "coded": [
            {name: extent_list(tuple(parts)) for name, parts in arrays.items()}
            for arrays in extents
        ],
    }


def _coded(
    staged: StagedJob,
    block: RowBlock,
    method: Method,
    residuals: ResidualRows | None,
    is_first: np.ndarray[Any, np.dtype[np.bool_]] | None,
) -> Iterator[tuple[range, list[_CodedRows]]]:
    """Yield the block's rows a pass at a time, each pass with its quantized rows.

    Rows of a pass that are in none of its quantized rows are stored exactly, or, if `is_first` says
    so, have their first values.
    """
    table = staged.job.tables[block.table]
    if table.codes:
        for rows, packed in staged_codes(staged, block):
            yield rows, [_CodedRows(None, table.bits, packed)]
        return
    values: BlockRows | BlockResiduals = BlockRows(staged, block, values_name(block.table))
    if table.residual:
        assert residuals is not None  # the job has a table with residuals
        values = BlockResiduals(
            staged, block, residuals, are_read_twice=table.allocation is not None
        )
    widths: RowWidths | None = None
    if table.allocation is not None:
        widths = row_widths(staged, block, table.allocation, values)
    if is_first is not None:
        widths = np.full(block.rows, table.bits, np.uint8) if widths is None else widths
        widths[is_first] = EXACT
    for rows in passes(staged, block):
        stored = values.read(rows)
        if widths is None:
            yield rows, [_quantized(stored, None, table.bits, method)]
            continue
        of_pass = widths[rows.start : rows.stop]
        # numpy finds the positions several times faster than torch does.
        positions = {bits: np.flatnonzero(of_pass == bits) for bits in CODE_BITS}
        yield (
            rows,
            [
                _quantized(stored, torch.from_numpy(of_width), bits, method)
                for bits, of_width in positions.items()
                if of_width.size
            ],
        )


def _quantized(stored: Tensor, positions: Tensor | None, bits: int, method: Method) -> _CodedRows:
    """Quantize the rows [n, dim] at `positions`, int64 [m]; None: all rows."""
    chosen = stored
    if positions is not None and len(positions) < len(stored):
        chosen = stored.new_empty(len(positions), stored.shape[1])
        row_gather.gather(stored, positions, chosen)
    rows = chosen.to(torch.float32)
    packed = quantize_packed(rows, bits, method, half_parameters=True)
    if stored.dtype == torch.float64:
        # Only rows whose conversion to F32 is exact may be quantized (format §3.2).
        inexact = (rows.to(torch.float64) != chosen).any(dim=1)
        packed = packed._replace(exact=packed.exact | inexact)
    return _CodedRows(positions, bits, packed)


def _implementation(staged: StagedJob, tables: Sequence[int]) -> str:
    """Return the implementation that quantized these tables: the agent's, or the trainer's."""
    job = staged.job
    names = {job.quantized_by if job.tables[table].codes else on_cpu() for table in tables}
    return "; ".join(sorted(names))


def _chosen(
    mask: Tensor | None, packed: PackedRows, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows that `mask` chooses (None: all), their parameters converted to `dtype`."""
    codes, scale, offset = packed.packed, packed.scale, packed.offset
    if mask is not None:
        codes, scale, offset = codes[mask], scale[mask], offset[mask]
    return codes, scale.to(dtype), offset.to(dtype)
