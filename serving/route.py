"""The cheapest way from what is served to another checkpoint (format §6.9)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from recpoint.catalog.runs.chain import Chain, PassedOver, check_link, check_with_own
from recpoint.catalog.runs.lineage import Representation
from recpoint.errors import ChainError, FormatError, MissingLink, ObjectNotFound, RecpointError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY, ManifestName

__all__ = ["Route", "find_route"]

_DAMAGE = (FormatError, ChainError, ObjectNotFound)


@dataclass(frozen=True, kw_only=True)
class Route:
    """What to read, and on what it goes.

    Attributes:
        chain: a whole one, or only the increments that follow the served version.
        start: what its first manifest is or goes on: a full; the served version; the full that the
            served version's own chain started from, `base`.
        row_bytes: of the chunks that have to be read.
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
    there: Mapping[ManifestName, Sequence[Representation]],
    read: Callable[[Representation], Manifest],
    tables: Collection[str] | None = None,
    avoid: Collection[str] = (),
) -> Route:
    """The way to checkpoint `name` for which the fewest bytes of rows are read.

    Walks from it towards older checkpoints, through all their representations, cheapest first,
    until it comes to a full, or to the checkpoint that is served: by its attempt, so that another
    checkpoint of the same step is no way. Every check of format §4 (I4) is made.

    Args:
        name: where to.
        served: what is there already, in every row; None: nothing.
        base: the full that its chain was read from.
        there: consolidated representations.
        read: reads a manifest.
        tables: whose rows are wanted; None: of all.
        avoid: keys of manifests to do without.

    Raises:
        ObjectNotFound: there is no such checkpoint.
        ChainError, FormatError: nothing leads to it; the first thing that was wrong.
    """
    number = count()  # of two ways that cost the same, the one found first
    ways: list[tuple[int, int, Representation | None, tuple[Manifest, ...]]] = []
    errors: dict[str, RecpointError] = {}
    walked: set[Representation] = set()

    def enter(cost: int, checkpoint: ManifestName, way: tuple[Manifest, ...]) -> None:
        for choice in (*there.get(checkpoint, ()), Representation(checkpoint)):
            if choice in walked or choice.key in avoid:
                continue
            try:
                found = _link(read, choice, way)
            except _DAMAGE as error:
                gone = isinstance(error.__cause__ or error, ObjectNotFound)
                gone = gone and bool(there.get(checkpoint))
                if not gone:  # retention lets go of the longer of several: that is no damage
                    errors.setdefault(choice.key, error)
                continue
            walked.add(choice)
            total = cost + _row_bytes(found, tables)
            heapq.heappush(ways, (total, next(number), choice, (found, *way)))

    enter(0, name, ())
    while ways:
        cost, _, _, way = heapq.heappop(ways)
        first = way[0]
        start = _start(first, served, base)
        if start is not None:
            passed = tuple(PassedOver(k, f"{type(e).__name__}: {e}") for k, e in errors.items())
            chain = Chain(manifests=way, passed_over=passed)
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
    """What a way has come to; None: it goes on."""
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
        found = read(choice)
        check_with_own(found, read)
        return found
    try:
        found = read(choice)
    except ObjectNotFound as error:
        raise MissingLink(
            choice.key,
            found="no manifest",
            expected=f"{way[0].parent}, on which {way[0].ref} depends",
            next_step="nothing: the follower takes the next full or consolidated checkpoint",
        ) from error
    check_link(way[0], found)
    return found


def _row_bytes(manifest: Manifest, tables: Collection[str] | None) -> int:
    return sum(
        entry.bytes
        for entry in manifest.chunks
        if entry.table is not None
        and (tables is None or manifest.tables[entry.table].name in tables)
    )
