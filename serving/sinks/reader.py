"""Looks rows up in a sink, for requests of a serving process in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from recpoint.errors import UnknownRow
from recpoint.format.records import CheckpointRef
from recpoint.serving.sinks.backlog import without_backlog
from recpoint.serving.sinks.contract import SinkReading
from recpoint.serving.sinks.opening import open_sink
from recpoint.serving.sinks.records import DeferredRows, SinkTable

__all__ = ["SinkReader", "SinkVersionReader"]


class SinkVersionReader:
    """One version of a sink, whole; use it inside the `with` block of `SinkReader.reading`.

    Args:
        reading: the sink's own view of the version.
    """

    def __init__(self, reading: SinkReading) -> None:
        self._reading = reading

    @property
    def checkpoint(self) -> CheckpointRef:
        """The checkpoint whose rows and dense layers these are."""
        return self._reading.version.version.checkpoint

    @property
    def tables(self) -> tuple[SinkTable, ...]:
        """The tables: name, rows, dim and dtype."""
        return self._reading.version.version.tables

    @property
    def number(self) -> int:
        """Number of the version; each later version of the sink has a higher one."""
        return self._reading.version.number

    @property
    def deferred(self) -> DeferredRows | None:
        """Rows that a budget left at older versions, and the oldest of these; None: none."""
        return self._reading.version.deferred

    def lookup(self, table: str, ids: Tensor) -> Tensor:
        """Return rows `ids` [...] of a table: [..., dim] of the table's dtype, in new memory.

        Args:
            table: name of the table.
            ids: int32 or int64, any shape.

        Raises:
            UnknownTable: the sink has no such table.
            UnknownRow: the table has no such row.
            NotServing: the version is no longer there: the block took too long.
            SinkError: the sink cannot be read.
        """
        flat = ids.flatten().long().cpu()
        distinct_ids, places = flat.unique(return_inverse=True)
        rows, present = self._reading.lookup(table, distinct_ids)
        if not bool(present.all()):
            missing_ids = distinct_ids[~present]
            raise UnknownRow(
                f"table {table!r:.200}",
                found=f"no row {int(missing_ids[0])}, and {len(missing_ids) - 1} more that are not "
                "there",
                expected=f"rows that the table has at {self.checkpoint}",
                next_step="look up rows that the table has, or use lookup_present",
            )
        return rows[places].view(*ids.shape, rows.shape[-1])

    def lookup_present(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows, zeros where there is none, and which ids have a row, bool of their shape.

        Args:
            table, ids: as for `lookup`.

        Raises:
            UnknownTable, NotServing, SinkError: as for `lookup`.
        """
        distinct_ids, places = ids.flatten().long().cpu().unique(return_inverse=True)
        rows, present = self._reading.lookup(table, distinct_ids)
        return rows[places].view(*ids.shape, rows.shape[-1]), present[places].view(ids.shape)

    def dense(self) -> dict[str, Tensor]:
        """Return the dense layers: parameters and buffers by name, on the CPU.

        Raises:
            NotServing, SinkError: as for `lookup`.
        """
        return without_backlog(self._reading.dense())


class SinkReader:
    """Reads a sink that `recpoint publish-to` keeps at the newest version.

        reader = SinkReader("redis://host/0")
        with reader.reading() as version:  # one version, whole, until the block ends
            rows = version.lookup("users", ids)

    Several threads may use it.

    Args:
        url: as for `recpoint publish-to`.

    Raises:
        SettingsError: no sink has such a URL.
    """

    def __init__(self, url: str) -> None:
        self._sink = open_sink(url)

    @contextmanager
    def reading(self) -> Iterator[SinkVersionReader]:
        """The version that was committed last, in a `with` block.

        In Redis a version stays readable for the sink's grace after the next one was committed.

        Raises:
            NotServing: on entering: nothing was published yet.
            SinkError: the sink cannot be read.
        """
        with self._sink.reading() as reading:
            yield SinkVersionReader(reading)

    def close(self) -> None:
        """Let go of files and connections."""
        self._sink.close()
