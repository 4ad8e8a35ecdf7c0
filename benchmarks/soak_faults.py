"""What is killed when in a soak, and how long lag stays high after that."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.soak_training import INTERVAL_BATCHES

__all__ = [
    "Fault",
    "Happened",
    "Recovery",
    "Spell",
    "elsewhere",
    "interval_seconds",
    "plan_faults",
    "recoveries",
    "spells",
]

_KINDS = {"trainer": 4, "agent": 4, "store": 3, "prefect": 1, "agent+trainer": 1, "agent+store": 1}
#: In the end the trainer and the agent live on, so that their memory can be measured.
_LATE_KINDS = {"store": 3, "prefect": 1}
_LATE = 0.6


class Fault(NamedTuple):
    """Kill these once so many checkpoints are committed, and start them again after a while."""

    at_checkpoint: int
    kinds: tuple[str, ...]
    away_seconds: float


@dataclass(frozen=True, kw_only=True)
class Happened:
    """A fault as it was: monotonic seconds of the kill, and of what was killed being up again."""

    fault: Fault
    killed: float
    back: float


class Recovery(NamedTuple):
    """How long after `back` lag was at two intervals or more; 0: it was not after that."""

    kinds: str
    away_seconds: float
    seconds: float


class Spell(NamedTuple):
    """A time of high lag, in monotonic seconds of its first and last batch."""

    first: float
    last: float


def plan_faults(checkpoints: int, every: int, seed: int) -> list[Fault]:
    """One fault about every `every` checkpoints; each kind comes at least once."""
    draw = random.Random(seed)
    first, spacing = 6, max(4, every)
    late_from = max(int(_LATE * checkpoints), first + spacing * len(_KINDS))
    kinds = list(_KINDS)
    draw.shuffle(kinds)  # at first each once
    faults = []
    at = first
    while at < checkpoints - 6:
        if at >= late_from:
            kind = draw.choices(list(_LATE_KINDS), list(_LATE_KINDS.values()))[0]
        else:
            kind = kinds.pop() if kinds else draw.choices(list(_KINDS), list(_KINDS.values()))[0]
        # Prefect is brought back by the agent, in its own time.
        away = 0.0 if kind == "prefect" else draw.uniform(0.0, 8.0)
        faults.append(Fault(at, tuple(kind.split("+")), away))
        gap = 2 * spacing if at >= late_from else spacing
        at += gap + draw.randrange(3)
    return faults


def interval_seconds(progress: Sequence[dict[str, Any]]) -> float:
    """How long an interval took, in the median, by what trainers said."""
    steps = [
        (after["t"] - before["t"]) / (after["step"] - before["step"])
        for before, after in zip(progress, progress[1:], strict=False)
        if "step" in before and "step" in after and after["step"] > before["step"]
    ]
    return float(INTERVAL_BATCHES * statistics.median(steps))


def spells(progress: Sequence[dict[str, Any]], interval: float) -> list[Spell]:
    """When lag was at two intervals or more; with less than an interval between them, as one."""
    found: list[Spell] = []
    for line in progress:
        if line.get("lag_batches", 0) < 2 * INTERVAL_BATCHES:
            continue
        if found and line["t"] - found[-1].last < interval:
            found[-1] = found[-1]._replace(last=line["t"])
        else:
            found.append(Spell(line["t"], line["t"]))
    return found


def recoveries(
    happened: Sequence[Happened], progress: Sequence[dict[str, Any]], interval: float
) -> list[Recovery]:
    """For each fault until when lag was high of it, up to the next fault.

    A spell is of the fault if it has begun four intervals after the return; see `elsewhere`.
    """
    found = []
    ends = [later.killed for later in happened[1:]] + [float("inf")]
    high = spells(progress, interval)
    for one, end in zip(happened, ends, strict=True):
        until = [
            min(spell.last, end)
            for spell in high
            if spell.last >= one.killed and spell.first <= min(_window(one, interval), end)
        ]
        kinds = "+".join(one.fault.kinds)
        late = max(0.0, max(until) - one.back) if until else 0.0
        found.append(Recovery(kinds, one.back - one.killed, late))
    return found


def elsewhere(
    happened: Sequence[Happened], progress: Sequence[dict[str, Any]], interval: float
) -> list[Spell]:
    """Spells of high lag that are of no fault: the machine was busy, or something is wrong."""
    return [
        spell
        for spell in spells(progress, interval)
        if not any(
            spell.last >= one.killed and spell.first <= _window(one, interval) for one in happened
        )
    ]


def _window(one: Happened, interval: float) -> float:
    return one.back + 4 * interval
