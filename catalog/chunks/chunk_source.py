"""Says where chunks are read from: a store, or whatever else can give their bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from recpoint.catalog.stores.store_contract import Store

__all__ = ["ChunkSource", "StoreChunks"]


class ChunkSource(Protocol):
    """What reading chunks needs; called from several threads.

    A source gives bytes and is not believed: `chunk_reader` compares them with the digest in the
    manifest, and asks a second time for those that differ.
    """

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """Lengths in bytes of the chunks whose keys start with `prefix`, by key.

        Raises:
            ObjectNotFound: the source says why it has none of them.
            StoreError: it cannot tell now.
        """

    def read(
        self, key: str, *, max_bytes: int, lend: Callable[[int], memoryview] | None = None
    ) -> bytes | memoryview:
        """All bytes of a chunk, as they are there now.

        Args:
            key: of the chunk.
            max_bytes: more are an error, and nothing is allocated for them.
            lend: gives memory for so many bytes; where a source can choose, the chunk goes there.

        Raises:
            ObjectNotFound: there is none.
            MalformedObject: it is larger than `max_bytes`.
            StoreError: it could not be read.
        """


@dataclass(frozen=True)
class StoreChunks:
    """The chunks in the store of a run."""

    store: Store

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """See `ChunkSource.sizes`; one listing."""
        return {info.key: info.size_bytes for info in self.store.list(prefix)}

    def read(
        self, key: str, *, max_bytes: int, lend: Callable[[int], memoryview] | None = None
    ) -> bytes | memoryview:
        """See `ChunkSource.read`."""
        if lend is None:
            return self.store.get(key, max_bytes=max_bytes)
        return self.store.get_lent(key, max_bytes=max_bytes, lend=lend)
