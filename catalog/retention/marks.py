"""Reads the marks of manifests that are to be deleted (format §6.6, mark)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from recpoint.catalog.retention.keep import Decision
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import Clocks, ObjectInfo
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import FormatError, ObjectNotFound
from recpoint.format.record_kinds import MARK
from recpoint.format.retention_records import Mark

__all__ = [
    "Marks",
    "marked",
]


def marked(run: Run) -> set[str]:
    """Return the keys of the manifests that have a mark; costs one listing and no reads."""
    return set(run.records(MARK).names())


class Marks:
    """The marks of a run; each is read once.

    Args:
        run: the run.
        clocks: the times of this host and the store, for the marks' ages.
    """

    def __init__(self, run: Run, clocks: Clocks) -> None:
        self._clocks = clocks
        self._infos: dict[str, ObjectInfo] = {}
        self._infos.update(run.records(MARK).listed())
        with ReadScheduler.of_records() as reads:
            read = reads.results(self._infos, partial(_read_mark, run))
            self._marks = dict(zip(self._infos, read, strict=True))

    @property
    def keys(self) -> Iterable[str]:
        """Keys of the manifests that have a mark, readable or not."""
        return self._infos.keys()

    def holds(self, decision: Decision) -> bool:
        """Tell whether this manifest has a mark, not an earlier manifest with the same key."""
        mark = self._marks.get(decision.manifest.key)
        return mark is not None and mark.attempt == decision.manifest.attempt

    def age_seconds(self, manifest: str) -> float:
        """Return the age of a mark that holds, in seconds; negative if it is from the future."""
        mark, info = self._marks[manifest], self._infos[manifest]
        assert mark is not None  # `holds` is true
        return self._clocks.age_seconds(mark.stamp, modified_ms=info.modified_ms)


def _read_mark(run: Run, manifest: str) -> Mark | None:
    try:
        return run.records(MARK).read(manifest)
    except (FormatError, ObjectNotFound):
        return None
