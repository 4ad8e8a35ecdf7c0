"""Whether all chunks that a record is about to name are stored: the last look before it is written.

A sweep on another host, or somebody by hand, may have removed what this host knows it has uploaded.
"""

from __future__ import annotations

from collections.abc import Iterable

from recpoint.catalog.stores.store_contract import Store
from recpoint.errors import ObjectNotFound
from recpoint.format.manifest import ChunkEntry
from recpoint.format.records import CheckpointRef

__all__ = ["chunks_missing", "not_there", "stored_sizes"]


def stored_sizes(store: Store, prefix: str) -> dict[str, int]:
    """Length in bytes of each object whose key starts with `prefix`: one listing.

    Raises:
        StoreError: the store cannot be read.
    """
    return {info.key: info.size_bytes for info in store.list(prefix)}


def not_there(store: Store, prefix: str, entries: Iterable[ChunkEntry]) -> list[ChunkEntry]:
    """Those of `entries`, chunks under `prefix`, that are not stored in their length.

    Raises:
        StoreError: the store cannot be read.
    """
    sizes = stored_sizes(store, prefix)
    return [entry for entry in entries if sizes.get(entry.key) != entry.bytes]


def chunks_missing(ref: CheckpointRef, missing: list[ChunkEntry]) -> ObjectNotFound:
    """The error that says so of a staged job: it stays staged, and is written anew."""
    return ObjectNotFound(
        missing[0].key,
        found=f"{len(missing)} chunks missing, or of another length, that were uploaded for {ref}",
        expected="all that its manifest will name",
        next_step="nothing: the next try writes them again; a sweep on another host with a grace "
        "shorter than the store was away may have removed them",
    )
