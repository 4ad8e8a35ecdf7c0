"""Reads all rows of cached tables as they were at one moment, while training goes on.

Three places have a row's value of that moment: its slot, if no step has changed it since; a copy
that was saved before a step changed it; or the home, which is frozen. The home thread freezes the
home and copies the rows that are in slots (`CacheView.begin`), in one piece of work, so that no row
enters or leaves a slot meanwhile. All other rows are then read from the frozen home, by whichever
thread calls `CacheView.finish`.

If all rows were written to the home before it was frozen, it has the rows of the moment, and can
stage them itself (`CacheView.stage`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from recpoint.embeddings.cache.slots import RecordLayout, TableSlots
from recpoint.embeddings.home.contract import Checked, FrozenRows
from recpoint.errors import HomeError

__all__ = ["CacheView", "RowsAtHome", "SavesRows", "TableView"]

#: Slots that are copied while a step may have to wait: about a millisecond's work.
_SLOTS_AT_A_TIME: Final = 16_384
#: Rows that are read from the home at a time.
_ROWS_AT_A_TIME: Final = 65_536


class _RowRequest(NamedTuple):
    """Rows of one part of a table, and where they go. Ids are counted from the part's first row.

    Attributes:
        ids: int64 [n], ascending; None: all rows of the part.
        outs: for the weight and each row state, [n, …], on the CPU.
        filled: bool [n]: the row is there.
    """

    ids: Tensor | None
    outs: Sequence[Tensor]
    filled: Tensor

    def positions(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of `ids` are wanted, bool [m], and the places of those."""
        if self.ids is None:
            is_in_part = (ids >= 0) & (ids < len(self.filled))
            return is_in_part, ids[is_in_part]
        if not self.ids.numel():
            return torch.zeros_like(ids, dtype=torch.bool), ids[:0]
        positions = torch.searchsorted(self.ids, ids).clamp_(max=self.ids.numel() - 1)
        is_wanted = self.ids[positions] == ids
        return is_wanted, positions[is_wanted]


class RowsAtHome(NamedTuple):
    """Rows of one table that its home is to stage.

    Attributes:
        table: name of the table.
        frozen: the rows as they were.
        ids: int64 [n], ascending, or all rows of a range. They count from the table's first row.
        layout: layout of the records.
        new_records: returns the records of rows that the home does not have, uint8 [m, bytes], from
            their ids, int64 [m].
    """

    table: str
    frozen: FrozenRows
    ids: Tensor | range
    layout: RecordLayout
    new_records: Callable[[Tensor], Tensor]


class TableView:
    """One table of a `CacheView`.

    Args:
        slots: the table's slots, with the row states of the moment.
        initial: returns the first values of rows.
        part: the rows that may be wanted.
    """

    def __init__(self, slots: TableSlots, initial: Callable[[Tensor], Tensor], part: range) -> None:
        self.slots = slots
        self._part = part
        self._initial = initial
        self._arrays = tuple(array for _, array in slots.arrays())
        self._layout: RecordLayout | None = None
        self._new_states = tuple(array[slots.blank].cpu().clone() for array in self._arrays[1:])
        self._saved = torch.zeros_like(slots.changed)
        self._pieces: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        self._requests: list[_RowRequest] = []
        self._staged: list[Tensor | None] = []
        self.frozen: FrozenRows | None = None
        self.checked = Checked()

    def freeze(self, frozen: FrozenRows | None) -> None:
        """Take the frozen home; None: the home does not know the table yet.

        The table's first write-back lays out its records, and may come after this was made.
        """
        self.frozen = frozen
        self._layout = self.slots.layout

    def want(self, ids: Tensor | None, outs: Sequence[Tensor]) -> None:
        """Have rows written to `outs`; see `_RowRequest`."""
        count = len(self._part) if ids is None else ids.numel()
        filled = torch.zeros(count, dtype=torch.bool, device="cpu")
        self._requests.append(_RowRequest(ids, tuple(outs), filled))

    def stage(self, ids: Tensor | None) -> None:
        """Have the home stage rows; see `CacheView.stage`."""
        self._staged.append(ids)

    @property
    def at_home(self) -> list[RowsAtHome]:
        """The rows that the home is to stage, once it is frozen.

        Raises:
            HomeError: the home does not know the table.
        """
        if not self._staged:
            return []
        if self.frozen is None or self._layout is None:
            raise HomeError(
                f"table {self.slots.name!r}",
                found="a home that does not know the table",
                expected="one that has its rows, so that it can stage them",
                next_step="nothing: the next checkpoint also holds these rows",
            )
        first = self._part.start
        return [
            RowsAtHome(
                self.slots.name,
                self.frozen,
                self._part if ids is None else ids + first,
                self._layout,
                self._new_records,
            )
            for ids in self._staged
        ]

    def _new_records(self, ids: Tensor) -> Tensor:
        assert self._layout is not None  # `at_home` has looked
        size = ids.numel(), self._layout.size_bytes
        records = torch.empty(size, dtype=torch.uint8, device="cpu")
        arrays = self._new_rows(ids)
        for field, array in zip(self._layout.fields, arrays, strict=True):
            self._layout.put(records, field, array)
        return records

    def _new_rows(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Return values and row states of rows that were never trained."""
        values = self._initial(ids).to(self._arrays[0].dtype)
        states = (state.expand(ids.numel(), *state.shape) for state in self._new_states)
        return values, *states

    def save(self, slots: Tensor) -> None:
        """Copy the rows of slots that are about to change; the lock is held."""
        if not self._requests:
            return
        new = slots[~self._saved[slots]]
        self._saved[new] = True
        chosen_slots = new.to(self.slots.weight.device)
        arrays = tuple(array.index_select(0, chosen_slots).cpu() for array in self._arrays)
        self._pieces.append((self.slots.ids[new], arrays))

    def copy_slots(self, lock: Lock) -> None:
        """Copy the rows that are in slots and that no step has changed; by the home thread."""
        if not self._requests:
            return
        for first in range(0, self.slots.capacity, _SLOTS_AT_A_TIME):
            slots = torch.arange(
                first,
                min(first + _SLOTS_AT_A_TIME, self.slots.capacity),
                dtype=torch.int64,
                device="cpu",
            )
            with lock:
                slots = slots[(self.slots.ids[slots] >= 0) & ~self._saved[slots]]
                self._put(self.slots.ids[slots], slots, self._arrays)

    def copy_saved(self) -> None:
        """Copy the rows that were saved; nothing is saved any more."""
        for ids, arrays in self._pieces:
            rows = torch.arange(ids.numel(), dtype=torch.int64, device="cpu")
            self._put(ids, rows, arrays)
        self._pieces.clear()

    def _put(self, ids: Tensor, positions: Tensor, arrays: Sequence[Tensor]) -> None:
        """Write rows that lie at `positions` in `arrays` to their places."""
        for request in self._requests:
            is_wanted, places = request.positions(ids - self._part.start)
            chosen = positions[is_wanted].to(arrays[0].device)
            for array, out in zip(arrays, request.outs, strict=True):
                out[places] = array.index_select(0, chosen).cpu()
            request.filled[places] = True

    def read_home(self) -> None:
        """Read all other rows from the frozen home."""
        for request in self._requests:
            for first in range(0, len(request.filled), _ROWS_AT_A_TIME):
                places = (
                    torch.nonzero(~request.filled[first : first + _ROWS_AT_A_TIME]).view(-1) + first
                )
                if places.numel():
                    self._read(request, places)

    def _read(self, request: _RowRequest, places: Tensor) -> None:
        ids = (places if request.ids is None else request.ids[places]) + self._part.start
        is_at_home = torch.zeros(ids.numel(), dtype=torch.bool, device="cpu")
        if self.frozen is not None and self._layout is not None:
            records = torch.empty(
                ids.numel(), self._layout.size_bytes, dtype=torch.uint8, device="cpu"
            )
            is_at_home = self.frozen.fetch(ids, records)
            checked = self.frozen.check(ids)
            self.checked = Checked(*map(sum, zip(self.checked, checked, strict=True)))
            for field, out in zip(self._layout.fields, request.outs, strict=False):
                out[places[is_at_home]] = self._layout.array(records[is_at_home], field)
        if bool(is_at_home.all()):
            return
        for array, out in zip(self._new_rows(ids[~is_at_home]), request.outs, strict=True):
            out[places[~is_at_home]] = array.to(out.dtype)


class SavesRows(Protocol):
    """Wants rows as they were at one moment, and is told before they change."""

    def save(self, name: str, slots: Tensor) -> None:
        """Save rows that are about to change, int64 [n] slots; the lock is held."""


class CacheView:
    """All cached tables of a model as they are when it is made.

    Args:
        submit: has the home thread do something.
        lock: held while rows are saved, or copied from slots.
        collected: called, with the lock held, once no row has to be saved any more.
    """

    def __init__(
        self,
        submit: Callable[[Callable[[], None]], Future[None]],
        lock: Lock,
        freeze: Callable[[str], FrozenRows | None],
        collected: Callable[[CacheView], None],
    ) -> None:
        self._submit = submit
        self._lock = lock
        self._freeze = freeze
        self._collected = collected
        self._tables: dict[str, TableView] = {}
        self._copied: Future[None] | None = None
        self._checked_at_home = Checked()
        self._is_released = False

    def add(self, name: str, table: TableView) -> None:
        """Add a table."""
        self._tables[name] = table

    def fetch(self, name: str, ids: Tensor | None, outs: Sequence[Tensor]) -> None:
        """Have rows of a table arrive in `outs` when `finish` returns. Call it before `begin`.

        Args:
            name: name of the table.
            ids: int64 [n], ascending, on the CPU, not changed until then, counted from the first
                row of the table's part; None: all rows of the part.
            outs: for the weight and each row state, in the optimizer's order: [n, …], on the CPU.
        """
        self._tables[name].want(ids, outs)

    def stage(self, name: str, ids: Tensor | None) -> None:
        """Have the home stage rows of a table (`finish`). Call it before `begin`.

        All rows that have changed must have been written to the home before it is frozen.

        Args:
            name: name of the table.
            ids: as for `fetch`.
        """
        self._tables[name].stage(ids)

    def save(self, name: str, slots: Tensor) -> None:
        """Save rows that are about to change, int64 [n] slots; the lock is held."""
        self._tables[name].save(slots)

    def begin(self) -> None:
        """Have the home thread copy the rows that are in slots. Training may go on."""
        self._copied = self._submit(self._copy)

    def _copy(self) -> None:
        try:
            if self._is_released:
                return
            for name, table in self._tables.items():
                table.freeze(self._freeze(name))
            for table in self._tables.values():
                table.copy_slots(self._lock)
        finally:
            with self._lock:
                self._collected(self)
        for table in self._tables.values():
            table.copy_saved()

    @property
    def checked(self) -> Checked:
        """The stripes of the rows that were read from the home."""
        of_tables = [self._checked_at_home, *(table.checked for table in self._tables.values())]
        return Checked(*map(sum, zip(*of_tables, strict=True)))

    def finish(self, stage: Callable[[Sequence[RowsAtHome]], Checked] | None = None) -> None:
        """Wait for these rows, read all others from the home, and release the view.

        Args:
            stage: has the home stage rows, and returns what was compared; None: `stage` was not
                called.

        Raises:
            HomeError: the home has failed, or has rows that do not fit their parity.
        """
        try:
            if self._copied is not None:
                self._copied.result()
                for table in self._tables.values():
                    table.read_home()
                if stage is not None:
                    self._checked_at_home = stage(
                        [rows for table in self._tables.values() for rows in table.at_home]
                    )
        finally:
            self.release()

    def release(self) -> None:
        """Give the home free; idempotent. What was not copied yet never is."""
        if self._is_released:
            return
        self._is_released = True
        if self._copied is None:
            with self._lock:
                self._collected(self)
        # By the home thread, which may be freezing the home now.
        self._submit(self._thaw)

    def _thaw(self) -> None:
        for table in self._tables.values():
            if table.frozen is not None:
                table.frozen.release()
