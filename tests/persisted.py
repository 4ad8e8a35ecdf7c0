"""Runs a persist up to its commit, and reads what it has stored."""

from __future__ import annotations

from recpoint.catalog.persist.persist import PersistJob
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run

__all__ = ["objects", "restored", "store_groups"]


def store_groups(job: PersistJob) -> list[int]:
    """Quantize, encode and upload each group of a job; return each group's chunk bytes."""
    stored = []
    for group in job.groups:
        if group.quantized:
            job.quantize(group)
        job.encode(group)
        stored.append(job.upload(group))
    return stored


def restored(run: Run) -> MemoryTarget:
    """Restore the newest checkpoint."""
    target = MemoryTarget()
    restore(run, target)
    return target


def objects(run: Run, prefix: str = "chunks/") -> dict[str, bytes]:
    """Return every object under a prefix, key -> contents."""
    return {info.key: run.store.get(info.key, max_bytes=1 << 30) for info in run.store.list(prefix)}
