"""Marks: manifests whose deletion is announced (format §6.6 T2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from recpoint.catalog.retention.retention import Decision
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.elapsed import Clocks
from recpoint.catalog.stores.store_contract import ObjectInfo
from recpoint.errors import FormatError, ObjectNotFound
from recpoint.format.naming import EXPIRED_PREFIX, expired_key, parse_expired_key
from recpoint.format.records import MAX_RECORD_BYTES, unpack_record
from recpoint.format.retention_records import Mark

__all__ = ["Marks", "marked"]

_READERS = 8


def marked(run: Run) -> set[str]:
    """Keys of the manifests that have a mark; one listing, no reads."""
    return {manifest for manifest, _ in _listed(run)}


def _listed(run: Run) -> Iterator[tuple[str, ObjectInfo]]:
    for info in run.store.list(EXPIRED_PREFIX):
        manifest = parse_expired_key(info.key)
        if manifest is not None:
            yield manifest, info


class Marks:
    """The marks of a run; each is read once.

    Args:
        run: the run.
        clocks: what the clocks say, for the marks' ages.
    """

    def __init__(self, run: Run, clocks: Clocks) -> None:
        self._clocks = clocks
        self._infos: dict[str, ObjectInfo] = {}
        self._infos.update(_listed(run))
        with ThreadPoolExecutor(max_workers=_READERS) as readers:
            read = readers.map(lambda info: _read_mark(run, info.key), self._infos.values())
            self._marks = dict(zip(self._infos, read, strict=True))

    @property
    def keys(self) -> Iterable[str]:
        """Keys of the manifests that have a mark, readable or not."""
        return self._infos.keys()

    def holds(self, decision: Decision) -> bool:
        """Whether there is a mark of this very manifest, and not of one that was there before."""
        mark = self._marks.get(decision.manifest.key)
        return mark is not None and mark.attempt == decision.manifest.attempt

    def age_seconds(self, manifest: str) -> float:
        """How long a manifest whose mark holds has been marked; negative: from the future."""
        mark, info = self._marks[manifest], self._infos[manifest]
        assert mark is not None  # it holds
        return self._clocks.age_seconds(mark.stamp, modified_ms=info.modified_ms)


def _read_mark(run: Run, key: str) -> Mark | None:
    try:
        data = run.store.get(key, max_bytes=MAX_RECORD_BYTES)
        mark = unpack_record(Mark, data, name=key, next_step="nothing: it is written anew")
    except (FormatError, ObjectNotFound):
        return None
    return mark if mark.run == run.id and expired_key(mark.manifest) == key else None
