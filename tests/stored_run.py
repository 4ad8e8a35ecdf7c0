"""Keeps a run in memory and copies it to any URL, which is cheaper than making a new run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store

__all__ = ["StoredRun"]

_AT_ONCE = 8


class StoredRun:
    """All objects of a run at one moment."""

    def __init__(self, run: Run) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            keys = [info.key for info in run.store.list()]
            read = pool.map(lambda key: run.store.get(key, max_bytes=1 << 20), keys)
            self._objects = dict(zip(keys, read, strict=True))

    def copy_to(self, url: str) -> Run:
        """Copy the run to `url`, a directory or a run URL, and open it there."""
        store = open_store(url)
        if "://" in url:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(store.put, self._objects.keys(), self._objects.values()))
        else:
            for key, data in self._objects.items():  # without fsync: no test cuts power here
                path = Path(url, key)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        return Run.open(store)
