"""What a persist has stored, as its tests look at it."""

from __future__ import annotations

from recpoint.catalog.restoring.memory_target import MemoryTarget
from recpoint.catalog.restoring.restore import restore
from recpoint.catalog.runs.run import Run

__all__ = ["objects", "restored"]


def restored(run: Run) -> MemoryTarget:
    """The newest checkpoint."""
    target = MemoryTarget()
    restore(run, target)
    return target


def objects(run: Run, prefix: str = "chunks/") -> dict[str, bytes]:
    """Every object under a prefix."""
    return {info.key: run.store.get(info.key, max_bytes=1 << 30) for info in run.store.list(prefix)}
