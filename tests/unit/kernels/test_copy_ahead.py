"""Rows copied ahead: the fast version equals the reference, on each instruction set."""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from recpoint.kernels import copy_ahead, dirty_bitmap
from recpoint.kernels.copy_ahead import TableAhead, reference
from recpoint.kernels.dirty_rows.destination import Room
from recpoint.lookahead.plan import plan_table
from tests.unit.kernels.every import every


def _bitmap(rows: int, ids: set[int]) -> Tensor:
    bitmap = dirty_bitmap.new(rows)
    dirty_bitmap.mark(bitmap, torch.tensor(sorted(ids), dtype=torch.int64), rows=rows)
    return bitmap


def _room(tensor: Tensor) -> Room:
    return Room(tensor.data_ptr(), tensor.nbytes, tensor)


class Scene:
    """Tables with marks, and a window of batches whose ids are partly out of range."""

    def __init__(self, seed: int, kernel: Any, *, tables: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.batches = self.draw.choice([0, 1, 3, 8])
        self.tables = [self._table(kernel) for _ in range(tables)]
        self.copier = kernel.Copier([table for table, *_ in self.tables])

    def _table(
        self, kernel: Any
    ) -> tuple[TableAhead, list[Tensor], set[int], Tensor, list[Tensor]]:
        rows = self.draw.choice([1, 31, 64, 100, 3_000, 5_000])
        marked = {row for row in range(rows) if self.draw.random() < 0.2}
        given = [
            torch.randint(-3, rows + 3, (self.draw.randint(0, 60),)).to(
                self.draw.choice([torch.int32, torch.int64])
            )
            for _ in range(self.batches)
        ]
        taken, seen = _bitmap(rows, marked), dirty_bitmap.new(rows)
        uses = kernel.last_uses(given, rows=rows, seen=seen)
        whole = self.draw.random() < 0.3
        first = None if whole else kernel.first_places(taken, seen)
        places = uses.ids.clone() if first is None else kernel.places(uses.ids, taken, seen, first)
        placed = rows if first is None else int(first[-1])
        sources = [torch.rand(rows, 4), torch.rand(rows)]
        ids = torch.full((placed + 1,), -7)
        outs = [torch.full((placed + 1, *source.shape[1:]), 77.0) for source in sources]
        table = TableAhead(
            rows=rows,
            fresh=dirty_bitmap.new(rows),
            taken=taken,
            seen=seen,
            uses=uses,
            places=places,
            first_places=first,
            ids=None if whole else _room(ids[:-1]),
            arrays=tuple((s, _room(out[:-1])) for s, out in zip(sources, outs, strict=True)),
        )
        return table, given, marked, ids, outs

    def train(self, table: TableAhead, given: list[Tensor], batch: int) -> set[int]:
        """Change and mark most rows of a batch, and sometimes rows that nobody predicted."""
        inside = [row for row in given[batch].tolist() if 0 <= row < table.rows]
        rows = [row for row in inside if self.draw.random() < 0.9]
        rows += [self.draw.randrange(table.rows) for _ in range(self.draw.choice([0, 0, 0, 2]))]
        for source, _ in table.arrays:
            source[rows] += 1
        dirty_bitmap.mark(table.fresh, torch.tensor(rows, dtype=torch.int64), rows=table.rows)
        return set(rows)

    def play(self) -> list[object]:
        """Train part of the window, cut, and check all rows. Return what was left."""
        dirty = [set(marked) for _, _, marked, _, _ in self.tables]
        for batch in range(self.draw.randint(0, self.batches)):
            for number, (table, given, *_) in enumerate(self.tables):
                dirty[number] |= self.train(table, given, batch)
            if self.draw.random() < 0.8:
                self.copier.hand_over([batch + 1] * len(self.tables))
            for number, (table, *_) in enumerate(self.tables):
                if table.first_places is None and self.draw.random() < 0.3:
                    marked_rows = dirty_bitmap.count(table.fresh)
                    assert self.copier.hand_over_marked(number) == marked_rows
                    assert dirty_bitmap.count(table.fresh) == 0
        self.copier.stop()
        self.copier.hand_over([self.batches] * len(self.tables))
        left = self.copier.left()
        self.copier.finish(left)
        for (table, given, marked, ids, outs), rows, (_, _, unplaced) in zip(
            self.tables, dirty, left, strict=True
        ):
            looked_up = {row for some in given for row in some.tolist() if 0 <= row < table.rows}
            placed = sorted(marked | looked_up)
            if table.first_places is None:
                placed = list(range(table.rows))
            else:
                assert ids[:-1].tolist() == placed
            assert ids[-1] == -7
            assert unplaced.tolist() == sorted(rows - set(placed))
            assert set(dirty_bitmap.collect(table.taken, rows=table.rows).tolist()) == rows
            assert dirty_bitmap.count(table.fresh) == 0
            held = [p for p, r in enumerate(placed) if table.first_places is None or r in rows]
            for (source, _), out in zip(table.arrays, outs, strict=True):
                assert torch.equal(out[held], source[torch.tensor(placed, dtype=torch.int64)[held]])
                assert (out[-1] == 77).all()
        return [one.unplaced.tolist() for one in left]


@pytest.mark.parametrize("share", [0.3, 1.0])
@every("seed", range(60))
def test_every_row_lies_in_its_place(seed: int, share: float, threads: int) -> None:
    expected = Scene(seed, reference, tables=1 + seed % 3)
    found = Scene(seed, copy_ahead, tables=1 + seed % 3)
    for (ours, *_), (theirs, *_) in zip(found.tables, expected.tables, strict=True):
        assert ours.uses.starts.tolist() == theirs.uses.starts.tolist()
        assert torch.equal(ours.seen, theirs.seen)
        assert ours.placed == theirs.placed
    thread = threading.Thread(target=found.copier.run, args=(share,))
    thread.start()
    assert found.play() == expected.play()
    thread.join(60)
    assert not thread.is_alive()


def test_rows_are_copied_before_the_end() -> None:
    rows = 100_000
    source, out = torch.rand(rows, 16), torch.zeros(rows, 16)
    taken = _bitmap(rows, set(range(rows)))
    seen = dirty_bitmap.new(rows)
    uses = copy_ahead.last_uses([torch.arange(100)], rows=rows, seen=seen)
    table = TableAhead(
        rows=rows, fresh=dirty_bitmap.new(rows), taken=taken, seen=seen, uses=uses,
        places=uses.ids.clone(), first_places=None, ids=None, arrays=((source, _room(out)),),
    )  # fmt: skip
    copier = copy_ahead.Copier([table])
    thread = threading.Thread(target=copier.run, args=(1.0,))
    thread.start()
    while copier.copied()[0] < rows - 100:  # pytest's time limit ends it
        pass
    assert torch.equal(out[100:], source[100:])
    assert (out[:100] == 0).all()
    copier.hand_over([1])
    while copier.copied()[0] < rows:
        pass
    copier.finish(copier.left())
    thread.join(60)
    assert torch.equal(out, source)
    assert copier.copied() == (rows, 64 * rows, 0, 0)


def test_marked_rows_are_copied_once_more_before_the_end() -> None:
    rows = 100_000
    source, out = torch.zeros(rows, 16), torch.zeros(rows, 16)
    states, states_out = torch.zeros(rows), torch.zeros(rows)
    fresh, seen = dirty_bitmap.new(rows), dirty_bitmap.new(rows)
    uses = copy_ahead.last_uses([torch.arange(0)], rows=rows, seen=seen)
    table = TableAhead(
        rows=rows, fresh=fresh, taken=dirty_bitmap.new(rows), seen=seen, uses=uses,
        places=uses.ids.clone(), first_places=None, ids=None,
        arrays=((source, _room(out)), (states, _room(states_out))),
    )  # fmt: skip
    copier = copy_ahead.Copier([table])
    thread = threading.Thread(target=copier.run, args=(1.0,))
    thread.start()
    while copier.copied()[0] < rows:  # pytest's time limit ends it
        pass
    changed = torch.randperm(rows)[:5_000]
    for array in (source, states):
        array[changed] = 1
    dirty_bitmap.mark(fresh, changed, rows=rows)
    assert copier.hand_over_marked(0) == 5_000
    while copier.copied()[0] < rows + 5_000:
        pass
    assert torch.equal(out, source) and torch.equal(states_out, states)
    (left,) = copier.left()
    assert left.ids.numel() == 0
    copier.finish([left])
    thread.join(60)
    assert set(dirty_bitmap.collect(table.taken, rows=rows).tolist()) == set(changed.tolist())
    assert copier.copied()[2:] == (0, 0)


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_memory_that_training_gives_back_ends_the_copy_and_not_the_process(
    is_handed_over: bool,
) -> None:
    """Training does so when it moves a tensor; here no allocator keeps the memory mapped."""
    rows = 1 << 20
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    page_flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    size = ctypes.c_size_t(64 * rows)
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, page_flags, -1, 0)
    memory = (ctypes.c_char * (64 * rows)).from_address(address)
    source = torch.frombuffer(memory, dtype=torch.float32).view(rows, 16)
    out = torch.zeros(rows, 16)
    taken, seen = dirty_bitmap.new(rows), dirty_bitmap.new(rows)
    uses = copy_ahead.last_uses([torch.arange(0)], rows=rows, seen=seen)
    table = TableAhead(
        rows=rows, fresh=dirty_bitmap.new(rows), taken=taken, seen=seen, uses=uses,
        places=uses.ids.clone(), first_places=None, ids=None, arrays=((source, _room(out)),),
    )  # fmt: skip
    copier = copy_ahead.Copier([table])
    copied_rows = 0
    thread = threading.Thread(target=copier.run, args=(1.0,))
    if is_handed_over:
        thread.start()
        while copier.copied()[0] < rows:  # pytest's time limit ends it
            pass
        copied_rows = rows
        dirty_bitmap.mark(table.fresh, torch.arange(0, rows, 100), rows=rows)
    out += 1
    assert libc.munmap(ctypes.c_void_p(address), size) == 0
    if is_handed_over:
        copier.hand_over_marked(0)
    else:
        thread.start()
    thread.join(60)  # it returns, because nothing is left at the address
    assert not thread.is_alive()
    assert copier.copied() == (copied_rows, 64 * copied_rows, 0, 0)
    assert (out == 1).all()


def test_what_does_not_fit_is_refused() -> None:
    seen = dirty_bitmap.new(100)
    with pytest.raises(ValueError, match="ids: torch.float32"):
        copy_ahead.last_uses([torch.rand(3)], rows=100, seen=seen)
    with pytest.raises(ValueError, match="expected ceil"):
        copy_ahead.last_uses([], rows=200, seen=seen)
    with pytest.raises(IndexError, match="ids: 128"):
        copy_ahead.places(torch.tensor([128]), seen, seen, copy_ahead.first_places(seen, seen))
    uses = copy_ahead.last_uses([], rows=100, seen=seen)
    source, out = torch.rand(100, 2), torch.zeros(99, 2)
    places = copy_ahead.first_places(seen, seen)
    no_rows = TableAhead(
        rows=100, fresh=seen, taken=seen, seen=seen, uses=uses, places=uses.ids,
        first_places=places, ids=None, arrays=(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="not every row has a place"):
        copy_ahead.Copier([no_rows]).hand_over_marked(0)
    with pytest.raises(ValueError, match="rows: room for 792 bytes, expected 800"):
        copy_ahead.Copier(
            [
                TableAhead(
                    rows=100, fresh=seen, taken=seen, seen=seen, uses=uses, places=uses.ids,
                    first_places=None, ids=None, arrays=((source, _room(out)),),
                )
            ]
        )  # fmt: skip


@every("seed", range(40))
def test_the_plan_says_after_which_batch_a_row_is_final(seed: int) -> None:
    """Against brute force: a row is final after the last batch that looks it up."""
    draw = random.Random(seed)
    rows = draw.choice([1, 40, 700])
    batches = [
        torch.tensor([draw.randrange(rows) for _ in range(draw.randint(0, 30))], dtype=torch.int64)
        for _ in range(draw.randint(0, 6))
    ]
    marked = {row for row in range(rows) if draw.random() < draw.choice([0.0, 0.3, 1.0])}
    is_full = draw.random() < 0.3
    plan = plan_table(
        batches,
        rows=rows,
        marked=None if is_full else _bitmap(rows, marked),
        seen=dirty_bitmap.new(rows),
    )
    last = {row: n for n, ids in enumerate(batches) for row in ids.tolist()}
    for number in range(len(batches)):
        part = slice(int(plan.uses.starts[number]), int(plan.uses.starts[number + 1]))
        found = plan.uses.ids[part].tolist()
        assert sorted(found) == sorted(row for row, batch in last.items() if batch == number)
    placed = sorted(range(rows) if is_full else marked | last.keys())
    assert plan.placed == len(placed)
    assert [placed[place] for place in plan.places.tolist()] == plan.uses.ids.tolist()
    assert set(dirty_bitmap.collect(plan.seen, rows=rows).tolist()) == last.keys()
