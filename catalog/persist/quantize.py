"""Runs the first step of a persist: quantizes the rows of a group (format §3.2, §3.3).

Rows of a block that each have a width of their own (`row_widths`) are quantized as soon as their
widths are chosen. Rows that the trainer has quantized are read from the slot and checked
(`staged_codes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.persist.block_codes import BlockCodes, Positions
from recpoint.catalog.persist.block_rows import BlockRows, passes
from recpoint.catalog.persist.first_rows import first_rows
from recpoint.catalog.persist.plan import (
    FIRST,
    ChunkGroup,
    RowBlock,
    stored_forms,
)
from recpoint.catalog.persist.quantizer_choice import Choice, choose_quantizer
from recpoint.catalog.persist.residuals import BlockResiduals, ResidualRows
from recpoint.catalog.persist.row_widths import PricedWidths, RowWidths, with_fewer_chunks
from recpoint.catalog.persist.spool import (
    SpoolFile,
    extent_list,
    load_result,
    result_path,
    save_result,
)
from recpoint.catalog.persist.staged_codes import exact_span, staged_codes
from recpoint.catalog.staging.job import StagedJob, values_name
from recpoint.format.job import Allocation
from recpoint.format.manifest import CODE_BITS, Quantizer
from recpoint.kernels import row_gather
from recpoint.kernels.allocation import EXACT
from recpoint.kernels.implementation import on_cpu
from recpoint.kernels.quantize import Method, PackedRows, quantize_packed

__all__ = ["Quantization", "quantization_of", "quantize_group"]

_MOST_TEXT = 255

_Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Quantization(NamedTuple):
    """How the rows of a checkpoint were quantized, as its manifest records it."""

    quantizers: tuple[Quantizer, ...]
    implementation: str


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
    codes = BlockCodes(stored_forms(table), block.rows, spool)
    is_first = first_rows(staged, block)
    if is_first is not None:
        codes.form_of_row[is_first] = stored_forms(table).index(FIRST)
    if table.codes:
        for rows, packed in staged_codes(staged, block):
            codes.write(rows, None, table.bits, packed)
    else:
        values: BlockRows | BlockResiduals = BlockRows(staged, block, values_name(block.table))
        if table.residual:
            assert residuals is not None  # the job has a table with residuals
            values = BlockResiduals(staged, block, residuals)
        if table.allocation is not None:
            _write_priced(staged, block, table.allocation, values, method, codes, is_first)
        else:
            widths = np.full(block.rows, table.bits, np.uint8)
            if is_first is not None:
                widths[is_first] = EXACT
            for rows in passes(staged, block):
                of_pass = widths[rows.start : rows.stop]
                _write_pass(rows, values.read(rows), of_pass, (table.bits,), method, codes)
    return {
        "table": block.table,
        "number": block.number,
        "exact_first": exact_span(staged, block)[0] if table.codes else 0,
        "forms": extent_list((spool.append(codes.form_of_row),))[0],
        "coded": [
            {name: extent_list(tuple(parts)) for name, parts in arrays.items()}
            for arrays in codes.extents
        ],
    }


def _write_priced(
    staged: StagedJob,
    block: RowBlock,
    allocation: Allocation,
    values: BlockRows | BlockResiduals,
    method: Method,
    codes: BlockCodes,
    is_first: _Mask | None,
) -> None:
    """Choose a width for each row of a block, and write the rows' codes.

    Whether a width has too few rows for a chunk shows at the end of the block. So rows are written
    in the widths chosen, while they are in the caches, and rows of few widths once more.
    """
    chooser = PricedWidths(staged, block, allocation, values)
    chosen = np.empty(block.rows, np.uint8)
    all_passes = passes(staged, block)

    def write(rows: range, stored: Tensor, widths: RowWidths, bits_wanted: Sequence[int]) -> None:
        of_pass = widths[rows.start : rows.stop]
        if is_first is not None:  # rows with their first values have no codes
            of_pass = np.where(is_first[rows.start : rows.stop], np.uint8(EXACT), of_pass)
        _write_pass(rows, stored, of_pass, bits_wanted, method, codes)

    stored = torch.empty(0, dtype=torch.float32, device="cpu")
    for rows in all_passes:
        stored = values.read(rows)
        chosen[rows.start : rows.stop] = chooser.of(rows, stored)
        if len(all_passes) > 1:
            write(rows, stored, chosen, CODE_BITS)
    widths = with_fewer_chunks(chosen.copy(), staged.job.tables[block.table].spec.dim)
    if len(all_passes) == 1:
        write(all_passes[0], stored, widths, CODE_BITS)
        return
    is_moved = widths != chosen
    bits_left = np.unique([chosen[is_moved], widths[is_moved]]).tolist()
    codes.discard(bits_left)
    for rows in all_passes if bits_left else ():
        write(rows, values.read(rows), widths, bits_left)


def _write_pass(
    rows: range,
    stored: Tensor,
    widths: RowWidths,
    bits_wanted: Sequence[int],
    method: Method,
    codes: BlockCodes,
) -> None:
    """Quantize those rows of a pass that have one of some widths, and write their codes.

    Args:
        rows: their positions in the block.
        stored: what is quantized of them, [n, dim].
        widths: of the rows of the pass.
        bits_wanted: the wanted widths.
        method: how scale and offset are found.
        codes: takes the codes.
    """
    for bits in bits_wanted:
        # numpy finds the positions several times faster than torch does.
        positions = np.flatnonzero(widths == bits)
        if positions.size:
            chosen = None if positions.size == len(widths) else positions
            codes.write(rows, chosen, bits, _quantized(stored, chosen, bits, method))


def _quantized(
    stored: Tensor, positions: Positions | None, bits: int, method: Method
) -> PackedRows:
    """Quantize the rows [n, dim] at `positions`, int64 [m]; None: all rows."""
    chosen = stored
    if positions is not None:
        chosen = stored.new_empty(len(positions), stored.shape[1])
        row_gather.gather(stored, torch.from_numpy(positions), chosen)
    rows = chosen.to(torch.float32)
    packed = quantize_packed(rows, bits, method, half_parameters=True)
    if stored.dtype == torch.float64:
        # Only rows whose conversion to F32 is exact may be quantized (format §3.2).
        inexact = (rows.to(torch.float64) != chosen).any(dim=1)
        packed = packed._replace(exact=packed.exact | inexact)
    return packed


def _implementation(staged: StagedJob, tables: Sequence[int]) -> str:
    """Return the implementation that quantized these tables: the agent's, or the trainer's."""
    job = staged.job
    names = {job.quantized_by if job.tables[table].codes else on_cpu() for table in tables}
    return "; ".join(sorted(names))
