"""Which checkpoints a restore tries when none is named, and what is said of those it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from recpoint.catalog.lineage import ManifestName
from recpoint.catalog.run import Run
from recpoint.catalog.validations import Doubts
from recpoint.errors import NothingToRestore

__all__ = ["RestoreOrder", "Skipped", "skipped_lines", "skipped_text"]

_MOST_REASONS = 6
_MOST_CHARACTERS = 400


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

    Args:
        names: newest first.
        doubts: what validations say; None: it does not matter, since a person named the checkpoint.
        damaged: those that were found so before, and how.

    Attributes:
        skipped: what was left so far, newest first.
    """

    def __init__(
        self,
        names: Sequence[ManifestName],
        doubts: Doubts | None,
        *,
        damaged: Mapping[ManifestName, str] | None = None,
    ) -> None:
        self._names = names
        self._doubts = doubts
        self._known_damaged = damaged or {}
        self._unvalidated = self._damaged = False
        self.skipped: list[Skipped] = []

    def __iter__(self) -> Iterator[ManifestName]:
        """Each is the best that is left; who asks for another has told `damaged` of this one."""
        for name in self._names:
            if name in self._known_damaged:
                self.damaged(name, self._known_damaged[name])
                continue
            doubt = None if self._doubts is None else self._doubts.about(name)
            if doubt is None:
                yield name
            else:
                self._doubted(name, doubt)

    def damaged(self, name: ManifestName, error: str) -> None:
        """It could not be restored."""
        self._damaged = True
        self.skipped.append(Skipped(name, error))

    def _doubted(self, name: ManifestName, doubt: str) -> None:
        assert self._doubts is not None
        self._unvalidated |= self._doubts.against(name) is None
        self.skipped.append(Skipped(name, f"{doubt}; it is restored if its step is named"))

    def nothing_good(self, run: Run, *, expected: str) -> NothingToRestore:
        """The error when nothing is left; something was skipped."""
        if self._unvalidated:
            next_step = f"recpoint validate {run.url}"
        elif self._damaged:
            next_step = f"recpoint check {run.url} --level full"
        else:
            step = self.skipped[0].name.step
            next_step = f"recpoint validate {run.url} --step {step} says what is wrong"
        return NothingToRestore(
            run.url, found=skipped_text(self.skipped), expected=expected, next_step=next_step
        )
