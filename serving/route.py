"""Finds the cheapest way from a version that is held to another checkpoint (format §6.9)."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, Literal

from recpoint.catalog.run.chain import (
    DAMAGE,
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
from recpoint.errors import MissingLink, ObjectNotFound, RecpointError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY, ManifestName

__all__ = ["Route", "Routes", "find_route"]


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
    prefers_changes: bool = False,
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
        prefers_changes: take a way that starts with a full only if there is no other, even if it
            reads fewer bytes.

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
            except DAMAGE as error:
                is_deleted = isinstance(error.__cause__ or error, ObjectNotFound)
                is_deleted = is_deleted and bool(representations.get(checkpoint))
                if not is_deleted:  # retention deletes the longer of several ways: no damage
                    errors.setdefault(choice.key, error)
                continue
            walked.add(choice)
            total = cost + _row_bytes(link, tables)
            heapq.heappush(ways, (total, next(number), choice, (link, *way)))

    def route(
        start: Literal["full", "served", "base"], cost: int, way: tuple[Manifest, ...]
    ) -> Route:
        passed = tuple(PassedOver.of(key, error) for key, error in errors.items())
        beside = needed_beside(way, read, avoid)
        chain = Chain(manifests=way, passed_over=passed, beside=beside)
        return Route(chain=chain, start=start, row_bytes=cost, passed_over=passed)

    enter(0, name, ())
    from_full: tuple[int, tuple[Manifest, ...]] | None = None
    while ways:
        cost, _, _, way = heapq.heappop(ways)
        first = way[0]
        start = _start(first, served, base)
        if start == "full" and prefers_changes:
            from_full = from_full or (cost, way)
            continue
        if start is not None:
            return route(start, cost, way)
        assert first.parent is not None
        enter(cost, ManifestName(first.parent.step, first.parent.generation), way)
    if from_full is not None:
        return route("full", *from_full)
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


#: How many manifests stay in memory. They never change, and the next route needs the same ones.
_KEPT_MANIFESTS: Final = 64


class Routes:
    """Finds routes to checkpoints of one run, and goes around damage; for one thread at a time.

    Args:
        run: the run.
        tables: names of the tables whose rows are wanted; None: all.
    """

    def __init__(self, run: Run, tables: Collection[str] | None) -> None:
        self._run = run
        self._tables = tables
        self._manifests: OrderedDict[Representation, Manifest] = OrderedDict()

    def take(
        self,
        name: ManifestName,
        apply: Callable[[Route], bool],
        *,
        start: Manifest | None,
        base: Callable[[], Manifest | None] = lambda: None,
        line: Sequence[ManifestName] = (),
        prefers_changes: bool = False,
    ) -> tuple[PassedOver, ...]:
        """Apply the cheapest route to a checkpoint, and where that is damaged, the next one.

        Args:
            name: the checkpoint.
            apply: reads what a route names; False: this kind of start does not do, so another
                route is wanted.
            start: the checkpoint that is held in every row; None: nothing.
            base: returns the full that a route may start from too; None: none.
            line: checkpoints, newest first; its parents are probably among them.
            prefers_changes: as for `find_route`.

        Returns:
            The damaged manifests that the route avoided.

        Raises:
            FormatError, ChainError, ObjectNotFound: the checkpoint is damaged, or nothing leads to
                it.
            RecpointError: as `apply`.
        """
        avoid: dict[str, PassedOver] = {}
        first: RecpointError | None = None
        while True:
            try:
                route = self._find(name, avoid, line, start, base(), prefers_changes)
            except DAMAGE as error:
                raise first or error from None
            try:
                if apply(route):
                    return (*avoid.values(), *route.passed_over)
            except DAMAGE as error:
                first = first or error
                key = blamed(route.chain, error)
                if key is None:
                    raise first from None
                avoid[key] = PassedOver.of(key, error)

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

    def _find(
        self,
        name: ManifestName,
        avoid: Collection[str],
        line: Sequence[ManifestName],
        start: Manifest | None,
        base: Manifest | None,
        prefers_changes: bool,
    ) -> Route:
        consolidated = self._run.consolidated()
        # If nothing is held, a whole chain is read; else a few manifests: not worth guessing.
        guessed = () if start is not None else line
        with ManifestsAhead(self._run, guessed, consolidated, avoid) as ahead:
            return find_route(
                name,
                start,
                base=base,
                representations=consolidated,
                read=lambda representation: self._read(representation, ahead.read),
                tables=self._tables,
                avoid=avoid,
                prefers_changes=prefers_changes,
            )
