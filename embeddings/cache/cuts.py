"""Prepares the slots and the home of a cache for cuts, and makes views of all rows.

A view reads rows as they are when it is made, while training goes on (`view.CacheView`). If all
rows that have changed are written to the home first (`Cuts.prepare`), the home has the rows of the
cut, and can stage them itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import torch
from torch import Tensor

from recpoint.embeddings.cache.changed_rows import ChangedRows
from recpoint.embeddings.cache.mover import Mover
from recpoint.embeddings.cache.trainers import Trainers
from recpoint.embeddings.cache.turns import Act
from recpoint.embeddings.cache.view import CacheView, SavesRows, TableView
from recpoint.embeddings.home.contract import FrozenRows, TableRows
from recpoint.interrupts import held

__all__ = ["Cuts"]

#: Bytes of changed rows that are copied before they are written to the home.
_COPIED_BYTES: Final = 64 << 20

#: Table -> its rows at home, frozen; None: the home does not know the table.
_Frozen = dict[str, FrozenRows | None]


class Cuts:
    """What cuts need of the tables of one cache.

    Args:
        mover: freezes the home, and writes rows to it.
        trainers: the trainers that share the tables.
    """

    def __init__(self, mover: Mover, trainers: Trainers) -> None:
        self._tables = mover.tables
        self._mover = mover
        self._trainers = trainers
        self._lock = threading.Lock()  # held while rows are saved, or copied from slots
        self._views: list[SavesRows] = []  # whose rows in slots are not copied yet
        self._prepared: _Frozen | None = None  # by `prepare`, for the next view

    @property
    def saves_rows(self) -> bool:
        """Whether rows have to be saved before they change."""
        return bool(self._views)

    def save(self, name: str, slots: Tensor) -> None:
        """Have all views save rows of a table that are about to change, int64 [n] slots."""
        with self._lock:
            for view in self._views:
                view.save(name, slots)

    def prepare(self, *, writes_back: bool) -> Callable[[], None]:
        """Prepare for a view; see `Cache.prepare_view`."""
        with self._trainers.leaving():
            if writes_back:
                self._mover.raise_error()
            if not (self._trainers.meet_for_view() or writes_back):
                return lambda: None
            return self._begin_writing(writes_back)

    def _begin_writing(self, writes_back: bool) -> Callable[[], None]:
        changed_rows, may_begin = ChangedRows(self._tables, self._lock), threading.Event()
        staged_tables = [name for name in self._tables if writes_back and self.stages_at_home(name)]
        with held():
            self._views.append(changed_rows)
            unused, self._prepared = self._prepared, {}  # of a cut that has failed
            act = self._mover.guarded(
                partial(
                    self._write_and_freeze,
                    changed_rows,
                    staged_tables,
                    self._prepared,
                    unused or {},
                )
            )
            self._mover.thread.submit(partial(self._until_over, changed_rows, may_begin, act))
        return may_begin.set

    def _until_over(
        self, changed_rows: ChangedRows, may_begin: threading.Event, act: Callable[[], None]
    ) -> None:
        """Have steps save rows until `act` is over, also if it fails or never begins its work."""
        may_begin.wait()
        try:
            act()
        finally:
            with self._lock:
                self._views.remove(changed_rows)

    def _write_and_freeze(
        self,
        changed_rows: ChangedRows,
        staged_tables: Sequence[str],
        frozen: _Frozen,
        unused: _Frozen,
    ) -> None:
        _release_all(unused)
        for name in staged_tables:
            self._mover.put_at_home(self._tables[name])
        copied: list[TableRows] = []
        for name in self._tables:
            if (rows := changed_rows.take(name)) is not None:
                copied.append(rows)
            if sum(rows.records.nbytes for rows in copied) > _COPIED_BYTES:
                self._mover.write_back(copied)
                copied = []
        self._mover.write_back(copied)
        meeting = self._mover.meeting
        meeting.meet(Act.WRITE_CUT)  # all trainers have written their rows
        for name in self._tables:
            # Each is released, also if the next one fails.
            frozen[name] = self._mover.freeze(name)
        meeting.meet(Act.FREEZE_CUT)  # later write-backs of any trainer are not in it

    def stages_at_home(self, name: str) -> bool:
        """Whether the home can have a table's rows after `prepare`; see `Cache.stages_at_home`.

        It never has the keys of a keyed table, so it cannot stage its rows.
        """
        rows = self._tables[name]
        return rows.is_trained and rows.reserved is None

    def view(self, parts: Mapping[str, range]) -> CacheView:
        """Return a view of each table as it is now; see `Cache.view`.

        Args:
            parts: name of each table -> the rows that may be read.
        """
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            self._mover.raise_error()
            view = CacheView(
                self._mover.thread.submit, self._lock, self._mover.freeze, self._collected
            )
        else:
            view = self._prepared_view(prepared)
        for name, rows in self._tables.items():
            view.add(name, TableView(rows.slots, rows.initial, parts[name]))
        self._views.append(view)
        return view

    def _prepared_view(self, frozen: _Frozen) -> CacheView:
        """Return a view of rows that `prepare` has written back and frozen."""

        def take(name: str) -> FrozenRows | None:
            self._mover.raise_error()
            return frozen.pop(name)

        def collected(view: CacheView) -> None:
            self._collected(view)
            with suppress(RuntimeError):  # the cache was closed, and its home thread ends
                # If the view has never begun.
                self._mover.thread.submit(partial(_release_all, frozen))

        return CacheView(self._mover.thread.submit, self._lock, take, collected)

    def _collected(self, view: CacheView) -> None:
        if view in self._views:
            self._views.remove(view)

    def rows_of(self, name: str, ids: Tensor) -> tuple[Tensor, ...]:
        """Return rows and row states as they are now; see `Cache.rows_of`."""
        with self._trainers.leaving():
            unique_ids, positions = torch.unique(ids, return_inverse=True)
            outs = [
                torch.empty((unique_ids.numel(), *array.shape[1:]), dtype=array.dtype, device="cpu")
                for _, array in self._tables[name].slots.arrays()
            ]
            unused, self._prepared = self._prepared, None  # of a cut that has failed
            if unused is not None:
                self._mover.thread.submit(partial(_release_all, unused))
            with held():
                self.prepare(writes_back=False)()
            view = self.view(
                {table: range(rows.slots.rows) for table, rows in self._tables.items()}
            )
            view.fetch(name, unique_ids, outs)
            view.begin()
            view.finish()
            self._trainers.end_read()
        return tuple(out[positions] for out in outs)

    def begin_anew(self) -> None:
        """Release what was prepared for a cut that has failed. The home thread must be idle."""
        prepared, self._prepared = self._prepared, None
        _release_all(prepared or {})


def _release_all(frozen: _Frozen) -> None:
    for rows in frozen.values():
        if rows is not None:
            rows.release()
    frozen.clear()
