from __future__ import annotations

import multiprocessing
import os

import numpy as np
import pytest
import torch

from recpoint.kernels import dirty_bitmap, dirty_rows
from recpoint.kernels.dirty_rows import into, reference
from tests.unit.kernels.every import every


def _bitmap(rows: int, ids: torch.Tensor) -> torch.Tensor:
    bitmap = dirty_bitmap.new(rows)
    dirty_bitmap.mark(bitmap, ids, rows=rows)
    return bitmap


def _room(source: torch.Tensor, count: int) -> torch.Tensor:
    """Room for `count` rows, and one more that has to stay as it is."""
    return torch.full((count + 1, *source.shape[1:]), 77, dtype=source.dtype)


@pytest.mark.parametrize("rows", [1, 31, 63, 64, 65, 200_000])
@every("density", [0.0, 0.001, 0.02, 0.3, 0.9, 1.0])
def test_rows_of_several_tables_are_copied(rows: int, density: float, threads: int) -> None:
    torch.manual_seed(rows)
    lengths = [rows, 5_000, rows]
    tables = [torch.rand(n, 16) for n in lengths]
    states = [torch.rand(n) for n in lengths]
    marks = [(torch.rand(n) < density).nonzero().reshape(-1) for n in lengths]
    bitmaps = [_bitmap(n, ids) for n, ids in zip(lengths, marks, strict=True)]
    tally = dirty_rows.count(bitmaps, rows=lengths)
    assert list(tally.counts) == [ids.numel() for ids in marks]
    places = [
        (torch.full((ids.numel() + 1,), -7), _room(table, ids.numel()), _room(state, ids.numel()))
        for table, state, ids in zip(tables, states, marks, strict=True)
    ]
    tally.copy(
        [
            into(ids[:-1], (table, weights[:-1]), (state, values[:-1]))
            for (ids, weights, values), table, state in zip(places, tables, states, strict=True)
        ]
    )
    for (ids, weights, values), table, state, wanted in zip(
        places, tables, states, marks, strict=True
    ):
        assert torch.equal(ids[:-1], wanted)
        assert torch.equal(weights[:-1], table[wanted])
        assert torch.equal(values[:-1], state[wanted])
        assert ids[-1] == -7
        assert (weights[-1] == 77).all()
        assert values[-1] == 77


def test_no_dirty_row_behind_a_crowded_beginning(threads: int) -> None:
    """What the room for ids held before is no id: memory of a slot is used again and again."""
    rows, crowded = 4 * 65_536, 65_536
    table = torch.rand(rows, 2)
    bitmap = _bitmap(rows, torch.arange(crowded))
    for _ in range(30):  # whether a stale id was read hung on which thread came first
        ids, out = torch.full((crowded,), 1 << 40), torch.empty(crowded, 2)
        dirty_rows.count([bitmap], rows=[rows]).copy([into(ids, (table, out))])
        assert torch.equal(ids, torch.arange(crowded))
        assert torch.equal(out, table[:crowded])


def test_a_table_without_destination_is_left_out(threads: int) -> None:
    table = torch.rand(100, 3)
    bitmap = _bitmap(100, torch.tensor([3, 70]))
    out = torch.empty(2, 3)
    ids = torch.empty(2, dtype=torch.int64)
    tally = dirty_rows.count([bitmap, bitmap], rows=[100, 100])
    tally.copy([None, into(ids, (table, out))])
    assert ids.tolist() == [3, 70]
    assert torch.equal(out, table[ids])


def test_no_tables_and_no_arrays_are_fine() -> None:
    dirty_rows.count([], rows=[]).copy([])
    ids = torch.empty(1, dtype=torch.int64)
    dirty_rows.count([_bitmap(9, torch.tensor([4]))], rows=[9]).copy([into(ids)])
    assert ids.tolist() == [4]


def test_what_does_not_fit_is_refused_before_anything_is_copied() -> None:
    table = torch.rand(100, 3)
    ids, out = torch.empty(2, dtype=torch.int64), torch.full((2, 3), 5.0)
    bitmap = _bitmap(100, torch.tensor([3, 70]))
    tally = dirty_rows.count([bitmap], rows=[100])
    with pytest.raises(ValueError, match="room for 8 bytes, expected 16"):
        tally.copy([into(ids[:1], (table, out[:1]))])
    with pytest.raises(ValueError, match="source: 99 rows, expected 100"):
        tally.copy([into(ids, (table[:99], out))])
    with pytest.raises(ValueError, match="dtype"):
        tally.copy([into(ids, (table.double(), out))])
    with pytest.raises(ValueError, match="not contiguous"):
        tally.copy([into(ids, (table.t().contiguous().t(), out))])
    with pytest.raises(ValueError):
        tally.copy([])
    with pytest.raises(ValueError, match="ceil"):
        dirty_rows.count([bitmap], rows=[200])
    assert (out == 5.0).all()


@pytest.mark.parametrize("change", ["more", "fewer"])
def test_a_bitmap_that_changes_in_between_is_found_out(change: str, threads: int) -> None:
    table = torch.rand(100, 3)
    bitmap = _bitmap(100, torch.tensor([3, 70]))
    tally = dirty_rows.count([bitmap], rows=[100])
    if change == "more":
        dirty_bitmap.mark(bitmap, torch.tensor([4, 5, 6]), rows=100)
    else:
        dirty_bitmap.clear(bitmap)
    ids, out = torch.full((3,), -7), torch.full((3, 3), 5.0)
    with pytest.raises(RuntimeError, match="changed while they were read"):
        tally.copy([into(ids[:2], (table, out[:2]))])
    assert ids[2] == -7
    assert (out == 5.0).all()


def test_bits_past_the_last_row_read_no_memory() -> None:
    table = torch.rand(33, 3)
    bitmap = dirty_bitmap.new(33)
    bitmap[1] = 0b100  # row 34
    tally = dirty_rows.count([bitmap], rows=[33])
    with pytest.raises(RuntimeError, match="changed"):
        tally.copy([into(torch.empty(1, dtype=torch.int64), (table, table[:1].clone()))])


class _Case:
    """100,000 rows of a table, enough for several threads."""

    def __init__(self) -> None:
        self.rows = 300_000
        self.table = torch.rand(self.rows, 8)
        self.wanted = torch.randperm(self.rows)[:100_000].sort().values
        self.expected = self.table[self.wanted]
        self.bitmap = _bitmap(self.rows, self.wanted)
        self.ids, self.out = torch.empty_like(self.wanted), torch.empty_like(self.expected)

    def is_copied(self) -> bool:
        tally = dirty_rows.count([self.bitmap], rows=[self.rows])
        tally.copy([into(self.ids, (self.table, self.out))])
        # numpy: in a forked child torch's own operations may wait for threads that are not there.
        return np.array_equal(self.ids.numpy(), self.wanted.numpy()) and np.array_equal(
            self.out.numpy(), self.expected.numpy()
        )


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_threads_it_does_not_have() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        case = _Case()
        assert case.is_copied()  # the pool's threads exist now, in this process
        case.ids.zero_()
        child = multiprocessing.get_context("fork").Process(
            target=lambda: os._exit(0 if case.is_copied() else 1), daemon=True
        )
        child.start()
        child.join(60)
        if child.exitcode is None:
            child.kill()
        assert child.exitcode == 0
    finally:
        torch.set_num_threads(before)


def test_equals_the_reference() -> None:
    torch.manual_seed(3)
    table, state = torch.rand(500, 7), torch.rand(500, 2, 3, dtype=torch.float64)
    for n in (0, 1, 40, 500):
        bitmap = _bitmap(500, torch.randperm(500)[:n])
        found = []
        for count in (dirty_rows.count, reference.count):
            tally = count([bitmap], rows=[500])
            ids = torch.empty(tally.counts[0], dtype=torch.int64)
            outs = [torch.empty(n, *t.shape[1:], dtype=t.dtype) for t in (table, state)]
            tally.copy([into(ids, *zip((table, state), outs, strict=True))])
            found.append([ids, *outs])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
