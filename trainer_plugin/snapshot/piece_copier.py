"""Copies whole tables of one device to their places in a slot, in pieces, between batches.

1. A piece is a few MB of rows: of one table, or of several small ones. Pieces are taken in order.
2. After each batch, `step` begins to copy the next piece into each buffer that is free. There are
   two buffers.
3. A later `step` sees that a piece has arrived. A thread moves it from the buffer to the slot; the
   buffer is free again when that is done. The thread uses the host's memory only.
4. At the cut, `finish` copies the pieces that are left, and `copy_again` rows that have changed.

Rows may be written while they are copied. Whoever uses the copier copies such rows again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.kernels import row_gather
from recpoint.kernels.arguments import require
from recpoint.trainer_plugin.snapshot.device_copies import DeviceCopies, PendingCopy

__all__ = ["PieceBuffers", "PieceCopier", "TableRoom"]

#: Arrays begin at multiples of this in a buffer, as they do in a slot.
_ALIGNMENT_BYTES = 64

#: The most tables in a piece: each takes calls of the device, and training waits for these.
_MOST_TABLES = 64

_BUFFERS = 2


class TableRoom(NamedTuple):
    """A table, and where its rows go.

    Attributes:
        arrays: (source uint8 [rows, n] on the device, room uint8 [rows, n] in the slot) for values
            and each row state, contiguous; 1 row or more.
    """

    arrays: tuple[tuple[Tensor, Tensor], ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.arrays[0][0].shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its row states."""
        return sum(source.shape[1] for source, _ in self.arrays)

    def buffer_bytes(self, rows: int) -> int:
        """Return the most bytes that so many rows take in a buffer."""
        return rows * self.row_bytes + _ALIGNMENT_BYTES * len(self.arrays)


class _RowRange(NamedTuple):
    """Rows `start` … `stop` - 1 of a table."""

    table: int
    start: int
    stop: int


class _ArraySpan(NamedTuple):
    """Consecutive rows of an array on their way: from `source` through `memory` to `room`."""

    source: Tensor
    memory: Tensor
    room: Tensor


class _RowPiece(NamedTuple):
    """Row ranges that are copied at once.

    Attributes:
        ranges: the rows.
        spans: their arrays.
        rows: number of the rows.
        size_bytes: their bytes.
    """

    ranges: tuple[_RowRange, ...]
    spans: tuple[_ArraySpan, ...]
    rows: int
    size_bytes: int


class PieceBuffers:
    """The buffers through which the pieces of one device go.

    Args:
        copies: the device.
        tables: the sources, [rows, …] each, of each table that is to be copied.

    Raises:
        RuntimeError: there is no memory for them.
    """

    def __init__(self, copies: DeviceCopies, tables: Sequence[Sequence[Tensor]]) -> None:
        longest_row = max(
            sum(array[:1].nbytes + _ALIGNMENT_BYTES for array in arrays) for arrays in tables
        )
        self.copies = copies
        self.all = tuple(
            copies.buffer(max(copies.piece_bytes, longest_row)) for _ in range(_BUFFERS)
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(memory.nbytes for memory in self.all)


class _PieceBuffer:
    """A buffer, and the piece that is in it.

    Attributes:
        memory: the buffer.
        piece: the piece; None: the buffer is free.
        arrival: tells when the piece is in the buffer; None: it is there.
        move: moves the piece to the slot; None: that has not begun.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.piece: _RowPiece | None = None
        self.arrival: PendingCopy | None = None
        self.move: Future[None] | None = None


class PieceCopier:
    """Copies tables of one device. Used by the training thread.

    Args:
        buffers: the buffers, which nothing else uses.
        tables: the tables.
        thread: moves pieces from a buffer to the slot.

    Attributes:
        rows_copied, bytes_copied: rows and bytes that lie in the slot.
    """

    def __init__(
        self, buffers: PieceBuffers, tables: Sequence[TableRoom], thread: Executor
    ) -> None:
        for table in tables:
            for source, room in table.arrays:
                require("source", source, torch.uint8, 2)
                require("room", room, torch.uint8, 2)
                if source.shape != room.shape:
                    raise ValueError(f"room: {tuple(room.shape)}, expected {tuple(source.shape)}")
        self._copies = buffers.copies
        self._tables = tuple(tables)
        self._thread = thread
        self._buffers = [_PieceBuffer(memory) for memory in buffers.all]
        self._ranges = self._pieces(buffers.all[0].numel())
        # For each table, the rows from its start of which a copy was begun.
        self._begun_rows = [0] * len(self._tables)
        self.rows_copied = self.bytes_copied = 0

    def _pieces(self, buffer_bytes: int) -> Iterator[list[_RowRange]]:
        """Yield the row ranges of each piece."""
        piece: list[_RowRange] = []
        free_bytes = buffer_bytes
        for number, table in enumerate(self._tables):
            start = 0
            while start < table.rows:
                fitting = (free_bytes - table.buffer_bytes(0)) // table.row_bytes
                if piece and (fitting <= 0 or len(piece) == _MOST_TABLES):
                    yield piece
                    piece, free_bytes = [], buffer_bytes
                    continue
                stop = min(table.rows, start + max(1, fitting))
                piece.append(_RowRange(number, start, stop))
                free_bytes -= table.buffer_bytes(stop - start)
                start = stop
        if piece:
            yield piece

    def step(self) -> None:
        """After a batch: move pieces that have arrived, and begin to copy the next ones."""
        is_first = True
        for buffer in self._buffers:
            self._follow(buffer)
            if buffer.piece is None and self._next(buffer):
                if is_first:
                    self._copies.follow_training()
                    is_first = False
                self._begin(buffer)

    def _follow(self, buffer: _PieceBuffer) -> None:
        """Move the piece on if it has arrived, and free the buffer if it lies in the slot."""
        if buffer.arrival is not None and buffer.arrival.is_there():
            buffer.arrival = None
            assert buffer.piece is not None
            buffer.move = self._thread.submit(_move, buffer.piece.spans)
        if buffer.move is not None and buffer.move.done():
            buffer.move.result()  # raises what went wrong
            assert buffer.piece is not None
            self.rows_copied += buffer.piece.rows
            self.bytes_copied += buffer.piece.size_bytes
            buffer.move = buffer.piece = None

    def _next(self, buffer: _PieceBuffer) -> bool:
        """Plan the next piece for a free buffer; False: there is none."""
        ranges = next(self._ranges, None)
        if ranges is None:
            return False
        spans: list[_ArraySpan] = []
        end = rows = size_bytes = 0
        for part in ranges:
            for source, room in self._tables[part.table].arrays:
                rows_of_source = source[part.start : part.stop].view(-1)
                memory = buffer.memory[end : end + rows_of_source.numel()]
                spans.append(
                    _ArraySpan(rows_of_source, memory, room[part.start : part.stop].view(-1))
                )
                size_bytes += rows_of_source.numel()
                end = -(-(end + rows_of_source.numel()) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            rows += part.stop - part.start
        buffer.piece = _RowPiece(tuple(ranges), tuple(spans), rows, size_bytes)
        return True

    def _begin(self, buffer: _PieceBuffer) -> None:
        """Begin to copy the planned piece into its buffer."""
        assert buffer.piece is not None
        buffer.arrival = self._copies.copy(
            [span.source for span in buffer.piece.spans],
            [span.memory for span in buffer.piece.spans],
        )
        for part in buffer.piece.ranges:
            self._begun_rows[part.table] = part.stop

    def settle(self) -> None:
        """Wait until all pieces that were begun lie in the slot."""
        for buffer in self._buffers:
            if buffer.arrival is not None:
                buffer.arrival.wait()
            self._follow(buffer)
        for buffer in self._buffers:
            if buffer.move is not None:
                buffer.move.exception()  # waits; `_follow` raises it
            self._follow(buffer)

    def give_up(self) -> None:
        """Wait until nothing is read or written any more. Never raises."""
        for buffer in self._buffers:
            if buffer.arrival is not None:
                try:
                    buffer.arrival.wait()
                except RuntimeError:
                    pass  # the device has failed: nothing is under way, and training fails too
            if buffer.move is not None:
                buffer.move.exception()
            buffer.arrival = buffer.move = buffer.piece = None
        self._ranges = iter(())

    def finish(self) -> tuple[int, ...]:
        """Copy the pieces that are left, after `settle`, while nothing writes to the tables.

        Returns:
            For each table, the rows from its start that were copied before.
        """
        copied_before = tuple(self._begun_rows)
        is_left = True
        while is_left:
            is_left = False
            # One buffer fills while the thread empties the other.
            for buffer in self._buffers:
                if buffer.arrival is not None:
                    buffer.arrival.wait()
                if buffer.move is not None:
                    buffer.move.exception()
                self._follow(buffer)
                if buffer.piece is None and self._next(buffer):
                    self._begin(buffer)
                is_left |= buffer.piece is not None
        return copied_before

    def copy_again(self, table: int, ids: Tensor) -> int:
        """Copy rows again, after `finish`, while nothing writes to the tables.

        Args:
            table: number of the table.
            ids: int64 [n] on the host, distinct.

        Returns:
            The bytes that were copied.

        Raises:
            RuntimeError: the device has no memory for the rows.
        """
        memory = self._buffers[0].memory
        for source, room in self._tables[table].arrays:
            row_bytes = source.shape[1]
            for part in ids.split(max(1, memory.numel() // row_bytes)):
                rows = memory[: part.numel() * row_bytes].view(part.numel(), row_bytes)
                self._copies.gather(source, part, rows)
                row_gather.scatter(rows, part, room)
        return ids.numel() * self._tables[table].row_bytes


def _move(spans: Sequence[_ArraySpan]) -> None:
    """Move a piece from its buffer to the slot; Python's other threads run meanwhile."""
    for span in spans:
        # Both are contiguous parts of memory that the span keeps alive, of one size.
        ctypes.memmove(span.room.data_ptr(), span.memory.data_ptr(), span.memory.numel())
