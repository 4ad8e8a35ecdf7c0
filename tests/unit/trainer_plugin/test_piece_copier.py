"""Pieces of tables go through two buffers to their places, whenever a device copies them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from recpoint.trainer_plugin.snapshot import piece_copier
from recpoint.trainer_plugin.snapshot.device_copies import (
    CudaCopies,
    DeviceCopies,
    HostCopies,
    copies_of,
)
from recpoint.trainer_plugin.snapshot.piece_copier import PieceBuffers, PieceCopier, TableRoom
from tests.late_copies import LateCopies


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def room_of(*arrays: Tensor) -> TableRoom:
    """A table's arrays as bytes, with a room that is poisoned."""
    sources = [array.view(-1).view(torch.uint8).view(len(array), -1) for array in arrays]
    return TableRoom(tuple((source, torch.full_like(source, 0xA5)) for source in sources))


def copier_of(
    copies: DeviceCopies, tables: Sequence[TableRoom], thread: ThreadPoolExecutor
) -> PieceCopier:
    sources = [[source for source, _ in table.arrays] for table in tables]
    return PieceCopier(PieceBuffers(copies, sources), tables, thread)


def settled_step(copier: PieceCopier) -> None:
    """A step, after the thread has done what it was given."""
    for buffer in copier._buffers:
        if buffer.move is not None:
            buffer.move.exception()
    copier.step()


def test_two_pieces_a_batch_each_behind_training_and_no_buffer_before_it_is_empty(
    thread: ThreadPoolExecutor,
) -> None:
    copies = LateCopies(HostCopies(1_024), random.Random(1), arrives=0.0)
    tables = [room_of(torch.arange(1_000, dtype=torch.int64))]
    copier = copier_of(copies, tables, thread)
    assert copies.called == ["buffer", "buffer"]
    copies.called.clear()
    copier.step()
    assert copies.called == ["follow training", "copy", "copy"]
    copier.step()  # neither has arrived
    assert copies.called == ["follow training", "copy", "copy"]
    copies.arrives = 1.0
    settled_step(copier)  # both have: the thread moves them
    settled_step(copier)
    assert copies.called.count("copy") == 4
    # Each step follows training once, before its first copy.
    assert "".join(call[0] for call in copies.called) in ("fccfcc", "fccfcfc")
    copier.settle()
    assert copier.rows_copied == 4 * ((1_024 - 64) // 8)
    assert copier.bytes_copied == 8 * copier.rows_copied
    assert copier.finish() == (copier._begun_rows[0] - (1_000 - 480),)
    assert copier.rows_copied == 1_000
    assert all(torch.equal(source, room) for source, room in tables[0].arrays)


@pytest.mark.parametrize("seed", range(5))
def test_every_row_has_its_place_and_is_copied_once(seed: int, thread: ThreadPoolExecutor) -> None:
    draw = random.Random(seed)
    tables = [
        room_of(
            torch.rand(rows, draw.randint(1, 40)),
            torch.rand(rows).half(),
            torch.rand(rows, 3, 2, dtype=torch.float64),
        )
        for rows in [draw.choice([1, 2, 37, 900]) for _ in range(9)]
    ]
    copies = LateCopies(HostCopies(draw.choice([1, 4_096, 1 << 20])), draw, arrives=0.6)
    copier = copier_of(copies, tables, thread)
    for _ in range(draw.randint(0, 12)):
        settled_step(copier)
    copier.settle()
    copied_before = copier.finish()
    assert copier.rows_copied == sum(table.rows for table in tables)
    assert copier.bytes_copied == sum(table.rows * table.row_bytes for table in tables)
    assert copied_before <= tuple(table.rows for table in tables)
    for table in tables:
        assert all(torch.equal(source, room) for source, room in table.arrays)


def test_small_tables_share_a_piece_up_to_a_number(
    thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_copier, "_MOST_TABLES", 4)
    copies = LateCopies(HostCopies(1 << 20), random.Random(1), arrives=1.0)
    tables = [room_of(torch.rand(5, 2)) for _ in range(10)]
    copier = copier_of(copies, tables, thread)
    settled_step(copier)
    settled_step(copier)
    settled_step(copier)
    assert [call for call in copies.called if call == "copy"] == 3 * ["copy"]
    copier.settle()
    assert copier.rows_copied == 50


def test_rows_that_changed_are_copied_again_in_parts_of_a_buffer(
    thread: ThreadPoolExecutor,
) -> None:
    values, states = torch.rand(300, 4), torch.rand(300)
    table = room_of(values, states)
    copier = copier_of(HostCopies(256), [table], thread)
    copier.finish()
    changed_ids = torch.arange(1, 300, 7)
    values[changed_ids] += 1
    states[changed_ids] += 1
    assert copier.copy_again(0, changed_ids) == changed_ids.numel() * 20
    assert copier.copy_again(0, changed_ids[:0]) == 0
    assert all(torch.equal(source, room) for source, room in table.arrays)


def test_a_copier_that_gives_up_leaves_the_slot_alone(thread: ThreadPoolExecutor) -> None:
    table = room_of(torch.rand(900, 4))
    copies = LateCopies(HostCopies(1_024), random.Random(1), arrives=0.5)
    copier = copier_of(copies, [table], thread)
    for _ in range(4):
        copier.step()
    copier.give_up()
    assert copies.under_way == 0
    ((_, room),) = table.arrays
    room.fill_(7)
    copier.step()
    assert copier.finish() == (copier._begun_rows[0],)
    assert bool((room == 7).all())


def test_what_does_not_fit_is_refused(thread: ThreadPoolExecutor) -> None:
    source = torch.zeros(3, 4, dtype=torch.uint8)
    for wrong in (source[:2], source.t(), torch.zeros(3, 4), source.view(-1)):
        with pytest.raises(ValueError, match="room: "):
            copier_of(HostCopies(), [TableRoom(((source, wrong),))], thread)
    with pytest.raises(ValueError, match="source: "):
        copier_of(HostCopies(), [TableRoom(((source.t(), source),))], thread)


def test_a_device_without_copies_is_refused_and_memory_that_cannot_be_pinned() -> None:
    with pytest.raises(ValueError, match="tables on meta, expected cpu or cuda"):
        copies_of(torch.device("meta"))
    assert isinstance(copies_of(torch.device("cpu")), HostCopies)
    if not torch.cuda.is_available():
        refused: Any = CudaCopies.__new__(CudaCopies)  # a stream cannot be had without a GPU
        with pytest.raises(RuntimeError, match="4096 bytes of the host's memory could not be pin"):
            refused.buffer(4_096)
