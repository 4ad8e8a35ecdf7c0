"""Holds the newest records of a table in append-only files, with an index in memory.

A log is what was written between two seals. Its newest records are in segments, and the last
of them in a buffer that is not written yet. Once it is sealed it never changes, so it is read
without a lock, and several readers of frozen rows may share it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.embeddings.home.directory import HomeFile, page_memory
from recpoint.embeddings.home.forms import TableForm
from recpoint.errors import HomeError
from recpoint.kernels import row_blocks
from recpoint.kernels.row_blocks import BlockForm, Channel, State
from recpoint.kernels.row_map import RowMap

__all__ = ["RecordLog", "Layout", "Targets", "require_right"]

#: A file number in `Targets.files`: the record was copied from memory.
_COPIED: Final = -1


class Layout(NamedTuple):
    """How the records of a table lie in its files.

    Attributes:
        form: the table.
        blocks: how records lie in blocks.
        number: of the table, as headers of slots have it: 1 or more.
        buffer_slots: slots that are written at once, whole blocks.
        segment_slots: slots of a segment, a multiple of `buffer_slots`.
    """

    form: TableForm
    blocks: BlockForm
    number: int
    buffer_slots: int
    segment_slots: int

    @classmethod
    def of(cls, form: TableForm, number: int, *, buffer_bytes: int, segment_bytes: int) -> Layout:
        """Return the layout of a table.

        Raises:
            ValueError: records that are too long.
        """
        blocks = BlockForm.of(form.record_bytes)
        buffer_slots = blocks.slots * max(1, buffer_bytes // blocks.block_bytes)
        written_bytes = blocks.file_bytes(buffer_slots)
        segment_slots = buffer_slots * max(1, segment_bytes // written_bytes)
        return cls(form, blocks, number, buffer_slots, segment_slots)


class Targets:
    """Where each row of a call is to be read.

    Args:
        ids: int64 [n].
        base: the file in which a row lies if no log has it, in the slot of its id.
    """

    def __init__(self, ids: Tensor, base: HomeFile | None) -> None:
        self.ids = ids
        descriptor = _COPIED if base is None else base.descriptor
        self.files = torch.full_like(ids, descriptor)
        self.slots = ids.clone()
        self.left = torch.arange(len(ids), dtype=torch.int64, device="cpu")
        self._base = base
        self._paths = {} if base is None else {base.descriptor: base.path}

    def add_files(self, files: list[HomeFile]) -> None:
        """Name files for errors."""
        self._paths.update({file.descriptor: file.path for file in files})

    def read(self, channel: Channel, out: Tensor, layout: Layout, *, whole: bool = False) -> Tensor:
        """Read all rows that were not copied. Row i goes to out[i].

        Returns:
            bool [n]: whether the row was found. False: only of rows in the base file.

        Raises:
            HomeError: a file is damaged or cannot be read.
        """
        is_present = torch.ones(len(self.ids), dtype=torch.bool, device="cpu")
        positions = (self.files != _COPIED).nonzero().view(-1)
        if not len(positions):
            return is_present
        # Rows that lie near each other are read at once.
        order = torch.argsort((self.files[positions] << 44) + self.slots[positions])
        positions = positions[order]
        files, slots, ids = (array[positions] for array in (self.files, self.slots, self.ids))
        states = channel.read(
            files, slots, ids, out, positions, table=layout.number, form=layout.blocks, whole=whole
        )
        if states.any():
            in_base = files == (_COPIED if self._base is None else self._base.descriptor)
            is_absent = (states == State.ABSENT) & in_base
            states[is_absent] = State.FOUND
            is_present[positions[is_absent]] = False
            require_right(states, files, slots, ids, self._paths, layout)
        return is_present


class RecordLog:
    """Rows that were written between two seals.

    One thread appends at a time. `lock` guards the index, the buffer and what is written until the
    log is sealed; `pins` always.

    Args:
        layout: of the table.
        number: of the log; later ones have larger numbers.
        lock: of the table.
        make: makes a segment by its number.
    """

    def __init__(
        self,
        layout: Layout,
        number: int,
        lock: threading.Lock,
        make: Callable[[int], HomeFile],
    ) -> None:
        self.number = number
        self.rows = RowMap()
        self._layout = layout
        self._lock = lock
        self._make = make
        self._segments: list[HomeFile] = []
        self._buffer = page_memory(layout.blocks.file_bytes(layout.buffer_slots))
        self._written = 0  # slots in segments; the buffer begins with the next
        self._end = 0  # slots that have a record
        self._pins = 0
        self._is_retired = False

    def append(self, ids: Tensor, records: Tensor) -> None:
        """Append records. They count once all are appended.

        The index is changed last, so an error leaves all rows with their records of before: those
        in segments, and those in the buffer, which is not emptied before it was written.

        Raises:
            HomeError: a segment cannot be written. The log takes no more records.
        """
        layout, appended = self._layout, 0
        # If an earlier call ended early, the slots that it had written are left out.
        first = max(self._end, self._written)
        while appended < len(ids):
            buffer_place = first + appended - self._written
            if buffer_place == layout.buffer_slots:
                self._write_buffer()
                continue
            count = min(layout.buffer_slots - buffer_place, len(ids) - appended)
            # Nobody reads these slots yet, because the index does not have them.
            row_blocks.fill(
                records[appended : appended + count],
                ids[appended : appended + count],
                table=layout.number,
                form=layout.blocks,
                memory=self._buffer,
                first=buffer_place,
            )
            appended += count
        with self._lock:
            self._end = first + len(ids)  # before the index, which must not lose these slots
            self.rows.put(ids, first)

    def _write_buffer(self) -> None:
        number, segment_place = divmod(self._written, self._layout.segment_slots)
        if number == len(self._segments):
            self._segments.append(self._make(number))
        self._segments[number].write(self._buffer, self._layout.blocks.place(segment_place))
        with self._lock:
            self._written += self._layout.buffer_slots

    def point(self, targets: Targets, out: Tensor) -> None:
        """Direct rows that are left to the places where this log has them.

        Rows in the buffer are copied to `out`. The caller holds `lock`, unless this is sealed.
        """
        unread = targets.left
        if not len(unread) or not len(self.rows):
            return
        places = self.rows.find(targets.ids[unread])
        is_here = places >= 0
        targets.left = unread[~is_here]
        self.point_at(targets, unread[is_here], places[is_here], out, whole=False)

    def point_at(
        self, targets: Targets, positions: Tensor, places: Tensor, out: Tensor, *, whole: bool
    ) -> None:
        """Direct rows to their places; copy those in the buffer."""
        in_memory = places >= self._written
        if in_memory.any():
            copied = positions[in_memory]
            slots = places[in_memory] - self._written
            row_blocks.take(self._buffer, slots, out, copied, form=self._layout.blocks, whole=whole)
            targets.files[copied] = _COPIED
            positions, places = positions[~in_memory], places[~in_memory]
        if len(positions):
            descriptors = [segment.descriptor for segment in self._segments]
            files = torch.tensor(descriptors, dtype=torch.int64, device="cpu")
            targets.files[positions] = files[places // self._layout.segment_slots]
            targets.slots[positions] = places % self._layout.segment_slots
            targets.add_files(self._segments)

    def pin(self) -> None:
        """Keep the files until `unpin`. The caller holds `lock`."""
        self._pins += 1

    def unpin(self) -> None:
        """Undo one `pin`. The caller holds `lock`."""
        self._pins -= 1
        self._remove_if_unused()

    def retire(self) -> None:
        """Remove the files once nobody has pinned them. The caller holds `lock`."""
        self._is_retired = True
        self._remove_if_unused()

    @property
    def is_held(self) -> bool:
        """Whether it is retired but still pinned."""
        return self._is_retired and self._pins > 0

    def _remove_if_unused(self) -> None:
        if self._is_retired and self._pins <= 0:
            self.remove()

    def remove(self) -> None:
        """Remove the files at once."""
        for segment in self._segments:
            segment.remove()

    @property
    def buffer_bytes(self) -> int:
        """Memory of the buffer."""
        return self._buffer.nbytes

    @property
    def log_bytes(self) -> int:
        """Bytes in segments, also of records that were replaced."""
        return self._layout.blocks.file_bytes(self._written)

    def disk_bytes(self) -> int:
        """Return the bytes that the segments take on the disk."""
        return sum(segment.disk_bytes() for segment in self._segments)


def require_right(
    states: Tensor,
    files: Tensor,
    slots: Tensor,
    ids: Tensor,
    paths: dict[int, Path],
    layout: Layout,
) -> None:
    """Refuse states other than FOUND.

    Raises:
        HomeError: names the file, the table, the row and what is wrong with it.
    """
    wrong = (states != State.FOUND).nonzero().view(-1)
    # A row that was not read says nothing. Another row says why.
    telling = [i for i in wrong.tolist() if states[i] != State.NOT_READ]
    if not telling:
        return
    i = telling[0]
    state, row = int(states[i]), int(ids[i])
    path = paths.get(int(files[i]), Path("a file of the home"))
    offset = layout.blocks.place(int(slots[i]))
    expected = f"its record of {layout.form.record_bytes} bytes at byte {offset}"
    next_step = "check this disk and its memory; then start training from a checkpoint"
    if state < 0:
        failure = f"[Errno {-state}] {os.strerror(-state)}"
        if -state in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            next_step = "free room on this disk or raise the limit, then start training again"
    else:
        failure = {
            State.ABSENT: "zeros",
            State.CUT_OFF: "the end of the file",
            State.DAMAGED: "bytes with another checksum",
            State.MISPLACED: "a record of another row or table",
        }[State(state)]
    raise HomeError(
        f"{path}, table {layout.form.table!r}, row {row}",
        found=failure,
        expected=expected,
        next_step=next_step,
    )
