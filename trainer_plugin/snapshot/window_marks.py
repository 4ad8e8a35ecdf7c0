"""Keeps the marks of the tables whose rows a window copies: those before it, and those since.

When a window opens, each table goes on with a clean bitmap, and the marks until then are set aside.
At the cut the clean bitmap names the rows that may have changed since. A window that is void gives
the marks back to their trackers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.embeddings.tables.marks import Dirty, Tracker
from recpoint.trainer_plugin.policy import ChainLink, Tip
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable

__all__ = ["OpeningState", "WindowMarks", "WindowTable"]


class OpeningState(NamedTuple):
    """What must be the same at the cut as when the window opened.

    Attributes:
        link: place of the checkpoint in its chain.
        tip: tip of the chain before it.
        tables: the tables.
    """

    link: ChainLink
    tip: Tip | None
    tables: tuple[LiveTable, ...]

    def why_changed(self, tip: Tip | None, tables: Sequence[LiveTable]) -> str | None:
        """Return what is different at the cut; None: nothing."""
        if tip != self.tip:
            return "an earlier checkpoint was lost"
        if [live.spec for live in tables] != [live.spec for live in self.tables]:
            return "tables or their row states changed"
        return None


class WindowTable(NamedTuple):
    """A table whose rows are copied ahead; its tracker marks into `fresh` meanwhile.

    Attributes:
        number: its index in the checkpoint.
        live: the table as it was when the window opened.
        tracker: tracks its dirty rows.
        aside: the marks from before the window.
        fresh: the bitmap that has taken marks since.
        addresses: devices and addresses of values and row states when the window opened.
    """

    number: int
    live: LiveTable
    tracker: Tracker
    aside: Dirty
    fresh: Tensor
    addresses: tuple[tuple[torch.device, int], ...]

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """The live values and row states."""
        return self.live.weight.detach(), *self.live.row_states

    @property
    def array_names(self) -> list[str]:
        """The names of these arrays in a slot (format §7)."""
        states = range(len(self.live.row_states))
        return [f"t{self.number}.values", *(f"t{self.number}.state.{state}" for state in states)]

    @property
    def has_moved(self) -> bool:
        """Whether values or row states lie in other memory than when the window opened."""
        return self.addresses != _addresses(self.live)


class WindowMarks:
    """The marks of the tables that a window copies. Used by the training thread.

    A table that is dirty as a whole, and one without a tracker, is not copied.

    Args:
        tables: the tables of the checkpoint.
        trackers: trackers of the tables' dirty rows, none of them `unapplied`.

    Attributes:
        tables: the tables whose marks were set aside.
    """

    def __init__(self, tables: Sequence[LiveTable], trackers: Mapping[str, Tracker]) -> None:
        self.tables: list[WindowTable] = []
        # Tables whose marks are aside now, by `Table.key`.
        self._open: dict[str, WindowTable] = {}
        try:
            for number, live in enumerate(tables):
                tracker = trackers.get(live.key)
                if tracker is not None and not tracker.all_rows:
                    aside = tracker.set_aside()
                    table = WindowTable(
                        number, live, tracker, aside, tracker.bitmap, _addresses(live)
                    )
                    self._open[live.key] = table
                    self.tables.append(table)
        except BaseException:  # there is no memory for one more bitmap
            self.give_back()
            raise

    @property
    def size_bytes(self) -> int:
        """Bytes of the bitmaps that take marks meanwhile."""
        return sum(table.fresh.nbytes for table in self.tables)

    def why_void(self) -> str | None:
        """Return why rows can be copied no longer: a table has another weight or other memory."""
        for table in self.tables:
            if table.tracker.bitmap is not table.fresh:
                return "a table has another weight"
            if table.has_moved:
                return f"table {table.live.spec.name!r} lies in other memory"
        return None

    def why_void_at_cut(self) -> str | None:
        """Return why copies are of no use at the cut; None: marks name all rows that changed."""
        reason: str | None = None
        for table in self.tables:
            table.tracker.check_version()  # of each table: it also counts changes
            name = table.live.spec.name
            if reason is None and (
                table.tracker.all_rows or table.tracker.bitmap is not table.fresh
            ):
                reason = f"every row of table {name!r} became dirty"
            if reason is None and table.has_moved:
                reason = f"table {name!r} lies in other memory"
        return reason

    def end(self, key: str, *, keep: bool) -> Dirty | None:
        """Return the dirty rows of a table, as `Tracker.end_window`; None: it was not copied.

        Args:
            key: `Table.key`.
            keep: the rows stay dirty.
        """
        table = self._open.pop(key, None)
        return None if table is None else table.tracker.end_window(table.aside, keep=keep)

    def give_back(self) -> None:
        """Return all marks to their trackers."""
        for table in self._open.values():
            table.tracker.merge_back(table.aside)
        self._open.clear()


def _addresses(live: LiveTable) -> tuple[tuple[torch.device, int], ...]:
    return tuple([(array.device, array.data_ptr()) for array in (live.weight, *live.row_states)])
