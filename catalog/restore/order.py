"""Orders the checkpoints that a restore tries, by the caller's selection and by validations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Final, NamedTuple

from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import Doubts
from recpoint.errors import NothingToRestore, SettingsError
from recpoint.format.naming import MAX_GENERATION, MAX_STEP, ManifestName

__all__ = [
    "NEWEST",
    "RestoreOrder",
    "Selection",
    "Skipped",
    "candidates",
    "skipped_lines",
    "skipped_text",
]


_NEXT: Final = (
    "recpoint list URL --all shows steps and generations; validated_within is how many batches "
    "may be trained again to start from a validated checkpoint"
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The checkpoint of a run that the caller wants.

    Attributes:
        step: the step of the checkpoint; None selects the newest good one.
        generation: with `step`: its generation, which need not be on the live line.
        validated_only: without a step: pass over checkpoints that were not validated.
        validated_within: without a step: prefer the newest validated checkpoint over newer ones
            that were not validated, if it is at most this many batches older than the newest
            checkpoint that is not known to be bad. None: always prefer the newest.

    Raises:
        SettingsError: a field has an invalid value; or a generation is given without a step.
    """

    step: int | None = None
    generation: int | None = None
    validated_only: bool = False
    validated_within: int | None = None

    def __post_init__(self) -> None:
        for name, least, most in (
            ("step", 0, MAX_STEP),
            ("generation", 1, MAX_GENERATION),
            ("validated_within", 0, None),
        ):
            number = _plain_number(name, getattr(self, name), least, most)
            object.__setattr__(self, name, number)
        if self.generation is not None and self.step is None:
            raise _refused("generation", "no step beside it", "step and generation")
        if not isinstance(self.validated_only, bool):
            raise _refused("validated_only", f"{self.validated_only!r:.100}", "True or False")

    @classmethod
    def of(cls, name: ManifestName) -> Selection:
        """Select one checkpoint by name, on the live line or not."""
        return cls(step=name.step, generation=name.generation)

    @property
    def named(self) -> bool:
        """Whether one checkpoint is named, so that no other is restored if it is damaged."""
        return self.step is not None

    @property
    def in_words(self) -> str:
        """The selection as text, for errors and logs."""
        if self.step is not None:
            if self.generation is None:
                return f"step {self.step}"
            return str(ManifestName(self.step, self.generation))
        if self.validated_only:
            return "the newest validated checkpoint"
        if self.validated_within is None:
            return "the newest checkpoint"
        return f"the newest checkpoint, or a validated one within {self.validated_within} batches"


def candidates(run: Run, selection: Selection, *, before: int | None = None) -> list[ManifestName]:
    """Return the checkpoints that match a selection, newest first.

    Args:
        run: the run.
        selection: the selection; its validation fields are not used here.
        before: leave out this generation and later ones.

    Raises:
        NothingToRestore: the step is not on the live line.
        FormatError, GenerationRecordLost: see `Run.live_line`.
        StoreError: the store cannot be read.
    """
    step, generation = selection.step, selection.generation
    if step is None:
        return run.live_line(before=before)
    if generation is not None:
        # The caller names the checkpoint, so it need not be on the live line (format §5), and the
        # lineage need not even be readable.
        return [ManifestName(step, generation)]
    live = [name for name in run.live_line(before=before) if name.step == step]
    if live:
        return live
    other_names = [name for name in reversed(run.manifest_names()) if name.step == step]
    raise NothingToRestore(
        f"{run.url}, {selection.in_words}",
        found=f"superseded only: {', '.join(map(str, other_names))}"
        if other_names
        else "no checkpoint",
        expected="a checkpoint of this step on the live line",
        next_step=f"name its generation too: step {step}, generation {other_names[0].generation} "
        f"(--generation {other_names[0].generation})"
        if other_names
        else f"recpoint list {run.url} --all",
    )


def _plain_number(name: str, value: object, least: int, most: int | None) -> int | None:
    """Return the number as an `int`, because numpy's integers are not `int`."""
    if value is None:
        return None
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if number >= least and (most is None or number <= most):
            return number
    raise _refused(name, f"{value!r:.100}", f"a whole number, {least} or more; or None")


def _refused(name: str, found: str, expected: str) -> SettingsError:
    return SettingsError(name, found=found, expected=expected, next_step=_NEXT)


#: Selects the newest good checkpoint of the live line.
NEWEST: Final = Selection()


_MOST_REASONS = 6
_MOST_CHARACTERS = 400
_NAMED = "; it is restored if its step is named"


class Skipped(NamedTuple):
    """A newer checkpoint that was not restored, and why."""

    name: ManifestName
    error: str


def skipped_lines(skipped: Iterable[Skipped]) -> list[str]:
    """Return skipped checkpoints as text, grouped by reason; at most `_MOST_REASONS` reasons."""
    by_reason: dict[str, list[ManifestName]] = {}
    for name, error in skipped:
        by_reason.setdefault(error, []).append(name)
    lines = []
    for error, names in list(by_reason.items())[:_MOST_REASONS]:
        names_text = str(names[0])
        if len(names) > 1:
            names_text = f"{len(names)} checkpoints, steps {min(names).step} … {max(names).step}"
        short = error if len(error) <= _MOST_CHARACTERS else f"{error[:_MOST_CHARACTERS]}…"
        lines.append(f"{names_text}: {short}")
    hidden_count = sum(len(names) for names in list(by_reason.values())[_MOST_REASONS:])
    if hidden_count:
        lines.append(f"{hidden_count} more, for other reasons")
    return lines


def skipped_text(skipped: Iterable[Skipped]) -> str:
    """Return `skipped_lines` as one line."""
    return "; ".join(skipped_lines(skipped))


class RestoreOrder:
    """Yields checkpoints to try, one after another, until the caller has restored one.

    First comes the newest validated checkpoint that is at most `validated_within` batches older
    than the newest checkpoint that is not known to be bad; if there is none, that newest one. After
    a checkpoint turns out to be damaged, the same rule applies to the remaining ones. So at most
    `validated_within` batches are given up for a validation.

    Args:
        names: the checkpoints, newest first.
        doubts: the results of validations; None ignores them, because the caller named the
            checkpoint.
        selection: the caller's selection.
        damaged: checkpoints that are known to be damaged, and their errors.
    """

    def __init__(
        self,
        names: Sequence[ManifestName],
        doubts: Doubts | None,
        selection: Selection,
        *,
        damaged: Mapping[ManifestName, str] | None = None,
    ) -> None:
        self._selection = selection
        self._names_left = list(names)
        self._doubts = doubts
        self._known_damaged = damaged or {}
        self._unvalidated = self._damaged = False
        self._skipped: list[Skipped] = []
        self._preferred: list[Skipped] = []

    def __iter__(self) -> Iterator[ManifestName]:
        """Yield the best remaining checkpoint; call `damaged` before asking for the next one."""
        while self._names_left:
            newest = self._names_left[0]
            if self._is_out(newest):
                self._names_left.pop(0)
                continue
            name = self._validated_near(newest) or newest
            newer = self._names_left[: self._names_left.index(name)]
            self._preferred = [
                Skipped(newer_name, self._why_not(newer_name, name)) for newer_name in newer
            ]
            self._names_left.remove(name)
            yield name
            self._preferred = []

    @property
    def skipped(self) -> list[Skipped]:
        """The checkpoints skipped in favour of the last one yielded, newest first."""
        return sorted([*self._skipped, *self._preferred], reverse=True)

    def _is_out(self, name: ManifestName) -> bool:
        if name in self._known_damaged:
            self.damaged(name, self._known_damaged[name])
            return True
        doubt = None if self._doubts is None else self._doubts.about(name)
        if doubt is None:
            return False
        self._doubted(name, doubt)
        return True

    def _why_not(self, newer: ManifestName, name: ManifestName) -> str:
        """Return why `newer` is skipped in favour of `name`."""
        doubt = None if self._doubts is None else self._doubts.about(newer)
        if newer in self._known_damaged:
            return self._known_damaged[newer]
        if doubt is not None:
            return f"{doubt}{_NAMED}"
        most_batches = self._selection.validated_within
        return f"not validated; {name} is, within {most_batches} batches of the newest"

    def _validated_near(self, newest: ManifestName) -> ManifestName | None:
        """Return the newest validated checkpoint near enough to `newest`, if wanted; else None."""
        doubts, most_batches = self._doubts, self._selection.validated_within
        if doubts is None or most_batches is None:
            return None
        for name in self._names_left:
            if newest.step - name.step > most_batches:
                break
            verdict = doubts.known(name)
            if verdict is None or not verdict.passed("sample") or name in self._known_damaged:
                continue
            if doubts.about(name) is None:
                return name
        return None

    def damaged(self, name: ManifestName, error: str) -> None:
        """Note that `name` could not be restored because of `error`."""
        self._damaged = True
        self._skipped.append(Skipped(name, error))

    def _doubted(self, name: ManifestName, doubt: str) -> None:
        assert self._doubts is not None
        self._unvalidated |= self._doubts.against(name) is None
        self._skipped.append(Skipped(name, f"{doubt}{_NAMED}"))

    def nothing_good(self, run: Run, *, good: str) -> NothingToRestore:
        """Return the error for a run of which every checkpoint was skipped.

        Args:
            run: the run.
            good: the quality that no checkpoint had, as the end of "expected".
        """
        if self._unvalidated:
            next_step = f"recpoint validate {run.url}"
        elif self._damaged:
            next_step = f"recpoint check {run.url} --level full"
        else:
            step = self._skipped[0].name.step
            next_step = f"recpoint validate {run.url} --step {step} says what is wrong"
        return NothingToRestore(
            run.url,
            found=skipped_text(self.skipped),
            expected=f"{self._selection.in_words}, {good}",
            next_step=next_step,
        )
