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


def plan_faults(checkpoints: int, spacing_least: int, seed: int) -> list[Fault]:
    """Plan about one fault every `spacing_least` checkpoints, each kind at least once."""
    draw = random.Random(seed)
    first, spacing = 6, max(4, spacing_least)
    late_from = max(int(_LATE * checkpoints), first + spacing * len(_KINDS))
    kinds = list(_KINDS)
    draw.shuffle(kinds)  # each kind once, before kinds are repeated
    faults = []
    checkpoint = first
    while checkpoint < checkpoints - 6:
        if checkpoint >= late_from:
            kind = draw.choices(list(_LATE_KINDS), list(_LATE_KINDS.values()))[0]
        else:
            kind = kinds.pop() if kinds else draw.choices(list(_KINDS), list(_KINDS.values()))[0]
        # The agent starts Prefect again by itself.
        away = 0.0 if kind == "prefect" else draw.uniform(0.0, 8.0)
        faults.append(Fault(checkpoint, tuple(kind.split("+")), away))
        gap = 2 * spacing if checkpoint >= late_from else spacing
        checkpoint += gap + draw.randrange(3)
    return faults


def interval_seconds(progress: Sequence[dict[str, Any]]) -> float:
    """Return the median seconds of an interval, from the trainers' progress."""
    steps = [
        (later["t"] - earlier["t"]) / (later["step"] - earlier["step"])
        for earlier, later in zip(progress, progress[1:], strict=False)
        if "step" in earlier and "step" in later and later["step"] > earlier["step"]
    ]
    return float(INTERVAL_BATCHES * statistics.median(steps))


def spells(progress: Sequence[dict[str, Any]], interval: float) -> list[Spell]:
    """Return when lag was at two intervals or more; join spells less than an interval apart."""
    spells: list[Spell] = []
    for line in progress:
        if line.get("lag_batches", 0) < 2 * INTERVAL_BATCHES:
            continue
        if spells and line["t"] - spells[-1].last < interval:
            spells[-1] = spells[-1]._replace(last=line["t"])
        else:
            spells.append(Spell(line["t"], line["t"]))
    return spells


def recoveries(
    happened: Sequence[Happened], progress: Sequence[dict[str, Any]], interval: float
) -> list[Recovery]:
    """Return for each fault how long it kept lag high, up to the next fault.

    A spell belongs to a fault if it began within four intervals after the return; other spells are
    in `elsewhere`.
    """
    recoveries = []
    ends = [next_kill.killed for next_kill in happened[1:]] + [float("inf")]
    high = spells(progress, interval)
    for kill, end in zip(happened, ends, strict=True):
        late_ends = [
            min(spell.last, end)
            for spell in high
            if spell.last >= kill.killed and spell.first <= min(_window(kill, interval), end)
        ]
        kinds = "+".join(kill.fault.kinds)
        late = max(0.0, max(late_ends) - kill.back) if late_ends else 0.0
        recoveries.append(Recovery(kinds, kill.back - kill.killed, late))
    return recoveries


def elsewhere(
    happened: Sequence[Happened], progress: Sequence[dict[str, Any]], interval: float
) -> list[Spell]:
    """Return spells of high lag that belong to no fault: a busy machine, or a defect."""
    return [
        spell
        for spell in spells(progress, interval)
        if not any(
            spell.last >= kill.killed and spell.first <= _window(kill, interval)
            for kill in happened
        )
    ]


def _window(kill: Happened, interval: float) -> float:
    return kill.back + 4 * interval
