"""Runs the third step of a persist: writes the chunks of a group from their recipes.

After this step the chunks are in the store (format §6.1, write order, rule 3).
"""

from __future__ import annotations

import base64
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any, Final

import crc32c

from recpoint.catalog.persist.encode import chunk_recipes
from recpoint.catalog.persist.plan import ChunkGroup
from recpoint.catalog.persist.spool import (
    Part,
    assemble_parts,
    open_in_spool,
    part_from,
    result_path,
)
from recpoint.catalog.staging.job import StagedJob
from recpoint.catalog.staging.slot_reading import Extent
from recpoint.catalog.store import durable
from recpoint.catalog.store.contract import host_seconds
from recpoint.catalog.store.scheduler import WHOLE_CHUNK_BYTES, WriteBudget, WriteScheduler
from recpoint.catalog.store.store import Store
from recpoint.catalog.store.streams import StreamCount
from recpoint.errors import DigestMismatch, SettingsError, StoreThrottled

__all__ = ["MOST_STREAMS", "bound_uploads", "upload_group"]

#: The most uploads at once, unless a person sets it.
MOST_STREAMS: Final = 32

#: Bytes of all uploads at once, unless a person sets how many there may be. Each holds a chunk in
#: memory, and the store's client holds one or two more copies.
_UPLOADED_BYTES: Final = 4 * WHOLE_CHUNK_BYTES


class _MeasuredUploads:
    """The uploads of this process, over all groups and runs: their budget, and how many they are.

    Args:
        most: the most uploads at once.
        budget_bytes: bytes of all of them together.
    """

    def __init__(self, most: int, budget_bytes: int) -> None:
        self._streams = StreamCount(most)
        self.budget = WriteBudget(
            self._streams.streams, budget_bytes=budget_bytes, most_at_once=most
        )
        self._lock = threading.Lock()

    def put(self, store: Store, key: str, data: bytes) -> None:
        """Write an object, in the room that was reserved for it, and learn from how that went."""
        refusals_before = store.refusals
        try:
            store.put(key, data)
        except StoreThrottled:
            self._note(len(data), is_refused=True)
            raise
        self._note(len(data), is_refused=store.refusals > refusals_before)

    def _note(self, size_bytes: int, *, is_refused: bool) -> None:
        with self._lock:
            at_seconds = host_seconds()
            if is_refused:
                self._streams.refused(at_seconds=at_seconds)
            else:
                all_used = self.budget.is_full
                self._streams.wrote(size_bytes, at_seconds=at_seconds, all_used=all_used)
            self.budget.allow(self._streams.streams)


_uploads = _MeasuredUploads(MOST_STREAMS, _UPLOADED_BYTES)


def bound_uploads(most: int) -> None:
    """Have at most so many uploads at once in this process; to be called before the first.

    Each may take three times the 32 MiB of the largest chunks. Without this call there are at most
    32, of 128 MiB together.

    Raises:
        SettingsError: it is less than 1, or more than a client of a store has connections.
    """
    global _uploads
    if not 1 <= most <= MOST_STREAMS:
        raise SettingsError(
            "upload_streams",
            found=str(most),
            expected=f"a number from 1 to {MOST_STREAMS}",
            next_step="leave it out: the agent finds how many the store and its network take",
        )
    _uploads = _MeasuredUploads(most, most * WHOLE_CHUNK_BYTES)


def upload_group(store: Store, staged: StagedJob, group: ChunkGroup) -> int:
    """Write the chunks of an encoded group, several at once; all are durable when it returns.

    After a failure, the next call continues where the failed one stopped. At the end the group's
    spool files are removed, except for the entries that the manifest needs. If the spool had no
    room to note a written chunk, the files stay for the next call.

    Returns:
        Bytes of the group's chunks in the store.

    Raises:
        DigestMismatch: slot or spool changed after the group was encoded.
        StoreError: the store did not accept a chunk.
        ValueError: the group has not been encoded.
    """
    chunks = chunk_recipes(staged, group)
    marker = result_path(staged, group.index, "uploaded")
    uploaded_keys = _uploaded(marker, staged)
    remaining = [chunk for chunk in chunks if chunk["entry"]["key"] not in uploaded_keys]
    uploads = _uploads
    unnoted = threading.Event()
    lock = threading.Lock()

    def upload(chunk: dict[str, Any]) -> None:
        uploads.put(store, chunk["entry"]["key"], _chunk_bytes(chunk))
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            with lock, open(open_in_spool(marker, flags), "a", encoding="ascii") as file:
                # Starts with a line break, because an earlier write may have left half a line.
                file.write(f"\n{staged.job.attempt} {chunk['entry']['key']}\n")
        except OSError:
            # The chunk is stored even if there was no room for this line; a later call writes it
            # again.
            unnoted.set()

    with WriteScheduler(uploads.budget) as writes:
        for chunk in remaining:
            writes.begin(writes.reserve(chunk["entry"]["bytes"]), partial(upload, chunk))
        writes.finish()
    if not unnoted.is_set():  # otherwise a later call needs these files again
        for name in ("quantized", "encoded"):
            result_path(staged, group.index, name).with_suffix(".bin").unlink(missing_ok=True)
    return sum(int(chunk["entry"]["bytes"]) for chunk in chunks)


def _chunk_bytes(chunk: dict[str, Any]) -> bytes:
    entry = chunk["entry"]
    parts = tuple(part_from(part) for part in chunk["parts"])
    data = assemble_parts(parts, start=base64.b64decode(chunk["header"]))
    checksum = crc32c.crc32c(data)
    if checksum != entry["crc32c"] or len(data) != entry["bytes"]:
        raise DigestMismatch(
            f"{os.path.dirname(_file(parts[0])) if parts else 'recipe'} ({entry['key']})",
            found=f"{len(data)} bytes with crc32c {checksum}",
            expected=f"{entry['bytes']} bytes with crc32c {entry['crc32c']}",
            next_step="check the memory of this host; the trainer stages the rows again",
        )
    durable.step(f"chunk {entry['key']} put together")
    return data


def _file(part: Part) -> str:
    return part.path if isinstance(part, Extent) else part.whole.path


def _uploaded(marker: Path, staged: StagedJob) -> set[str]:
    try:
        with open(open_in_spool(marker), encoding="ascii") as file:
            lines = file.read().split("\n")
    except FileNotFoundError:
        return set()
    pairs = (line.partition(" ") for line in lines)
    return {key for attempt, _, key in pairs if attempt == staged.job.attempt}
