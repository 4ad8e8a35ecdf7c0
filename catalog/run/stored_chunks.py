"""Checks last, before a record is written, that all chunks that it names are stored.

A sweep on another host, or a person, may have removed chunks after this host uploaded them.
"""

from __future__ import annotations

from collections.abc import Iterable

from recpoint.catalog.store.contract import Store
from recpoint.errors import ObjectNotFound
from recpoint.format.manifest import ChunkEntry
from recpoint.format.records import CheckpointRef

__all__ = [
    "chunks_missing",
    "not_there",
    "stored_sizes",
]


def stored_sizes(store: Store, prefix: str) -> dict[str, int]:
    """Return the length in bytes of each object whose key starts with `prefix`; one listing.

    Raises:
        StoreError: the store cannot be read.
    """
    return {info.key: info.size_bytes for info in store.list(prefix)}


def not_there(store: Store, prefix: str, entries: Iterable[ChunkEntry]) -> list[ChunkEntry]:
    """Return the chunks of `entries`, all under `prefix`, that are missing or of another length.

    Raises:
        StoreError: the store cannot be read.
    """
    sizes = stored_sizes(store, prefix)
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
