"""Marks: manifests whose deletion is announced (format §6.6 T2)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from recpoint.catalog.retention.retention import Decision
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.elapsed import Clocks
from recpoint.catalog.stores.io_scheduler import ReadScheduler
from recpoint.catalog.stores.store_contract import ObjectInfo
from recpoint.errors import FormatError, ObjectNotFound
from recpoint.format.record_kinds import MARK
from recpoint.format.retention_records import Mark

__all__ = ["Marks", "marked"]


def marked(run: Run) -> set[str]:
    """Keys of the manifests that have a mark; one listing, no reads."""
    return set(run.records(MARK).names())


class Marks:
    """The marks of a run; each is read once.

    Args:
        run: the run.
        clocks: what the clocks say, for the marks' ages.
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
        """Whether there is a mark of this very manifest, and not of one that was there before."""
        mark = self._marks.get(decision.manifest.key)
        return mark is not None and mark.attempt == decision.manifest.attempt

    def age_seconds(self, manifest: str) -> float:
        """How long a manifest whose mark holds has been marked; negative: from the future."""
        mark, info = self._marks[manifest], self._infos[manifest]
        assert mark is not None  # it holds
        return self._clocks.age_seconds(mark.stamp, modified_ms=info.modified_ms)


def _read_mark(run: Run, manifest: str) -> Mark | None:
    try:
        return run.records(MARK).read(manifest)
    except (FormatError, ObjectNotFound):
        return None
