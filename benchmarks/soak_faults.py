"""Plans which processes a soak kills when, and measures how long lag stays high after that."""

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
#: The last checkpoints have no faults, so that trainer and agent live long enough to measure
#: memory.
_LATE_KINDS = {"store": 3, "prefect": 1}
_LATE = 0.6


class Fault(NamedTuple):
    """Processes to kill after so many commits, and to start again after a while."""

    at_checkpoint: int
    kinds: tuple[str, ...]
    away_seconds: float


@dataclass(frozen=True, kw_only=True)
class Happened:
    """A fault that happened: monotonic seconds of the kill, and of the processes' return."""

    fault: Fault
    killed: float
    back: float


class Recovery(NamedTuple):
    """How long after `back` lag was still at two intervals or more; 0: not at all."""

    kinds: str
    away_seconds: float
    seconds: float


class Spell(NamedTuple):
    """A time of high lag: the monotonic seconds of its first and last batch."""

    first: float
    last: float


def plan_faults(checkpoints: int, every: int, seed: int) -> list[Fault]:
    """Plans about one fault every `every` checkpoints, each kind at least once."""
    draw = random.Random(seed)
    first, spacing = 6, max(4, every)
    late_from = max(int(_LATE * checkpoints), first + spacing * len(_KINDS))
    kinds = list(_KINDS)
    draw.shuffle(kinds)  # each kind once, before kinds are repeated
    faults = []
    at = first
    while at < checkpoints - 6:
        if at >= late_from:
            kind = draw.choices(list(_LATE_KINDS), list(_LATE_KINDS.values()))[0]
        else:
            kind = kinds.pop() if kinds else draw.choices(list(_KINDS), list(_KINDS.values()))[0]
        # The agent starts Prefect again by itself.
        away = 0.0 if kind == "prefect" else draw.uniform(0.0, 8.0)
        faults.append(Fault(at, tuple(kind.split("+")), away))
        gap = 2 * spacing if at >= late_from else spacing
        at += gap + draw.randrange(3)
    return faults


def interval_seconds(progress: Sequence[dict[str, Any]]) -> float:
    """Returns the median seconds of an interval, from the trainers' progress."""
    steps = [
        (after["t"] - before["t"]) / (after["step"] - before["step"])
        for before, after in zip(progress, progress[1:], strict=False)
        if "step" in before and "step" in after and after["step"] > before["step"]
    ]
    return float(INTERVAL_BATCHES * statistics.median(steps))


def spells(progress: Sequence[dict[str, Any]], interval: float) -> list[Spell]:
    """Returns when lag was at two intervals or more; joins spells less than an interval apart."""
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
    """Returns for each fault how long it kept lag high, up to the next fault.

    A spell belongs to a fault if it began within four intervals after the return; other spells are
    in `elsewhere`.
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
    """Returns spells of high lag that belong to no fault: a busy machine, or a defect."""
    return [
        spell
        for spell in spells(progress, interval)
        if not any(
            spell.last >= one.killed and spell.first <= _window(one, interval) for one in happened
        )
    ]


def _window(one: Happened, interval: float) -> float:
    return one.back + 4 * interval
