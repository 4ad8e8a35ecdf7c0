"""Moves a follower from the version in service to another checkpoint, by the cheapest way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from recpoint.catalog.restore.chain import ChainReading
from recpoint.catalog.restore.chunks import StoreChunks
from recpoint.catalog.run.chain import PassedOver
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import RecpointError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from recpoint.kernels import dirty_bitmap
from recpoint.serving.loading import Loading
from recpoint.serving.model import ALL, Bitmaps, Copies
from recpoint.serving.route import Route, Routes
from recpoint.serving.version import Version

__all__ = ["OnProgress", "Updater"]


#: Called with bytes read so far and bytes to read.
OnProgress = Callable[[int, int], None]


class _NotCumulative(Exception):
    """An increment on the base lacks rows in which the served version differs from the base."""


class Updater:
    """Reads checkpoints into the standby copy and switches to it; for one thread at a time.

    Args:
        run: the run.
        copies: the two copies of the served model.
        tables: names of the tables that are followed; None: all.
        coded: keep quantized rows as they are stored.
        threads: chunks read at once.
        reader_wait_seconds: how long to wait for requests that look at the standby copy.

    Attributes:
        served: manifest of the version in service.
        increments, fulls, bytes_read: manifests applied and bytes read so far.
    """

    def __init__(
        self,
        run: Run,
        copies: Copies,
        *,
        tables: Collection[str] | None,
        coded: bool,
        threads: int,
        reader_wait_seconds: float,
    ) -> None:
        self._run = run
        self._routes = Routes(run, tables)
        self._copies = copies
        self._tables = tables
        self._coded = coded
        self._threads = threads
        self._wait_seconds = reader_wait_seconds
        self.served: Manifest | None = None
        self.increments = self.fulls = self.bytes_read = 0
        self._base: Manifest | None = None  # the full that the version in service was read from
        self._differs: dict[
            tuple[str, int], Tensor
        ] = {}  # bitmaps of the rows in which that version may differ from the base

    def move(
        self,
        name: ManifestName,
        *,
        committed_ms: int,
        line: Sequence[ManifestName] = (),
        on_progress: OnProgress | None = None,
    ) -> tuple[PassedOver, ...]:
        """Serve checkpoint `name`; return the damaged manifests that the way there avoided.

        The served version stays unchanged until everything has been read and checked, and after
        every error.

        Args:
            name: the checkpoint.
            committed_ms: when it was committed.
            line: checkpoints, newest first; its parents are probably among them.
            on_progress: called with bytes read so far and bytes to read, from this thread.

        Raises:
            FormatError, ChainError, ObjectNotFound: it is damaged, or nothing leads to it.
            IncompatibleModel: it does not fit the model.
            NotServing: requests still hold the standby copy.
            StoreError: the store cannot be read.
        """
        is_cumulative = self.served is not None and name > _name(self.served)

        def apply(route: Route) -> bool:
            nonlocal is_cumulative
            try:
                self._apply(route, committed_ms, on_progress)
            except _NotCumulative:
                is_cumulative = False
                return False
            return True

        return self._routes.take(
            name,
            apply,
            start=self.served,
            base=lambda: self._base if is_cumulative else None,
            line=line,
        )

    def read(self, representation: Representation) -> Manifest:
        """Return a manifest, from memory if it was read before; errors as `Run.read_manifest`."""
        return self._routes.read(representation)

    def _apply(self, route: Route, committed_ms: int, on_progress: OnProgress | None) -> None:
        standby = self._copies.standby(wait_seconds=self._wait_seconds)
        if route.start != "full":
            standby.catch_up(self._copies.active)
        loading = Loading(standby, route.chain, self._tables, coded=self._coded)
        reading = ChainReading(StoreChunks(self._run.store), route.chain, {}, on_progress)
        standby.behind = ALL  # until it is known which rows were written
        try:
            reading.run(loading, self._threads)
            if route.start == "base":
                self._require_cumulative(loading.changed)
        except (RecpointError, _NotCumulative):
            # The error came before a row of the faulty chunk was written; written rows are marked.
            if route.start != "full":
                standby.behind = loading.changed
            raise
        newest = route.chain.newest
        version = Version(
            checkpoint=newest.ref,
            committed_ms=committed_ms,
            served_ms=now_ms(),
            model=None if standby.model is None else standby.model.model,
            tables=dict(standby.tables),
            dense=standby.dense,
        )
        standby.behind = {}
        previous = self._copies.switch(standby, version)
        if previous is not standby:
            previous.behind = ALL if route.start == "full" else loading.changed
        self._account(route, loading.changed, reading.bytes_read)

    def _account(self, route: Route, changed: Bitmaps, bytes_read: int) -> None:
        manifests = route.chain.manifests
        self.served = route.chain.newest
        self.bytes_read += bytes_read
        self.fulls += route.start == "full"
        self.increments += len(manifests) - (route.start == "full")
        if route.start == "full":
            self._base = manifests[0]
        if route.start == "served":
            for name, rows in changed.items():
                dirty_bitmap.merge(self._differs[name], rows)
        else:
            self._differs = {name: rows.clone() for name, rows in changed.items()}

    def _require_cumulative(self, changed: Bitmaps) -> None:
        """Check that an increment on the base brought all rows in which the served one differs."""
        for name, rows in self._differs.items():
            if name not in changed or bool((rows & ~changed[name]).any()):
                raise _NotCumulative


def _name(manifest: Manifest) -> ManifestName:
    return ManifestName(manifest.step, manifest.generation)
