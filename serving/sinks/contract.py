"""Defines a sink: a store that serving reads, which gets whole versions of a run's tables.

A publisher brings a version in this order:

    begin(version, parent)      what is to come
    put, delete                 rows, in any order; each row at most once
    commit(dense, changes)      from now on readers see the version, all of it

Readers see the version that was committed last, whole: never a row of the version that is being
brought. A publisher may be killed at any call, and its connection may lose any answer. The next
`begin` goes on from what the sink records:

- No attempt's rows lie among those that readers see: the next version is made from the committed
  one by its changes.
- Rows of the same version do: it is brought again, each row that the first attempt put, too.
- Rows of another version do: all rows come anew, beside those that readers see (`begin` with the
  parent None).

A publisher whose sink another publisher has begun to write may write nothing more: its calls fail.
`recpoint.testing.sinks` has tests of this contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, Self

from torch import Tensor

from recpoint.errors import SinkError
from recpoint.format.records import CheckpointRef
from recpoint.serving.sinks.records import CommittedVersion, SinkVersion, TableChange

__all__ = ["Sink", "SinkPosition", "SinkReading", "refuse_parent"]


class SinkPosition(NamedTuple):
    """Where a sink stands.

    Attributes:
        committed: the version that readers see; None: none yet.
        begun: the version of an attempt that was not committed, and whose rows may lie among those
            that readers see; None: there is none.
    """

    committed: CommittedVersion | None
    begun: SinkVersion | None


class SinkReading(Protocol):
    """One version of a sink, whole, inside the `with` block that gave it.

    Attributes:
        version: what it is.
    """

    @property
    def version(self) -> CommittedVersion:
        """What the version is."""

    def lookup(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows.

        Args:
            table: name of the table.
            ids: int64 [n], on the CPU, in any order.

        Returns:
            The rows, [n, dim] of the table's dtype, zeros where there is none; and which ids have a
            row, bool [n].

        Raises:
            UnknownTable: the version has no such table.
            NotServing: the version is no longer there; begin another block.
            SinkError: the sink cannot be read.
        """

    def dense(self) -> dict[str, Tensor]:
        """Return the tensors that were committed with the version, by name.

        Raises:
            NotServing, SinkError: as for `lookup`.
        """

    def row_count(self, table: str) -> int:
        """Return how many rows the version has in a table; may read the whole sink.

        Raises:
            UnknownTable, NotServing, SinkError: as for `lookup`.
        """


class Sink(ABC):
    """A store that gets versions; for one thread at a time.

    Attributes:
        url: names it, without a password.
    """

    url: str

    @abstractmethod
    def position(self) -> SinkPosition:
        """Return where the sink stands.

        Raises:
            MalformedObject: its record is damaged.
            SinkError: the sink cannot be read.
        """

    @abstractmethod
    def begin(self, version: SinkVersion, parent: CheckpointRef | None) -> None:
        """Begin to bring a version; readers notice nothing.

        Args:
            version: what is to come.
            parent: the committed version, which `version` differs from in the rows to come; None:
                all rows come anew, and rows that do not come are not in the version.

        Raises:
            SinkError: `parent` is not what the sink holds; or the rows of another attempt are in
                the sink, and `parent` is given; or the sink cannot be written.
        """

    @abstractmethod
    def put(self, table: str, ids: Tensor, rows: Tensor) -> None:
        """Give rows their values in the version that was begun.

        Args:
            table: name of a table of the version.
            ids: int64 [n], without duplicates, on the CPU.
            rows: [n, dim] of the table's dtype, contiguous, on the CPU; not kept.

        Raises:
            SinkError: another publisher has begun since, or the sink cannot be written.
        """

    @abstractmethod
    def delete(self, table: str, ids: Tensor) -> None:
        """Remove rows in the version that was begun; rows that are not there do no harm.

        Args:
            table: name of a table of the version.
            ids: int64 [n], without duplicates, on the CPU.

        Raises:
            SinkError: as for `put`.
        """

    @abstractmethod
    def commit(self, dense: Mapping[str, Tensor], changes: Sequence[TableChange]) -> None:
        """Have readers see the version that was begun, from now on.

        Args:
            dense: parameters and buffers except the tables, by name; and what the publisher
                records with the version (`backlog`).
            changes: what was put and deleted, and what was deferred.

        Raises:
            SinkError: as for `put`. If the answer was lost, `position` says if it is committed.
        """

    @abstractmethod
    def discard(self) -> None:
        """Give up what this process has begun, after an error; never raises."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[SinkReading]:
        """The committed version, whole, in a `with` block.

        Raises:
            NotServing: on entering: nothing was committed yet.
            SinkError: the sink cannot be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def refuse_parent(
    url: str, position: SinkPosition, version: SinkVersion, parent: CheckpointRef | None
) -> None:
    """Refuse a `begin` that does not go on from where the sink stands.

    Raises:
        SinkError: as `Sink.begin`.
    """
    if parent is None:
        return
    committed = None if position.committed is None else position.committed.version.checkpoint
    if parent != committed:
        raise SinkError(
            url,
            found="nothing" if committed is None else str(committed),
            expected=f"{parent}, which the rows to come are changes of",
            next_step="publish again: what is missing follows from what the sink holds",
        )
    if position.begun is not None and position.begun != version:
        raise SinkError(
            url,
            found=f"rows of {position.begun.checkpoint}, which was begun and not committed",
            expected=f"no rows of another version than {version.checkpoint}",
            next_step="publish again: all rows come anew",
        )
