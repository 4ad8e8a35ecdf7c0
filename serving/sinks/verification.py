"""Compares what a sink holds with its checkpoint: every row, and the dense layers.

A row that the sink records as deferred may be that of the checkpoint; if it is not, it must be that
of the older checkpoint which it stands at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from recpoint.catalog.restore.chain import ChainReading
from recpoint.catalog.restore.chunks import StoreChunks
from recpoint.catalog.run.leases import reading as lease
from recpoint.catalog.run.run import Run
from recpoint.errors import ForeignObject
from recpoint.format.naming import ManifestName
from recpoint.format.records import CheckpointRef
from recpoint.serving.route import Route, Routes
from recpoint.serving.sinks.backlog import Backlog, without_backlog
from recpoint.serving.sinks.contract import Sink, SinkReading
from recpoint.serving.sinks.records import CommittedVersion
from recpoint.serving.sinks.row_bytes import equal_rows
from recpoint.serving.sinks.row_stream import RowStream, TakesRows, streamed_tables
from recpoint.serving.update import OnProgress

__all__ = ["Comparison", "verify"]

_MOST_DIFFERENCES: Final = 20


@dataclass
class Comparison:
    """What a comparison of a sink with its checkpoint found.

    Attributes:
        version: the version that the sink holds.
        rows: rows of the checkpoint that were compared.
        older_rows: rows, of those that the sink records as deferred, that are as they were at the
            older checkpoint which they stand at.
        differences: up to 20 rows, tensors or counts that differ, each as a sentence.
        more_differences: how many more there are.
    """

    version: CommittedVersion
    rows: int = 0
    older_rows: int = 0
    differences: list[str] = field(default_factory=list)
    more_differences: int = 0

    def add(self, difference: str) -> None:
        """Take note of a difference."""
        if len(self.differences) < _MOST_DIFFERENCES:
            self.differences.append(difference)
        else:
            self.more_differences += 1

    def add_older(self, older: Comparison) -> None:
        """Take over what a comparison of deferred rows with an older checkpoint found."""
        self.older_rows += older.older_rows
        self.more_differences += older.more_differences
        for difference in older.differences:
            self.add(difference)


def verify(
    run: Run, sink: Sink, *, threads: int = 2, on_progress: OnProgress | None = None
) -> Comparison:
    """Compare every row and every dense tensor of a sink with the checkpoint that it says it holds.

    The sink is read as requests read it. A row that only the sink has is found by counts.

    Args:
        run: the run that was published.
        sink: the sink.
        threads: chunks read at once.
        on_progress: called with bytes read so far and bytes to read, of one checkpoint after
            another if rows are deferred.

    Raises:
        NotServing: the sink holds nothing yet, or a newer version came while this one was read.
        ForeignObject: the sink holds another run.
        ObjectNotFound: retention has deleted the checkpoint, or one that deferred rows stand at.
        MalformedObject: the sink's record of deferred rows is damaged.
        FormatError, ChainError: the checkpoint is damaged.
        StoreError, SinkError: the store or the sink cannot be read.
    """
    with sink.reading() as reading:
        version = reading.version.version
        if version.run != run.id:
            raise ForeignObject(
                sink.url,
                found=f"run {version.run}",
                expected=f"run {run.id} of {run.url}",
                next_step="name the run that was published to this sink",
            )
        backlog = Backlog.of_dense(reading.dense(), version, url=sink.url)
        checkpoints = [backlog.checkpoints[number] for number in backlog.numbers]
        read = partial(_read, run, reading, threads, on_progress)
        with lease(run, purpose="verify_sink", covers=[version.checkpoint, *checkpoints]):
            compared = read(version.checkpoint, lambda: _ComparedRows(reading, backlog))
            for number in compared.older.numbers:
                older = read(
                    backlog.checkpoints[number], partial(_OlderRows, reading, compared, number)
                )
                compared.comparison.add_older(older.comparison)
    return compared.comparison


class _Compares(TakesRows, Protocol):
    """Compares the rows of a checkpoint with those of a sink, as they come.

    Attributes:
        comparison: what was found.
    """

    comparison: Comparison

    def finish(self, dense: Mapping[str, Tensor]) -> None:
        """Compare what does not come as rows, after the last row."""


_ComparesT = TypeVar("_ComparesT", bound=_Compares)


def _read(
    run: Run,
    reading: SinkReading,
    threads: int,
    on_progress: OnProgress | None,
    checkpoint: CheckpointRef,
    begin: Callable[[], _ComparesT],
) -> _ComparesT:
    """Return a comparison after it has taken all rows of a checkpoint.

    Args:
        run: the run.
        reading: the version that the sink holds.
        threads, on_progress: as for `verify`.
        checkpoint: the checkpoint.
        begin: returns a new comparison, again if the way to the checkpoint is damaged.
    """
    tables = reading.version.version.tables
    names = {table.name for table in tables if table.ids != "slots"}
    compared = begin()

    def compare(route: Route) -> bool:
        nonlocal compared
        compared = begin()
        newest = route.chain.newest
        stored_tables, logical = streamed_tables(newest, names)
        if newest.ref != checkpoint:
            compared.comparison.add(f"the run has {newest.ref}, the sink {checkpoint}")
        elif stored_tables != tables:
            compared.comparison.add(f"{checkpoint} has tables of other shapes than the sink")
        else:
            stream = RowStream(logical, compared, is_anew=True)
            ChainReading(StoreChunks(run.store), route.chain, {}, on_progress).run(stream, threads)
            compared.finish(stream.dense)
        return True

    name = ManifestName(checkpoint.step, checkpoint.generation)
    Routes(run, names).take(name, compare, start=None)
    return compared


class _ComparedRows:
    """Compares the rows of the checkpoint that a sink holds.

    Args:
        reading: the version that the sink holds.
        backlog: the rows that it records as deferred.

    Attributes:
        comparison: what was found.
        older: rows that are not those of the checkpoint, and are recorded as deferred.
    """

    def __init__(self, reading: SinkReading, backlog: Backlog) -> None:
        self._reading, self._backlog = reading, backlog
        self._rows: Counter[str] = Counter()
        self.comparison = Comparison(reading.version)
        self.older = Backlog()
        self.older.checkpoints |= backlog.checkpoints

    def put(self, table: str, ids: Tensor, rows: Tensor, importance: Tensor | None) -> None:
        """Compare rows, [n, dim], bit for bit."""
        if not len(ids):
            return
        held_rows, present = self._reading.lookup(table, ids)
        self.comparison.rows += len(ids)
        differs = ~(equal_rows(held_rows, rows) & present)
        numbers = self._backlog.rows_of(table).numbers_of(ids)
        is_older = differs & (numbers > 0)
        self.older.add(table, ids[is_older], numbers[is_older])
        self._rows[table] += len(ids) - int((is_older & ~present).sum())
        for place in (differs & ~is_older).nonzero().flatten().tolist():
            what = "has other values" if bool(present[place]) else "is missing"
            self.comparison.add(f"row {int(ids[place])} of table {table!r} {what} in the sink")

    def delete(self, table: str, ids: Tensor) -> None:
        """Do nothing: whole checkpoints delete no rows."""

    def held_rows(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of the sink."""
        return self._reading.lookup(table, ids)

    def finish(self, dense: Mapping[str, Tensor]) -> None:
        """Compare counts of rows, what is said to be deferred, and the dense layers."""
        for table in self._reading.version.version.tables:
            count = self._reading.row_count(table.name)
            if count != self._rows[table.name]:
                self.comparison.add(
                    f"table {table.name!r} has {count} rows in the sink, and "
                    f"{self._rows[table.name]} in the checkpoint"
                )
        for change in self._reading.version.changes:
            served = self._reading.version.version.table(change.table)
            recorded = None if served is None else self._backlog.summary(served)
            if recorded != change.deferred:
                self.comparison.add(
                    f"table {change.table!r} has {change.deferred or 'no deferred rows'} by its "
                    f"version, and {recorded or 'none'} by their record"
                )
        held_dense = without_backlog(self._reading.dense())
        for name in sorted(held_dense.keys() | dense.keys()):
            held, stored = held_dense.get(name), dense.get(name)
            if held is None or stored is None or not _is_same(held, stored):
                self.comparison.add(f"dense tensor {name!r} differs")


class _OlderRows:
    """Compares deferred rows with the older checkpoint that they stand at.

    Args:
        reading: the version that the sink holds.
        compared: the comparison with the newest checkpoint.
        number: number of the sink's version that had the older one.

    Attributes:
        comparison: what was found.
    """

    def __init__(self, reading: SinkReading, compared: _ComparedRows, number: int) -> None:
        self._reading, self._older, self._number = reading, compared.older, number
        self._compared_ids: dict[str, list[Tensor]] = {}
        self.comparison = Comparison(reading.version)

    def put(self, table: str, ids: Tensor, rows: Tensor, importance: Tensor | None) -> None:
        """Compare those of the rows, [n, dim], that stand at this checkpoint."""
        stands_here = self._older.rows_of(table).numbers_of(ids) == self._number
        ids, rows = ids[stands_here], rows[stands_here]
        if not len(ids):
            return
        self._compared_ids.setdefault(table, []).append(ids)
        held_rows, present = self._reading.lookup(table, ids)
        self._note(table, ids, equal_rows(held_rows, rows) & present)

    def delete(self, table: str, ids: Tensor) -> None:
        """Do nothing: whole checkpoints delete no rows."""

    def held_rows(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of the sink."""
        return self._reading.lookup(table, ids)

    def finish(self, dense: Mapping[str, Tensor]) -> None:
        """Compare the keys that had no row yet: the sink has none either."""
        for table in self._reading.version.version.tables:
            standing = self._older.rows_of(table.name)
            ids = standing.ids[standing.numbers == self._number]
            compared_ids = [ids[:0], *self._compared_ids.get(table.name, [])]
            ids = ids[~torch.isin(ids, torch.cat(compared_ids))]
            self._note(table.name, ids, ~self._reading.lookup(table.name, ids)[1])

    def _note(self, table: str, ids: Tensor, is_right: Tensor) -> None:
        self.comparison.older_rows += int(is_right.sum())
        for row in ids[~is_right].tolist():
            self.comparison.add(
                f"row {row} of table {table!r} is deferred, and is neither that of its version nor "
                "that of the older one which it stands at"
            )


def _is_same(held: Tensor, stored: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    if held.shape != stored.shape or held.dtype != stored.dtype:
        return False
    held_bytes, stored_bytes = (
        tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (held, stored)
    )
    return torch.equal(held_bytes, stored_bytes)
