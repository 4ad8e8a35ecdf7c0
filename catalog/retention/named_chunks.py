"""Collects the chunks that the manifests of a run name, for a sweep (format §6.5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from recpoint.catalog.run.facts import OnStep, unwatched
from recpoint.catalog.run.gone_manifests import why_gone
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.lost_manifests import Link, LostManifests
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import ObjectInfo
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import FormatError, ObjectNotFound
from recpoint.format.naming import PART_KEY, AttemptName, ManifestName, parse_chunk_key

__all__ = [
    "NamedChunks",
]


class NamedChunks:
    """The chunks that manifests name, and lost manifests that are needed; reads each manifest once.

    Args:
        run: the run.
        spare_newest: see `recpoint.catalog.retention.sweep.plan_sweep`.
        pins: names of the pins of each pinned checkpoint.

    Attributes:
        chunks: keys of chunks that a manifest names, or named when it was read, and of its pages.
        attempts: the attempts of these chunks.
        unreadable: keys of manifests that cannot be read.
        lost: the checkpoints that are needed although their manifests are lost.
    """

    def __init__(
        self,
        run: Run,
        *,
        spare_newest: bool,
        pins: Mapping[ManifestName, Sequence[str]] | None = None,
    ) -> None:
        self._run = run
        self._spare_newest = spare_newest
        self._pins = pins or {}
        self._links: dict[Representation, Link] = {}
        self._there: Mapping[ManifestName, Sequence[Representation]] | None = None
        self._newest = 0
        self._newest_steps: dict[int, int] = {}
        self.chunks: set[str] = set()
        self.attempts: set[AttemptName] = set()
        self.unreadable: list[str] = []
        self.lost = LostManifests(pins=self._pins)

    def read_new_manifests(self, on_step: OnStep = unwatched) -> None:
        """Read the manifests that have appeared since the last call."""
        self.unreadable.clear()
        there = self._run.representations()
        self._newest = max(self._run.generation_numbers(), default=0)
        self._newest_steps = {name.generation: name.step for name in sorted(there)}
        left = [one for forms in there.values() for one in forms if one not in self._links]
        with ReadScheduler.of_records() as reads:
            found = zip(left, reads.results(left, self._read), strict=True)
            for number, (one, read) in enumerate(found, 1):
                on_step("looking for orphans", number, len(left))
                if read is None:
                    self.unreadable.append(one.key)
                    continue
                link, chunks = read
                if link is not None:
                    self._links[one] = link
                    self.chunks.update(chunks)
                    self.attempts.update(filter(None, map(parse_chunk_key, chunks[:1])))
        if left or there != self._there:
            self._there = there
            named = (one for forms in there.values() for one in forms if one in self._links)
            gone = why_gone(self._run, there)
            self.lost = LostManifests((self._links[one] for one in named), self._pins, gone=gone)

    def _read(self, one: Representation) -> tuple[Link | None, list[str]] | None:
        """Return a manifest's link, and the keys of its chunks and pages.

        Returns (None, []) if it was removed after it was listed, and None if it is unreadable.
        """
        try:
            manifest = self._run.read_manifest(one)
        except ObjectNotFound:
            return None, []
        except FormatError:
            return None
        pages = [page.key for page in manifest.pages]
        return Link.of(manifest), [entry.key for entry in manifest.chunks] + pages

    def may_be_committed(self, attempt: AttemptName, infos: Iterable[ObjectInfo]) -> bool:
        """Tell whether the newest trainer may still commit an attempt.

        The attempt may be staged on another host. If parts show that it has several ranks, other
        hosts may have some of them staged. If its generation is newer than the newest record, that
        record is lost, and its trainer may continue.
        """
        return (
            (self._spare_newest or any(PART_KEY.parse(info.key) for info in infos))
            and attempt.generation >= self._newest
            and attempt.step > self._newest_steps.get(attempt.generation, -1)
        )
