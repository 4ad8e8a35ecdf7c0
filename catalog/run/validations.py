"""The records of validations: reading and adding them (format §10)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from recpoint.catalog.run.chain import resolve_chain
from recpoint.catalog.run.run import Run
from recpoint.errors import ChainError, ForeignObject, FormatError, ObjectNotFound, StoreUnavailable
from recpoint.format.naming import (
    MAX_VALIDATION,
    VALIDATION_KEY,
    ManifestName,
    ValidationLevel,
    ValidationName,
    ValidationResult,
)
from recpoint.format.record_kinds import VALIDATION
from recpoint.format.validation import ValidationRecord

__all__ = [
    "Doubts",
    "LEVELS",
    "Verdict",
    "add_record",
    "newest_of_bytes",
    "records_of",
    "verdict",
    "verdict_of",
    "verdicts",
]


#: Each level looks at everything that the level before it looks at, and more.
LEVELS: tuple[ValidationLevel, ...] = ("metadata", "sample", "full")
_WORST_FIRST: tuple[ValidationResult, ...] = ("failed", "stateless", "passed")
_TRIES = 100
_FOUND = {"failed": "found wrong or damaged rows", "stateless": "found its state damaged"}


class Verdict(NamedTuple):
    """The result of all validations of one checkpoint together.

    A failure stands until a later validation of the same or a higher level has passed.
    """

    result: ValidationResult
    level: ValidationLevel
    number: int  # of the validation that decides

    def __str__(self) -> str:
        return self.level if self.result == "passed" else f"{self.result} ({self.level})"

    @property
    def in_words(self) -> str:
        """For people: the level to which it was validated, or which validation is against it."""
        if self.result != "passed":
            return f"validation {self.number} {_FOUND[self.result]}"
        return f"validated ({self.level})"

    def passed(self, level: ValidationLevel) -> bool:
        """Say whether a validation of this level or a higher one has passed."""
        return self.result == "passed" and LEVELS.index(self.level) >= LEVELS.index(level)


def verdicts(run: Run) -> dict[ManifestName, Verdict]:
    """Return the verdict on every checkpoint that was ever validated; one listing, no reads."""
    found: dict[ManifestName, list[ValidationName]] = {}
    for name in run.records(VALIDATION).names():
        found.setdefault(ManifestName(name.step, name.generation), []).append(name)
    return {checkpoint: verdict(names) for checkpoint, names in found.items()}


def verdict(names: Iterable[ValidationName]) -> Verdict:
    """Return the verdict of the validations of one checkpoint, of which there is at least one.

    A failure for wrong rows and one for damaged state stand beside each other, each until a
    validation of its level or a higher one has passed. If both stand, the verdict names wrong rows.
    """
    against: dict[ValidationResult, ValidationName] = {}
    passed: ValidationName | None = None
    # If two validations made at the same time have one number, the worse result counts.
    for name in sorted(names, key=lambda name: (name.number, -_WORST_FIRST.index(name.result))):
        if name.result == "passed":
            against = {result: one for result, one in against.items() if _rank(one) > _rank(name)}
            if passed is None or _rank(name) >= _rank(passed):
                passed = name
            continue
        # A failure for damaged state does not replace one for wrong rows, and vice versa.
        known = against.get(name.result)
        if known is None or _rank(name) >= _rank(known):
            against[name.result] = name
        passed = None
    stands = next((against[result] for result in _WORST_FIRST if result in against), passed)
    if stands is None:
        raise ValueError("a verdict needs at least one validation")
    return Verdict(stands.result, stands.level, stands.number)


def _rank(name: ValidationName) -> int:
    return LEVELS.index(name.level)


def verdict_of(run: Run, checkpoint: ManifestName) -> Verdict | None:
    """Return the verdict on one checkpoint; None: never validated. One listing, no reads."""
    found = records_of(run, checkpoint)
    return verdict(found) if found else None


def records_of(run: Run, checkpoint: ManifestName) -> list[ValidationName]:
    """Return the validations of one checkpoint, oldest first; one listing, no reads."""
    return sorted(run.records(VALIDATION).names(*checkpoint))


def newest_of_bytes(names: Iterable[ValidationName]) -> list[ValidationName]:
    """Return the validations of one checkpoint that read bytes and that no later one replaces.

    A later one of the same or a higher level replaces them. So at most two are left, unless some
    were made at the same time.
    """
    looked = [name for name in names if name.level != "metadata"]
    return [
        name
        for name in looked
        if not any(one.number > name.number and _rank(one) >= _rank(name) for one in looked)
    ]


def add_record(run: Run, record: ValidationRecord) -> ValidationName:
    """Store a record under the next free number; no stored record is changed.

    Raises:
        ForeignObject: a record has the highest possible number.
        StoreUnavailable: so many validations end at once that no number was free.
        StoreError: the store refuses, or cannot be reached.
    """
    checkpoint = ManifestName(record.checkpoint.step, record.checkpoint.generation)
    for _ in range(_TRIES):
        there = records_of(run, checkpoint)
        number = max((name.number for name in there), default=0) + 1
        if number > MAX_VALIDATION:
            last = VALIDATION_KEY.of(*there[-1])
            raise ForeignObject(
                last,
                found="the highest number that there is",
                expected="a lower number, so that another can follow",
                next_step=f"find out what wrote {run.url}/{last}, remove it, and validate again",
            )
        name = ValidationName(*checkpoint, number, record.level, record.result)
        # `same` means our own record, because it holds times. If not, both say the same anyway.
        if run.records(VALIDATION).create(record, *name) != "other":
            return name
    raise StoreUnavailable(
        f"{run.url}/{VALIDATION_KEY.prefix}",
        found=f"{_TRIES} numbers in a row taken by other validations",
        expected="one validation of a checkpoint at a time",
        next_step="stop the process that keeps validating this checkpoint, and try again",
    )


class Doubts:
    """Says why validations speak against restoring a checkpoint that nobody named (format §10).

    Args:
        run: the run; its validations are listed once.
        validated_only: whether a checkpoint that was never validated is doubtful too.
        known: the verdicts, if the caller has just read them; None: they are read.
    """

    def __init__(
        self,
        run: Run,
        *,
        validated_only: bool,
        known: Mapping[ManifestName, Verdict] | None = None,
    ) -> None:
        self._run = run
        self._validated_only = validated_only
        self._known = verdicts(run) if known is None else known
        self._failed = {name for name, found in self._known.items() if found.result == "failed"}

    def known(self, name: ManifestName) -> Verdict | None:
        """Return the verdict on the checkpoint itself; None: it was never validated."""
        return self._known.get(name)

    def about(self, name: ManifestName) -> str | None:
        """Return why not to restore it, in a few words; None: nothing speaks against it."""
        known = self._known.get(name)
        if self._validated_only and (known is None or known.passed("metadata")):
            if known is None or not known.passed("sample"):
                return f"not validated{'' if known is None else ' beyond its metadata'}"
        return self.against(name)

    def against(self, name: ManifestName) -> str | None:
        """Return what validations found against it; None: nothing, or there are no validations."""
        known = self._known.get(name)
        if known is not None and known.result != "passed":
            return known.in_words
        if known is not None and known.passed("full"):
            return None
        link = self._failed_link(name)
        if link is None:
            return None
        return (
            f"validation {self._known[link].number} of {link}, which it needs, {_FOUND['failed']}"
        )

    def _failed_link(self, name: ManifestName) -> ManifestName | None:
        if not self._failed:
            return None
        for original in (True, False):  # both, because merged rows come from the original links
            try:
                chain = resolve_chain(self._run, name, original=original)
            except (FormatError, ChainError, ObjectNotFound):
                continue  # a restore will find out what is wrong
            links = (ManifestName(link.step, link.generation) for link in chain.all_manifests)
            return next((link for link in links if link in self._failed), None)
        return None
