"""Which checkpoints a restore tries when none is named, and what is said of those it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from recpoint.catalog.records.validations import Doubts
from recpoint.catalog.restoring.selection import Selection
from recpoint.catalog.runs.run import Run
from recpoint.errors import NothingToRestore
from recpoint.format.naming import ManifestName

__all__ = ["RestoreOrder", "Skipped", "skipped_lines", "skipped_text"]

_MOST_REASONS = 6
_MOST_CHARACTERS = 400
_NAMED = "; it is restored if its step is named"


class Skipped(NamedTuple):
    """A newer checkpoint that was not restored, and why."""

    name: ManifestName
    error: str


def skipped_lines(skipped: Iterable[Skipped]) -> list[str]:
    """What was left, for people: checkpoints with one reason together, and not all reasons."""
    by_reason: dict[str, list[ManifestName]] = {}
    for name, error in skipped:
        by_reason.setdefault(error, []).append(name)
    lines = []
    for error, names in list(by_reason.items())[:_MOST_REASONS]:
        which = str(names[0])
        if len(names) > 1:
            which = f"{len(names)} checkpoints, steps {min(names).step} … {max(names).step}"
        short = error if len(error) <= _MOST_CHARACTERS else f"{error[:_MOST_CHARACTERS]}…"
        lines.append(f"{which}: {short}")
    rest = sum(len(names) for names in list(by_reason.values())[_MOST_REASONS:])
    if rest:
        lines.append(f"{rest} more, for other reasons")
    return lines


def skipped_text(skipped: Iterable[Skipped]) -> str:
    """`skipped_lines` in one."""
    return "; ".join(skipped_lines(skipped))


class RestoreOrder:
    """Checkpoints to try, one after another, until one is good on whoever restores.

    The newest that nothing speaks against; but before it the newest validated one that is at most
    `validated_within` batches older, if there is one. Whenever one turns out to be damaged, the
    same holds among those that are left: no more than so many batches are given up for a
    validation, counted from the newest that is not known to be bad.

    Args:
        names: newest first.
        doubts: what validations say; None: it does not matter, since a person named the checkpoint.
        selection: what was asked for; its `validated_within` is meant above.
        damaged: those that were found so before, and how.
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
        self._left = list(names)
        self._doubts = doubts
        self._known_damaged = damaged or {}
        self._unvalidated = self._damaged = False
        self._skipped: list[Skipped] = []
        self._preferred: list[Skipped] = []

    def __iter__(self) -> Iterator[ManifestName]:
        """Each is the best that is left; who asks for another has told `damaged` of this one."""
        while self._left:
            newest = self._left[0]
            if self._is_out(newest):
                self._left.pop(0)
                continue
            name = self._validated_near(newest) or newest
            newer = self._left[: self._left.index(name)]
            self._preferred = [Skipped(one, self._why_not(one, name)) for one in newer]
            self._left.remove(name)
            yield name
            self._preferred = []

    @property
    def skipped(self) -> list[Skipped]:
        """What was left for the one that was tried last, newest first."""
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
        """Why `newer` is left for `name`."""
        doubt = None if self._doubts is None else self._doubts.about(newer)
        if newer in self._known_damaged:
            return self._known_damaged[newer]
        if doubt is not None:
            return f"{doubt}{_NAMED}"
        within = self._selection.validated_within
        return f"not validated; {name} is, within {within} batches of the newest"

    def _validated_near(self, newest: ManifestName) -> ManifestName | None:
        """The newest validated one that is near enough; None: there is none, or nobody asks."""
        doubts, within = self._doubts, self._selection.validated_within
        if doubts is None or within is None:
            return None
        for name in self._left:
            if newest.step - name.step > within:
                break
            known = doubts.known(name)
            if known is None or not known.passed("sample") or name in self._known_damaged:
                continue
            if doubts.about(name) is None:
                return name
        return None

    def damaged(self, name: ManifestName, error: str) -> None:
        """It could not be restored."""
        self._damaged = True
        self._skipped.append(Skipped(name, error))

    def _doubted(self, name: ManifestName, doubt: str) -> None:
        assert self._doubts is not None
        self._unvalidated |= self._doubts.against(name) is None
        self._skipped.append(Skipped(name, f"{doubt}{_NAMED}"))

    def nothing_good(self, run: Run, *, good: str) -> NothingToRestore:
        """The error when nothing is left; something was skipped. `good`: what none of them was."""
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
