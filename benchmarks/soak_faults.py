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
    "high_between",
    "interval_seconds",
    "plan_faults",
    "recoveries",
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
    """How long after `back` lag was last at two intervals or more; 0: it was not after that."""

    kinds: str
    away_seconds: float
    seconds: float


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


def recoveries(happened: Sequence[Happened], progress: Sequence[dict[str, Any]]) -> list[Recovery]:
    """For each fault until when lag was at two intervals or more, up to the next fault."""
    found = []
    ends = [later.killed for later in happened[1:]] + [float("inf")]
    for one, end in zip(happened, ends, strict=True):
        high = [
            line["t"]
            for line in progress
            if one.killed <= line["t"] < end and line.get("lag_batches", 0) >= 2 * INTERVAL_BATCHES
        ]
        kinds = "+".join(one.fault.kinds)
        late = max(0.0, high[-1] - one.back) if high else 0.0
        found.append(Recovery(kinds, one.back - one.killed, late))
    return found


def high_between(
    happened: Sequence[Happened], progress: Sequence[dict[str, Any]], interval: float
) -> float:
    """Share of the batches long after any fault at which lag was at two intervals or more."""
    lines = [line for line in progress if "lag_batches" in line]
    quiet: list[bool] = [
        line["lag_batches"] >= 2 * INTERVAL_BATCHES
        for line in lines
        if not any(one.killed <= line["t"] <= one.back + 4 * interval for one in happened)
    ]
    return sum(quiet) / max(1, len(quiet))
