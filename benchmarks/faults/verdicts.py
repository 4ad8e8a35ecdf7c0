"""Judges what a system made of a fault, by one rule for all systems."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from benchmarks.faults.acts import Ended

__all__ = ["Outcome", "Verdict", "is_clear", "judge", "worst"]

#: Exceptions that say what the program did, and not what is wrong with the checkpoint.
_BARE = frozenset(
    {
        "ArithmeticError", "AssertionError", "AttributeError", "BufferError", "EOFError",
        "IndexError", "KeyError", "LookupError", "MemoryError", "NameError", "OverflowError",
        "RecursionError", "StopIteration", "SystemError", "TypeError", "UnboundLocalError",
        "ZeroDivisionError",
    }
)  # fmt: skip


class Outcome(enum.Enum):
    """How a system met a fault, best first."""

    SURVIVED = "survived"
    CLEAR = "clear error"
    UNCLEAR = "unclear error"
    SILENT = "silent loss"
    NOT_APPLICABLE = "n/a"


_ORDER = (Outcome.SURVIVED, Outcome.CLEAR, Outcome.UNCLEAR, Outcome.SILENT)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a cell, and why, for people."""

    outcome: Outcome
    why: str = ""


def is_clear(ended: Ended, names: Iterable[str]) -> bool:
    """Tell whether an error is clear.

    It is if the text of the exception, or of one that it was raised from, contains one of `names`
    (the damaged file or the checkpoint that it belongs to), and if its class is not one of Python's
    own for mistakes in a program. A process that crashed or hung gave no clear error.
    """
    if ended.hung or ended.signal or not ended.error_type or ended.error_type in _BARE:
        return False
    return any(name in ended.error for name in names)


def judge(
    restored: Ended,
    *,
    newest: Collection[str],
    other_states: Mapping[str, str],
    names: Iterable[str],
    acknowledged: bool = False,
) -> Verdict:
    """Judge a restore of the newest state.

    Args:
        restored: the act of the restore, whose value is (step, digest of all tensors).
        newest: digests of what counts as the newest sound state.
        other_states: digest -> what it is, of other states that were saved at some time.
        names: of the files and checkpoints that the fault damaged, for `is_clear`.
        acknowledged: the save of the newest state returned success, and nothing touched its files
            since: that it does not restore is a silent loss, with an error or without.
    """
    if not restored.ok and acknowledged:
        return Verdict(
            Outcome.SILENT, f"the save returns success, the restore: {_short(str(restored))}"
        )
    if not restored.ok:
        clear = is_clear(restored, names)
        return Verdict(Outcome.CLEAR if clear else Outcome.UNCLEAR, _short(str(restored)))
    step, digest = restored.value
    if digest in newest:
        return Verdict(Outcome.SURVIVED)
    returned = other_states.get(digest, "data that was never saved")
    return Verdict(Outcome.SILENT, f"returns {returned}, as step {step}, without an error")


def worst(verdicts: Collection[Verdict]) -> Verdict:
    """Return the worst verdict of several trials, with how many of them ended like that.

    Trials for which the fault does not apply do not count beside others.
    """
    judged = [v for v in verdicts if v.outcome is not Outcome.NOT_APPLICABLE]
    if not judged:
        return next(iter(verdicts))
    worst_verdict = max(judged, key=lambda verdict: _ORDER.index(verdict.outcome))
    alike = sum(verdict.outcome is worst_verdict.outcome for verdict in judged)
    if len(judged) == 1:
        return worst_verdict
    return Verdict(
        worst_verdict.outcome, f"{alike} of {len(judged)}; {worst_verdict.why}".removesuffix("; ")
    )


def _short(text: str, most: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
