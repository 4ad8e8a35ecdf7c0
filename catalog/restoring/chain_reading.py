"""Reading a chain into a target: what is stored first, then the state, then each row once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from recpoint.catalog.chunks.chunk_reader import read_rows
from recpoint.catalog.chunks.chunk_source import ChunkSource
from recpoint.catalog.chunks.read_buffers import ReadBuffers
from recpoint.catalog.chunks.stored_objects import look_at_stored
from recpoint.catalog.restoring.chain_rows import TableRows, WantedChunk
from recpoint.catalog.restoring.restore_target import (
    RestoreTarget,
    StateCheckingTarget,
    check_targets,
)
from recpoint.catalog.restoring.state_reading import StateReading
from recpoint.catalog.runs.chain import Chain
from recpoint.catalog.stores.io_scheduler import (
    READ_SMALL_BYTES,
    WHOLE_CHUNK_BYTES,
    ReadScheduler,
)
from recpoint.errors import FormatError, ObjectNotFound, RecpointError
from recpoint.format.manifest import ChunkEntry

__all__ = ["ChainReading"]


class ChainReading:
    """One chain on its way into a target: all that it names, or what follows a known version.

    Args:
        source: where its chunks are.
        chain: what is read. Its first manifest is a full, or an increment whose parent is what the
            target holds already, in every row.
        damaged: errors of chunks by key, known from other chains of the run and added to.
        on_progress: called with bytes read so far and bytes to read, from the thread of `run`.

    Attributes:
        chunks_read, bytes_read: so far.
    """

    def __init__(
        self,
        source: ChunkSource,
        chain: Chain,
        damaged: dict[str, RecpointError],
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._source = source
        self._chain = chain
        self._damaged = damaged  # what is known of chunks that other chains of the run share
        self._on_progress = on_progress
        self._tables: list[TableRows] = []
        self._bytes_to_read = 0
        self.bytes_read = 0
        self.chunks_read = 0

    def run(self, target: RestoreTarget, threads: int) -> None:
        """Read it with so many threads.

        Raises:
            FormatError, ObjectNotFound: a chunk is damaged or missing; its key is the subject.
            IncompatibleModel: it does not fit the target; nothing has been written.
            StoreError: the source cannot be read.
        """
        with ReadScheduler(threads) as reads:
            self._restore(target, reads)

    def _restore(self, target: RestoreTarget, reads: ReadScheduler) -> None:
        newest = self._chain.newest
        self._check_stored()
        targets = tuple(target.begin(newest))
        check_targets(newest, targets)
        self._tables = [
            TableRows(self._chain, table, into)
            for table, into in enumerate(targets)
            if into is not None
        ]
        self._bytes_to_read = sum(table.bytes for table in self._tables)
        # The state first: when it is damaged, no table has been touched yet.
        states = StateReading(self._source, newest, reads, self._account, self._expect)
        state = states.for_target(target)
        if isinstance(target, StateCheckingTarget):
            target.check_state(newest, state)
        with torch.no_grad():
            self._write_rows(reads, self._tables)
        target.finish(newest, state)

    def _check_stored(self) -> None:
        """Find missing and truncated objects before anything is read or written."""
        for missing in look_at_stored(self._source, self._chain):
            if missing.entry.content != "sample":  # which nothing that is restored needs
                raise missing.error
        for manifest in self._chain.manifests:
            for entry in manifest.chunks:
                if entry.key in self._damaged:
                    raise self._damaged[entry.key]

    def _write_rows(self, reads: ReadScheduler, tables: Sequence[TableRows]) -> None:
        """Read and check in threads, decode here: from the newest checkpoint to the full."""
        chunks = (chunk for table in tables for chunk in table.chunks())
        buffers = ReadBuffers()
        for chunk, outcome in reads.in_order(
            chunks,
            lambda chunk: read_rows(
                self._source,
                chunk.manifest,
                chunk.entry,
                buffers=buffers if chunk.entry.bytes > READ_SMALL_BYTES else None,
            ),
            size_bytes=_budgeted_bytes,
        ):
            if chunk.table.leaves_out(chunk):  # as was not known when it was to be read
                self._show_progress()
                continue
            try:
                chunk.table.take(chunk, outcome.result())
            except (FormatError, ObjectNotFound) as error:
                self._damaged[chunk.entry.key] = error
                raise
            self._account(chunk.entry)
        for table in tables:
            table.finish()

    def _expect(self, size_bytes: int) -> None:
        self._bytes_to_read += size_bytes

    def _account(self, entry: ChunkEntry) -> None:
        self.chunks_read += 1
        self.bytes_read += entry.bytes
        self._show_progress()

    def _show_progress(self) -> None:
        if self._on_progress is not None:
            left_out = sum(table.left_out_bytes for table in self._tables)
            self._on_progress(self.bytes_read, self._bytes_to_read - left_out)


def _budgeted_bytes(chunk: WantedChunk) -> int:
    """What a chunk counts as. One that may prove not to be needed is no small one: few are read."""
    size_bytes = chunk.memory_bytes
    if chunk.is_needed and size_bytes <= READ_SMALL_BYTES:
        return size_bytes
    return max(chunk.entry.bytes, WHOLE_CHUNK_BYTES)
