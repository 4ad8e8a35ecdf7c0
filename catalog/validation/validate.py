"""Validating a checkpoint: what is stored, compared with what the trainer recorded (format §10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from recpoint.catalog.records.going import Going
from recpoint.catalog.records.validations import LEVELS, add_record
from recpoint.catalog.runs.chain import Chain, read_with_chain, resolve_chain
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.elapsed import now_ms
from recpoint.catalog.validation.validate_chain import DAMAGE, ChainValidation, Found, passed_over
from recpoint.errors import SettingsError, UnsupportedVersion
from recpoint.format.naming import ManifestName, ValidationLevel, ValidationName, ValidationResult
from recpoint.format.records import CheckpointRef
from recpoint.format.validation import (
    MAX_FINDINGS,
    MAX_TEXT,
    TableDigests,
    ValidationFinding,
    ValidationRecord,
)

__all__ = ["Validation", "record", "validate"]


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
        leased: as for `catalog.restoring.restore.restore`.
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
