"""Compares what a sink holds with its checkpoint: every row, and the dense layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from recpoint.catalog.restore.chain import ChainReading
from recpoint.catalog.restore.chunks import StoreChunks
from recpoint.catalog.restore.rows import LogicalTable
from recpoint.catalog.run.leases import reading as lease
from recpoint.catalog.run.run import Run
from recpoint.errors import ForeignObject
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from recpoint.serving.route import Route, Routes
from recpoint.serving.sinks.contract import Sink, SinkReading
from recpoint.serving.sinks.records import CommittedVersion
from recpoint.serving.sinks.row_stream import RowStream, streamed_tables
from recpoint.serving.update import OnProgress

__all__ = ["Comparison", "verify"]

_MOST_DIFFERENCES: Final = 20


@dataclass
class Comparison:
    """What a comparison of a sink with its checkpoint found.

    Attributes:
        version: the version that the sink holds.
        rows: rows of the checkpoint that were compared.
        differences: up to 20 rows, tensors or counts that differ, each as a sentence.
        more_differences: how many more there are.
    """

    version: CommittedVersion
    rows: int = 0
    differences: list[str] = field(default_factory=list)
    more_differences: int = 0

    def add(self, difference: str) -> None:
        """Take note of a difference."""
        if len(self.differences) < _MOST_DIFFERENCES:
            self.differences.append(difference)
        else:
            self.more_differences += 1


def verify(
    run: Run, sink: Sink, *, threads: int = 2, on_progress: OnProgress | None = None
) -> Comparison:
    """Compare every row and every dense tensor of a sink with the checkpoint that it says it holds.

    The sink is read as requests read it. A row that only the sink has is found by counts.

    Args:
        run: the run that was published.
        sink: the sink.
        threads: chunks read at once.
        on_progress: called with bytes read so far and bytes to read.

    Raises:
        NotServing: the sink holds nothing yet, or a newer version came while this one was read.
        ForeignObject: the sink holds another run.
        ObjectNotFound: retention has deleted the checkpoint.
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
        comparison = Comparison(reading.version)
        names = {table.name for table in version.tables if table.ids != "slots"}

        def compare(route: Route) -> bool:
            nonlocal comparison
            comparison = Comparison(reading.version)
            chunks = StoreChunks(run.store)
            compared = _ComparedRows(reading, comparison)
            if compared.is_of(route.chain.newest, names):
                stream = RowStream(compared.logical, compared, is_anew=True)
                ChainReading(chunks, route.chain, {}, on_progress).run(stream, threads)
                compared.finish(stream.dense)
            return True

        name = ManifestName(version.checkpoint.step, version.checkpoint.generation)
        with lease(run, purpose="verify_sink", covers=[version.checkpoint]):
            Routes(run, names).take(name, compare, start=None)
    return comparison


class _ComparedRows:
    """Compares rows of a checkpoint with those of a sink, as they come.

    Args:
        reading: the version that the sink holds.
        comparison: takes what was found.
    """

    def __init__(self, reading: SinkReading, comparison: Comparison) -> None:
        self._reading, self._comparison = reading, comparison
        self._rows: Counter[str] = Counter()
        self.logical: list[LogicalTable] = []

    def is_of(self, manifest: Manifest, names: Collection[str]) -> bool:
        """Whether the sink says that it holds this checkpoint, with its tables."""
        version = self._reading.version.version
        if manifest.ref != version.checkpoint:
            self._comparison.add(f"the run has {manifest.ref}, the sink {version.checkpoint}")
            return False
        tables, self.logical = streamed_tables(manifest, names)
        if tables != version.tables:
            self._comparison.add("the checkpoint has tables of other shapes than the sink")
        return tables == version.tables

    def put(self, table: str, ids: Tensor, rows: Tensor) -> None:
        """Compare rows, [n, dim], bit for bit."""
        self._rows[table] += len(ids)
        held, present = self._reading.lookup(table, ids)
        self._comparison.rows += len(ids)
        is_equal = (held.view(torch.uint8) == rows.view(torch.uint8)).view(len(ids), -1).all(dim=1)
        for place in (~(is_equal & present)).nonzero().flatten().tolist():
            what = "has other values" if bool(present[place]) else "is missing"
            self._comparison.add(f"row {int(ids[place])} of table {table!r} {what} in the sink")

    def delete(self, table: str, ids: Tensor) -> None:
        """Do nothing: whole checkpoints delete no rows."""

    def held_rows(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of the sink."""
        return self._reading.lookup(table, ids)

    def finish(self, dense: Mapping[str, Tensor]) -> None:
        """Compare the counts of rows, and the dense layers."""
        for table in self._reading.version.version.tables:
            count = self._reading.row_count(table.name)
            if count != self._rows[table.name]:
                self._comparison.add(
                    f"table {table.name!r} has {count} rows in the sink, and "
                    f"{self._rows[table.name]} in the checkpoint"
                )
        held_dense = self._reading.dense()
        for name in sorted(held_dense.keys() | dense.keys()):
            held, stored = held_dense.get(name), dense.get(name)
            if held is None or stored is None or not _is_same(held, stored):
                self._comparison.add(f"dense tensor {name!r} differs")


def _is_same(held: Tensor, stored: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    if held.shape != stored.shape or held.dtype != stored.dtype:
        return False
    held_bytes, stored_bytes = (
        tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (held, stored)
    )
    return torch.equal(held_bytes, stored_bytes)
