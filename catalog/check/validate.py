"""Validates a checkpoint: compares its chains with the samples that the trainer recorded.

Validates one chain of a checkpoint: objects, samples, state, then the tables (format §10).

Validates a checkpoint: compares what is stored with what the trainer recorded (format §10).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import NamedTuple, Self

from recpoint.catalog.check.rows import RowValidation, Sampled, Unequal, read_samples
from recpoint.catalog.restore.chunks import StoreChunks, look_at_stored
from recpoint.catalog.restore.state import read_state
from recpoint.catalog.run.chain import Chain, PassedOver, read_with_chain, resolve_chain
from recpoint.catalog.run.going import Going
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
from recpoint.format.manifest import CheckedStripes, ChunkEntry, Manifest
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


Damage = FormatError | ChainError | ObjectNotFound
DAMAGE = (FormatError, ChainError, ObjectNotFound)


class JudgedFinding(NamedTuple):
    """A finding, and the result it implies; `"passed"` if it makes the checkpoint no worse."""

    finding: ValidationFinding
    result: ValidationResult

    @classmethod
    def of(cls, error: Damage, label: str, result: ValidationResult) -> Self:
        """Make a finding from an error."""
        finding = ValidationFinding(
            subject=error.subject[:MAX_TEXT],
            row=None,
            what=label,
            found=error.found[:MAX_TEXT],
            expected=error.expected[:MAX_TEXT],
            bound="",
        )
        return cls(finding, result)


def passed_over(text: PassedOver) -> JudgedFinding:
    """Return the finding for a damaged representation that a reader can do without."""
    finding = ValidationFinding(
        subject=text.key[:MAX_TEXT],
        row=None,
        what=PASSED_OVER,
        found=text.error[:MAX_TEXT],
        expected="a sound manifest; another one of the checkpoint is used instead",
        bound="",
    )
    return JudgedFinding(finding, "passed")


class ChainValidation:
    """Validates one chain of one checkpoint.

    Attributes:
        found: the findings.
        damage: the first damage of rows or state, if any; a difference of values is not damage.
        reached: the level that was reached. It is lower than the requested one if a consolidated
            manifest does not tell which checkpoint its rows are of, and `"metadata"` if row chunks
            are missing, so that none was read.
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
        self.found: list[JudgedFinding] = []
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
        """Number of manifests whose chunks were read."""
        return len(self._links) if self.chunks_read else 0

    @property
    def stripes(self) -> CheckedStripes | None:
        """What its trainer found when it compared stripes, over the whole chain."""
        return CheckedStripes.joined(link.stripes for link in self._chain.manifests)

    @property
    def passed(self) -> bool:
        """Whether nothing was found that makes the checkpoint worse."""
        return all(finding.result == "passed" for finding in self.found)

    @property
    def rows_are_wrong(self) -> bool:
        """Whether all rows could be read, but some differ from the trainer's."""
        return not self._rows_damaged and not self._rows_passed

    def validate(self, threads: int) -> None:
        """Run the checks of the level; a check that depends on damaged objects is skipped.

        Missing state does not stop the checks of rows.

        Raises:
            UnsupportedVersion: a later release wrote an object.
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
        """Whether it is known for each row which link it is of, as the requested level needs."""
        return self.reached == self._level

    def add_original(self, original: ChainValidation) -> None:
        """Add the findings on the checkpoint's original chain, which was validated in full.

        If the original passed and its rows are equal to the rows read here, these are right, too.
        """
        listed = {(entry.finding.subject, entry.finding.what) for entry in self.found}
        self.found += [
            entry
            for entry in original.found
            if (entry.finding.subject, entry.finding.what) not in listed
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
            digests = next(
                (table_digests for table_digests in self.digests if table_digests.table == table),
                None,
            )
            if digests != expected.get(table):
                text = "the rows of its links as they were committed"
                self._unequal(spec.name, Unequal(None, "digests", "other rows", text, ""))

    def add_not_told_apart(self, error: RecpointError) -> None:
        """Note that the level was not reached, because the original chain is damaged."""
        self.found.append(self._not_told_apart(error))

    @property
    def _rows_passed(self) -> bool:
        return all(entry.result != "failed" for entry in self.found)

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
            # The samples belong to the checkpoint's own manifest, if that still exists.
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
                base=self._chain.base,
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
        """Compare the digests of all rows with those of an earlier validation that passed.

        They must be equal even if the rows are stored in another way now. If they are, this
        validation reaches the earlier one's level, too.
        """
        earlier = self._earlier()
        if earlier is None:
            return
        earlier_digests = {digests.table: digests for digests in earlier.digests}
        for digests in self.digests:
            expected = earlier_digests.get(digests.table)
            if expected is not None and expected != digests:
                spec = self._chain.newest.tables[digests.table]
                text = f"the rows of the {earlier.level} validation at {earlier.finished_ms} ms"
                self._unequal(spec.name, Unequal(None, "digests", "other rows", text, ""))
        if earlier.level == "full" and len(earlier_digests) == len(self._chain.newest.tables):
            self.reached = "full"

    def _earlier(self) -> ValidationRecord | None:
        """Return the newest validation that passed and digested all rows, preferably a full one."""
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

    def _not_told_apart(self, error: RecpointError) -> JudgedFinding:
        merged = next(link for link in self._links if link.stands_for is not None)
        finding = ValidationFinding(
            subject=Representation.of(merged).key[:MAX_TEXT],
            row=None,
            what="level",
            found="rows of several checkpoints, compared only with the newest one's sample",
            expected="for level full, each link as it was committed, or an earlier full "
            f"validation; but {error.subject}: {error.found}"[:MAX_TEXT],
            bound="",
        )
        return JudgedFinding(finding, "passed")

    def _account(self, entry: ChunkEntry) -> None:
        self.chunks_read += 1
        self.bytes_read += entry.bytes
        if self._on_progress is not None:
            total = max(self._bytes_to_read, self.bytes_read)
            self._on_progress(self.bytes_read, total)

    def _unequal(self, table: str, unequal: Unequal) -> None:
        row, *texts = unequal
        label, found_text, expected, bound = (text[:MAX_TEXT] for text in texts)
        finding = ValidationFinding(
            subject=table[:MAX_TEXT],
            row=row,
            what=label,
            found=found_text,
            expected=expected,
            bound=bound,
        )
        self.found.append(JudgedFinding(finding, "failed"))

    def _damaged(self, error: Damage, label: str, result: ValidationResult) -> None:
        if isinstance(error, UnsupportedVersion):
            raise error
        if result != "passed" and self.damage is None:
            self.damage = error
        self._rows_damaged |= result == "failed"
        damage = JudgedFinding.of(error, label, result)
        # A missing chunk fails again when its bytes are read; that error names the URL, which ends
        # with the key.
        findings = (entry.finding for entry in self.found if entry.finding.what == label)
        if not any(damage.finding.subject.endswith(finding.subject) for finding in findings):
            self.found.append(damage)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The outcome of a validation.

    Attributes:
        checkpoint: the checkpoint that was validated.
        level: the level that was reached, at most the requested one. It is `"metadata"` if no row
            was read, because manifests or row chunks are missing. A chain with consolidated
            manifests, which hold rows of several checkpoints, reaches `"full"` only if its digests
            equal those of the links it was merged from (which are read too, if all of them are
            there), or those of an earlier full validation that passed.
        result: `"passed"`; `"failed"`: rows are damaged or wrong, also in every later checkpoint
            that needs them; `"stateless"`: only this checkpoint's own state is damaged.
        findings: the findings that make the checkpoint worse.
        notes: other findings, such as a sample that cannot be read.
        links_read, chunks_read, bytes_read: numbers of manifests and chunks read, and bytes.
        rows_compared: number of sampled rows compared.
        worst: largest difference between an exact and a decoded value, divided by its bound.
        digests: digests of all rows of each restored table, if the whole chain was read and passed.
        stripes: stripes of embedding servers that the trainer compared with their parity when it
            took this checkpoint and those that it stands on; None: there was nothing to compare.
        started_ms, finished_ms: times in milliseconds since the epoch.
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
    stripes: CheckedStripes | None
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
    """Compare a checkpoint with what its trainer recorded; nothing is changed.

    Memory: `threads` + 2 chunks, the samples, one rank's state; for `"full"` also one bit for each
    row of the largest table.

    Args:
        run: the run.
        name: the checkpoint, which may be superseded.
        level: `"metadata"` checks manifests, chain, and existence and length of each chunk.
            `"sample"` also checks each byte of the chunks that this checkpoint itself wrote:
            digests, decoding, and the sampled rows in them. `"full"` checks each byte of the whole
            chain, all sampled rows of each link that are restored, and digests of the restored
            tables.
        leased: as for `catalog.restore.restore.restore`.
        threads: chunks read at once.
        on_progress: called with bytes read so far and bytes to read, in this thread.

    Raises:
        SettingsError: `level` or `threads` has an invalid value.
        ObjectNotFound: there is no such checkpoint.
        UnsupportedVersion: a later release wrote the checkpoint; it cannot be validated here.
        RetentionRefused: with `leased`: the checkpoint is being deleted, which is no damage.
        StoreError: the store cannot be read, which is no damage of the checkpoint either.
    """
    if level not in LEVELS:
        raise SettingsError(
            "level", found=f"{level!r:.80}", expected=", ".join(LEVELS), next_step="choose a level"
        )
    if threads < 1:
        raise SettingsError(
            "threads", found=str(threads), expected="1 or more", next_step="correct threads"
        )
    started_ms = now_ms()
    looks: list[ChainValidation] = []
    going = Going.read(run, leased=leased)  # MUST come before a manifest is read

    def read(chain: Chain) -> ChainValidation:
        going.require_staying(chain)
        look = ChainValidation(run, name, chain, level, on_progress)
        looks.append(look)
        look.validate(threads)
        if look.damage is not None and not look.rows_are_wrong:
            raise look.damage  # another representation may not need the damaged object
        return look

    findings: list[JudgedFinding] = []
    try:
        _, chain = read_with_chain(run, name, read)
        findings += [passed_over(text) for text in chain.passed_over]
    except UnsupportedVersion:
        raise
    except DAMAGE as error:
        # Of several chains tried the first one counts. If none was tried, the chain is broken.
        if not looks:
            if not run.representations().get(name):
                raise  # there is no such checkpoint
            findings.append(JudgedFinding.of(error, "chain", "failed"))
        looks = looks[:1]
    if looks and looks[-1].passed and not looks[-1].tells_links_apart:
        _look_at_original(run, name, looks[-1], threads, on_progress)
    return _outcome(run, name, started_ms, looks[-1] if looks else None, findings)


def _look_at_original(
    run: Run,
    name: ManifestName,
    look: ChainValidation,
    threads: int,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Compare rows of consolidated manifests with the links that they were merged from."""
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
    """Store the outcome of a validation in the catalog.

    Args:
        run: the run.
        validation: the outcome.
        evaluated_by: the function whose metrics were recorded with it, if any.

    Returns:
        Name of the record.

    Raises:
        StoreError: the store refuses, or cannot be reached.
    """
    findings = validation.findings + validation.notes
    kept_findings = findings[:MAX_FINDINGS]
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
            findings=kept_findings,
            more_findings=len(findings) - len(kept_findings),
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
    also: Sequence[JudgedFinding],
) -> Validation:
    entries = [*(look.found if look else ()), *also]
    results = {entry.result for entry in entries}
    order: tuple[ValidationResult, ...] = ("failed", "stateless", "passed")
    result: ValidationResult = next(
        (order_result for order_result in order if order_result in results), "passed"
    )
    return Validation(
        checkpoint=look.ref if look else _ref(run, name),
        level=look.reached if look else "metadata",
        result=result,
        findings=tuple(entry.finding for entry in entries if entry.result != "passed"),
        notes=tuple(entry.finding for entry in entries if entry.result == "passed"),
        links_read=look.links_read if look else 0,
        chunks_read=look.chunks_read if look else 0,
        bytes_read=look.bytes_read if look else 0,
        rows_compared=look.rows_compared if look else 0,
        worst=look.worst if look else 0.0,
        digests=look.digests if look and result == "passed" else (),
        stripes=look.stripes if look else None,
        started_ms=started_ms,
        finished_ms=now_ms(),
    )


def _ref(run: Run, name: ManifestName) -> CheckpointRef:
    """Return the reference in a checkpoint's manifest; without attempt if that cannot be read."""
    try:
        return run.manifest(*name).ref
    except DAMAGE:
        return CheckpointRef(step=name.step, generation=name.generation, attempt="0" * 32)
