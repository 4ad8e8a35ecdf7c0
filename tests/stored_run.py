"""A run kept in memory, to be put under as many URLs as a test needs: cheaper than a new one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store

__all__ = ["StoredRun"]

_AT_ONCE = 8


class StoredRun:
    """All objects of a run as they are now."""

    def __init__(self, run: Run) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            keys = [info.key for info in run.store.list()]
            read = pool.map(lambda key: run.store.get(key, max_bytes=1 << 20), keys)
            self._objects = dict(zip(keys, read, strict=True))

    def copy_to(self, url: str) -> Run:
        """The same run under `url`: a directory, or a run URL."""
        store = open_store(url)
        if "://" in url:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(store.put, self._objects.keys(), self._objects.values()))
        else:
            for key, data in self._objects.items():  # not durably: no power is cut here
                path = Path(url, key)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        return Run.open(store)
