"""Chunks of a consolidation on their way to the store, and what an earlier try left there."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Final, Self

import crc32c

from recpoint.catalog.stores.io_scheduler import WriteBudget, WriteScheduler
from recpoint.catalog.stores.store_contract import Store
from recpoint.errors import MalformedObject, ObjectNotFound, StoreUnavailable
from recpoint.format.chunk import Chunk, build_chunk
from recpoint.format.manifest import ChunkEntry
from recpoint.format.naming import parse_chunk_name, sample_chunk_key, state_chunk_key

__all__ = ["Uploads", "moved_chunk"]

#: Chunks on their way at once; each is in memory, and in the store's client once or twice more.
_MERGE_UPLOADS: Final = 2


class Uploads:
    """Writes chunks in threads; leaving the context waits for those under way.

    The first chunk is written whatever is there: it makes the attempt young, so that no sweep
    that begins now takes what is found under it (format §6.8 C4). Of the others those that are
    there, byte for byte, are not written again.

    Args:
        store: where to.
        prefix: that all keys start with.
        trust: whether what is there may count as written.
    """

    def __init__(self, store: Store, prefix: str, *, trust: bool = True) -> None:
        self._store = store
        self._prefix = prefix
        self._trust = trust
        self._there: dict[str, int] | None = None
        self._writes = WriteScheduler(WriteBudget(_MERGE_UPLOADS))
        self._entries: list[ChunkEntry] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writes.__exit__(kind, error, traceback)

    def put(self, entry: ChunkEntry, data: bytes) -> None:
        """Write a chunk; returns while it is under way, and raises what went wrong with another."""
        self._entries.append(entry)
        if self._there is None:
            self._store.put(entry.key, data)
            self._there = {}
            if self._trust:
                infos = self._store.list(self._prefix)
                self._there = {info.key: info.size_bytes for info in infos}
            return
        room = self._writes.reserve(len(data))
        self._writes.begin(room, partial(self._write, entry, data))

    def finish(self) -> tuple[ChunkEntry, ...]:
        """Wait until all are durable; what was put, in order."""
        self._writes.finish()
        return tuple(self._entries)

    def _write(self, entry: ChunkEntry, data: bytes) -> None:
        assert self._there is not None
        if self._there.get(entry.key) == len(data) and self._is_good(entry, len(data)):
            return
        self._store.put(entry.key, data)

    def _is_good(self, entry: ChunkEntry, size_bytes: int) -> bool:
        try:
            found = self._store.get(entry.key, max_bytes=size_bytes)
        except (ObjectNotFound, MalformedObject, StoreUnavailable):
            return False
        return len(found) == size_bytes and crc32c.crc32c(found) == entry.crc32c


def moved_chunk(chunk: Chunk, entry: ChunkEntry, attempt: str) -> tuple[ChunkEntry, bytes]:
    """A chunk of state or samples under another attempt: the same arrays, another header."""
    meta = chunk.meta.model_copy(update={"attempt": attempt})
    data = build_chunk(meta, list(chunk.sections.values()))
    named = parse_chunk_name(entry.key)
    assert named is not None  # ChunkEntry lets no other key through
    name = state_chunk_key if entry.content == "state" else sample_chunk_key
    key = name(meta.step, meta.generation, attempt, rank=entry.rank, number=named.number)
    changes = {"key": key, "bytes": len(data), "crc32c": crc32c.crc32c(data)}
    return ChunkEntry.model_validate(entry.model_dump() | changes), data
