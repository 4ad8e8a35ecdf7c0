"""Whether the objects of a chain are there, in their lengths, before one of them is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from recpoint.catalog.chunks.chunk_reader import check_entry, check_stored
from recpoint.catalog.chunks.chunk_source import ChunkSource
from recpoint.catalog.runs.chain import Chain
from recpoint.catalog.stores.io_scheduler import ReadScheduler
from recpoint.errors import FormatError, ObjectNotFound
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.naming import parse_chunk_key

__all__ = ["Missing", "look_at_stored", "why_missing"]


_LISTINGS = 16


class Missing(NamedTuple):
    """A chunk that is not there as the manifest says."""

    entry: ChunkEntry
    error: FormatError | ObjectNotFound


def _needed(chain: Chain) -> list[tuple[Manifest, ChunkEntry]]:
    """What restoring and validating a chain reads: all rows; state and sample of the newest."""
    return [
        (manifest, entry)
        for manifest in chain.manifests
        for entry in manifest.chunks
        if entry.content == "rows" or manifest is chain.newest
    ]


def look_at_stored(source: ChunkSource, chain: Chain) -> Iterator[Missing]:
    """Find missing and truncated objects by listing, without reading one.

    Raises:
        StoreError: the source cannot tell now.
    """
    chunks = _needed(chain)
    prefixes = {_prefix_of(entry) for _, entry in chunks if parse_chunk_key(entry.key)}
    sizes: dict[str, int] = {}
    refused: dict[str, ObjectNotFound] = {}
    # A listing each, and most of it waiting: a long chain's are made several at a time.
    with ReadScheduler(min(_LISTINGS, len(prefixes) or 1)) as reads:
        for prefix, listing in reads.in_order(sorted(prefixes), source.sizes):
            try:
                sizes.update(listing.result())
            except ObjectNotFound as error:
                refused[prefix] = error
    for manifest, entry in chunks:
        try:
            check_entry(manifest, entry)
            check_stored(manifest, entry, sizes)
        except (FormatError, ObjectNotFound) as error:
            yield Missing(entry, refused.get(_prefix_of(entry), error))


def why_missing(source: ChunkSource, entry: ChunkEntry) -> ObjectNotFound | None:
    """The source's own reason why the chunks beside `entry` cannot be listed; None: it has none.

    Raises:
        StoreError: the source cannot tell now.
    """
    try:
        source.sizes(_prefix_of(entry))
    except ObjectNotFound as error:
        return error
    return None


def _prefix_of(entry: ChunkEntry) -> str:
    return entry.key.rpartition("/")[0] + "/"
