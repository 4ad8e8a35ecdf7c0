"""Moves a follower from the version in service to another checkpoint, by the cheapest way.

The cheapest way from the served version to another checkpoint (format §6.9).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, Literal

from torch import Tensor

from recpoint.catalog.restore.chain import ChainReading
from recpoint.catalog.restore.chunks import StoreChunks
from recpoint.catalog.run.chain import (
    Chain,
    PassedOver,
    blamed,
    check_link,
    check_with_own,
    needed_beside,
)
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.manifests_ahead import ManifestsAhead
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import ChainError, FormatError, MissingLink, ObjectNotFound, RecpointError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY, ManifestName
from recpoint.kernels import dirty_bitmap
from recpoint.serving.model import ALL, Bitmaps, Copies, Loading, Version

__all__ = ["DAMAGE", "OnProgress", "Updater"]


_DAMAGE = (FormatError, ChainError, ObjectNotFound)


@dataclass(frozen=True, kw_only=True)
class Route:
    """What to read, and what must be in memory before.

    Attributes:
        chain: a whole chain, or only the increments that follow the served version or its base.
        start: `full`: the first manifest is a full. `served`: its parent is the served version.
            `base`: its parent is the full that the served version's own chain started from.
        row_bytes: bytes of row chunks to read.
        passed_over: manifests that are damaged, or lead nowhere.
    """

    chain: Chain
    start: Literal["full", "served", "base"]
    row_bytes: int
    passed_over: tuple[PassedOver, ...]


def find_route(
    name: ManifestName,
    served: Manifest | None,
    *,
    base: Manifest | None = None,
    representations: Mapping[ManifestName, Sequence[Representation]],
    read: Callable[[Representation], Manifest],
    tables: Collection[str] | None = None,
    avoid: Collection[str] = (),
) -> Route:
    """Return the way to checkpoint `name` that reads the fewest bytes of rows.

    Walks from `name` towards older checkpoints, through all their representations, cheapest first,
    until it reaches a full or the served checkpoint. The attempt identifies the served checkpoint,
    so another one of the same step does not count. Makes every check of format §4 (invariant 4).

    Args:
        name: the checkpoint to reach.
        served: the checkpoint that is in memory, in every row; None: nothing.
        base: the full that the chain of `served` was read from.
        representations: consolidated representations.
        read: reads a manifest.
        tables: names of the tables whose rows are wanted; None: all.
        avoid: keys of manifests to do without.

    Raises:
        ObjectNotFound: there is no such checkpoint.
        ChainError, FormatError: nothing leads to the checkpoint; the first error that was found.
    """
    number = count()  # if two ways cost the same, the one found first wins
    ways: list[tuple[int, int, Representation | None, tuple[Manifest, ...]]] = []
    errors: dict[str, RecpointError] = {}
    walked: set[Representation] = set()

    def enter(cost: int, checkpoint: ManifestName, way: tuple[Manifest, ...]) -> None:
        for choice in (*representations.get(checkpoint, ()), Representation(checkpoint)):
            if choice in walked or choice.key in avoid:
                continue
            try:
                link = _link(read, choice, way)
            except _DAMAGE as error:
                is_deleted = isinstance(error.__cause__ or error, ObjectNotFound)
                is_deleted = is_deleted and bool(representations.get(checkpoint))
                if not is_deleted:  # retention deletes the longer of several ways: no damage
                    errors.setdefault(choice.key, error)
                continue
            walked.add(choice)
            total = cost + _row_bytes(link, tables)
            heapq.heappush(ways, (total, next(number), choice, (link, *way)))

    enter(0, name, ())
    while ways:
        cost, _, _, way = heapq.heappop(ways)
        first = way[0]
        start = _start(first, served, base)
        if start is not None:
            passed = tuple(PassedOver(k, f"{type(e).__name__}: {e}") for k, e in errors.items())
            beside = needed_beside(way, read, avoid)
            chain = Chain(manifests=way, passed_over=passed, beside=beside)
            return Route(chain=chain, start=start, row_bytes=cost, passed_over=passed)
        assert first.parent is not None
        enter(cost, ManifestName(first.parent.step, first.parent.generation), way)
    for error in errors.values():
        raise error
    raise ObjectNotFound(
        MANIFEST_KEY.of(*name),
        found="no manifest",
        expected=f"one of {name}",
        next_step="recpoint list URL",
    )


def _start(
    first: Manifest, served: Manifest | None, base: Manifest | None
) -> Literal["full", "served", "base"] | None:
    """Return where a way starts; None: it needs an older checkpoint first."""
    if first.parent is None:
        return "full"
    if served is not None and first.parent == served.ref:
        check_link(first, served)
        return "served"
    if base is not None and first.parent == base.ref:
        check_link(first, base)
        return "base"
    return None


def _link(
    read: Callable[[Representation], Manifest], choice: Representation, way: tuple[Manifest, ...]
) -> Manifest:
    if not way:
        manifest = read(choice)
        check_with_own(manifest, read)
        return manifest
    try:
        manifest = read(choice)
    except ObjectNotFound as error:
        raise MissingLink(
            choice.key,
            found="no manifest",
            expected=f"{way[0].parent}, on which {way[0].ref} depends",
            next_step="nothing: the follower takes the next full or consolidated checkpoint",
        ) from error
    check_link(way[0], manifest)
    return manifest


def _row_bytes(manifest: Manifest, tables: Collection[str] | None) -> int:
    return sum(
        entry.bytes
        for entry in manifest.chunks
        if entry.table is not None
        and (tables is None or manifest.tables[entry.table].name in tables)
    )


#: Errors of a checkpoint, not of the store or of the model.
DAMAGE: Final = (FormatError, ChainError, ObjectNotFound)

#: How many manifests stay in memory. They never change, and the next update needs the same ones.
_KEPT_MANIFESTS: Final = 64


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
        self._manifests: OrderedDict[Representation, Manifest] = OrderedDict()

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
        """Return a manifest, from memory if it was read before; errors as `Run.read_manifest`."""
        return self._read(representation, self._run.read_manifest)

    def _read(
        self, representation: Representation, read: Callable[[Representation], Manifest]
    ) -> Manifest:
        manifest = self._manifests.get(representation)
        if manifest is None:
            manifest = self._manifests[representation] = read(representation)
        self._manifests.move_to_end(representation)
        while len(self._manifests) > _KEPT_MANIFESTS:
            self._manifests.popitem(last=False)
        return manifest

    def _route(
        self,
        name: ManifestName,
        avoid: Collection[str],
        line: Sequence[ManifestName],
        *,
        base: bool,
    ) -> Route:
        consolidated = self._run.consolidated()
        # If nothing is served, a whole chain is read; else a few manifests: not worth guessing.
        guessed = () if self.served is not None else line
        with ManifestsAhead(self._run, guessed, consolidated, avoid) as ahead:
            return find_route(
                name,
                self.served,
                base=self._base if base else None,
                representations=consolidated,
                read=lambda representation: self._read(representation, ahead.read),
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
