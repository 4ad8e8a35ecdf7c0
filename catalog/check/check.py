"""Checks a run for damage before a restore meets it: manifests and chunks (format §4, §6.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from recpoint.catalog.check.representation_graph import Damage, RepresentationGraph
from recpoint.catalog.check.rows import decode_samples
from recpoint.catalog.persist.ranks import first_part, parts_text
from recpoint.catalog.restore.chunks import (
    StoreChunks,
    check_entry,
    check_stored,
    read_chunk,
    read_rows,
    why_missing,
)
from recpoint.catalog.restore.rows import RowCoverage
from recpoint.catalog.restore.state import read_state
from recpoint.catalog.run.chain import DAMAGE
from recpoint.catalog.run.facts import OnStep, unwatched
from recpoint.catalog.run.gone_manifests import why_gone
from recpoint.catalog.run.line_to_go_on import superseded_alone, superseded_text
from recpoint.catalog.run.lineage import Representation, next_step_of_lost
from recpoint.catalog.run.lost_manifests import Link, LostManifests
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.records import parsed_twice
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import (
    FormatError,
    GenerationRecordLost,
    MissingLink,
    NothingToRestore,
    ObjectNotFound,
)
from recpoint.format.chunk import Section, check_digest
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.naming import (
    GENERATION_KEY,
    MANIFEST_KEY,
    PART_KEY,
    PIN_KEY,
    AttemptName,
    ManifestName,
    attempt_prefix,
    generation_in_key,
    is_probe_key,
    parse_chunk_key,
)
from recpoint.format.record_kinds import PART, SIDE_KINDS, kind_of
from recpoint.format.records import GenerationRecord

__all__ = ["CheckReport", "Level", "Severity", "check"]


Level = Literal["metadata", "full"]
Severity = Literal["error", "warning", "info"]

_SWEPT = "; recpoint sweep removes old ones"


class Finding(NamedTuple):
    """A result of a check; of severity error if a checkpoint that counts does not restore."""

    severity: Severity
    key: str
    text: str


class CheckpointHealth(NamedTuple):
    """A checkpoint, and whether one of its chains is good at the level of the check."""

    name: ManifestName
    live: bool
    restorable: bool


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The result of a check.

    Attributes:
        level: the level of the check.
        checkpoints: health of each checkpoint checked, newest first.
        findings: the findings, worst first.
        chunks_read, bytes_read: number of chunks read, and their bytes.
        nothing_counts: a restore finds nothing, because there is no checkpoint yet, or because a
            start that was told to begin anew has superseded all of them and has none of its own.
    """

    level: Level
    checkpoints: tuple[CheckpointHealth, ...]
    findings: tuple[Finding, ...]
    chunks_read: int
    bytes_read: int
    nothing_counts: bool = False

    @property
    def ok(self) -> bool:
        """Whether every checkpoint that counts restores, at the level of the check."""
        return not any(finding.severity == "error" for finding in self.findings)


def check(
    run: Run,
    *,
    level: Level = "metadata",
    step: int | None = None,
    threads: int = 4,
    on_step: OnStep = unwatched,
    on_progress: Callable[[int, int], None] | None = None,
) -> CheckReport:
    """Check a run; nothing is changed.

    Args:
        run: the run.
        level: `"metadata"` checks generations, manifests, every chain, and the existence and length
            of each chunk. `"full"` also reads and decodes every byte of every chunk, and without
            `step` every other record (pins, validations and the like) and the chunks of parts.
        step: check only the checkpoints of this step and their dependencies; None: all.
        threads: chunks read at once.
        on_step: called after each manifest that was read, in this thread.
        on_progress: called with bytes read so far and bytes to read, in this thread; only for
            `"full"`.

    Raises:
        NothingToRestore: there is no checkpoint of `step`.
        StoreError: the store cannot be read.
    """
    checking = _Checking(run, step)
    checking.look_at_records(on_step)
    checking.look_at_objects()
    if level == "full":
        with ReadScheduler(threads) as reads:
            checking.look_at_bytes(reads, on_progress)
    return checking.report(level)


class _Checking:
    """One run of a check; it reads each object once, however many checkpoints depend on it."""

    def __init__(self, run: Run, step: int | None) -> None:
        self._run = run
        self._source = StoreChunks(run.store)
        self._step = step
        self._findings: list[Finding] = []
        self._damage: dict[str, tuple[Representation, str, bool]] = {}
        self._rowless: set[Representation] = set()  # damaged rows: nothing after it restores
        self._stateless: set[Representation] = set()  # damaged state, which nothing else needs
        self._chunks_read = self._bytes_read = self._bytes_to_read = 0
        self._on_progress: Callable[[int, int], None] | None = None
        self._parts: dict[AttemptName, list[int]] = {}
        self._unlisted: dict[str, ObjectNotFound | None] = {}
        self._nothing_counts = False
        numbers = run.generation_numbers()
        # Lists manifests before chunks: a manifest's chunks are written before it, so a checkpoint
        # that is committed meanwhile cannot look damaged. At worst its chunks look unnamed.
        self._representations = run.representations()
        self._live = self._live_line(numbers)
        self._graph = RepresentationGraph(run, self._representations)
        self._sizes = {info.key: info.size_bytes for info in run.store.list()}
        self._chosen = [
            name for name in reversed(self._representations) if step in (None, name.step)
        ]
        if step is not None and not self._chosen:
            raise NothingToRestore(
                f"{run.url}, step {step}",
                found="no checkpoint",
                expected="one of the run's steps",
                next_step=f"recpoint list {run.url}",
            )

    def _live_line(self, numbers: list[int]) -> frozenset[ManifestName] | None:
        """Return the checkpoints on the live line; None if the lineage cannot be followed."""
        try:
            return frozenset(self._run.line_of(numbers, self._representations))
        except DAMAGE as error:
            self._add("error", error.subject, f"the lineage cannot be followed: {error}")
            return None

    def look_at_records(self, on_step: OnStep = unwatched) -> None:
        """Check every generation record, and every chain of every chosen checkpoint."""
        numbers = self._run.generation_numbers()
        for number, outcome in self._run.read_generations(numbers).items():
            if not isinstance(outcome, GenerationRecord):
                self._add_once("warning", GENERATION_KEY.of(number), str(outcome))
        self._look_for_lost(numbers)
        self._look_at_a_line_of_none()
        self._graph.load(self._chosen, on_step)
        for name in self._chosen:
            broken = [link for link in self._graph.of(name) if link in self._graph.broken]
            for link in broken:
                error = self._graph.broken[link]
                if isinstance(error, MissingLink) and len(broken) < len(self._graph.of(name)):
                    text = f"its longer chain is gone, which is no loss: {error}"
                    self._add("info", link.key, text)
                else:
                    self._damaged(link, link.key, f"does not restore: {error}")
            if not broken and not self._counts(name):
                self._add("info", self._graph.of(name)[-1].key, "superseded")

    def _look_for_lost(self, numbers: list[int]) -> None:
        """Find generations that an object's key names but that have no record."""
        named: dict[int, str] = {}
        for key in self._sizes:
            number = generation_in_key(key)
            if number is not None and (number not in named or MANIFEST_KEY.parse(key)):
                named[number] = key
        for number in self._run.lost_generations(named, listed=numbers):
            # A record older than the newest is not needed to follow the live line.
            severity: Severity = "error" if number > max(numbers, default=0) else "warning"
            error = GenerationRecordLost(
                GENERATION_KEY.of(number),
                found=f"no generation record, but {named[number]}",
                expected="a record of each generation that objects belong to",
                next_step=next_step_of_lost(number),
            )
            self._add_once(severity, error.subject, str(error))

    def _look_at_a_line_of_none(self) -> None:
        """Warn if there are checkpoints but none counts yet; nothing is damaged then."""
        if self._step is not None or self._live is None or self._live:
            return
        if not self._representations:
            self._nothing_counts = True
            return
        # Asks once more, because a first checkpoint may have been committed after `_live` was read.
        superseded = superseded_alone(self._run)
        if not superseded:
            return
        self._nothing_counts = True
        text = (
            f"nothing counts yet: this start began a line of its own and has no checkpoint so far; "
            f"{superseded_text(superseded)}, which is restored by step and generation"
        )
        self._add("warning", GENERATION_KEY.of(self._run.generation_numbers()[-1]), text)

    def look_at_objects(self) -> None:
        """Check existence and length of each chunk of each chain; find objects nobody names."""
        for link, manifest in self._graph.sound():
            for entry in manifest.chunks:
                try:
                    check_entry(manifest, entry)
                    check_stored(manifest, entry, self._sizes)
                except DAMAGE as error:
                    self._damaged_chunk(link, entry, self._as_the_store_says(entry, error))
        self._look_at_the_rest()

    def _as_the_store_says(self, entry: ChunkEntry, error: Damage) -> Damage:
        """Return the store's reason for a missing chunk, if it has one; otherwise `error`."""
        if not isinstance(error, ObjectNotFound):
            return error
        directory = entry.key.rpartition("/")[0]
        if directory not in self._unlisted:
            self._unlisted[directory] = why_missing(self._source, entry)
        return self._unlisted[directory] or error

    def _look_at_the_rest(self) -> None:
        """Report foreign keys, parts, and chunks that no manifest names."""
        if self._step is not None:
            return  # the other checkpoints' manifests, which may name the chunks, were not read
        named: set[str] = set()
        links: list[Link] = []
        for link in (link for several in self._representations.values() for link in several):
            manifest = self._graph.read(link)
            if not isinstance(manifest, Manifest):
                return  # this manifest may name any of the chunks
            named.update(entry.key for entry in manifest.chunks)
            named.update(page.key for page in manifest.pages)
            links.append(Link.of(manifest))
        orphans: dict[AttemptName, int] = {}
        pins: dict[ManifestName, list[str]] = {}
        for key in self._sizes:
            attempt = parse_chunk_key(key)
            part = PART_KEY.parse(key)
            if part is not None:
                part_ranks = self._parts.setdefault(part.checkpoint, [])
                part_ranks.append(part.rank)
                continue
            if attempt is not None:
                if key not in named:
                    orphans[attempt] = orphans.get(attempt, 0) + 1
            elif (pin := PIN_KEY.parse(key)) is not None:
                pins.setdefault(ManifestName(pin.step, pin.generation), []).append(pin.name)
            elif kind_of(key) is None and not is_probe_key(key):
                self._add("info", key, "not an object of recpoint; ignored")
        lost = LostManifests(links, pins, gone=why_gone(self._run, self._representations))
        self._look_at_parts(orphans, lost)
        for attempt, count in orphans.items():
            chunks = "1 chunk" if count == 1 else f"{count} chunks"
            needed = _why_needed(lost, attempt)
            text = f"{chunks} that no manifest names{needed or _SWEPT}"
            self._add("warning" if needed else "info", attempt_prefix(*attempt), text)

    def _look_at_parts(self, orphans: dict[AttemptName, int], lost: LostManifests) -> None:
        """Report stored parts, and the chunks of parts without a checkpoint."""
        for attempt, numbers in self._parts.items():
            part = first_part(self._run, attempt, numbers)
            ranks = max(numbers) + 1 if part is None else part.ranks
            part_text = f"the part of {parts_text(numbers, ranks)}"
            prefix = PART_KEY.under(*attempt)
            chunks = orphans.pop(attempt, 0)
            needed = _why_needed(lost, attempt)
            if needed:
                text = f"{part_text} and {chunks} chunks that no manifest names{needed}"
            elif ManifestName(attempt.step, attempt.generation) in self._representations:
                text = f"{part_text} of a committed step; recpoint sweep removes it"
            else:
                text = (
                    f"{part_text} and {chunks} chunks of a step that is not committed: other "
                    "parts are "
                    "missing; recpoint sweep removes old ones"
                )
            self._add("warning" if needed else "info", prefix, text)

    def look_at_bytes(
        self, reads: ReadScheduler, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Read, verify and decode every chunk of every chain, and the records beside them."""
        self._on_progress = on_progress
        self._bytes_to_read = sum(
            entry.bytes for _, manifest in self._graph.sound() for entry in manifest.chunks
        )
        for link, manifest in self._graph.sound():
            self._look_at_rows(reads, link, manifest)
            try:
                read_state(self._source, manifest, reads, self._account)
            except DAMAGE as error:
                # A store names an object by its URL, a parser by its key; both end with the key.
                subjects = (
                    entry.key for entry in manifest.chunks if error.subject.endswith(entry.key)
                )
                self._damaged_part(link, next(subjects, error.subject), error, of_state=True)
            self._look_at_samples(reads, link, manifest)
        self._look_at_side_records(reads)

    def _look_at_samples(
        self, reads: ReadScheduler, link: Representation, manifest: Manifest
    ) -> None:
        """Check the samples; damage is only a warning, because no restore reads them."""
        entries = [entry for entry in manifest.chunks if entry.content == "sample"]
        sound: list[tuple[ChunkEntry, dict[str, Section]]] = []
        for entry, outcome in reads.in_order(
            entries, lambda entry: read_chunk(self._source, manifest, entry)
        ):
            try:
                sound.append((entry, outcome.result().sections))
            except DAMAGE as error:
                self._damaged_chunk(link, entry, error)
            self._account(entry)
        try:
            decode_samples(manifest, sound)
        except FormatError as error:
            self._add_once("warning", error.subject, str(error))

    def _look_at_side_records(self, reads: ReadScheduler) -> None:
        """Check pins, validations and the like; damage is only a warning: no restore needs them."""
        if self._step is not None:
            return  # only this step's checkpoints are checked
        keys = [key for key in self._sizes if kind_of(key) in SIDE_KINDS]
        for key, outcome in reads.in_order(keys, self._defect_of):
            error = outcome.result()
            if error is not None:
                self._add_once("warning", key, str(error))
        self._look_at_part_chunks(reads)

    def _look_at_part_chunks(self, reads: ReadScheduler) -> None:
        """Check the bytes of the chunks that parts name; a manifest that joins them will, too.

        Damage is only a warning: no checkpoint needs the chunks yet. They may be gone, because a
        sweep or a retry of their agent removes them.
        """
        records = self._run.records(PART)
        entries: list[ChunkEntry] = []
        for key in self._sizes:
            if kind_of(key) is PART:
                try:
                    entries += records.read_key(key).chunks
                except (FormatError, ObjectNotFound):
                    continue  # `_look_at_side_records` has reported it
        for entry, outcome in reads.in_order(entries, self._part_chunk_defect):
            error = outcome.result()
            if error is not None:
                self._add_once("warning", entry.key, str(error))
            self._account(entry)

    def _part_chunk_defect(self, entry: ChunkEntry) -> FormatError | None:
        def parse(data: bytes | memoryview) -> None:
            check_digest(data, key=entry.key, entry=entry)

        try:
            parsed_twice(lambda: self._source.read(entry.key, max_bytes=entry.bytes), parse)
        except FormatError as error:
            return error
        except ObjectNotFound:
            pass
        return None

    def _defect_of(self, key: str) -> FormatError | None:
        """Return what is wrong with the record `key`; None if it is sound or has been removed."""
        kind = kind_of(key)
        assert kind is not None  # the caller chose the key by its kind
        try:
            self._run.records(kind).read_key(key)
        except FormatError as error:
            return error
        except ObjectNotFound:
            pass
        return None

    def _look_at_rows(self, reads: ReadScheduler, link: Representation, manifest: Manifest) -> None:
        by_table: dict[int, list[ChunkEntry]] = {}
        for entry in manifest.chunks:
            if entry.table is not None:
                by_table.setdefault(entry.table, []).append(entry)
        for table, entries in by_table.items():
            spec = manifest.tables[table]
            counts = [entry.row_count or 0 for entry in entries]
            coverage = RowCoverage(rows=spec.rows, row_counts=counts)
            good = True
            for entry, outcome in reads.in_order(
                entries, lambda entry: read_rows(self._source, manifest, entry)
            ):
                try:
                    coverage.add(outcome.result().rows)
                except DAMAGE as error:
                    good = False
                    self._damaged_part(link, entry.key, error)
                self._account(entry)
            if good:
                try:
                    coverage.finish(key=link.key, table=spec.name)
                except FormatError as error:
                    self._damaged_part(link, link.key, error)

    def _account(self, entry: ChunkEntry) -> None:
        self._chunks_read += 1
        self._bytes_read += entry.bytes
        if self._on_progress is not None:
            self._on_progress(self._bytes_read, max(self._bytes_to_read, self._bytes_read))

    def _counts(self, name: ManifestName) -> bool:
        """Tell whether a checkpoint is on the live line; true if the line is unknown."""
        return self._live is None or name in self._live

    def _damaged_chunk(self, link: Representation, entry: ChunkEntry, error: Damage) -> None:
        if entry.content == "sample":  # no restore reads it
            self._add_once("warning", entry.key, str(error))
        else:
            self._damaged_part(link, entry.key, error, of_state=entry.content == "state")

    def _damaged_part(
        self, link: Representation, key: str, error: Damage, *, of_state: bool = False
    ) -> None:
        # A restore reads the rows of a whole chain, but only the newest link's state (§6.3).
        (self._stateless if of_state else self._rowless).add(link)
        self._damaged(link, key, str(error), of_state=of_state)

    def _damaged(
        self, link: Representation, key: str, text: str, *, of_state: bool = False
    ) -> None:
        # Noted once: a missing chunk fails again when its bytes are read.
        self._damage.setdefault(key, (link, text, of_state))

    def _add_once(self, severity: Severity, key: str, text: str) -> None:
        # If the live line depends on the object, it has already been added as an error.
        if not any(finding.key == key for finding in self._findings):
            self._add(severity, key, text)

    def _add(self, severity: Severity, key: str, text: str) -> None:
        self._findings.append(Finding(severity, key, text))

    def report(self, level: Level) -> CheckReport:
        """Return the findings, worst first, and the health of each chosen checkpoint."""
        leading = self._graph.leading(self._rowless)
        health = [
            CheckpointHealth(
                name,
                self._live is not None and name in self._live,
                any(o in leading and o not in self._stateless for o in self._graph.of(name)),
            )
            for name in self._chosen
        ]
        # Damage is an error if a checkpoint on the live line does not restore because of it.
        lost = {
            checkpoint.name
            for checkpoint in health
            if self._counts(checkpoint.name) and not checkpoint.restorable
        }
        blamed = {link for name in lost for link in self._graph.needs(name)}
        for key, (link, text, of_state) in self._damage.items():
            counts = link.name in lost if of_state else link in blamed
            self._add("error" if counts else "warning", key, text)
        order: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}
        return CheckReport(
            level=level,
            checkpoints=tuple(health),
            findings=tuple(
                sorted(self._findings, key=lambda finding: (order[finding.severity], finding.key))
            ),
            chunks_read=self._chunks_read,
            bytes_read=self._bytes_read,
            nothing_counts=self._nothing_counts,
        )


def _why_needed(lost: LostManifests, attempt: AttemptName) -> str:
    """Return who needs the chunks of an attempt, and what to do, as text; empty if nobody does."""
    reason = lost.why_needed(ManifestName(attempt.step, attempt.generation), attempt.attempt)
    if not reason:
        return ""
    return (
        f": {reason}; put the manifest back, from a replica or an older version of the bucket, and "
        "check again; no sweep removes these chunks until then"
    )
