"""Tables and bitmaps of more than 2^31 elements: an index that overflows 32 bits lands elsewhere.

They are sparse files in memory that is mapped, of which only what is touched takes room.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recpoint.kernels import dirty_bitmap, dirty_rows, erasure, quantize, row_gather
from recpoint.kernels.quantize import reference

ELEMENTS = 2**31
DIM = 5
#: The table has more elements than 32 bits count with a sign, and more bytes than without.
ROWS = ELEMENTS // DIM + 1000

Huge = Callable[[int, torch.dtype], Tensor]


@pytest.fixture
def huge(tmp_path: Path) -> Iterator[Huge]:
    """Make vectors of zeros; their files are deleted after the test."""
    probe = tmp_path / "probe"
    with probe.open("wb") as file:
        file.truncate(1 << 30)
    sparse = probe.stat().st_blocks * 512 < 1 << 20
    probe.unlink()
    if not sparse:
        pytest.skip(f"{tmp_path}: its filesystem has no sparse files")
    numbers = itertools.count()

    def vector(count: int, dtype: torch.dtype) -> Tensor:
        path = tmp_path / f"huge-{next(numbers)}"
        return torch.from_file(str(path), shared=True, size=count, dtype=dtype)

    yield vector
    for path in tmp_path.glob("huge-*"):
        path.unlink()


@pytest.fixture
def table(huge: Huge) -> Tensor:
    return huge(ROWS * DIM, torch.float32).view(ROWS, DIM)


PLACES = torch.tensor([ROWS - 1, 0, ROWS // 2 + 7])


def _same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def test_rows_far_behind_are_gathered_scattered_and_moved(table: Tensor, threads: int) -> None:
    rows = torch.randn(3, DIM)
    row_gather.scatter(rows, PLACES, table)
    assert _same(table[PLACES], rows)
    out = torch.full((4, DIM), float("nan"))
    row_gather.gather(table, PLACES[[0, 1, 2, 0]], out)
    assert _same(out, rows[[0, 1, 2, 0]])
    row_gather.move(rows, torch.tensor([2, 1, 0]), table, PLACES)
    assert _same(table[PLACES], rows[[2, 1, 0]])
    back = torch.full((3, DIM), float("nan"))
    row_gather.move(table, PLACES, back, torch.tensor([1, 2, 0]))
    assert _same(back, rows[[0, 2, 1]])
    assert not table[[1, ROWS // 2, ROWS - 2]].any()
    with pytest.raises(IndexError):
        row_gather.gather(table, torch.tensor([ROWS]), out[:1])


def test_rows_far_behind_are_quantized_and_decoded(table: Tensor, threads: int) -> None:
    rows = torch.randn(3, DIM)
    table[PLACES] = rows
    for method in (quantize.ASYMMETRIC, quantize.default_method(4)):
        found = quantize.quantize_rows(table, PLACES, 4, method)
        expected = reference.quantize_packed(rows, 4, method)
        assert all(_same(left, right) for left, right in zip(found, expected, strict=True))
    packed, scale, offset, *_ = expected
    order = torch.tensor([2, 0, 1])
    quantize.dequantize_rows(packed, scale, offset, table, PLACES, bits=4, positions=order)
    decoded = reference.dequantize_packed(packed, scale, offset, dim=DIM, bits=4)
    assert _same(table[PLACES], decoded[order])
    assert not table[[1, ROWS // 2, ROWS - 2]].any()


def test_bits_of_rows_far_behind_are_marked(huge: Huge) -> None:
    rows = 32 * ELEMENTS + 70
    bitmap = huge((rows + 31) // 32, torch.int32)

    def marked(row: int) -> bool:
        return bool(int(bitmap[row // 32]) >> row % 32 & 1)

    far = [rows - 1, 2**31 + 33, 5, 2**36 + 64, 5]
    dirty_bitmap.mark(bitmap, torch.tensor(far), rows=rows)
    assert [marked(row) for row in far] == [True] * 5
    assert int(bitmap[0]) == 1 << 5
    dirty_bitmap.mark(bitmap, torch.tensor([2**31 - 1, 7], dtype=torch.int32), rows=rows)
    assert marked(2**31 - 1) and int(bitmap[0]) == (1 << 5) + (1 << 7)
    new = dirty_bitmap.mark_new(bitmap, torch.tensor([rows - 1, 2**35, 2**36, 2**35]), rows=rows)
    assert new.tolist() == [1, 2]
    assert marked(2**35) and marked(2**36) and int(bitmap[0]) == (1 << 5) + (1 << 7)
    again = dirty_bitmap.mark_new(bitmap, range(rows - 3, rows), rows=rows)
    assert again.tolist() == [0, 1]
    with pytest.raises(IndexError):
        dirty_bitmap.mark(bitmap, torch.tensor([rows]), rows=rows)


def test_differences_of_rows_far_behind_are_applied(table: Tensor, threads: int) -> None:
    parity = table.view(torch.uint8)
    differences = torch.randint(0, 256, (4, 4 * DIM), dtype=torch.uint8)
    erasure.apply(parity, PLACES[[0, 1, 2, 0]], differences)
    found = parity[PLACES]
    assert torch.equal(found[0], differences[0] ^ differences[3])
    assert torch.equal(found[1:], differences[1:3])
    assert not parity[[1, ROWS // 2, ROWS - 2]].any()
    with pytest.raises(IndexError):
        erasure.apply(parity, torch.tensor([ROWS]), differences[:1])


def test_dirty_rows_far_behind_are_copied(huge: Huge, table: Tensor, threads: int) -> None:
    many = ELEMENTS + 70  # rows, of which the last have numbers of more than 31 bits
    narrow = huge(many, torch.uint8)
    # So many before row 2^31 that what a thread takes next begins there.
    crowd = torch.arange(2**31 - 40_000, 2**31, 2)
    ends = torch.tensor([0, many // 2]), torch.tensor([2**31, many - 1])
    ids = [torch.cat([ends[0], crowd, ends[1]]), PLACES.sort().values]
    count = len(ids[0])
    bitmaps = [dirty_bitmap.new(many), dirty_bitmap.new(ROWS)]
    for bitmap, some, rows in zip(bitmaps, ids, (many, ROWS), strict=True):
        dirty_bitmap.mark(bitmap, some, rows=rows)
    narrow[ids[0]] = (torch.arange(count) % 251).to(torch.uint8)
    table[ids[1]] = torch.randn(3, DIM)
    tally = dirty_rows.count(bitmaps, rows=[many, ROWS])
    assert tally.counts == (count, 3)
    found = [torch.full((count,), -7), torch.full((3,), -7)]
    values, weights = (
        torch.full((count,), 77, dtype=torch.uint8),
        torch.full((3, DIM), float("nan")),
    )
    tally.copy(
        [dirty_rows.into(found[0], (narrow, values)), dirty_rows.into(found[1], (table, weights))]
    )
    assert all(_same(left, right) for left, right in zip(found, ids, strict=True))
    assert _same(values, narrow[ids[0]])
    assert values[-2:].tolist() == [(count - 2) % 251, (count - 1) % 251]
    assert _same(weights, table[ids[1]])
    assert _same(dirty_bitmap.collect(bitmaps[0], rows=many), ids[0])
