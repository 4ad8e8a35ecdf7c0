"""Third step of a persist: chunks from their recipes to the store (format §6.1 W3)."""

from __future__ import annotations

import base64
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import crc32c

from recpoint.catalog.persisting.persist_parts import Part, assemble_parts, part_from
from recpoint.catalog.persisting.persist_plan import Group
from recpoint.catalog.persisting.persist_spool import (
    load_result,
    open_in_spool,
    result_path,
)
from recpoint.catalog.staging.staged_job import Extent, StagedJob
from recpoint.catalog.stores import durable
from recpoint.catalog.stores.store import Store
from recpoint.errors import DigestMismatch
from recpoint.format.manifest import ChunkEntry

__all__ = ["UPLOADS_AT_ONCE", "encoded_entries", "upload_group"]

#: Uploads at once in this process, over all groups and runs: each holds a chunk in memory, and the
#: store's client another copy or two of it.
UPLOADS_AT_ONCE = 4

_slots = threading.BoundedSemaphore(UPLOADS_AT_ONCE)


def upload_group(store: Store, staged: StagedJob, group: Group) -> int:
    """Write the chunks of an encoded group, several at once; all are durable when it returns.

    A call after one that failed in the middle goes on where that one stopped. The group's part of
    the spool is emptied, but for the entries that the manifest will need; it stays where the spool
    has no room to note what was written.

    Returns:
        Bytes of the group's chunks.

    Raises:
        DigestMismatch: slot or spool changed since the group was encoded.
        StoreError: the store did not take a chunk.
    """
    chunks = _chunks(staged, group)
    marker = result_path(staged, group.index, "uploaded")
    done = _uploaded(marker, staged)
    left = [chunk for chunk in chunks if chunk["entry"]["key"] not in done]
    stop, unnoted = threading.Event(), threading.Event()
    lock = threading.Lock()

    def upload(chunk: dict[str, Any]) -> None:
        # After one failure the others would only make the caller wait for the same answer.
        with _slots:
            if stop.is_set():
                return
            try:
                store.put(chunk["entry"]["key"], _chunk_bytes(chunk))
            except BaseException:
                stop.set()
                raise
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            with lock, open(open_in_spool(marker, flags), "a", encoding="ascii") as file:
                # After a line break: half a line may be there, of one that there was no room for.
                file.write(f"\n{staged.job.attempt} {chunk['entry']['key']}\n")
        except OSError:
            # Without room for this line the chunk is stored all the same, and a later try writes it
            # once more.
            unnoted.set()

    with ThreadPoolExecutor(UPLOADS_AT_ONCE, thread_name_prefix="upload") as pool:
        uploads = [pool.submit(upload, chunk) for chunk in left]
    for failed in uploads:
        failed.result()
    if not unnoted.is_set():  # else a later try reads them again
        for name in ("quantized", "encoded"):
            result_path(staged, group.index, name).with_suffix(".bin").unlink(missing_ok=True)
    return sum(int(chunk["entry"]["bytes"]) for chunk in chunks)


def encoded_entries(staged: StagedJob, group: Group) -> list[ChunkEntry]:
    """What the manifest says about the chunks of an encoded group."""
    return [ChunkEntry.model_validate(chunk["entry"]) for chunk in _chunks(staged, group)]


def _chunks(staged: StagedJob, group: Group) -> list[dict[str, Any]]:
    result = load_result(result_path(staged, group.index, "encoded"), staged)
    if result is None:
        raise ValueError(f"group {group.index} of {staged.path} has not been encoded")
    chunks: list[dict[str, Any]] = result["chunks"]
    return chunks


def _chunk_bytes(chunk: dict[str, Any]) -> bytes:
    entry = chunk["entry"]
    parts = tuple(part_from(part) for part in chunk["parts"])
    data = assemble_parts(parts, start=base64.b64decode(chunk["header"]))
    found = crc32c.crc32c(data)
    if found != entry["crc32c"] or len(data) != entry["bytes"]:
        raise DigestMismatch(
            f"{os.path.dirname(_file(parts[0])) if parts else 'recipe'} ({entry['key']})",
            found=f"{len(data)} bytes with crc32c {found}",
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
