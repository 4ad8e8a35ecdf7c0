"""Defines a home: where rows of embedding tables live while no trainer holds them in its cache.

A row with its optimizer state is one record of a fixed number of bytes. A home knows neither dtypes
nor optimizers. `homes.local` makes a home in memory or in files. `recpoint.testing.homes` tests
that a class keeps this contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from recpoint.closing import Closing
from recpoint.errors import HomeError
from recpoint.format.servers import AllServers
from recpoint.kernels import erasure

__all__ = ["Checked", "FrozenRows", "Home", "TableRows"]


class TableRows(NamedTuple):
    """Rows of one table, as arguments of a call.

    Attributes:
        table: name of the table.
        ids: int64 [n], ascending without duplicates, contiguous, on the CPU.
        records: uint8 [n, record_bytes], contiguous, on the CPU: what is stored, or memory for what
            is read.
    """

    table: str
    ids: Tensor
    records: Tensor


class Checked(NamedTuple):
    """How many stripes of rows and parity rows were compared.

    Attributes:
        stripes: those whose members fit each other.
        unknown: those that could not be compared, such as those of a server that is recovered.
    """

    stripes: int = 0
    unknown: int = 0


class FrozenRows(ABC):
    """Reads rows of a table as they were when `Home.freeze` was called.

    As a context manager, it is released at the end of the block.
    """

    @abstractmethod
    def fetch(self, ids: Tensor, out: Tensor) -> Tensor:
        """Read frozen records. As `Home.fetch`, for ids within the frozen rows.

        Raises:
            HomeError: the rows were released, or as `Home.fetch`.
            ValueError: as `Home.fetch`; also for an id outside the frozen rows.
        """

    def check(self, ids: Tensor) -> Checked:
        """Compare rows with what else the home knows of them, which is nothing without parity.

        It compares what the home has now. A later write does not hide a mismatch. Only the recovery
        of a member of the stripe does.

        Args:
            ids: as for `fetch`.

        Raises:
            HomeError: rows do not fit their parity. The error names the first stripe.
        """
        return Checked()

    @abstractmethod
    def release(self) -> None:
        """Give the frozen records up. A second call does nothing. No `fetch` may be running."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class Home(Closing):
    """Holds records of embedding rows by table and id.

    Who calls what: a trainer names its tables with `add_table`. Before a batch it calls `fetch` for
    the rows that its cache lacks, and it makes the initial values of rows that were never written.
    When a row leaves the cache, the trainer calls `write_back`. A checkpoint calls `freeze`, and
    reads the frozen rows while training goes on.

    Threads: `fetch`, `write_back`, `freeze` and `FrozenRows.fetch` may be called by several threads
    at the same time, also for one table. If several threads write or read the same row, the callers
    agree on the order: without that, a fetch returns the record before or after a write-back, never
    a mixture. A `FrozenRows.fetch` beside a write-back of the same rows returns the frozen records.
    `clear` must not run beside other calls for its table, and `close` not beside any other call.
    `add_rows` may run beside `FrozenRows.fetch` of its table, and beside no other call for it.

    A home is no checkpoint. It promises nothing about records after its process has ended.

    As a context manager, it is closed at the end of the block.

    Attributes:
        trainers: number of processes that share the rows, each with a home object of its own.
        may_add_rows: whether `add_rows` is supported.
    """

    trainers = 1
    may_add_rows = False

    @property
    def lost_servers(self) -> int:
        """Servers of the home whose rows are being recovered, as far as it knows."""
        return 0

    @property
    def lost_rows(self) -> int:
        """Rows and parity rows of these servers that are left to recover."""
        return 0

    @property
    def staging_servers(self) -> int:
        """How many servers can stage their own rows of a checkpoint; 0: the home cannot."""
        return 0

    def servers_now(self) -> AllServers | None:
        """Return how its servers are, without asking them; None: it has none, or is closed.

        Any thread may call it.
        """
        return None

    def server_bytes(self, number: int) -> tuple[int, int]:
        """Ask a server, by its number from 0 on, how many bytes of memory and of disk it takes.

        Raises:
            HomeError, OutOfStep: it does not answer, or the home has no servers or is closed.
        """
        raise HomeError(
            f"server {number + 1}",
            found="a home without servers",
            expected="one whose rows are in server processes",
            next_step="call size_bytes()",
        )

    @abstractmethod
    def add_table(self, table: str, *, rows: int, record_bytes: int) -> None:
        """Make room for a table. Needed once before the table is used; again, it does nothing.

        The time and memory do not depend on the number of rows.

        Args:
            table: any name that is not empty.
            rows: rows of the table, 1 or more. Ids are 0 … rows - 1.
            record_bytes: bytes of a row with its optimizer state, 1 or more.

        Raises:
            HomeError: the table is there with another size, or the home is closed.
            ValueError: a name or number that no table can have.
        """

    def add_rows(self, table: str, *, rows: int) -> None:
        """Give a table more rows, which were never written. As many rows as before do nothing.

        The time and memory do not depend on the number of rows. Frozen rows stay readable.

        Args:
            table: a table that was added.
            rows: rows of the table afterwards, as many as before or more.

        Raises:
            HomeError: the table was not added, the home is closed, the system refuses, or
                `may_add_rows` is False. The table is as before.
            ValueError: fewer rows than the table has.
        """
        raise HomeError(
            f"table {table!r}",
            found="a home whose tables keep their sizes",
            expected="a home in memory or in files of this process",
            next_step="take a checkpoint, and restore it into a table with more rows",
        )

    @abstractmethod
    def fetch(self, table: str, ids: Tensor, out: Tensor) -> Tensor:
        """Read records.

        Args:
            table: a table that was added.
            ids: int64 [n], ascending without duplicates, contiguous, on the CPU.
            out: uint8 [n, record_bytes], contiguous, on the CPU. The records of rows that the home
                has are written to it. Other rows of `out` are left alone.

        Returns:
            bool [n]: True if the home has the row. Rows that were never written are False: the
            caller makes their initial values.

        Raises:
            HomeError: the table was not added, the home is closed, or its files are damaged or
                cannot be read. `out` is then undefined.
            ValueError: ids or out have another form, or an id is outside the table.
        """

    @abstractmethod
    def write_back(self, table: str, ids: Tensor, records: Tensor, *, batch: int) -> None:
        """Store records. A second call with the same arguments leaves what one call leaves.

        Args:
            table: a table that was added.
            ids: as for `fetch`.
            records: uint8 [n, record_bytes], contiguous, on the CPU. They are copied.
            batch: the batch after which the records are these. For a table it never decreases.

        Raises:
            HomeError: the table was not added, the batch is before that of an earlier call, the
                home is closed, or its files cannot be written. In a home of this process, every row
                of the call then has its record of before. On servers, each row has its record of
                before or the new one, and a repetition of the call that succeeds is all it takes.
            ValueError: ids or records have another form, or an id is outside the table.
        """

    def exclusive_or(self, table: str, ids: Tensor, records: Tensor, *, batch: int) -> None:
        """Replace records by records XOR others; a row that was never written counts as zeros.

        Args:
            table: a table that was added.
            ids: as for `fetch`.
            records: as for `write_back`.
            batch: as for `write_back`.

        Raises:
            HomeError, ValueError: as `fetch` and `write_back`. Every row then has its record of
                before.
        """
        found = torch.zeros_like(records)
        self.fetch(table, ids, found)
        self.write_back(table, ids, erasure.difference(found, records, out=found), batch=batch)

    def fetch_all(self, wanted: Sequence[TableRows]) -> list[Tensor]:
        """Read records of several tables, each at most once; a home may do that in fewer steps.

        Returns:
            For each table what `fetch` returns.

        Raises:
            HomeError, ValueError: as `fetch`.
        """
        return [self.fetch(*one) for one in wanted]

    def write_back_all(self, changed: Sequence[TableRows], *, batch: int) -> None:
        """Store records of several tables, each at most once, as `write_back` does.

        Raises:
            HomeError: as `write_back`. Some tables may then be written, and others not.
            ValueError: as `write_back`.
        """
        for one in changed:
            self.write_back(*one, batch=batch)

    @abstractmethod
    def freeze(self, table: str, rows: range) -> FrozenRows:
        """Return a reader of rows as they are now, for use while write-backs go on.

        Several may be open at once. Records that are replaced while one is open take additional
        room until it is released.

        Args:
            table: a table that was added.
            rows: the rows that will be read: a range of step 1 within the table.

        Raises:
            HomeError: the table was not added, or the home is closed.
            ValueError: not a range of step 1 within the table.
        """

    @abstractmethod
    def clear(self, table: str) -> None:
        """Forget all rows of a table and its batch number.

        A home on servers then takes servers that were started again, which have lost their rows.

        Raises:
            HomeError: rows of the table are frozen, the table was not added, or the home is closed.
        """

    @abstractmethod
    def size_bytes(self) -> dict[str, int]:
        """Return the bytes that the home takes, by role.

        "rows", "index", "frozen" and "buffers" are memory, "disk" is not. A home has all five.

        Raises:
            HomeError: the home is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything up. A second call does nothing; other calls raise HomeError."""
