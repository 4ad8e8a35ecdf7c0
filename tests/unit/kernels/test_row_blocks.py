"""Records in blocks of files: the fast version equals the reference, on each instruction set."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recpoint.kernels import row_blocks
from recpoint.kernels.row_blocks import BlockForm, Channel, State, reference

TABLE = 7


@pytest.fixture(params=[False, True], ids=["asynchronous", "waiting"])
def channel(request: pytest.FixtureRequest) -> Channel:
    return Channel(wait_for_each=request.param)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "blocks", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def _same(values: int, n: int) -> Tensor:
    return torch.full((n,), values, dtype=torch.int64)


def _drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def _written(file: int, form: BlockForm, ids: Tensor, seed: int) -> Tensor:
    """Write records of these rows to the slots of the same numbers. Return the records."""
    records = _drawn(seed, len(ids), form.record_bytes)
    slots = int(ids.max()) + 1
    memory = torch.zeros(form.file_bytes(slots), dtype=torch.uint8)
    for i, row in enumerate(ids.tolist()):
        one = slice(i, i + 1)
        row_blocks.fill(records[one], ids[one], table=TABLE, form=form, memory=memory, first=row)
    os.pwrite(file, memory.numpy().tobytes(), 0)
    return records


LENGTHS = [1, 7, 8, 64, 520, 2_100, 4_080, 4_081, 40_000]


@pytest.mark.parametrize("record_bytes", [*LENGTHS, row_blocks.MOST_RECORD_BYTES])
def test_a_slot_never_straddles_blocks(record_bytes: int) -> None:
    form = BlockForm.of(record_bytes)
    assert form.slot_bytes >= record_bytes + row_blocks.HEADER_BYTES
    assert form.slots * form.slot_bytes <= form.block_bytes
    for slot in (0, 1, form.slots - 1, form.slots, 12_345):
        start = form.place(slot)
        assert start // form.block_bytes == (start + form.slot_bytes - 1) // form.block_bytes
        assert form.file_bytes(slot + 1) == (start // form.block_bytes + 1) * form.block_bytes


@pytest.mark.parametrize("record_bytes", LENGTHS)
def test_what_is_filled_and_taken_is_the_reference(record_bytes: int) -> None:
    form = BlockForm.of(record_bytes)
    records = _drawn(record_bytes, 9, record_bytes)
    ids = torch.arange(9) * 2**40 + 3
    ours, theirs = (_drawn(5, form.file_bytes(12)) for _ in range(2))
    row_blocks.fill(records, ids, table=2**32 - 1, form=form, memory=ours, first=2)
    reference.fill(records, ids, table=2**32 - 1, form=form, memory=theirs, first=2)
    assert torch.equal(ours, theirs)
    slots, positions = torch.tensor([10, 2, 5]), torch.tensor([1, 3, 0])
    for whole, width in ((False, form.record_bytes), (True, form.slot_bytes)):
        outs = _drawn(6, 5, width), _drawn(6, 5, width)
        row_blocks.take(ours, slots, outs[0], positions, form=form, whole=whole)
        reference.take(ours, slots, outs[1], positions, form=form, whole=whole)
        assert torch.equal(*outs)
        if not whole:
            assert torch.equal(outs[0][positions], records[slots - 2])


@pytest.mark.parametrize("record_bytes", LENGTHS)
@pytest.mark.parametrize("whole", [False, True])
def test_what_is_read_is_the_reference(
    file: int, channel: Channel, record_bytes: int, whole: bool
) -> None:
    """Rows that are there, absent, damaged, misplaced or behind the end, in any order."""
    form = BlockForm.of(record_bytes)
    draw = random.Random(record_bytes)
    ids = torch.tensor(sorted(draw.sample(range(1_000), 300)))
    _written(file, form, ids, seed=1)
    for row in ids[::17].tolist():
        at = form.place(row) + draw.randrange(row_blocks.HEADER_BYTES + record_bytes)
        byte = os.pread(file, 1, at)[0]
        os.pwrite(file, bytes([byte ^ 1 << draw.randrange(8)]), at)
    some = draw.sample(range(int(ids.max()) + 1), 200)
    for order in (sorted(some), some, sorted(some, reverse=True), [some[0]], []):
        wanted = torch.tensor(order, dtype=torch.int64)
        expect = wanted.clone()
        expect[::11] += 1  # belongs to another row
        positions = torch.randperm(len(wanted))
        width = form.slot_bytes if whole else record_bytes
        outs, states = [], []
        for kernel in (channel, reference.Channel()):
            out = _drawn(3, len(wanted), width)
            reader: Any = kernel
            states.append(
                reader.read(
                    _same(file, len(wanted)), wanted, expect, out, positions, table=TABLE,
                    form=form, whole=whole,
                ).tolist()
            )  # fmt: skip
            outs.append(out)
        assert states[0] == states[1]
        assert torch.equal(*outs)
        if len(order) > 1:
            assert {State.FOUND, State.ABSENT, State.DAMAGED, State.MISPLACED} <= set(states[0])


@pytest.mark.parametrize("record_bytes", LENGTHS)
def test_patched_slots_leave_their_neighbours(
    file: int, channel: Channel, record_bytes: int
) -> None:
    form = BlockForm.of(record_bytes)
    draw = random.Random(record_bytes)
    ids = torch.tensor(sorted(draw.sample(range(2_000), 900)))
    records = _written(file, form, ids, seed=1)
    end = int(ids.max()) + 1
    chosen = torch.tensor(sorted(draw.sample(range(end), 500)))
    new = _drawn(2, len(chosen), record_bytes)
    memory = torch.zeros(form.file_bytes(len(chosen)), dtype=torch.uint8)
    row_blocks.fill(new, chosen, table=TABLE, form=form, memory=memory, first=0)
    rows = torch.empty(len(chosen), form.slot_bytes, dtype=torch.uint8)
    every = torch.arange(len(chosen))
    row_blocks.take(memory, every, rows, every, form=form, whole=True)
    assert not channel.patch(_same(file, len(chosen)), chosen, rows, form=form).any()
    out = torch.zeros(end, record_bytes, dtype=torch.uint8)
    wanted = torch.arange(end)
    states = channel.read(_same(file, end), wanted, wanted, out, wanted, table=TABLE, form=form)
    expected = torch.zeros(end, record_bytes, dtype=torch.uint8)
    expected[ids] = records
    expected[chosen] = new
    assert torch.equal(out, expected)
    there = set(ids.tolist()) | set(chosen.tolist())
    assert (states == State.FOUND).nonzero().view(-1).tolist() == sorted(there)


def test_rows_behind_the_end_are_cut_off(file: int, channel: Channel) -> None:
    form = BlockForm.of(64)
    ids = torch.arange(500)
    records = _written(file, form, ids, seed=1)
    os.ftruncate(file, 2 * form.block_bytes + 100)
    out = torch.zeros(500, 64, dtype=torch.uint8)
    states = channel.read(_same(file, 500), ids, ids, out, ids, table=TABLE, form=form)
    assert (states == State.CUT_OFF).any()
    assert set(states[2 * form.slots :].tolist()) <= {State.CUT_OFF, State.NOT_READ}
    found = states == State.FOUND
    assert torch.equal(out[found], records[found])
    rows = torch.zeros(1, form.slot_bytes, dtype=torch.uint8)
    last = torch.tensor([2 * form.slots])
    states = channel.patch(_same(file, 1), last, rows, form=form)
    assert states.tolist() == [State.CUT_OFF]


def test_errors_of_the_system_are_states(file: int, channel: Channel, tmp_path: Path) -> None:
    form = BlockForm.of(64)
    ids = torch.arange(3_000)
    _written(file, form, ids, seed=1)
    read_only = os.open(tmp_path / "blocks", os.O_RDONLY)
    closed = os.dup(file)
    os.close(closed)
    try:
        files = _same(file, 3_000)
        files[2_000:] = closed
        out = torch.zeros(3_000, 64, dtype=torch.uint8)
        states = channel.read(files, ids, ids, out, ids, table=TABLE, form=form)
        assert -errno.EBADF in states.tolist()
        assert State.FOUND not in states[2_000:].tolist()
        rows = torch.zeros(3_000, form.slot_bytes, dtype=torch.uint8)
        states = channel.patch(_same(read_only, 3_000), ids, rows, form=form)
        assert -errno.EBADF in states.tolist() and State.FOUND not in states.tolist()
        states = channel.read(_same(file, 3_000), ids, ids, out, ids, table=TABLE, form=form)
        assert not states.any()  # the channel works on
    finally:
        os.close(read_only)


def test_a_channel_says_how_it_reads() -> None:
    assert not Channel(wait_for_each=True).is_asynchronous
    assert Channel().nbytes == 4 * Channel(lanes=32).nbytes
    assert Channel(lanes=32).nbytes >= BlockForm.of(row_blocks.MOST_RECORD_BYTES).block_bytes
    with pytest.raises(ValueError, match="lanes: 31"):
        Channel(lanes=31)


def test_what_does_not_fit_is_refused(file: int, channel: Channel) -> None:
    form = BlockForm.of(64)
    for wrong in (0, row_blocks.MOST_RECORD_BYTES + 1):
        with pytest.raises(ValueError, match=f"record_bytes: {wrong}"):
            BlockForm.of(wrong)
    records, ids = torch.zeros(2, 64, dtype=torch.uint8), torch.arange(2)
    memory = torch.zeros(form.block_bytes, dtype=torch.uint8)
    for first in (-1, form.slots - 1):
        with pytest.raises(ValueError, match="first: slots"):
            row_blocks.fill(records, ids, table=1, form=form, memory=memory, first=first)
    with pytest.raises(ValueError, match="expected blocks"):
        row_blocks.fill(records, ids, table=1, form=form, memory=memory[1:].clone(), first=0)
    with pytest.raises(ValueError, match="records: shape"):
        row_blocks.fill(records[:, 1:].clone(), ids, table=1, form=form, memory=memory, first=0)
    slots = torch.tensor([0, form.slots])
    with pytest.raises(IndexError, match=f"slots: {form.slots}"):
        row_blocks.take(memory, slots, records, ids, form=form, whole=False)
    with pytest.raises(IndexError, match="positions: 2"):
        row_blocks.take(memory, ids, records, ids + 1, form=form, whole=False)
    files = _same(file, 2)
    with pytest.raises(IndexError, match="positions: 2"):
        channel.read(files, ids, ids, records, ids + 1, table=1, form=form)
    with pytest.raises(IndexError, match="slots: -1"):
        channel.read(files, ids - 1, ids, records, ids, table=1, form=form)
    with pytest.raises(ValueError, match="files: 1"):
        channel.read(files[:1], ids, ids, records, ids, table=1, form=form)
    with pytest.raises(ValueError, match="out: shape"):
        channel.read(files, ids, ids, records, ids, table=1, form=form, whole=True)
    with pytest.raises(ValueError, match="rows: shape"):
        channel.patch(files, ids, records, form=form)
