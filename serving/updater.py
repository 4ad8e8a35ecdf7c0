"""Moving a follower from the version in service to another checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Final

from torch import Tensor

from recpoint.catalog.chunks.chunk_source import StoreChunks
from recpoint.catalog.restoring.chain_reading import ChainReading
from recpoint.catalog.runs.chain import PassedOver, blamed
from recpoint.catalog.runs.lineage import Representation
from recpoint.catalog.runs.manifests_ahead import ManifestsAhead
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.elapsed import now_ms
from recpoint.errors import ChainError, FormatError, ObjectNotFound, RecpointError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from recpoint.kernels import dirty_bitmap
from recpoint.serving.copies import Copies
from recpoint.serving.model_copy import ALL, Bitmaps, Loading
from recpoint.serving.route import Route, find_route
from recpoint.serving.version import Version

__all__ = ["DAMAGE", "OnProgress", "Updater"]

#: Of a checkpoint, not of the store or of the model.
DAMAGE: Final = (FormatError, ChainError, ObjectNotFound)

#: Manifests that are kept in memory: they never change, and the next update needs the same ones.
_KEPT_MANIFESTS: Final = 64


#: Called with bytes read so far and bytes to read.
OnProgress = Callable[[int, int], None]


class _NotCumulative(Exception):
    """An increment on the base that lacks rows in which what is served differs from that base."""


class Updater:
    """Reads checkpoints into the standby copy and switches to it; for one thread at a time.

    Args:
        run: the run.
        copies: what is served.
        tables: names of the tables that are followed; None: all.
        coded: keep quantized rows as they are stored.
        threads: chunks read at once.
        reader_wait_seconds: for requests that look at the standby copy.

    Attributes:
        served: manifest of the version in service.
        increments, fulls, bytes_read: applied so far.
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
        ] = {}  # rows in which it may differ from that, a bitmap
        self._manifests: OrderedDict[Representation, Manifest] = OrderedDict()

    def move(
        self,
        name: ManifestName,
        *,
        committed_ms: int,
        line: Sequence[ManifestName] = (),
        on_progress: OnProgress | None = None,
    ) -> tuple[PassedOver, ...]:
        """Serve checkpoint `name`, and say which damaged manifests the way there went around.

        What is served stays as it is until everything has been read and checked, and after every
        error.

        Args:
            name: the checkpoint.
            committed_ms: when it was committed.
            line: checkpoints, newest first, among which its parents probably are.
            on_progress: called with bytes read so far and bytes to read, from this thread.

        Raises:
            FormatError, ChainError, ObjectNotFound: it is damaged, or nothing leads to it.
            IncompatibleModel: it does not fit the model.
            NotServing: requests hold the copy that it would go into.
            StoreError: the store cannot be read.
        """
        avoid: dict[str, PassedOver] = {}
        first: RecpointError | None = None
        cumulative = self.served is not None and name > _name(self.served)
        while True:
            try:
                route = self._route(name, avoid, line, base=cumulative)
            except DAMAGE as error:
                raise first or error from None
            try:
                self._apply(route, committed_ms, on_progress)
            except _NotCumulative:
                cumulative = False
            except DAMAGE as error:
                first = first or error
                key = blamed(route.chain, error)
                if key is None:
                    raise first from None
                avoid[key] = PassedOver(key, f"{type(error).__name__}: {error}")
            else:
                return (*avoid.values(), *route.passed_over)

    def read(self, representation: Representation) -> Manifest:
        """A manifest, from memory if it was read before; errors as `Run.read_manifest`."""
        return self._read(representation, self._run.read_manifest)

    def _read(
        self, representation: Representation, read: Callable[[Representation], Manifest]
    ) -> Manifest:
        known = self._manifests.get(representation)
        if known is None:
            known = self._manifests[representation] = read(representation)
        self._manifests.move_to_end(representation)
        while len(self._manifests) > _KEPT_MANIFESTS:
            self._manifests.popitem(last=False)
        return known

    def _route(
        self,
        name: ManifestName,
        avoid: Collection[str],
        line: Sequence[ManifestName],
        *,
        base: bool,
    ) -> Route:
        there = self._run.consolidated()
        # From nothing, a whole chain is read; else a few manifests, and no guessing is worth it.
        guessed = () if self.served is not None else line
        with ManifestsAhead(self._run, guessed, there, avoid) as ahead:
            return find_route(
                name,
                self.served,
                base=self._base if base else None,
                there=there,
                read=lambda one: self._read(one, ahead.read),
                tables=self._tables,
                avoid=avoid,
            )

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
            # Raised before a row of the chunk at fault was written: what was is marked.
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
        before = self._copies.switch(standby, version)
        if before is not standby:
            before.behind = ALL if route.start == "full" else loading.changed
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
        """That an increment on the base has brought all rows in which what is served differs."""
        for name, rows in self._differs.items():
            if name not in changed or bool((rows & ~changed[name]).any()):
                raise _NotCumulative


def _name(manifest: Manifest) -> ManifestName:
    return ManifestName(manifest.step, manifest.generation)
