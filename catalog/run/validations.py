"""Keeps what validations found: records of each checkpoint, and manifests known to be damaged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from recpoint.catalog.run.chain import resolve_chain
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import ObjectInfo
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import ChainError, ForeignObject, FormatError, ObjectNotFound, StoreUnavailable
from recpoint.format.manifest import Manifest
from recpoint.format.naming import (
    MAX_VALIDATION,
    VALIDATION_KEY,
    ManifestName,
    ValidationLevel,
    ValidationName,
    ValidationResult,
)
from recpoint.format.record_kinds import VALIDATION
from recpoint.format.validation import PASSED_OVER, ValidationRecord

__all__ = [
    "Doubts",
    "KnownDamage",
    "LEVELS",
    "Verdict",
    "add_record",
    "records_of",
    "verdict",
    "verdict_of",
    "verdicts",
]


# Records of validations: what is known of each checkpoint, and adding to it (format §10).


#: Each looks at all that the one before it looks at.
LEVELS: tuple[ValidationLevel, ...] = ("metadata", "sample", "full")

_WORST_FIRST: tuple[ValidationResult, ...] = ("failed", "stateless", "passed")
_TRIES = 100
_FOUND = {"failed": "found wrong or damaged rows", "stateless": "found its state damaged"}


class Verdict(NamedTuple):
    """What the validations of one checkpoint say, taken together.

    A failure stands until a later validation that looked at no less has passed.
    """

    result: ValidationResult
    level: ValidationLevel
    number: int  # of the validation that says so

    def __str__(self) -> str:
        return self.level if self.result == "passed" else f"{self.result} ({self.level})"

    @property
    def in_words(self) -> str:
        """For people: how far it was validated, or what a validation has against it."""
        if self.result != "passed":
            return f"validation {self.number} {_FOUND[self.result]}"
        return f"validated ({self.level})"

    def passed(self, level: ValidationLevel) -> bool:
        """Whether a validation of this level or a higher one has passed."""
        return self.result == "passed" and LEVELS.index(self.level) >= LEVELS.index(level)


def verdicts(run: Run) -> dict[ManifestName, Verdict]:
    """What is known of every checkpoint that was ever validated; one listing, no reads."""
    found: dict[ManifestName, list[ValidationName]] = {}
    for name in run.records(VALIDATION).names():
        found.setdefault(ManifestName(name.step, name.generation), []).append(name)
    return {checkpoint: verdict(names) for checkpoint, names in found.items()}


def verdict(names: Iterable[ValidationName]) -> Verdict:
    """What the validations of one checkpoint say; there is at least one.

    Wrong rows and damaged state stand beside each other, each until a validation of its level or a
    higher one has passed; of the two, wrong rows are what is told.
    """
    against: dict[ValidationResult, ValidationName] = {}
    passed: ValidationName | None = None
    # Of two with one number, made at the same time, the worse counts.
    for name in sorted(names, key=lambda name: (name.number, -_WORST_FIRST.index(name.result))):
        if name.result == "passed":
            against = {result: one for result, one in against.items() if _rank(one) > _rank(name)}
            if passed is None or _rank(name) >= _rank(passed):
                passed = name
            continue
        # That the state is damaged says nothing of rows that were wrong, nor the other way round.
        known = against.get(name.result)
        if known is None or _rank(name) >= _rank(known):
            against[name.result] = name
        passed = None
    stands = next((against[result] for result in _WORST_FIRST if result in against), passed)
    if stands is None:
        raise ValueError("no validation, no verdict")
    return Verdict(stands.result, stands.level, stands.number)


def _rank(name: ValidationName) -> int:
    return LEVELS.index(name.level)


def verdict_of(run: Run, checkpoint: ManifestName) -> Verdict | None:
    """What is known of one checkpoint; None: it was never validated. One listing, no reads."""
    found = records_of(run, checkpoint)
    return verdict(found) if found else None


def records_of(run: Run, checkpoint: ManifestName) -> list[ValidationName]:
    """The validations of one checkpoint, oldest first."""
    return sorted(run.records(VALIDATION).names(*checkpoint))


def newest_of_bytes(names: Iterable[ValidationName]) -> list[ValidationName]:
    """Of one checkpoint's validations that read bytes, those that no later one makes up for.

    One does that has looked at no less: so there are two at most, but for those made at once.
    """
    looked = [name for name in names if name.level != "metadata"]
    return [
        name
        for name in looked
        if not any(one.number > name.number and _rank(one) >= _rank(name) for one in looked)
    ]


def add_record(run: Run, record: ValidationRecord) -> ValidationName:
    """Store a record under the next free number; nothing that is there is changed.

    Raises:
        ForeignObject: a record has the highest number that there can be.
        StoreUnavailable: so many validations end at once that no number was to be had.
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
                expected="one that can be followed by another",
                next_step=f"find out what wrote {run.url}/{last}, remove it, and validate again",
            )
        name = ValidationName(*checkpoint, number, record.level, record.result)
        # The times in the bytes make them ours; if they are another's, both say the same anyway.
        if run.records(VALIDATION).create(record, *name) != "other":
            return name
    raise StoreUnavailable(
        f"{run.url}/{VALIDATION_KEY.prefix}",
        found=f"{_TRIES} numbers in a row taken by other validations",
        expected="one validation of a checkpoint at a time",
        next_step="stop what keeps validating this checkpoint, and try again",
    )


class Doubts:
    """What validations say against restoring a checkpoint that nobody has named (format §10).

    Args:
        run: the run; looked at once.
        validated_only: whether one that was never validated is doubtful too.
        known: what `verdicts` has found just now; None: it is asked.
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
        """What validations of the checkpoint itself say; None: it was never validated."""
        return self._known.get(name)

    def about(self, name: ManifestName) -> str | None:
        """Why not to restore it, in a few words; None: nothing speaks against it."""
        known = self._known.get(name)
        if self._validated_only and (known is None or known.passed("metadata")):
            if known is None or not known.passed("sample"):
                return f"not validated{'' if known is None else ' beyond its metadata'}"
        return self.against(name)

    def against(self, name: ManifestName) -> str | None:
        """What validations have found against it; None: nothing, also if there was none."""
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
        for original in (True, False):  # what was consolidated holds the rows of its links
            try:
                chain = resolve_chain(self._run, name, original=original)
            except (FormatError, ChainError, ObjectNotFound):
                continue  # what that means is for the restore to find out
            links = (ManifestName(link.step, link.generation) for link in chain.manifests)
            return next((link for link in links if link in self._failed), None)
        return None


# Manifests that validations have found damaged while others stood in for them (format §6.6, plan).
#
# Such a validation passes, so that its key does not tell: its record does.


class _Told(NamedTuple):
    """When a manifest was found damaged: by the store's clock, and by the validation's host's."""

    stored_ms: int
    finished_ms: int


class KnownDamage:
    """What is known of a run's manifests from validations that did without some of them.

    Nothing is read where every checkpoint has one manifest alone: then none stands in for another.
    Else one small record, seldom two, of each checkpoint that was validated and is not older than
    the oldest one with several.

    Args:
        run: the run.
        there: every manifest, by checkpoint.
        infos: every object.

    Raises:
        StoreError: the store cannot be read.
    """

    def __init__(
        self,
        run: Run,
        there: Mapping[ManifestName, Sequence[Representation]],
        infos: Mapping[str, ObjectInfo],
    ) -> None:
        self._infos = infos
        self._told: dict[str, list[_Told]] = {}
        several = [name for name, forms in there.items() if len(forms) > 1]
        if not several:
            return
        # A validation reads back from its checkpoint, and looks for another manifest on its way.
        names = _telling(infos, first_step=min(several).step)
        for name, record in zip(names, _read(run, names), strict=True):
            at = _Told(
                infos[VALIDATION_KEY.of(*name)].modified_ms, record.finished_ms if record else 0
            )
            for finding in record.findings if record else ():
                if finding.what == PASSED_OVER:
                    self._told.setdefault(finding.subject, []).append(at)

    def covers(self, key: str, manifest: Manifest) -> bool:
        """Whether a manifest is one that was found damaged.

        One that was made anew since, by the store's clock and by the stamps, is another.
        """
        info = self._infos.get(key)
        return any(
            info is None
            or info.modified_ms <= told.stored_ms
            or manifest.committed_ms <= told.finished_ms
            for told in self._told.get(key, ())
        )


def _telling(infos: Mapping[str, ObjectInfo], *, first_step: int) -> list[ValidationName]:
    """The validations that tell what is known of each checkpoint from `first_step` on."""
    found: dict[ManifestName, list[ValidationName]] = {}
    for key in infos:
        name = VALIDATION_KEY.parse(key)
        if name is not None and name.step >= first_step:
            found.setdefault(ManifestName(name.step, name.generation), []).append(name)
    return [name for names in found.values() for name in newest_of_bytes(names)]


def _read(run: Run, names: Sequence[ValidationName]) -> Iterator[ValidationRecord | None]:
    """Their records; None for one that is gone or cannot be read, which tells nothing."""

    def read(name: ValidationName) -> ValidationRecord | None:
        try:
            return run.records(VALIDATION).read(*name)
        except (FormatError, ObjectNotFound):
            return None

    with ReadScheduler.of_records() as reads:
        yield from reads.results(names, read)
