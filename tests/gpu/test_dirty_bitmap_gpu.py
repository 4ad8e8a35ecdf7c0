from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from recpoint.kernels import dirty_bitmap
from recpoint.kernels.dirty_bitmap import reference, triton

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64, 2049, 5000, 70_000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_marking_and_collecting_equal_the_reference(
    device: torch.device, rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    expected = torch.zeros((rows + 31) // 32, dtype=torch.int32)
    bitmap = expected.to(device, copy=True)
    for n in (0, 1, 7, 1500):
        ids = torch.randint(0, rows, (n,), dtype=dtype)
        triton.mark(bitmap, ids.to(device), rows=rows)
        reference.mark(expected, ids, rows=rows)
    assert torch.equal(bitmap.cpu(), expected)
    assert triton.count(bitmap) == reference.count(expected)
    collected = triton.collect(bitmap, rows=rows)
    assert collected.dtype == torch.int64
    assert torch.equal(collected.cpu(), reference.collect(expected, rows=rows))


def test_ids_outside_the_table_mark_nothing(device: torch.device) -> None:
    bitmap = torch.zeros(2, dtype=torch.int32, device=device)
    ids = torch.tensor([-1, -(2**62), 40, 63, 64, 2**40, 39], device=device)
    triton.mark(bitmap, ids, rows=40)
    assert triton.collect(bitmap, rows=40).tolist() == [39]


@pytest.mark.parametrize("rows", [1, 32, 40, 3000])
def test_whole_bitmap_operations_equal_the_reference(device: torch.device, rows: int) -> None:
    torch.manual_seed(rows)
    a, b = (torch.zeros((rows + 31) // 32, dtype=torch.int32) for _ in range(2))
    reference.mark(a, torch.randint(0, rows, (rows,)), rows=rows)
    reference.mark(b, torch.randint(0, rows, (rows // 3,)), rows=rows)
    first, second = a.to(device, copy=True), b.to(device, copy=True)
    triton.merge(first, second)
    reference.merge(a, b)
    assert torch.equal(first.cpu(), a) and torch.equal(second.cpu(), b)
    triton.clear(first)
    assert triton.count(first) == 0 and triton.collect(first, rows=rows).numel() == 0


def test_an_empty_table_has_an_empty_bitmap(device: torch.device) -> None:
    bitmap = torch.zeros(0, dtype=torch.int32, device=device)
    triton.mark(bitmap, torch.zeros(0, dtype=torch.int64, device=device), rows=0)
    assert triton.count(bitmap) == 0
    assert triton.collect(bitmap, rows=0).tolist() == []


#: Rows of the tables that one launch serves: none, one, word and block edges, several blocks.
MANY_ROWS = [1, 0, 33, 5000, 31, 64, 0, 40_000, 16_384, 16_385, 7]


def ids_for(rows: int, turn: int) -> torch.Tensor:
    """Ids in every form a lookup may have, some of them outside the table."""
    dtype = torch.int32 if turn % 2 else torch.int64
    if rows == 0:
        return torch.zeros(0, dtype=dtype)
    n = (0, 1, 9000, 300, 4097)[turn % 5]
    batch = torch.randint(0, rows, (n, 3), dtype=dtype)
    form = turn % 4
    if form == 0:
        return batch[:, 1]  # a column: a stride of its own
    if form == 1:
        return batch
    if form == 2:
        return batch[:, :2]  # not one sequence: has to be copied
    return batch[:1, 0].expand(50) if n else batch


@pytest.mark.parametrize("seed", range(5))
def test_many_tables_are_marked_and_collected_at_once(device: torch.device, seed: int) -> None:
    torch.manual_seed(seed)
    expected = [torch.zeros((rows + 31) // 32, dtype=torch.int32) for rows in MANY_ROWS]
    bitmaps = [bitmap.to(device, copy=True) for bitmap in expected]
    for turn in range(2):  # what is marked stays marked, also where it is marked again
        ids = [ids_for(rows, seed + turn + k) for k, rows in enumerate(MANY_ROWS)]
        # `to` keeps the strides of a column and of an expanded tensor only on the same device.
        moved = [part if device.type == "cpu" else part.to(device) for part in ids]
        triton.mark_many(bitmaps, moved, rows=MANY_ROWS)
        for bitmap, part, rows in zip(expected, ids, MANY_ROWS, strict=True):
            reference.mark(bitmap, part, rows=rows)
    for bitmap, wanted in zip(bitmaps, expected, strict=True):
        assert torch.equal(bitmap.cpu(), wanted)
    counts = [triton.count(bitmap) for bitmap in bitmaps]
    assert counts == [reference.count(bitmap) for bitmap in expected]
    found = triton.collect_many(bitmaps, rows=MANY_ROWS)
    wanted_ids = reference.collect_many(expected, rows=MANY_ROWS)
    for part, wanted in zip(found, wanted_ids, strict=True):
        assert part.dtype == torch.int64
        assert torch.equal(part.cpu(), wanted)


#: Ids of the features of one lookup: none, few, several blocks; in tables of these rows.
FEATURES = [(0, 5), (3, 33), (9_000, 700), (0, 1), (4_096, 64), (4_097, 40_000), (1, 700), (70, 1)]


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bags_each", [1, 3, None])
def test_features_of_one_lookup_are_found_on_the_device(
    device: torch.device,
    ids_dtype: torch.dtype,
    offsets_dtype: torch.dtype,
    bags_each: int | None,
) -> None:
    torch.manual_seed(3)
    # Each feature has bags of its own number, or all have the same.
    bags: list[tuple[int, int]] = []
    lengths: list[int] = []
    for number, (count, _) in enumerate(FEATURES):
        here = 1 + number % 3 if bags_each is None else bags_each
        split = torch.randint(0, count + 1, (here - 1,)).sort().values.tolist()
        lengths += [end - first for first, end in pairwise([0, *split, count])]
        bags.append((len(lengths) - here, len(lengths)))
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(offsets_dtype)
    parts = [torch.randint(0, rows, (count,), dtype=ids_dtype) for count, rows in FEATURES]
    parts[2][::7], parts[2][1::7], parts[4][0] = -1, -5, 2**30  # pruned, and out of range
    ids = torch.cat(parts)
    rows = [rows for _, rows in FEATURES]
    # Features 2 and 6 look up one table.
    expected = [torch.zeros((count + 31) // 32, dtype=torch.int32) for count in rows]
    expected[6] = expected[2]
    bitmaps = [bitmap.to(device, copy=True) for bitmap in expected]
    bitmaps[6] = bitmaps[2]
    for _ in range(2):
        triton.mark_features(bitmaps, ids.to(device), offsets.to(device), bags, rows=rows)
        reference.mark_features(expected, ids, offsets, bags, rows=rows)
    on_cpu = [torch.zeros_like(bitmap) for bitmap in expected]
    on_cpu[6] = on_cpu[2]
    dirty_bitmap.mark_features(on_cpu, ids, offsets, bags, rows=rows)
    for found, also, wanted in zip(bitmaps, on_cpu, expected, strict=True):
        assert torch.equal(found.cpu(), wanted) and torch.equal(also, wanted)
    is_marked = [reference.count(bitmap) > 0 for bitmap in expected]
    assert is_marked == [False, True, True, False, True, True, True, True]


def test_nothing_of_a_lookup_is_read_on_the_host(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    bitmaps = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2)]
    ids = torch.tensor([1, 2, 3], device=device)
    offsets = torch.tensor([0, 1, 3], device=device)

    def reads(*_: object) -> None:
        raise AssertionError("this waits for the device")

    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "__bool__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, reads)
        triton.mark_features(bitmaps, ids, offsets, [(0, 1), (1, 2)], rows=[9, 9])
    assert [bitmap.item() for bitmap in bitmaps] == [0b10, 0b1100]


def test_more_features_than_the_fewest_slots_and_bounds_past_the_ids(device: torch.device) -> None:
    rows = [2] * 40
    bitmaps = [torch.zeros(1, dtype=torch.int32, device=device) for _ in rows]
    ids = torch.ones(40, dtype=torch.int64, device=device)
    offsets = torch.arange(41, device=device)
    triton.mark_features(bitmaps, ids, offsets, [*pairwise(range(41))], rows=rows)
    assert [bitmap.item() for bitmap in bitmaps] == [2] * 40
    triton.mark_features(
        bitmaps[:2], ids[:3] * 0, offsets[:3] * 100 - 50, [(0, 1), (1, 2)], rows=[2, 2]
    )
    assert [bitmap.item() for bitmap in bitmaps[:3]] == [3, 2, 2]
    triton.mark_features(bitmaps, ids[:0], offsets * 0, [*pairwise(range(41))], rows=rows)
    triton.mark_features([], ids, offsets, [], rows=[])
    with pytest.raises(ValueError, match="bags"):
        triton.mark_features(bitmaps[:2], ids, offsets, [(0, 2), (2, 1)], rows=[2, 2])
    with pytest.raises(ValueError, match="ids"):
        triton.mark_features(bitmaps[:1], ids.float(), offsets, [(0, 1)], rows=[2])


def test_a_strided_column_of_a_batch_is_marked_where_it_lies(device: torch.device) -> None:
    batch = torch.arange(300, device=device).reshape(100, 3)
    bitmaps = [torch.zeros(10, dtype=torch.int32, device=device) for _ in range(3)]
    columns = [batch[:, 0], batch[:, 1].int()[::2], batch[:1, 2].expand(7)]
    triton.mark_many(bitmaps, columns, rows=[300] * 3)
    found = [part.tolist() for part in triton.collect_many(bitmaps, rows=[300] * 3)]
    assert found == [list(range(0, 300, 3)), list(range(1, 300, 6)), [2]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_outside_their_own_table_mark_nothing_in_any(
    device: torch.device, dtype: torch.dtype
) -> None:
    rows = [40, 5, 70]
    # Neighbours in one buffer: a bit outside its table would be seen in the next.
    words = torch.zeros(2 + 1 + 3, dtype=torch.int32, device=device)
    bitmaps = [words[:2], words[2:3], words[3:]]
    limit = torch.iinfo(dtype)
    wrong = [-1, limit.min, limit.max, 40, 63, 64, 31, 5, 2**20]
    ids = [torch.tensor(wrong, dtype=dtype, device=device)]
    ids += [torch.tensor([5, 31, 32, -32], dtype=dtype, device=device)]
    ids += [torch.tensor([70, 95, 96, -70, 69], dtype=dtype, device=device)]
    triton.mark_many(bitmaps, ids, rows=rows)
    found = [part.tolist() for part in triton.collect_many(bitmaps, rows=rows)]
    assert found == [[5, 31], [], [69]]
    assert triton.count(words) == 3


def test_more_tables_than_the_fewest_slots_are_served(device: torch.device) -> None:
    rows = [1 + k for k in range(35)]
    bitmaps = [torch.zeros((r + 31) // 32, dtype=torch.int32, device=device) for r in rows]
    triton.mark_many(bitmaps, [torch.arange(r, device=device) for r in rows], rows=rows)
    assert [triton.count(bitmap) for bitmap in bitmaps] == rows
    found = triton.collect_many(bitmaps, rows=rows)
    assert [part.tolist() for part in found] == [list(range(r)) for r in rows]


def test_no_tables_and_no_ids_launch_nothing(device: torch.device) -> None:
    triton.mark_many([], [], rows=[])
    assert triton.collect_many([], rows=[]) == []
    bitmap = torch.zeros(2, dtype=torch.int32, device=device)
    triton.mark_many([bitmap], [torch.zeros(0, dtype=torch.int32, device=device)], rows=[40])
    assert triton.count(bitmap) == 0


def test_a_table_of_addresses_is_not_used_for_other_tensors(device: torch.device) -> None:
    # The same ids for other bitmaps, then other ids for the same: each launch must see its own.
    bitmaps = [torch.zeros(4, dtype=torch.int32, device=device) for _ in range(4)]
    ids = [torch.tensor([k], device=device) for k in range(4)]
    triton.mark_many(bitmaps[:2], ids[:2], rows=[128] * 2)
    triton.mark_many(bitmaps[2:], ids[:2], rows=[128] * 2)
    triton.mark_many(bitmaps[:2], ids[2:], rows=[128] * 2)
    triton.mark_many(bitmaps[:2], ids[2:], rows=[128] * 2)
    ids[0].fill_(9)  # the same address: what lies there now counts
    triton.mark_many(bitmaps[:2], ids[:2], rows=[128] * 2)
    found = [part.tolist() for part in triton.collect_many(bitmaps, rows=[128] * 4)]
    assert found == [[0, 2, 9], [1, 3], [0], [1]]


def test_rows_whose_words_lie_past_two_to_the_31_bytes_and_words_are_marked(
    device: torch.device, huge: Callable[[int, torch.dtype], torch.Tensor]
) -> None:
    rows = (1 << 36) + 70
    bitmap = huge((rows + 31) // 32, torch.int32)
    touched = torch.tensor([0, 1, 2**26 + 1, 2**31, 2**31 + 2], device=device)
    bitmap[touched] = 0
    ids = torch.tensor([rows - 1, 2**31 + 33, 5, 2**36 + 64, 5, rows, 2**36 + 2**33], device=device)
    triton.mark_many([bitmap, bitmap], [ids[:3], ids[3:]], rows=[rows, rows])
    assert bitmap[touched].tolist() == [1 << 5, 0, 1 << 1, 0, 1 | 1 << 5]
    triton.mark(bitmap, torch.tensor([2**36 + 1], device=device), rows=rows)
    assert int(bitmap[2**31]) == 2
