"""What the manifests of a run name, as far as a sweep has to know it (format §6.5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from recpoint.catalog.records.run_facts import OnStep, unwatched
from recpoint.catalog.runs.lineage import Representation
from recpoint.catalog.runs.lost_manifests import Link, LostManifests
from recpoint.catalog.runs.manifests_gone import why_gone
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.io_scheduler import ReadScheduler
from recpoint.catalog.stores.store_contract import ObjectInfo
from recpoint.errors import FormatError, ObjectNotFound
from recpoint.format.naming import PART_KEY, AttemptName, ManifestName, parse_chunk_key

__all__ = ["NamedChunks"]


class NamedChunks:
    """The chunks that manifests name, and what they need besides; each manifest is read once.

    Args:
        run: the run.
        spare_newest: see `recpoint.catalog.sweeping.sweep.plan_sweep`.
        pins: names of the pins of each pinned checkpoint.

    Attributes:
        chunks: keys that some manifest names, or has named when it was read.
        attempts: of these.
        unreadable: keys of manifests that cannot be read.
        lost: what is needed of checkpoints whose manifests are gone.
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
        """Read the manifests that have appeared since the last look."""
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
        """Its link and keys of its chunks; neither if it was removed since it was listed; None:
        unreadable."""
        try:
            manifest = self._run.read_manifest(one)
        except ObjectNotFound:
            return None, []
        except FormatError:
            return None
        return Link.of(manifest), [entry.key for entry in manifest.chunks]

    def may_be_committed(self, attempt: AttemptName, infos: Iterable[ObjectInfo]) -> bool:
        """Whether the newest trainer may still stage or have staged it, somewhere.

        Of several ranks, as its parts tell, some are staged on other hosts, and waited for here.
        A generation above the newest record is one whose record is lost: its trainer may go on.
        """
        return (
            (self._spare_newest or any(PART_KEY.parse(info.key) for info in infos))
            and attempt.generation >= self._newest
            and attempt.step > self._newest_steps.get(attempt.generation, -1)
        )
