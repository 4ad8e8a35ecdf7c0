"""A persist up to its commit, and what it has stored, as its tests look at it."""

from __future__ import annotations

from recpoint.catalog.persist.persist import PersistJob
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run

__all__ = ["objects", "restored", "store_groups"]


def store_groups(job: PersistJob) -> list[int]:
    """Quantize, encode and upload each group of a job; the bytes of their chunks."""
    found = []
    for group in job.groups:
        if group.quantized:
            job.quantize(group)
        job.encode(group)
        found.append(job.upload(group))
    return found


def restored(run: Run) -> MemoryTarget:
    """The newest checkpoint."""
    target = MemoryTarget()
    restore(run, target)
    return target


def objects(run: Run, prefix: str = "chunks/") -> dict[str, bytes]:
    """Every object under a prefix."""
    return {info.key: run.store.get(info.key, max_bytes=1 << 30) for info in run.store.list(prefix)}
