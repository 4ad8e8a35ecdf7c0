from __future__ import annotations

import threading

import pytest
import torch

from recpoint.kernels import dirty_bitmap
from recpoint.kernels.dirty_bitmap import reference
from recpoint.kernels.native import library
from tests.unit.kernels.every import every


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(0,), (), (7,), (5, 3), (2, 1, 900)])
def test_ids_of_any_shape_are_marked(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = 777
    bitmap = dirty_bitmap.new(rows)
    expected = bitmap.clone()
    ids = torch.randint(0, rows, shape, dtype=dtype)
    dirty_bitmap.mark(bitmap, ids, rows=rows)
    reference.mark(expected, ids, rows=rows)
    assert torch.equal(bitmap, expected)


def test_ids_that_are_not_contiguous_are_marked() -> None:
    bitmap = dirty_bitmap.new(100)
    dirty_bitmap.mark(bitmap, torch.arange(100).reshape(10, 10)[:, ::3].t(), rows=100)
    assert dirty_bitmap.collect(bitmap, rows=100).tolist() == [
        row for row in range(100) if row % 10 % 3 == 0
    ]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrong", [-1, -40, -(2**31), 40, 63, 64, 2**31 - 1])
def test_an_id_outside_the_table_is_named_and_nothing_is_marked(
    dtype: torch.dtype, wrong: int
) -> None:
    bitmap = dirty_bitmap.new(40)
    ids = torch.tensor([[1, 2], [wrong, 3]], dtype=dtype)
    with pytest.raises(IndexError, match=rf"ids: {wrong}, expected 0 <= id < 40"):
        dirty_bitmap.mark(bitmap, ids, rows=40)
    assert dirty_bitmap.count(bitmap) == 0


@pytest.mark.parametrize("wrong", [2**31, 2**32 + 1, 2**63 - 1, -(2**63)])
def test_wide_ids_are_not_cut_to_32_bits(wrong: int) -> None:
    bitmap = dirty_bitmap.new(40)
    with pytest.raises(IndexError, match=str(wrong)):
        dirty_bitmap.mark(bitmap, torch.tensor([wrong]), rows=40)


def test_arguments_that_do_not_fit_are_refused() -> None:
    bitmap = dirty_bitmap.new(64)
    ids = torch.tensor([1])
    with pytest.raises(ValueError, match="bitmap"):
        dirty_bitmap.mark(bitmap, ids, rows=65)
    with pytest.raises(ValueError, match="bitmap"):
        dirty_bitmap.collect(bitmap, rows=32)
    with pytest.raises(ValueError, match="bitmap"):
        dirty_bitmap.mark(bitmap.to(torch.int64), ids, rows=64)
    with pytest.raises(ValueError, match="ids"):
        dirty_bitmap.mark(bitmap, ids.float(), rows=64)
    with pytest.raises(ValueError, match="bitmaps"):
        dirty_bitmap.merge(bitmap, dirty_bitmap.new(65))
    with pytest.raises(ValueError, match="rows"):
        dirty_bitmap.new(-1)


def test_collecting_is_the_same_for_any_number_of_threads(threads: int) -> None:
    torch.manual_seed(3)
    bitmap = dirty_bitmap.new(40_000)
    ids = torch.randperm(40_000)[:9_000]
    dirty_bitmap.mark(bitmap, ids, rows=40_000)
    assert torch.equal(dirty_bitmap.collect(bitmap, rows=40_000), ids.sort()[0])
    assert dirty_bitmap.count(bitmap) == 9_000


def test_two_threads_that_mark_one_bitmap_lose_nothing() -> None:
    rows = 64_000
    bitmap = dirty_bitmap.new(rows)
    dirty_bitmap.mark(bitmap, torch.tensor([0]), rows=rows)  # compiled before the race

    def mark(first: int) -> None:
        for start in range(first, rows, 64):
            dirty_bitmap.mark(bitmap, torch.arange(start, start + 32), rows=rows)

    both = [threading.Thread(target=mark, args=(first,)) for first in (0, 32)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert dirty_bitmap.count(bitmap) == rows


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_may_be_a_column_of_a_batch(dtype: torch.dtype) -> None:
    batch = torch.tensor([[3, 99, 5], [40, 99, 6], [64, 99, 7]], dtype=dtype)
    bitmap = dirty_bitmap.new(70)
    dirty_bitmap.mark(bitmap, batch[:, 0], rows=70)
    assert dirty_bitmap.collect(bitmap, rows=70).tolist() == [3, 40, 64]
    dirty_bitmap.mark(bitmap, torch.tensor([8], dtype=dtype).expand(5), rows=70)
    assert dirty_bitmap.collect(bitmap, rows=70).tolist() == [3, 8, 40, 64]
    with pytest.raises(IndexError, match="ids: 99"):
        dirty_bitmap.mark(bitmap, batch[:, 1], rows=70)
    assert dirty_bitmap.collect(bitmap, rows=70).tolist() == [3, 8, 40, 64]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_several_tables_are_marked_in_one_call(dtype: torch.dtype) -> None:
    rows = [5, 900, 33, 64]
    ids = [
        torch.tensor([4, 0], dtype=dtype),
        torch.randint(0, 900, (6, 50), dtype=dtype)[:, ::2],
        torch.empty(0, dtype=dtype),
        torch.tensor([[63, 63], [1, 32]], dtype=dtype)[:, 1],
    ]
    bitmaps = [dirty_bitmap.new(n) for n in rows]
    expected = [bitmap.clone() for bitmap in bitmaps]
    dirty_bitmap.mark_many(bitmaps, ids, rows=rows)
    reference.mark_many(expected, ids, rows=rows)
    for bitmap, right in zip(bitmaps, expected, strict=True):
        assert torch.equal(bitmap, right)
    dirty_bitmap.mark_many([], [], rows=[])


def test_several_tables_and_an_id_out_of_range() -> None:
    bitmaps = [dirty_bitmap.new(40) for _ in range(3)]
    ids = [torch.tensor([1]), torch.tensor([2, 40]), torch.tensor([3])]
    with pytest.raises(IndexError, match="ids: 40, expected 0 <= id < 40"):
        dirty_bitmap.mark_many(bitmaps, ids, rows=[40] * 3)
    assert [dirty_bitmap.count(bitmap) for bitmap in bitmaps] == [1, 0, 0]
    with pytest.raises(ValueError):
        dirty_bitmap.mark_many(bitmaps, ids[:1], rows=[40] * 3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_marker_marks_like_mark(dtype: torch.dtype) -> None:
    rows = 100
    marker = dirty_bitmap.marker(bitmap := dirty_bitmap.new(rows), rows=rows)
    expected = bitmap.clone()
    batch = torch.randint(0, rows, (6, 5), dtype=dtype)
    for ids in (batch, batch[:, 1], batch[:0], batch[::2, ::2]):
        marker(ids)
        reference.mark(expected, ids, rows=rows)
        assert torch.equal(bitmap, expected)
    before = bitmap.clone()
    for wrong in (-1, rows, 2**31 - 1):
        with pytest.raises(IndexError, match=f"ids: {wrong}, expected 0 <= id < 100"):
            marker(torch.tensor([3, wrong], dtype=dtype))
    with pytest.raises(ValueError, match="ids"):
        marker(torch.tensor([1.0]))
    assert torch.equal(bitmap, before)
    with pytest.raises(ValueError, match="bitmap"):
        dirty_bitmap.marker(bitmap, rows=200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int8])
@every("shape", [(), (1,), (3,), (16,), (2, 5)])
@every("rows", [1, 31, 64, 1_000])
def test_rows_that_are_not_zero_are_marked(
    rows: int, shape: tuple[int, ...], dtype: torch.dtype, threads: int
) -> None:
    values = torch.zeros(rows, *shape, dtype=dtype)
    last = values.view(rows, -1)[:, -1]
    last[torch.arange(0, rows, 3)] = 1
    bitmap, expected = dirty_bitmap.new(rows), dirty_bitmap.new(rows)
    for marked in (bitmap, expected):
        dirty_bitmap.mark(marked, torch.tensor([rows // 2]), rows=rows)
    dirty_bitmap.mark_nonzero(bitmap, values, rows=rows)
    reference.mark_nonzero(expected, values, rows=rows)
    assert torch.equal(bitmap, expected)
    wanted = set(range(0, rows, 3)) | {rows // 2}
    assert set(dirty_bitmap.collect(bitmap, rows=rows).tolist()) == wanted


def test_no_value_that_can_change_a_row_counts_as_zero() -> None:
    values = torch.zeros(6, 5)
    values[1, 2], values[2, 0], values[3, 4], values[4, 1] = torch.nan, 1e-45, -torch.inf, -0.0
    bitmap = dirty_bitmap.new(6)
    dirty_bitmap.mark_nonzero(bitmap, values, rows=6)
    assert dirty_bitmap.collect(bitmap, rows=6).tolist() == [1, 2, 3, 4]


def test_values_that_are_not_contiguous_are_looked_at_as_they_are() -> None:
    values = torch.zeros(3, 40).t()
    values[7, 2] = 1
    bitmap = dirty_bitmap.new(40)
    dirty_bitmap.mark_nonzero(bitmap, values, rows=40)
    assert dirty_bitmap.collect(bitmap, rows=40).tolist() == [7]
    dirty_bitmap.mark_nonzero(bitmap, torch.ones(1, 1).expand(40, 3), rows=40)
    assert dirty_bitmap.count(bitmap) == 40
    with pytest.raises(ValueError, match="expected 41 rows"):
        dirty_bitmap.mark_nonzero(dirty_bitmap.new(41), values, rows=41)


@pytest.mark.parametrize("rows", [1, 31, 64, 777])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_ids_are_marked_and_the_new_ones_named(rows: int, share: float) -> None:
    generator = torch.Generator().manual_seed(rows)
    bitmap = dirty_bitmap.new(rows)
    dirty_bitmap.mark(bitmap, torch.randperm(rows, generator=generator)[: rows // 3], rows=rows)
    expected = bitmap.clone()
    some = (torch.rand(rows, generator=generator) < share).nonzero().flatten()
    for ids in (some, range(rows // 4, rows // 2), some, torch.tensor([], dtype=torch.int64)):
        found = dirty_bitmap.mark_new(bitmap, ids, rows=rows)
        assert torch.equal(found, reference.mark_new(expected, ids, rows=rows))
        assert torch.equal(bitmap, expected)


def test_of_an_id_that_comes_twice_the_first_is_new() -> None:
    bitmap = dirty_bitmap.new(40)
    assert dirty_bitmap.mark_new(bitmap, torch.tensor([7, 39, 7]), rows=40).tolist() == [0, 1]


@pytest.mark.parametrize(
    "ids", [torch.tensor([1, -1]), torch.tensor([40, 2]), range(-1, 3), range(30, 41)]
)
def test_no_id_is_new_when_one_is_outside_the_table(ids: torch.Tensor | range) -> None:
    bitmap = dirty_bitmap.new(40)
    with pytest.raises(IndexError, match="expected 0 <= id < 40"):
        dirty_bitmap.mark_new(bitmap, ids, rows=40)
    assert dirty_bitmap.count(bitmap) == 0


def test_what_mark_new_cannot_take_is_refused() -> None:
    bitmap = dirty_bitmap.new(40)
    refused: list[tuple[torch.Tensor | range, str]] = [
        (torch.tensor([1], dtype=torch.int32), "ids: dtype"),
        (torch.arange(9).reshape(3, 3), "ids: shape"),
        (torch.arange(9)[::2], "not contiguous"),
        (range(0, 8, 2), "step 1"),
    ]
    for ids, what in refused:
        with pytest.raises(ValueError, match=what):
            dirty_bitmap.mark_new(bitmap, ids, rows=40)
    with pytest.raises(ValueError, match="bitmap"):
        dirty_bitmap.mark_new(bitmap, range(3), rows=70)


@pytest.mark.parametrize("words", [1, 2, 15, 16, 17, 31, 33, 129])
@every("density", [0.0, 0.004, 0.02, 0.1, 0.9, 1.0])
def test_no_id_is_written_past_its_room(words: int, density: float) -> None:
    """A bitmap may have come to more bits than were counted, wherever its blocks end."""
    generator = torch.Generator().manual_seed(words)
    marked = torch.rand(32 * words, generator=generator) < density
    bitmap = dirty_bitmap.new(32 * words)
    dirty_bitmap.mark(bitmap, marked.nonzero().reshape(-1), rows=32 * words)
    wanted = marked.nonzero().reshape(-1).tolist()
    for room in {0, 1, 2, 7, 8, 511, 512, 513, len(wanted) // 2, len(wanted), len(wanted) + 600}:
        out = torch.full((room + 64,), -1)
        counted = torch.tensor([room])
        at = bitmap.data_ptr(), words, counted.data_ptr(), out.data_ptr()
        assert library.collect_bits(*at, 1) == (room != len(wanted))
        written = min(room, len(wanted))
        assert out[:written].tolist() == wanted[:written]
        assert (out[room:] == -1).all()


def test_many_tables_are_marked_by_one_call(threads: int) -> None:
    rows = [40, 1, 2000]
    bitmaps = [dirty_bitmap.new(n) for n in rows]
    ids = [torch.tensor([1, 39, 1]), torch.tensor([0]), torch.arange(0, 2000, 7)]

    def flat() -> list[int]:
        parts = zip(bitmaps, ids, rows, strict=True)
        return [x for b, i, n in parts for x in (b.data_ptr(), i.data_ptr(), i.numel(), n)]

    assert dirty_bitmap.mark_tables() == -1
    assert dirty_bitmap.mark_tables(*flat()) == -1
    found = [dirty_bitmap.collect(b, rows=n) for b, n in zip(bitmaps, rows, strict=True)]
    assert [f.tolist() for f in found] == [sorted(set(i.tolist())) for i in ids]
    for bitmap in bitmaps:
        dirty_bitmap.clear(bitmap)
    ids[1] = torch.tensor([0, 1])
    assert dirty_bitmap.mark_tables(*flat()) == 1
    assert [dirty_bitmap.count(bitmap) for bitmap in bitmaps] == [2, 0, 0]
