"""Kernels that write where the caller says: all of what they promise, and not a bit beside it.

Buffers hold garbage before, of patterns that no result has by chance.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recpoint.kernels import dirty_bitmap, dirty_rows, quantize, row_gather
from recpoint.kernels.bit_packing import BITS
from recpoint.kernels.quantize import reference

DTYPES = st.sampled_from(
    [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64]
)
DIMS = st.one_of(st.integers(1, 40), st.sampled_from([64, 128]))


def _garbage(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Arbitrary bytes; NaN and infinities among those of floats."""
    generator = torch.Generator().manual_seed(seed)
    size = shape[0] * shape[1] * dtype.itemsize
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def _same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.view(torch.uint8), right.view(torch.uint8)
    )


@st.composite
def places(draw: st.DrawFn) -> tuple[int, Tensor]:
    """Rows of a table, and some of them in any order."""
    rows = draw(st.integers(1, 60))
    chosen = draw(st.lists(st.integers(0, rows - 1), max_size=rows, unique=True))
    return rows, torch.tensor(chosen, dtype=torch.int64)


@settings(deadline=None)
@given(places(), DIMS, DTYPES, st.integers(0, 2**31), st.booleans())
def test_rows_travel_and_nothing_else_changes(
    place: tuple[int, Tensor], dim: int, dtype: torch.dtype, seed: int, behind: bool
) -> None:
    rows, ids = place
    n = len(ids)
    table = _garbage(rows, dim, dtype=dtype, seed=seed)
    # Room for a row more on either side, which is not given away.
    for first in {0, int(behind)}:
        room = _garbage(n + 2, dim, dtype=dtype, seed=seed + 1)
        expected = room.clone()
        expected[first : first + n] = table[ids]
        row_gather.gather(table, ids, room[first : first + n])
        assert _same(room, expected)

    part = _garbage(n, dim, dtype=dtype, seed=seed + 2)
    scattered, moved, expected = table.clone(), table.clone(), table.clone()
    expected[ids] = part
    row_gather.scatter(part, ids, scattered)
    assert _same(scattered, expected)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    expected[ids] = part[order]
    row_gather.move(part, order, moved, ids)
    assert _same(moved, expected)


@settings(deadline=None)
@given(places(), DIMS, st.sampled_from(BITS), st.integers(0, 2**31))
def test_decoded_rows_fill_their_places_and_no_others(
    place: tuple[int, Tensor], dim: int, bits: int, seed: int
) -> None:
    rows, ids = place
    n = len(ids)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n + 3, dim, generator=generator)
    packed, scale, offset, *_ = quantize.quantize_packed(values, bits)
    decoded = reference.dequantize_packed(packed, scale, offset, dim=dim, bits=bits)
    table = _garbage(rows, dim, dtype=torch.float32, seed=seed)
    positions = torch.randperm(n + 3, generator=generator)[:n]
    expected = table.clone()
    expected[ids] = decoded[positions]
    quantize.dequantize_rows(packed, scale, offset, table, ids, bits=bits, positions=positions)
    assert _same(table, expected)


@settings(deadline=None)
@given(places(), places(), DIMS, DTYPES, st.integers(0, 2**31))
def test_dirty_rows_fill_their_room_and_nothing_behind_it(
    one: tuple[int, Tensor], other: tuple[int, Tensor], dim: int, dtype: torch.dtype, seed: int
) -> None:
    lengths = [one[0], other[0]]
    marks = [one[1].sort().values, other[1].sort().values]
    tables = [_garbage(rows, dim, dtype=dtype, seed=seed + rows) for rows in lengths]
    bitmaps = [dirty_bitmap.new(rows) for rows in lengths]
    for bitmap, ids, rows in zip(bitmaps, marks, lengths, strict=True):
        dirty_bitmap.mark(bitmap, ids, rows=rows)
    rooms = [_garbage(len(ids) + 2, dim, dtype=dtype, seed=seed) for ids in marks]
    # What lay there before is no id of any table.
    found = [torch.full((len(ids) + 2,), 2**61 + 5) for ids in marks]
    expected = []
    for room, numbers, table, ids in zip(rooms, found, tables, marks, strict=True):
        filled, wanted = room.clone(), numbers.clone()
        filled[1:-1], wanted[1:-1] = table[ids], ids
        expected.append((filled, wanted))
    dirty_rows.count(bitmaps, rows=lengths).copy(
        [
            dirty_rows.into(numbers[1:-1], (table, room[1:-1]))
            for numbers, table, room in zip(found, tables, rooms, strict=True)
        ]
    )
    for room, numbers, (filled, wanted) in zip(rooms, found, expected, strict=True):
        assert _same(room, filled)
        assert _same(numbers, wanted)
