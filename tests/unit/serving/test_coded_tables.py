"""Tables that are served as codes: rows of any mix of widths, in little memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recpoint.catalog.restore.chunks import StoredRows
from recpoint.catalog.restore.rows import LogicalTable, logical_tables
from recpoint.format.manifest import CODE_BITS, Scheme, TableSpec
from recpoint.kernels import quantize
from recpoint.serving.tables import CodedTable, coded_bytes

ROWS, DIM = 300, 16


def table_of(dtype: str = "F32") -> LogicalTable:
    spec = TableSpec.model_validate(
        {"name": "t", "rows": ROWS, "dim": DIM, "dtype": dtype, "row_states": []}
    )
    return logical_tables([spec])["t"]


def stored(values: Tensor, ids: Tensor, bits: int | None) -> tuple[StoredRows, Tensor]:
    """Rows as a chunk has them, and what they decode to; None: stored exactly."""
    none = torch.empty(0)
    if bits is None:
        return _rows(ids, "exact", 32, values, none, none), values
    packed, scale, offset, _, _ = quantize.quantize_packed(values, bits, half_parameters=True)
    decoded = quantize.dequantize_packed(packed, scale, offset, dim=DIM, bits=bits)
    return _rows(ids, "asymmetric", bits, packed, scale, offset), decoded


def _rows(
    ids: Tensor, scheme: Scheme, bits: int, values: Tensor, scale: Tensor, offset: Tensor
) -> StoredRows:
    return StoredRows(
        rows=ids,
        scheme=scheme,
        bits=bits,
        values=values,
        scale=scale,
        offset=offset,
        row_states=(),
    )


def take_all(table: CodedTable, expected: Tensor, widths: Tensor, values: Tensor) -> None:
    """Take the rows of each width that is above 0; 1 stands for exact."""
    for bits in (*CODE_BITS, 1):
        ids = (widths == bits).nonzero().flatten()
        if len(ids):
            rows, expected[ids] = stored(values[ids], ids, None if bits == 1 else bits)
            table.take(rows, None)
    table.finish()


def require(table: CodedTable, expected: Tensor) -> None:
    ids = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    assert torch.equal(table.lookup(ids), expected[ids])


@pytest.mark.parametrize("base", CODE_BITS)
@pytest.mark.parametrize("seed", [0, 1])
def test_two_copies_take_turns_whatever_the_widths(base: int, seed: int) -> None:
    """As a follower does: an update is read into one copy, then the other copies what changed."""
    generator = torch.Generator().manual_seed(seed)
    expected = torch.zeros(ROWS, DIM)
    choices = torch.tensor([*CODE_BITS, 1])
    active, idle = CodedTable(table_of(), base), CodedTable(table_of(), base)
    widths = choices[torch.randint(7, (ROWS,), generator=generator)]
    take_all(active, expected, widths, torch.randn(ROWS, DIM, generator=generator))
    require(active, expected)
    idle.copy_rows(active, None)
    require(idle, expected)
    for update in range(8):
        # Updates of few rows of one width, and of many of all widths.
        share = 0.1 if update % 2 else 0.5
        changed = torch.rand(ROWS, generator=generator) < share
        widths = choices[torch.randint(7, (ROWS,), generator=generator)]
        if update in (2, 5):
            widths[:] = choices[update]
        widths[~changed] = 0
        take_all(idle, expected, widths, torch.randn(ROWS, DIM, generator=generator))
        require(idle, expected)
        active.copy_rows(idle, changed.nonzero().flatten())
        require(active, expected)
        active, idle = idle, active


def test_few_wide_rows_take_no_room_in_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    widths = torch.full((ROWS,), 2)
    widths[:30] = 8
    table, expected = CodedTable(table_of(), 2), torch.zeros(ROWS, DIM)
    take_all(table, expected, widths, torch.randn(ROWS, DIM, generator=generator))
    require(table, expected)
    all_wide = CodedTable(table_of(), 8)
    assert table.bits == 2 and table.nbytes < 0.75 * all_wide.nbytes
    assert table.nbytes - ROWS * 8 == coded_bytes({2: 270, 8: 30}, DIM, 2)
    # Once most rows are wide, they lie among the others.
    widths[:] = 8
    take_all(table, expected, widths, torch.randn(ROWS, DIM, generator=generator))
    require(table, expected)
    assert table.bits == 8 and table.nbytes == all_wide.nbytes


def test_a_width_for_most_rows() -> None:
    mix = {2: 700, 3: 200, 8: 100}
    costs = {bits: coded_bytes(mix, 64, bits) for bits in mix}
    assert costs == {2: 16_000 + 300 * 80, 3: 24_000 + 100 * 80, 8: 64_000}
