"""Reads and changes one server's rows and parity rows, in its home.

A row is coded as its record and one more byte, which is 1 if the row was ever written. Parity is
computed of these bytes. So a recovered row is equal in each bit, and a row that was never written
is known as such.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from recpoint.embeddings.home.contract import FrozenRows, Home
from recpoint.embeddings.parity.differences import Added, OfTable
from recpoint.embeddings.parity.own_tables import OwnTable, RowsOfTables
from recpoint.embeddings.parity.peers import Differences, OutOfStep, TableSlots
from recpoint.kernels import row_gather

__all__ = ["OwnRows", "require_slots"]


class OwnRows:
    """The rows and parity rows of one server, by table.

    Args:
        number: of the server.
        home: holds rows and parity rows.

    Attributes:
        number: as given.
        lock: held while rows or parity rows are read or changed, and while messages about them are
            queued or applied; never during a call to another server. Only `table` and
            `same_length` take it. All other calls need it.
    """

    def __init__(self, number: int, home: Home) -> None:
        self.number = number
        self.lock = threading.Lock()
        self._home = home
        self._tables: dict[str, OwnTable] = {}

    @property
    def tables(self) -> Sequence[OwnTable]:
        """All tables, in the order in which they were added."""
        return list(self._tables.values())

    def has_table(self, name: str) -> bool:
        """Whether a table was added."""
        return name in self._tables

    def add_table(self, table: OwnTable) -> None:
        """Make room for a table's parity rows; its rows have theirs."""
        if table.parity_slots:
            self._home.add_table(
                table.parity_name, rows=table.parity_slots, record_bytes=table.coded_bytes
            )
        self._tables[table.name] = table

    def clear(self, name: str, generation: int) -> None:
        """Forget all rows and parity rows of a table, also which of them are lost."""
        table = self._tables[name]
        table.generation = generation
        table.is_known = table.is_parity_known = None
        self._home.clear(name)
        if table.parity_slots:
            self._home.clear(table.parity_name)

    def of_name(self, name: str) -> OwnTable:
        """Return a table.

        Raises:
            OutOfStep: it was not added yet.
        """
        table = self._tables.get(name)
        if table is None:
            raise OutOfStep(f"no table {name!r:.100} yet")
        return table

    def table(self, name: str) -> OwnTable:
        """Return a table, as `of_name` does, for a caller that does not hold the lock."""
        with self.lock:
            return self.of_name(name)

    def same_length(self, wanted: Sequence[TableSlots]) -> RowsOfTables:
        """Return the tables of a call from another server, with the slots that it names.

        Raises:
            OutOfStep: a table was not added yet.
            ValueError: a table comes twice, there is none, or rows differ in their length.
        """
        named = [(self.table(name), slots) for name, slots in wanted]
        lengths = {table.coded_bytes for table, _ in named}
        if len(lengths) != 1 or len({table.name for table, _ in named}) != len(named):
            raise ValueError("tables: expected different ones, whose rows have one length")
        return named

    def coded(self, tables: Sequence[OwnTable], slots: Tensor, counts: Sequence[int]) -> Tensor:
        """Return rows of tables whose rows have one length.

        Args:
            tables: the tables.
            slots: int64 [n], those of the first table first.
            counts: how many slots of each table there are.

        Returns:
            uint8 [n, coded_bytes].
        """
        size = len(slots), tables[0].record_bytes
        records = torch.empty(size, dtype=torch.uint8, device="cpu")
        parts = zip(tables, slots.split(counts), records.split(counts), strict=True)
        # Not `fetch_all`: it may wait for threads that read for trainers, and others wait for this.
        is_written = torch.cat([self._home.fetch(table.name, *part) for table, *part in parts])
        coded = torch.empty(len(slots), size[1] + 1, dtype=torch.uint8, device="cpu")
        if not bool(is_written.all()):
            records[~is_written] = 0  # a fetch leaves them alone
        coded[:, -1] = is_written
        coded[:, :-1] = records
        return coded

    def store(self, table: str, slots: Tensor, records: Tensor) -> None:
        """Store records, uint8 [n, record_bytes], in slots, int64 [n]."""
        self._home.write_back(table, slots, records, batch=0)

    def freeze(self, table: str, slots: range) -> FrozenRows:
        """Freeze rows as the home has them."""
        return self._home.freeze(table, slots)

    def read_parity(self, table: OwnTable, slots: Tensor, out: Tensor) -> None:
        """Read parity rows that were ever stored into `out`, uint8 [n, coded_bytes]."""
        self._home.fetch(table.parity_name, slots, out)

    def store_parity(self, table: OwnTable, slots: Tensor, rows: Tensor) -> None:
        """Store parity rows, uint8 [n, coded_bytes], and note that they are recovered."""
        self._home.write_back(table.parity_name, slots, rows, batch=0)
        table.set_parity_known(slots)

    def add_differences(self, part: OfTable) -> None:
        """Add differences to the parity rows that are recovered.

        The recovery of a parity row adds them to the others.
        """
        table = self._tables[part.table]
        if part.generation != table.generation:
            return  # of before the table was cleared
        slots, rows = part.slots, part.rows
        if table.is_parity_known is not None:
            chosen = table.is_parity_known[slots].nonzero().view(-1)
            slots, rows = slots[chosen], rows[chosen]
        if len(slots):
            self._home.exclusive_or(table.parity_name, slots, rows, batch=0)

    def copied(self, differences: Differences) -> Added:
        """Return differences that can be kept: the caller's memory is used again.

        Raises:
            OutOfStep, ValueError: they do not fit this server's parity rows.
        """
        self._require_fitting(differences)
        # One text for a table's name, however many messages are kept.
        shares = [
            share._replace(table=self._tables[share.table].name) for share in differences.tables
        ]
        return Added(
            Differences(
                tables=shares, rows=differences.rows.clone(), slots=differences.slots.clone()
            )
        )

    def _require_fitting(self, differences: Differences) -> None:
        """Refuse differences that do not fit this server's parity rows.

        Raises:
            OutOfStep: a table was not added yet.
            ValueError: says what is expected.
        """
        count = sum(share.rows for share in differences.tables)
        if not len(differences.slots) == len(differences.rows) == count:
            raise ValueError(f"differences: {len(differences.slots)} slots, expected {count}")
        if len({share.table for share in differences.tables}) != len(differences.tables):
            raise ValueError("differences: of one table twice, expected each table at most once")
        added = Added(differences)
        for number in range(added.count):
            part = added.part(number)
            table = self.of_name(part.table)
            require_slots(part.slots, table.parity_slots)
            if part.rows.shape[1] != table.coded_bytes:
                raise ValueError(
                    f"differences: {part.rows.shape[1]} bytes a row, expected {table.coded_bytes}"
                )


def require_slots(slots: Tensor, count: int) -> None:
    """Refuse slots that are not ascending, or outside 0 … count - 1.

    Raises:
        ValueError: says what is expected.
    """
    if row_gather.first_unordered(slots, 0, count) >= 0:
        raise ValueError(f"slots: not ascending, or one outside 0 … {count - 1}")
