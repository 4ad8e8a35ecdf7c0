"""Copying ahead on a CPU: the plan in one pass over the ids, and a copier with a thread of its own.

The functions that change marks keep the GIL, as in `dirty_bitmap`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from recpoint.kernels.arguments import require, require_dense
from recpoint.kernels.copy_ahead.tables import STEP_WORDS, LastUses, Left, TableAhead
from recpoint.kernels.dirty_bitmap import cpu as dirty_bitmap
from recpoint.kernels.dirty_bitmap.shapes import require_fit, require_pair
from recpoint.kernels.dirty_rows.destination import Destination, Room, row_bytes
from recpoint.kernels.native import library

__all__ = ["Copier", "first_places", "last_uses", "places"]

_ID_BYTES = 8
_WHOLE = 1_000_000  # a share of the time, in millionths


def last_uses(batches: Sequence[Tensor], *, rows: int, seen: Tensor) -> LastUses:
    """List each row that the batches look up once, under the last batch that looks it up."""
    require_fit(seen, rows)
    pointers: list[int] = []
    total = 0
    for ids in batches:
        if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1 or not ids.is_cpu:
            raise ValueError(
                f"ids: {ids.dtype} {tuple(ids.shape)} on {ids.device}, expected a vector of int32"
                " or int64 on the cpu"
            )
        require_dense("ids", ids)
        pointers += ids.data_ptr(), ids.numel(), ids.element_size()
        total += ids.numel()
    # One entry more: native code writes the entry before the list before it knows whether the id
    # is new. Memory that is never written is not there.
    room = min(total, rows) + 1
    ids = torch.empty(room, dtype=torch.int64, device="cpu")
    starts = torch.empty(len(batches) + 1, dtype=torch.int64, device="cpu")
    all_given = array("q", pointers)
    first = library.last_uses(
        _address(all_given), len(batches), rows, seen.data_ptr(), ids.data_ptr(), room,
        starts.data_ptr(),
    )  # fmt: skip
    return LastUses(ids[first:], starts.sub_(first))


def first_places(taken: Tensor, seen: Tensor) -> Tensor:
    """Return the number of rows set in either bitmap before each part, and of all rows set."""
    require_pair(taken, seen)
    words = taken.numel()
    first = torch.empty(-(-words // STEP_WORDS) + 1, dtype=torch.int64, device="cpu")
    library.first_places(taken.data_ptr(), seen.data_ptr(), words, first.data_ptr())
    return first


def places(ids: Tensor, taken: Tensor, seen: Tensor, first: Tensor) -> Tensor:
    """Return how many rows before each id are set in either bitmap."""
    require("ids", ids, torch.int64, 1)
    require_pair(taken, seen)
    require("first", first, torch.int64, 1)
    wrong = library.first_outside(ids.data_ptr(), ids.numel(), 32 * taken.numel())
    if wrong >= 0:
        raise IndexError(f"ids: {int(ids[wrong])}, expected 0 <= id < {32 * taken.numel()}")
    slots = torch.empty_like(ids)
    library.places_of(
        ids.data_ptr(), ids.numel(), taken.data_ptr(), seen.data_ptr(), first.data_ptr(),
        slots.data_ptr(),
    )  # fmt: skip
    return slots


class Copier:
    """Copies rows of tables to their places.

    A thread of the caller is in `run`. All other methods belong to the training thread.

    Rows may be written by training while they are copied: only rows that were marked after they
    were handed over, and these are copied once more in `finish`.

    Args:
        tables: the tables.

    Raises:
        ValueError: an array or a list does not fit its table.
        MemoryError: there is no memory.
    """

    def __init__(self, tables: Sequence[TableAhead]) -> None:
        self._address = 0
        self._tables = tuple(tables)
        self._kept_alive: list[object] = []  # what the copier has addresses of
        described: list[int] = []
        arrays: list[int] = []
        for table in self._tables:
            described += self._described(table, arrays)
        batches = {table.uses.starts.numel() - 1 for table in self._tables}
        if len(batches) > 1:
            raise ValueError(f"tables: windows of {sorted(batches)} batches, expected one length")
        self.batches = batches.pop() if batches else 0
        all_tables, all_arrays = array("q", described), array("q", arrays)
        self._address = library.new_copier(
            _address(all_tables), len(self._tables), _address(all_arrays), len(arrays) // 4
        )
        if not self._address:
            raise MemoryError("no memory to copy rows ahead")

    def _described(self, table: TableAhead, arrays: list[int]) -> list[int]:
        """Return the table as native.cpp has it, and append its arrays to `arrays`."""
        for bitmap in (table.fresh, table.taken, table.seen):
            require_fit(bitmap, table.rows)
        require("ids", table.uses.ids, torch.int64, 1)
        require("starts", table.uses.starts, torch.int64, 1)
        require("places", table.places, torch.int64, 1)
        if table.places.numel() != table.uses.ids.numel():
            raise ValueError(
                f"places: {table.places.numel()}, expected {table.uses.ids.numel()} as ids"
            )
        first = len(arrays) // 4
        whole = Room(0, _ID_BYTES * table.placed, table.seen)  # stands for ids that nobody wants
        destination = Destination(whole if table.ids is None else table.ids, table.arrays)
        sizes = row_bytes(destination, count=table.placed, rows=table.rows)
        for size, (source, room) in zip(sizes, table.arrays, strict=True):
            # Training may give a source other memory, so its present memory is kept.
            self._kept_alive += source.untyped_storage(), room.owner
            arrays += source.data_ptr(), room.address, size, 0
        self._kept_alive.append(table)
        return [
            table.fresh.data_ptr(), table.taken.data_ptr(), table.seen.data_ptr(),
            table.seen.numel(), table.rows, int(table.first_places is None),
            0 if table.first_places is None else table.first_places.data_ptr(),
            0 if table.ids is None else table.ids.address,
            table.uses.ids.data_ptr(), table.places.data_ptr(), table.uses.starts.data_ptr(),
            first, len(arrays) // 4,
        ]  # fmt: skip

    def __del__(self) -> None:
        if self._address:
            library.free_copier(self._address)  # no thread is in `run`: it would hold a reference

    def run(self, share: float, *, niceness: int = 0) -> None:
        """Copy rows that are handed over, on this thread, until `stop` or `finish` is called.

        Args:
            share: the share of its time that the thread copies, above 0 up to 1. It pauses
                otherwise.
            niceness: added to the thread's niceness for the rest of its life.
        """
        library.run_copier(self._address, max(1, round(_WHOLE * share)), niceness)

    def hand_over(self, batches: Sequence[int]) -> None:
        """Have the rows copied that no batch of the window after these looks up.

        Their marks move from `fresh` to `taken`, so no update of such a row may be outstanding that
        is marked already.

        Args:
            batches: for each table, the number of batches of the window that are trained, never
                fewer than before.

        Raises:
            ValueError: there are not as many batches.
            MemoryError: there is no memory; the copier must not be used any more.
        """
        if len(batches) != len(self._tables) or any(not 0 <= n <= self.batches for n in batches):
            raise ValueError(
                f"batches: {list(batches)}, expected 0 … {self.batches} for each table"
            )
        known_batches = array("q", batches)
        if not library.hand_over(self._address, _address(known_batches)):
            raise MemoryError("no memory to copy rows ahead")

    def hand_over_marked(self, index: int) -> int:
        """Have the rows of a table copied once more that are marked now.

        Their marks move from `fresh` to `taken`, so no update of a marked row may be outstanding.

        Args:
            index: of the table; the checkpoint holds all its rows.

        Returns:
            The number of rows.

        Raises:
            ValueError: the checkpoint does not hold every row of the table.
            MemoryError: there is no memory; the copier must not be used any more.
        """
        table = self._tables[index]
        if table.first_places is not None:
            raise ValueError(f"table {index}: not every row has a place, expected a full")
        count = dirty_bitmap.count(table.fresh)
        if count == 0:
            return 0
        ids = torch.empty(count, dtype=torch.int64, device="cpu")
        self._kept_alive.append(ids)
        handed_rows: int = library.hand_marked(self._address, index, ids.data_ptr(), count)
        if handed_rows < 0:
            raise MemoryError("no memory to copy rows ahead")
        return handed_rows

    def stop(self) -> None:
        """End `run` after the step that it is in; nothing is copied any more."""
        library.stop_copier(self._address)

    def left(self) -> list[Left]:
        """Return the rows that are marked and were not handed over, table by table."""
        copies = []
        for index, table in enumerate(self._tables):
            n = dirty_bitmap.count(table.fresh)
            ids, places, unplaced = torch.empty((3, n), dtype=torch.int64, device="cpu")
            placed = 0
            if n:
                placed = library.list_left(
                    self._address, index, ids.data_ptr(), places.data_ptr(), unplaced.data_ptr()
                )
            copies.append(Left(ids[:placed], places[:placed], unplaced[: n - placed]))
        return copies

    def finish(self, left: Sequence[Left]) -> None:
        """Copy everything that is left, and move all marks to `taken`.

        Afterwards nothing is copied any more.

        Args:
            left: as `left` returned it; the caller copies rows without a place.

        Raises:
            MemoryError: there is no memory; the copier must not be used any more.
        """
        for index, (ids, places, _) in enumerate(left):
            if ids.numel():
                self._kept_alive += ids, places
                if not library.add_rows(
                    self._address, index, ids.data_ptr(), places.data_ptr(), ids.numel()
                ):
                    raise MemoryError("no memory to copy rows ahead")
        library.finish_copier(self._address, torch.get_num_threads())
        for index in range(len(self._tables)):
            library.move_marks(self._address, index)

    def copied(self) -> tuple[int, int, int, int]:
        """Return the rows and bytes that `run` has copied, and those that `finish` has copied."""
        counts = array("q", bytes(4 * 8))
        library.copied_rows(self._address, _address(counts))
        rows_before, bytes_before, rows_after, bytes_after = counts
        return rows_before, bytes_before, rows_after, bytes_after


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]
