"""Knows a table's part on one server: which rows and parity rows are there, and which are lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.embeddings.parity.frozen_while_lost import FrozenWhileLost
from recpoint.embeddings.parity.peers import MOST_TABLES, TableSlots
from recpoint.embeddings.parity.stripes import Stripes, TablesStripes

__all__ = ["Batch", "Known", "OwnTable", "RowsOfTables", "first_batch", "places_of"]

#: Bytes of rows that one call between servers carries.
_BATCH_BYTES: Final = 2 << 20


class Known(NamedTuple):
    """How many rows and parity rows a server has to know, and knows."""

    known: int
    all: int


class OwnTable:
    """A table's part on one server.

    Args:
        name: of the table.
        stripes: where its rows and parity rows are.
        record_bytes: of a row.
        server: number of the server.

    Attributes:
        name, stripes, record_bytes: as given.
        parity_name: what the home calls the table's parity rows.
        coded_bytes: of a row as parity has it.
        generation: how often the table was cleared.
        slots, parity_slots: how many the server has.
        batch_rows: rows of a batch.
        is_known, is_parity_known: bool, for each slot; None: all are known.
        frozen: open readers of its rows that were frozen while rows were lost.
    """

    def __init__(self, name: str, stripes: Stripes, record_bytes: int, server: int) -> None:
        self.name = name
        self.parity_name = f"{name}\0parity"
        self.stripes = stripes
        self.record_bytes = record_bytes
        self.coded_bytes = record_bytes + 1
        self.generation = 0
        self.slots = len(stripes.slots_of(server, range(stripes.rows)))
        self.parity_slots = stripes.parity_slots(server)
        self.batch_rows = max(1, _BATCH_BYTES // self.coded_bytes)
        self.is_known: Tensor | None = None
        self.is_parity_known: Tensor | None = None
        self._first = self._first_parity = 0  # all before are known
        self.frozen: list[FrozenWhileLost] = []

    def lose_all(self) -> None:
        """Know no row and no parity row any more."""
        self.is_known = torch.zeros(self.slots, dtype=torch.bool, device="cpu")
        self.is_parity_known = torch.zeros(self.parity_slots, dtype=torch.bool, device="cpu")

    def are_known(self, slots: Tensor) -> Tensor:
        """Return whether rows are known, bool [n]."""
        return _flags(self.is_known, slots)

    def are_parity_known(self, slots: Tensor) -> Tensor:
        """Return whether parity rows are known, bool [n]."""
        return _flags(self.is_parity_known, slots)

    def set_known(self, slots: Tensor) -> None:
        """Note that lost rows are known now."""
        assert self.is_known is not None
        self.is_known[slots] = True

    def set_parity_known(self, slots: Tensor) -> None:
        """Note that lost parity rows are known now."""
        assert self.is_parity_known is not None
        self.is_parity_known[slots] = True

    def first_missing(self) -> Tensor:
        """Return the first slots whose rows are lost, int64 [n]; if none is, note that."""
        slots, self._first = _first_false(self.is_known, self._first, self.batch_rows)
        if not len(slots):
            self.is_known = None
        return slots

    def first_missing_parity(self) -> Tensor:
        """Return the first parity slots that are lost, int64 [n]; if none is, note that."""
        slots, self._first_parity = _first_false(
            self.is_parity_known, self._first_parity, self.batch_rows
        )
        if not len(slots):
            self.is_parity_known = None
        return slots

    @property
    def known(self) -> Known:
        """How many of both there are, and are known."""
        counts = [
            (size if flags is None else int(flags.sum()), size)
            for flags, size in (
                (self.is_known, self.slots),
                (self.is_parity_known, self.parity_slots),
            )
        ]
        return Known(sum(known_count for known_count, _ in counts), sum(size for _, size in counts))


#: Rows or parity rows of several tables whose rows have one length.
RowsOfTables = list[tuple[OwnTable, Tensor]]


class Batch:
    """Rows of several tables, as vectors over all of them.

    Args:
        parts: slots, int64 [n], of rows or of parity rows, in tables whose rows have one length.

    Attributes:
        tables: the tables.
        table_places: int64 [n], the place of each row's table.
        slots: int64 [n].
        stripes: of the tables.
    """

    def __init__(self, parts: RowsOfTables) -> None:
        self.tables = [table for table, _ in parts]
        self.table_places = places_of([len(slots) for _, slots in parts])
        self.slots = torch.cat([slots for _, slots in parts])
        self.stripes = TablesStripes([table.stripes for table in self.tables])

    def by_table(self, table_places: Tensor, slots: Tensor) -> tuple[list[int], list[TableSlots]]:
        """Return the places of the tables that have slots, and these slots.

        Args:
            table_places: int64 [m], ascending, the place of the table of each slot.
            slots: int64 [m].
        """
        counts = torch.bincount(table_places, minlength=len(self.tables)).tolist()
        parts = slots.split(counts)
        places = [place for place, count in enumerate(counts) if count]
        return places, [TableSlots(self.tables[place].name, parts[place]) for place in places]


def first_batch(missing: Iterable[tuple[OwnTable, Tensor]]) -> RowsOfTables:
    """Return as many of these rows as one batch has, of tables whose rows have one length."""
    batch: RowsOfTables = []
    rows_left = 0
    for table, slots in missing:
        if not batch:
            rows_left = table.batch_rows
        if len(slots) and (not batch or table.coded_bytes == batch[0][0].coded_bytes):
            batch.append((table, slots[:rows_left]))
            rows_left -= len(batch[-1][1])
            if not rows_left or len(batch) == MOST_TABLES:
                break
    return batch


def _flags(flags: Tensor | None, slots: Tensor) -> Tensor:
    """Return flags of slots; None: all flags are True."""
    if flags is None:
        return torch.ones(len(slots), dtype=torch.bool, device="cpu")
    return flags[slots]


def places_of(counts: Sequence[int]) -> Tensor:
    """Return counts[0] times 0, counts[1] times 1, …: int64 [sum of all]."""
    return torch.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device="cpu"))


def _first_false(flags: Tensor | None, start: int, most: int) -> tuple[Tensor, int]:
    """Return where flags are False from a start on, at most so many, and where to go on."""
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    if flags is None:
        return nothing, start
    while start < len(flags):
        part = flags[start : start + most]
        places = (~part).nonzero().view(-1) + start
        if len(places):
            return places, start
        start += len(part)
    return nothing, start
