"""Brings a sink to the version that is to be served, and keeps it there (format §6.9)."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from torch import Tensor

from recpoint.catalog.restore.chain import ChainReading
from recpoint.catalog.restore.chunks import StoreChunks
from recpoint.catalog.run.chain import DAMAGE
from recpoint.catalog.run.leases import reading as lease
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import now_ms
from recpoint.catalog.store.store import open_store
from recpoint.errors import (
    ForeignObject,
    RecpointError,
    SettingsError,
    SinkError,
    UnsupportedVersion,
)
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from recpoint.format.records import CheckpointRef
from recpoint.kernels import row_digest
from recpoint.serving.goal import CHANNELS, Channel, FollowerGoal, find_wanted
from recpoint.serving.route import Route, Routes
from recpoint.serving.sinks.backlog import Backlog
from recpoint.serving.sinks.budgeted import BudgetedRows
from recpoint.serving.sinks.contract import Sink
from recpoint.serving.sinks.records import CommittedVersion, SinkVersion, TableChange
from recpoint.serving.sinks.row_stream import RowStream, streamed_tables
from recpoint.serving.update import OnProgress

__all__ = ["Budget", "SinkPublisher", "SinkStanding"]

_log = logging.getLogger("recpoint.serving")

#: How long a checkpoint that could not be read is left alone.
_RETRY_SECONDS: Final = 60.0
_MASK: Final = (1 << 64) - 1


class SinkStanding(NamedTuple):
    """Where a sink stood when its publisher looked last.

    Attributes:
        committed: the version that readers see; None: none yet.
        waiting_since_ms: since when the run has had a better checkpoint; None: it has none.
        looked_ms: when the publisher read both, in milliseconds since the epoch.
    """

    committed: CommittedVersion | None
    waiting_since_ms: int | None
    looked_ms: int

    @property
    def lag_seconds(self) -> float:
        """How long the run has had a better checkpoint; 0: it has none."""
        since_ms = self.waiting_since_ms
        return 0.0 if since_ms is None else max(0.0, time.time() - since_ms / 1000)


class Budget(NamedTuple):
    """How much of a version is published at once, most changed rows first.

    Attributes:
        size_bytes: of the rows of a version, and of their ids. Rows that have waited as long as
            they may, deletions and dense layers go whatever it is, and so does a version that comes
            anew.
        most_versions: no row stands at an older version than so many before the sink's.
    """

    size_bytes: int
    most_versions: int = 16


class SinkPublisher:
    """Brings versions of a run to a sink; for one thread at a time.

    The sink says where it stands, so a publisher keeps nothing: it may be killed at any time, and
    another one, on any host, goes on.

    Args:
        url: the run.
        sink: gets the versions.
        tables: names of the tables that the sink is to hold; None: all.
        channel: which checkpoints are published: as for `recpoint.Follower`.
        replace: whether a sink that holds another run gets this one.
        budget: defers the rows of a version that changed least; None: all rows come, also those
            that were deferred before.
        threads: chunks read at once.

    Attributes:
        standing: what the last look has found, replaced and never changed; None: nobody has looked.

    Raises:
        SettingsError: a setting that cannot work, or a URL that names no store.
    """

    def __init__(
        self,
        url: str,
        sink: Sink,
        *,
        tables: Collection[str] | None = None,
        channel: Channel = "newest",
        replace: bool = False,
        budget: Budget | None = None,
        threads: int = 2,
    ) -> None:
        if budget is not None and min(budget) < 1:
            raise SettingsError(
                "budget",
                found=f"{budget.size_bytes} bytes, {budget.most_versions} versions",
                expected="1 byte or more, and 1 version or more",
                next_step="see recpoint publish-to --help",
            )
        if channel not in CHANNELS:
            raise SettingsError(
                "channel",
                found=f"{channel!r:.200}",
                expected=f"one of {', '.join(CHANNELS)}",
                next_step="see recpoint publish-to --help",
            )
        self._store = open_store(url)
        self._sink = sink
        self._tables = None if tables is None else frozenset(tables)
        self._channel: Channel = channel
        self._replace = replace
        self._budget = budget
        self._threads = threads
        self._has_wanted_tables_of: CheckpointRef | None = None
        self._failed: dict[ManifestName, tuple[float, RecpointError]] = {}
        self.standing: SinkStanding | None = None

    def poll(self, *, on_progress: OnProgress | None = None) -> CommittedVersion | None:
        """Bring the sink to the best checkpoint of the channel; return what it then holds.

        Args:
            on_progress: called with bytes read so far and bytes to read, from this thread.

        Returns:
            The version that readers see; None: the run has no checkpoint to publish yet.

        Raises:
            ForeignObject: the sink holds another run, and `replace` is not set.
            NothingToRestore: there is no run.
            IncompatibleModel: a table cannot be published.
            SinkError: the sink cannot be used. Readers see its last version.
            FormatError, ChainError: the run's records, or all better checkpoints, are damaged.
            StoreError: the store cannot be read.
        """
        run = Run.open(self._store)
        committed = self._sink.position().committed
        held = self._held(run, committed)
        served = None if held is None or self._has_other_tables(run, held) else _name(held)
        error: RecpointError | None = None
        goal = find_wanted(run, self._channel, served)
        self.standing = SinkStanding(committed, self._waiting_since(run, goal), now_ms())
        routes = Routes(run, self._tables)
        names = list(goal.names)
        if served is not None and self._is_to_complete(committed):
            names.append(served)
        self._failed = {name: self._failed[name] for name in names if name in self._failed}
        for name in names:
            recent_damage = self._recent_damage(name)
            if recent_damage is not None:
                error = error or recent_damage
                continue
            try:
                self._publish(run, routes, name, held, goal.names, on_progress)
            except UnsupportedVersion:
                raise
            except DAMAGE as damage:
                self._failed[name] = time.monotonic(), damage
                error = error or damage
                _log.warning("passing over %s: %s: %s", name, type(damage).__name__, damage)
                continue
            published = self._sink.position().committed
            self.standing = SinkStanding(published, None, now_ms())
            return published
        if error is not None:
            raise error
        return committed

    def _is_to_complete(self, committed: CommittedVersion | None) -> bool:
        """Whether deferred rows are to come, although the checkpoint may be the newest."""
        return self._budget is None and committed is not None and committed.deferred is not None

    def _waiting_since(self, run: Run, goal: FollowerGoal) -> int | None:
        """Return when the first checkpoint that the sink lacks was committed or published."""
        if goal.published_ms is not None or not goal.names:
            return goal.published_ms
        if self.standing is not None and self.standing.waiting_since_ms is not None:
            return self.standing.waiting_since_ms
        for name in reversed(goal.names):
            with suppress(*DAMAGE):
                return run.manifest(*name).committed_ms
        return now_ms()

    def _recent_damage(self, name: ManifestName) -> RecpointError | None:
        """Return why a checkpoint could not be read lately; None: it is to be read."""
        failed_at, damage = self._failed.get(name, (0.0, None))
        return damage if time.monotonic() - failed_at < _RETRY_SECONDS else None

    def _held(self, run: Run, committed: CommittedVersion | None) -> SinkVersion | None:
        """Return what the sink holds of this run; None: nothing."""
        if committed is None or committed.version.run == run.id:
            return None if committed is None else committed.version
        if self._replace:
            return None
        raise ForeignObject(
            self._sink.url,
            found=f"run {committed.version.run}",
            expected=f"run {run.id} of {run.url}, or an empty sink",
            next_step="publish to another sink, or take this one with --replace",
        )

    def _has_other_tables(self, run: Run, held: SinkVersion) -> bool:
        """Whether other tables of the checkpoint are wanted than the sink holds."""
        if self._has_wanted_tables_of == held.checkpoint:
            return False
        try:
            manifest = run.manifest(*_name(held))
        except DAMAGE:
            return False  # the next version decides
        if streamed_tables(manifest, self._tables)[0] != held.tables:
            return True
        self._has_wanted_tables_of = held.checkpoint
        return False

    def _publish(
        self,
        run: Run,
        routes: Routes,
        name: ManifestName,
        held: SinkVersion | None,
        line: Sequence[ManifestName],
        on_progress: OnProgress | None,
    ) -> None:
        manifest = run.manifest(*name)
        tables, logical = streamed_tables(manifest, self._tables)
        version = SinkVersion(run=run.id, checkpoint=manifest.ref, tables=tables)
        position = self._sink.position()  # again: a checkpoint before may have been damaged
        committed = position.committed
        start = self._start(routes, held, position.begun, version)
        backlog = Backlog()
        if start is not None and committed is not None and committed.deferred is not None:
            backlog = self._backlog(committed)
            start = self._start_of_deferred(routes, start, backlog, name, line)

        def apply(route: Route) -> bool:
            is_anew = route.start == "full" or held is None or committed is None
            bringing = _Bringing(self._sink, version)
            budgeted = None
            if self._budget is not None and not is_anew and committed is not None:
                budgeted = BudgetedRows(
                    bringing,
                    version,
                    committed,
                    backlog,
                    budget_bytes=self._budget.size_bytes,
                    most_versions=self._budget.most_versions,
                )
            stream = RowStream(
                logical,
                bringing if budgeted is None else budgeted,
                is_anew=is_anew,
                with_importance=budgeted is not None,
            )
            self._sink.begin(version, None if is_anew or held is None else held.checkpoint)
            try:
                self._require_held(committed)
                chunks = StoreChunks(run.store)
                ChainReading(chunks, route.chain, {}, on_progress).run(stream, self._threads)
                deferred = Backlog() if budgeted is None else budgeted.finish()
                dense = deferred.beside(stream.dense, version)
                self._sink.commit(dense, bringing.changes(deferred))
            finally:
                self._sink.discard()
            return True

        with lease(run, purpose="publish_to", covers=[manifest.ref]):
            routes.take(
                name,
                apply,
                start=start,
                line=line,
                prefers_changes=self._budget is not None,
            )

    def _start(
        self,
        routes: Routes,
        held: SinkVersion | None,
        begun: SinkVersion | None,
        version: SinkVersion,
    ) -> Manifest | None:
        """Return the checkpoint whose rows the sink holds and may keep; None: all come anew."""
        if held is None or held.tables != version.tables or begun not in (None, version):
            return None
        return _manifest_of(routes, held.checkpoint)

    def _require_held(self, committed: CommittedVersion | None) -> None:
        """Require that no other publisher has brought a version; from `begin` on none can.

        Raises:
            SinkError: one has. It may be of the same checkpoint, with fewer deferred rows.
        """
        held = self._sink.position().committed
        if held != committed:
            raise SinkError(
                self._sink.url,
                found="a version that another publisher brought meanwhile",
                expected="one publisher for each sink",
                next_step="end one of them; the next look of this one begins with that version",
            )

    def _backlog(self, committed: CommittedVersion) -> Backlog:
        """Return the rows that the sink holds of older versions than its own."""
        with self._sink.reading() as reading:
            return Backlog.of_dense(reading.dense(), committed.version, url=self._sink.url)

    def _start_of_deferred(
        self,
        routes: Routes,
        held: Manifest,
        backlog: Backlog,
        name: ManifestName,
        line: Sequence[ManifestName],
    ) -> Manifest | None:
        """Return the oldest checkpoint that a deferred row stands at; None: all come anew.

        All that differs between the sink and a checkpoint that follows from the held one has
        changed since then. Of a checkpoint that does not follow from it, that is not known.
        """
        follows = name == ManifestName(held.step, held.generation)

        def look(route: Route) -> bool:
            nonlocal follows
            follows = route.start == "served"
            return True

        if not follows:
            routes.take(name, look, start=held, line=line, prefers_changes=True)
        return _manifest_of(routes, backlog.checkpoints[backlog.numbers[0]]) if follows else None


class _Bringing:
    """Passes rows on to a sink, and sums up what it was given."""

    def __init__(self, sink: Sink, version: SinkVersion) -> None:
        self._sink = sink
        self._version = version
        self._rows: Counter[str] = Counter()
        self._deleted: Counter[str] = Counter()
        self._digests: Counter[str] = Counter()

    def put(self, table: str, ids: Tensor, rows: Tensor, importance: Tensor | None) -> None:
        self._sink.put(table, ids, rows)
        self._rows[table] += len(ids)
        self._digests[table] = (self._digests[table] + row_digest.digest(rows, ids)) & _MASK

    def delete(self, table: str, ids: Tensor) -> None:
        self._sink.delete(table, ids)
        self._deleted[table] += len(ids)

    def held_rows(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        with self._sink.reading() as reading:
            return reading.lookup(table, ids)

    def changes(self, deferred: Backlog) -> list[TableChange]:
        return [
            TableChange(
                table=table.name,
                rows_put=self._rows[table.name],
                rows_deleted=self._deleted[table.name],
                digest=f"{self._digests[table.name]:016x}",
                deferred=deferred.summary(table),
            )
            for table in self._version.tables
        ]


def _manifest_of(routes: Routes, checkpoint: CheckpointRef) -> Manifest | None:
    """Return the manifest of a checkpoint; None: it is damaged or deleted, or another attempt's."""
    try:
        manifest = routes.read(Representation(ManifestName(checkpoint.step, checkpoint.generation)))
    except DAMAGE:
        return None
    return manifest if manifest.ref == checkpoint else None


def _name(version: SinkVersion) -> ManifestName:
    return ManifestName(version.checkpoint.step, version.checkpoint.generation)
