"""Validates a checkpoint: each of its chains against what the trainer recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import NamedTuple, Self

from recpoint.catalog.check.rows import RowValidation, Sampled, Unequal, read_samples
from recpoint.catalog.restore.chunks import StoreChunks, look_at_stored
from recpoint.catalog.restore.state import read_state
from recpoint.catalog.run.chain import Chain, PassedOver, read_with_chain, resolve_chain
from recpoint.catalog.run.deletions import Going
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import LEVELS, add_record, records_of
from recpoint.catalog.store.contract import now_ms
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import (
    ChainError,
    FormatError,
    ObjectNotFound,
    RecpointError,
    SettingsError,
    UnsupportedVersion,
)
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.naming import ManifestName, ValidationLevel, ValidationName, ValidationResult
from recpoint.format.record_kinds import VALIDATION
from recpoint.format.records import CheckpointRef
from recpoint.format.validation import (
    MAX_FINDINGS,
    MAX_TEXT,
    PASSED_OVER,
    TableDigests,
    ValidationFinding,
    ValidationRecord,
)

__all__ = ["Validation", "record", "validate"]


# Validating one chain of a checkpoint: objects, samples, state, then the tables (format §10).


Damage = FormatError | ChainError | ObjectNotFound
DAMAGE = (FormatError, ChainError, ObjectNotFound)


class Found(NamedTuple):
    """Something that was found, and what the checkpoint is for it: `"passed"`: no worse."""

    finding: ValidationFinding
    result: ValidationResult

    @classmethod
    def of(cls, error: Damage, what: str, result: ValidationResult) -> Self:
        """What an error says."""
        finding = ValidationFinding(
            subject=error.subject[:MAX_TEXT],
            row=None,
            what=what,
            found=error.found[:MAX_TEXT],
            expected=error.expected[:MAX_TEXT],
            bound="",
        )
        return cls(finding, result)


def passed_over(text: PassedOver) -> Found:
    """A damaged representation that a reader does without."""
    finding = ValidationFinding(
        subject=text.key[:MAX_TEXT],
        row=None,
        what=PASSED_OVER,
        found=text.error[:MAX_TEXT],
        expected="a sound one; another stands in for it",
        bound="",
    )
    return Found(finding, "passed")


class ChainValidation:
    """One chain of one checkpoint.

    Attributes:
        found: what was found.
        damage: the first damage of rows or state, if any; a mismatch is none.
        reached: the level up to which it was looked at: lower than what was asked for where a
            consolidated manifest does not tell its checkpoints' rows apart, and `"metadata"` where
            chunks of rows are missing, so that none was read.
    """

    def __init__(
        self,
        run: Run,
        name: ManifestName,
        chain: Chain,
        level: ValidationLevel,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        newest_first = tuple(reversed(chain.manifests))
        self._run = run
        self._source = StoreChunks(run.store)
        self._name = name
        self._chain = chain
        self._level = level
        self._on_progress = on_progress
        self._links = newest_first if level == "full" else newest_first[:1]
        self._bytes_to_read = 0
        self.found: list[Found] = []
        self.damage: Damage | None = None
        self._rows_damaged = False
        merged = any(link.stands_for is not None for link in self._links)
        self.reached: ValidationLevel = "sample" if level == "full" and merged else level
        self.ref = chain.newest.ref
        self.chunks_read = self.bytes_read = self.rows_compared = 0
        self.worst = 0.0
        self.digests: tuple[TableDigests, ...] = ()

    @property
    def links_read(self) -> int:
        """Manifests whose chunks were read."""
        return len(self._links) if self.chunks_read else 0

    @property
    def passed(self) -> bool:
        """Whether nothing was found that makes the checkpoint worse."""
        return all(found.result == "passed" for found in self.found)

    @property
    def rows_are_wrong(self) -> bool:
        """Whether rows that are there, all of them, are not those that should be."""
        return not self._rows_damaged and not self._rows_passed

    def validate(self, threads: int) -> None:
        """All that the level asks for; what is broken ends what depends on it.

        State that is missing ends nothing of the rows: what they are has to be known all the same.

        Raises:
            UnsupportedVersion: something was written by a later release.
            StoreError: the store cannot be read.
        """
        with ReadScheduler(threads) as reads:
            self._look_at_stored()
            if self._rows_damaged:
                self.reached = "metadata"
            elif self._level != "metadata":
                self._look_at_bytes(reads)
        if self._level == "full" and self._rows_passed:
            self._compare_with_earlier()

    @property
    def tells_links_apart(self) -> bool:
        """Whether each row that was read is known to be that of the link that should have it."""
        return self.reached == self._level

    def add_original(self, original: ChainValidation) -> None:
        """Take over what was found of the same checkpoint's chain as it was committed, all of it.

        If that passed, and its rows are those that were read here, these are known to be right.
        """
        known = {(found.finding.subject, found.finding.what) for found in self.found}
        self.found += [
            found
            for found in original.found
            if (found.finding.subject, found.finding.what) not in known
        ]
        self._links += original._links
        self.chunks_read += original.chunks_read
        self.bytes_read += original.bytes_read
        self.rows_compared += original.rows_compared
        self.worst = max(self.worst, original.worst)
        self.reached = self._level
        expected = {digests.table: digests for digests in original.digests}
        tables = self._chain.newest.tables
        if not original.passed:
            return
        for table, spec in enumerate(tables):
            digests = next((one for one in self.digests if one.table == table), None)
            if digests != expected.get(table):
                text = "those of its links as they were committed"
                self._unequal(spec.name, Unequal(None, "digests", "other rows", text, ""))

    def add_not_told_apart(self, error: RecpointError) -> None:
        """Note that the level was not reached, since the original chain is not whole."""
        self.found.append(self._not_told_apart(error))

    @property
    def _rows_passed(self) -> bool:
        return all(found.result != "failed" for found in self.found)

    def _look_at_stored(self) -> None:
        results: dict[str, ValidationResult] = {"rows": "failed", "state": "stateless"}
        for missing in look_at_stored(self._source, self._chain):
            content = missing.entry.content
            self._damaged(missing.error, f"{content} chunk", results.get(content, "passed"))

    def _look_at_bytes(self, reads: ReadScheduler) -> None:
        newest = self._chain.newest
        self._bytes_to_read = sum(
            entry.bytes
            for link in self._links
            for entry in link.chunks
            if entry.content != "state" or link is newest
        )
        samples = [self._samples(reads, link) for link in self._links]
        try:
            read_state(self._source, newest, reads, self._account)
        except DAMAGE as error:
            self._damaged(error, "state chunk", "stateless")
        self._look_at_rows(reads, samples)

    def _samples(self, reads: ReadScheduler, link: Manifest) -> dict[int, Sampled]:
        if link.stands_for is not None and not any(e.content == "sample" for e in link.chunks):
            # What was recorded of the checkpoint is with its own manifest, as long as there is one.
            try:
                link = self._run.manifest(link.step, link.generation)
            except DAMAGE:
                return {}
            if link.ref != self.ref:
                return {}
        try:
            samples = read_samples(self._source, link, reads)
        except DAMAGE as error:
            self._damaged(error, "sample chunk", "passed")
            return {}
        for entry in link.chunks:
            if entry.content == "sample":
                self._account(entry)
        return samples

    def _look_at_rows(self, reads: ReadScheduler, samples: Sequence[Mapping[int, Sampled]]) -> None:
        digests: list[TableDigests] = []
        for table, spec in enumerate(self._chain.newest.tables):
            rows = RowValidation(
                self._source,
                self._links,
                table,
                [of_link.get(table) for of_link in samples],
                whole=self._level == "full",
            )
            for unequal in rows.find_unequal(reads, self._account):
                if isinstance(unequal, Unequal):
                    self._unequal(spec.name, unequal)
                else:
                    self._damaged(unequal, "row chunk", "failed")
            self.rows_compared += rows.rows_compared
            self.worst = max(self.worst, rows.worst)
            digests += [rows.digests] if rows.digests is not None else []
        self.digests = tuple(digests)

    def _compare_with_earlier(self) -> None:
        """What a validation of all rows has read before must be read again, however it is stored.

        Rows that are those of an earlier validation have been looked at as far as that one did.
        """
        earlier = self._earlier()
        if earlier is None:
            return
        there = {digests.table: digests for digests in earlier.digests}
        for digests in self.digests:
            expected = there.get(digests.table)
            if expected is not None and expected != digests:
                spec = self._chain.newest.tables[digests.table]
                text = f"the rows of the {earlier.level} validation at {earlier.finished_ms} ms"
                self._unequal(spec.name, Unequal(None, "digests", "other rows", text, ""))
        if earlier.level == "full" and len(there) == len(self._chain.newest.tables):
            self.reached = "full"

    def _earlier(self) -> ValidationRecord | None:
        """The newest validation that passed and digested all rows; one in full if there is one."""
        passed = [name for name in records_of(self._run, self._name) if name.result == "passed"]
        for level in ("full", "sample"):
            for name in reversed([name for name in passed if name.level == level]):
                try:
                    record = self._run.records(VALIDATION).read(*name)
                except DAMAGE:
                    continue
                if record.checkpoint == self.ref and record.digests:
                    return record
        return None

    def _not_told_apart(self, error: RecpointError) -> Found:
        merged = next(link for link in self._links if link.stands_for is not None)
        finding = ValidationFinding(
            subject=Representation.of(merged).key[:MAX_TEXT],
            row=None,
            what="level",
            found="rows of several checkpoints, held against the newest one's sample alone",
            expected="each link as it was committed, or an earlier full validation, for the level "
            f"full; but {error.subject}: {error.found}"[:MAX_TEXT],
            bound="",
        )
        return Found(finding, "passed")

    def _account(self, entry: ChunkEntry) -> None:
        self.chunks_read += 1
        self.bytes_read += entry.bytes
        if self._on_progress is not None:
            total = max(self._bytes_to_read, self.bytes_read)
            self._on_progress(self.bytes_read, total)

    def _unequal(self, table: str, unequal: Unequal) -> None:
        row, *texts = unequal
        what, found, expected, bound = (text[:MAX_TEXT] for text in texts)
        finding = ValidationFinding(
            subject=table[:MAX_TEXT],
            row=row,
            what=what,
            found=found,
            expected=expected,
            bound=bound,
        )
        self.found.append(Found(finding, "failed"))

    def _damaged(self, error: Damage, what: str, result: ValidationResult) -> None:
        if isinstance(error, UnsupportedVersion):
            raise error
        if result != "passed" and self.damage is None:
            self.damage = error
        self._rows_damaged |= result == "failed"
        found = Found.of(error, what, result)
        # A chunk that is missing fails again when its bytes are wanted; the store names its URL.
        known = (one.finding for one in self.found if one.finding.what == what)
        if not any(found.finding.subject.endswith(one.subject) for one in known):
            self.found.append(found)


# Validating a checkpoint: what is stored, compared with what the trainer recorded (format §10).


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What a validation looked at, and what came of it.

    Attributes:
        level: up to which it was looked at: at most the one asked for. `"full"` is not reached
            where a chain has consolidated manifests, which hold the rows of several checkpoints:
            unless they are, by their digests, those of the links that they were merged from, which
            are read too where all are there, or those that an earlier full validation has passed.
            `"metadata"` where no row was read, since manifests or chunks of rows are missing.
        result: `"passed"`; `"failed"`: rows are damaged or wrong, also in every checkpoint after
            this one that needs them; `"stateless"`: only this checkpoint's own state is damaged.
        notes: what does not make a checkpoint worse, such as a sample that cannot be read.
        worst: largest difference between an exact and a decoded value, as a part of its bound.
        digests: of all rows of each table as restored; if the whole chain was read and passed.
    """

    checkpoint: CheckpointRef
    level: ValidationLevel
    result: ValidationResult
    findings: tuple[ValidationFinding, ...]
    notes: tuple[ValidationFinding, ...]
    links_read: int
    chunks_read: int
    bytes_read: int
    rows_compared: int
    worst: float
    digests: tuple[TableDigests, ...]
    started_ms: int
    finished_ms: int

    @property
    def passed(self) -> bool:
        """Whether nothing was found that makes the checkpoint worse."""
        return self.result == "passed"


def validate(
    run: Run,
    name: ManifestName,
    *,
    level: ValidationLevel = "sample",
    leased: bool = False,
    threads: int = 4,
    on_progress: Callable[[int, int], None] | None = None,
) -> Validation:
    """Compare a checkpoint with what was recorded of it; nothing is changed.

    Memory: `threads` + 2 chunks, the samples, one rank's state; for `"full"` one bit a row of
    the largest table too.

    Args:
        run: the run.
        name: the checkpoint; also one that is superseded.
        level: `"metadata"`: manifests, chain, and whether each chunk is there in its length.
            `"sample"`: also each byte of the chunks that this checkpoint itself wrote: digests,
            decoding, the rows of the sample that lie in them. `"full"`: each byte of the whole
            chain, all sampled rows of each link that it restores, and digests of the restored
            tables.
        leased: as for `catalog.restore.restore.restore`.
        threads: chunks read at once.
        on_progress: called with bytes read so far and bytes to read, from this thread.

    Raises:
        ObjectNotFound: there is no such checkpoint.
        UnsupportedVersion: it was written by a later release, so that nothing can be said.
        RetentionRefused: with `leased`: it is being deleted, which is no damage.
        StoreError: the store cannot be read, which says nothing about the checkpoint either.
    """
    if level not in LEVELS:
        raise SettingsError(
            "level", found=f"{level!r:.80}", expected=", ".join(LEVELS), next_step="choose one"
        )
    if threads < 1:
        raise SettingsError("threads", found=str(threads), expected="1 or more", next_step="set it")
    started_ms = now_ms()
    looks: list[ChainValidation] = []
    going = Going.read(run, leased=leased)  # before a manifest is read

    def read(chain: Chain) -> ChainValidation:
        going.require_staying(chain)
        look = ChainValidation(run, name, chain, level, on_progress)
        looks.append(look)
        look.validate(threads)
        if look.damage is not None and not look.rows_are_wrong:
            raise look.damage  # another representation may do without what is damaged
        return look

    found: list[Found] = []
    try:
        _, chain = read_with_chain(run, name, read)
        found += [passed_over(text) for text in chain.passed_over]
    except UnsupportedVersion:
        raise
    except DAMAGE as error:
        # With several looks the first counts, as for a reader. With none, the chain is broken.
        if not looks:
            if not run.representations().get(name):
                raise  # there is no such checkpoint
            found.append(Found.of(error, "chain", "failed"))
        looks = looks[:1]
    if looks and looks[-1].passed and not looks[-1].tells_links_apart:
        _look_at_original(run, name, looks[-1], threads, on_progress)
    return _outcome(run, name, started_ms, looks[-1] if looks else None, found)


def _look_at_original(
    run: Run,
    name: ManifestName,
    look: ChainValidation,
    threads: int,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Hold rows of consolidated manifests against those of the links that they were merged from."""
    try:
        chain = resolve_chain(run, name, original=True)
        original = ChainValidation(run, name, chain, "full", on_progress)
        original.validate(threads)
    except UnsupportedVersion:
        raise
    except DAMAGE as error:
        look.add_not_told_apart(error)
        return
    if original.damage is not None and not original.rows_are_wrong:
        look.add_not_told_apart(original.damage)
    else:
        look.add_original(original)


def record(run: Run, validation: Validation, *, evaluated_by: str = "") -> ValidationName:
    """Keep what came of a validation in the catalog.

    Args:
        run: the run.
        validation: the outcome.
        evaluated_by: the function whose metrics were recorded with it, if there was one.

    Raises:
        StoreError: the store refuses, or cannot be reached.
    """
    findings = validation.findings + validation.notes
    kept = findings[:MAX_FINDINGS]
    worst = min(validation.worst * 1e6, 2.0**62)
    return add_record(
        run,
        ValidationRecord(
            run=run.id,
            checkpoint=validation.checkpoint,
            level=validation.level,
            result=validation.result,
            links_read=validation.links_read,
            chunks_read=validation.chunks_read,
            bytes_read=validation.bytes_read,
            rows_compared=validation.rows_compared,
            worst_ppm=int(worst),
            digests=validation.digests,
            findings=kept,
            more_findings=len(findings) - len(kept),
            evaluated_by=evaluated_by[:MAX_TEXT],
            started_ms=validation.started_ms,
            finished_ms=validation.finished_ms,
            writer=f"recpoint {version('recpoint')}",
        ),
    )


def _outcome(
    run: Run,
    name: ManifestName,
    started_ms: int,
    look: ChainValidation | None,
    also: Sequence[Found],
) -> Validation:
    found = [*(look.found if look else ()), *also]
    results = {one.result for one in found}
    order: tuple[ValidationResult, ...] = ("failed", "stateless", "passed")
    result: ValidationResult = next((one for one in order if one in results), "passed")
    return Validation(
        checkpoint=look.ref if look else _ref(run, name),
        level=look.reached if look else "metadata",
        result=result,
        findings=tuple(one.finding for one in found if one.result != "passed"),
        notes=tuple(one.finding for one in found if one.result == "passed"),
        links_read=look.links_read if look else 0,
        chunks_read=look.chunks_read if look else 0,
        bytes_read=look.bytes_read if look else 0,
        rows_compared=look.rows_compared if look else 0,
        worst=look.worst if look else 0.0,
        digests=look.digests if look and result == "passed" else (),
        started_ms=started_ms,
        finished_ms=now_ms(),
    )


def _ref(run: Run, name: ManifestName) -> CheckpointRef:
    """What a checkpoint whose chain is broken says of itself, if anything."""
    try:
        return run.manifest(*name).ref
    except DAMAGE:
        return CheckpointRef(step=name.step, generation=name.generation, attempt="0" * 32)
