from __future__ import annotations

import pytest
import torch

from recpoint.kernels import row_gather
from recpoint.kernels.row_gather import reference
from tests.unit.kernels.every import every

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES)
@every("shape", [(), (1,), (3,), (5, 7), (16,), (64,), (300,), (0,)])
def test_every_dtype_and_shape_of_row(
    dtype: torch.dtype, shape: tuple[int, ...], threads: int
) -> None:
    source = torch.randint(0, 2, (200, *shape)).to(dtype)
    ids = torch.randint(0, 200, (150,))
    out = torch.empty(150, *shape, dtype=dtype)
    row_gather.gather(source, ids, out)
    assert torch.equal(out, source[ids])
    unique = torch.randperm(200)[:150]
    dest = torch.empty(200, *shape, dtype=dtype).zero_()
    expected = dest.clone()
    expected[unique] = out
    row_gather.scatter(out, unique, dest)
    assert torch.equal(dest, expected)


@pytest.mark.parametrize("shift", [0, 1, 8])
@pytest.mark.parametrize("dim", [16, 32, 48, 64])
def test_large_results_are_streamed_whatever_their_alignment(shift: int, dim: int) -> None:
    rows = 9 * 2**20 // 2 // (4 * dim)
    source = torch.randn(rows * dim + shift)[shift:].view(rows, dim)
    ids = torch.randperm(rows)
    out = torch.full((rows, dim), torch.nan)
    row_gather.gather(source, ids, out)
    assert torch.equal(out, source[ids])
    back = torch.full((rows * dim + shift,), torch.nan)[shift:].view(rows, dim)
    row_gather.scatter(out, ids, back)
    assert torch.equal(back, source)


def test_payloads_of_nan_are_kept() -> None:
    patterns = torch.tensor([[0x7FC12345], [0x7F812345], [-1]], dtype=torch.int32)
    out = torch.zeros(3, 1)
    row_gather.gather(patterns.view(torch.float32), torch.tensor([2, 1, 0]), out)
    assert torch.equal(out.view(torch.int32), patterns.flip(0))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], -1),
        ([3], -1),
        ([3, 4, 8], -1),
        ([2, 4], 0),
        ([3, 9], 1),
        ([3, 3], 1),
        ([3, 5, 4], 2),
        ([-(2**63)], 0),
        ([3, 2**63 - 1], 1),
    ],
)
def test_the_first_id_out_of_order_or_range_is_found(ids: list[int], expected: int) -> None:
    given = torch.tensor(ids, dtype=torch.int64)
    assert row_gather.first_unordered(given, 3, 9) == expected
    assert reference.first_unordered(given, 3, 9) == expected
    with pytest.raises(ValueError, match="ids: dtype"):
        row_gather.first_unordered(given.int(), 3, 9)


@pytest.mark.parametrize("wrong", [-1, 5, 2**40, -(2**63)])
def test_an_id_outside_the_table_is_named_and_nothing_is_copied(wrong: int) -> None:
    table = torch.zeros(5, 2)
    rows = torch.ones(2, 2)
    ids = torch.tensor([0, wrong])
    with pytest.raises(IndexError, match=rf"ids: {wrong}, expected 0 <= id < 5"):
        row_gather.scatter(rows, ids, table)
    assert table.sum() == 0
    with pytest.raises(IndexError, match=str(wrong)):
        row_gather.gather(table, ids, rows)
    assert rows.sum() == 4


def test_arguments_that_do_not_fit_are_refused() -> None:
    table, ids, out = torch.zeros(5, 4), torch.tensor([0, 1]), torch.zeros(2, 4)
    for source, chosen, to, what in [
        (table.t().contiguous().t(), ids, out, "contiguous"),
        (table, ids, torch.zeros(4, 4)[::2], "contiguous"),
        (table, torch.arange(4)[::2], out, "contiguous"),
        (table, ids.int(), out, "ids: dtype"),
        (table, ids[None], out, "ids: shape"),
        (table, ids, out[:1], "1 rows for 2 ids"),
        (table, ids, out[:, :3].contiguous(), "does not fit"),
        (table, ids, out.double(), "dtype"),
    ]:
        with pytest.raises(ValueError, match=what):
            row_gather.gather(source, chosen, to)
        with pytest.raises(ValueError, match=what):
            row_gather.scatter(to, chosen, source)


def test_no_ids_copy_nothing() -> None:
    row_gather.gather(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4))
    row_gather.scatter(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(3, 4))


@pytest.mark.parametrize("dtype", DTYPES)
@every("shape", [(), (3,), (5, 7), (16,), (300,), (0,)])
def test_chosen_rows_are_moved_to_their_places(
    dtype: torch.dtype, shape: tuple[int, ...], threads: int
) -> None:
    source = torch.randint(0, 2, (200, *shape)).to(dtype)
    positions, ids = torch.randperm(200)[:90].sort().values, torch.randperm(300)[:90]
    dest = torch.empty(300, *shape, dtype=dtype).zero_()
    expected = dest.clone()
    reference.move(source, positions, expected, ids)
    row_gather.move(source, positions, dest, ids)
    assert torch.equal(dest, expected)


def test_large_moves_are_streamed() -> None:
    rows = 9 * 2**20 // 2 // 64
    source, dest = torch.randn(rows, 16), torch.full((rows, 16), torch.nan)
    positions, ids = torch.randperm(rows), torch.randperm(rows)
    row_gather.move(source, positions, dest, ids)
    assert torch.equal(dest[ids], source[positions])


def test_a_move_that_does_not_fit_is_refused() -> None:
    source, dest = torch.ones(4, 2), torch.zeros(5, 2)
    here, there = torch.tensor([0, 3]), torch.tensor([4, 1])
    for positions, ids, what in [
        (torch.tensor([0, 4]), there, "positions: 4, expected 0 <= id < 4"),
        (here, torch.tensor([5, 1]), "ids: 5, expected 0 <= id < 5"),
    ]:
        with pytest.raises(IndexError, match=what):
            row_gather.move(source, positions, dest, ids)
    for given, positions, to, ids, what in [
        (source, here[:1], dest, there, "positions: 1, expected 2"),
        (source, here.int(), dest, there, "positions: dtype"),
        (source.double(), here, dest, there, "dtype"),
        (source[:, :1].contiguous(), here, dest, there, "does not fit"),
        (source.t().contiguous().t(), here, dest, there, "contiguous"),
    ]:
        with pytest.raises(ValueError, match=what):
            row_gather.move(given, positions, to, ids)
    assert dest.sum() == 0
