"""Checks last, before a record is written, that all chunks that it names are stored.

A sweep on another host, or a person, may have removed chunks after this host uploaded them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeVar

from recpoint.catalog.store.contract import Store
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import ObjectNotFound
from recpoint.format.manifest import ChunkEntry
from recpoint.format.naming import AttemptName, attempt_prefix, attempt_prefixes
from recpoint.format.records import CheckpointRef

__all__ = [
    "chunks_missing",
    "not_there",
    "not_there_of_parts",
    "stored_sizes",
]

#: Up to so many chunks are listed one page after another; S3 gives 1,000 with each request.
_LISTED_IN_TURN: Final = 8_000
#: More are listed by ranges of ranks at once, in at least so many ranges.
_RANGES: Final = 16


class _Stored(Protocol):
    """What is said of an object: a chunk's entry, or a page."""

    @property
    def key(self) -> str: ...

    @property
    def bytes(self) -> int: ...


_Named = TypeVar("_Named", bound=_Stored)


def stored_sizes(store: Store, prefix: str) -> dict[str, int]:
    """Return the length in bytes of each object whose key starts with `prefix`; one listing.

    Raises:
        StoreError: the store cannot be read.
    """
    return {info.key: info.size_bytes for info in store.list(prefix)}


def not_there(store: Store, prefix: str, entries: Iterable[_Named]) -> list[_Named]:
    """Return the chunks or pages, all under `prefix`, that are missing or of another length.

    Raises:
        StoreError: the store cannot be read.
    """
    sizes = stored_sizes(store, prefix)
    return [entry for entry in entries if sizes.get(entry.key) != entry.bytes]


def not_there_of_parts(
    store: Store, attempt: AttemptName, entries: Sequence[ChunkEntry], *, parts: int
) -> list[ChunkEntry]:
    """As `not_there`, for the chunks of all parts of an attempt, with several listings at once.

    Args:
        store: where they are.
        attempt: the attempt.
        entries: its chunks; `rank` of each is the number of its part.
        parts: how many parts it has.
    """
    if len(entries) <= _LISTED_IN_TURN:
        return not_there(store, attempt_prefix(*attempt), entries)
    # The widest ranges: an answer that is not full costs a request as a full one does.
    ranks_each = next((each for each in (1_000, 100, 10) if parts >= _RANGES * each), 1)
    prefixes = attempt_prefixes(*attempt, parts=parts, ranks_each=ranks_each)
    sizes: dict[str, int] = {}
    with ReadScheduler.of_records() as reads:
        for some in reads.results(prefixes, lambda prefix: stored_sizes(store, prefix)):
            sizes |= some
    return [entry for entry in entries if sizes.get(entry.key) != entry.bytes]


def chunks_missing(ref: CheckpointRef, missing: list[ChunkEntry]) -> ObjectNotFound:
    """Return the error for missing chunks; the job stays staged, and the next try writes them."""
    return ObjectNotFound(
        missing[0].key,
        found=f"{len(missing)} uploaded chunks of {ref} missing or of another length",
        expected="all chunks that its manifest will name",
        next_step="nothing: the next try writes them again; a sweep on another host may have "
        "removed them, if the store was away for longer than its grace",
    )
