"""How often a job fails and how long it goes on: what was said, or what its past suggests. Pure.

Time is that of the trainers' monotonic clocks, carried from checkpoint to checkpoint: clocks of
hosts that disagree make no difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from recpoint.format.history import ChosenPrecision
from recpoint.trainer_plugin.setting_checks import (
    checked_number,
    checked_whole,
    keep,
    refused_setting,
)

__all__ = [
    "MS_PER_HOUR",
    "ExpectedFailures",
    "Past",
    "Rate",
    "failure_rate",
    "hours_left",
]

#: A job of unknown length is taken to go on for as long as it has lasted, and at least this long.
LEAST_HOURS_LEFT = 7 * 24.0

MS_PER_HOUR = 3_600_000
_MOST = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ExpectedFailures:
    """What is known of a job's failures beforehand; what is not given follows from its past.

    Numbers may be numpy's, and are kept as Python's.

    Attributes:
        per_node_hour: failures, and other restarts, of one node in an hour of training.
        nodes: nodes of the job; any one that fails restarts the job.
        job_hours: how long the whole job trains.

    Raises:
        SettingsError: a value that cannot be, or that means nothing without another.
    """

    per_node_hour: float | None = None
    nodes: int = 1
    job_hours: float | None = None

    def __post_init__(self) -> None:
        keep(self, nodes=checked_whole("ExpectedFailures.nodes", self.nodes, 1, _MOST))
        for name, zero in (("per_node_hour", True), ("job_hours", False)):
            value = getattr(self, name)
            if value is not None:
                setting = f"ExpectedFailures.{name}"
                keep(self, **{name: checked_number(setting, value, highest=_MOST, zero=zero)})
        if self.per_node_hour is None:
            if self.nodes != 1:
                expected = "per_node_hour with it: restarts of the past are of all nodes together"
                raise refused_setting("ExpectedFailures.nodes", self.nodes, expected)
            if self.job_hours is None:
                raise refused_setting(
                    "ExpectedFailures", "neither of the two", "per_node_hour or job_hours"
                )


@dataclass(frozen=True, kw_only=True)
class Past:
    """What came before a trainer's start, on the line of checkpoints that it goes on with.

    Attributes:
        trained_ms: training that the restored checkpoint holds.
        restarts: starts of trainers on the line after its first, this one included.
        lossy_restores: restores from quantized rows that the state has been through, this one's
            included.
        precision: what the rule had chosen for the restored checkpoint; or since, for what is left
            behind, where the job had fallen back by then.
    """

    trained_ms: int = 0
    restarts: int = 0
    lossy_restores: int = 0
    precision: ChosenPrecision | None = None


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Failures of the job in an hour, infinite when nothing is known; and where that is from."""

    per_hour: float
    source: str


def failure_rate(
    expected: ExpectedFailures | None, past: Past, *, trained_ms: int, assumed_hours: float = 0.0
) -> Rate:
    """As was said; else the restarts so far and one more, in the time trained so far.

    One more, since the next may come at once: few restarts in little time say little.

    Args:
        expected: what was said.
        past: what came before this trainer.
        trained_ms: training so far, this trainer's included.
        assumed_hours: without failures, added to the time trained: a rate to begin with.
    """
    if expected is not None and expected.per_node_hour is not None:
        return Rate(per_hour=expected.per_node_hour * expected.nodes, source="settings")
    hours = trained_ms / MS_PER_HOUR + assumed_hours
    source = f"{past.restarts} restarts so far and one to come in {hours:.3g} h"
    if assumed_hours:
        source += f", {assumed_hours:g} h of them assumed"
    return Rate(per_hour=(past.restarts + 1) / hours if hours > 0 else math.inf, source=source)


def hours_left(expected: ExpectedFailures | None, *, trained_ms: int) -> float | None:
    """Hours of training to come; None when the job goes on for longer than was said."""
    trained = trained_ms / MS_PER_HOUR
    if expected is None or expected.job_hours is None:
        return max(LEAST_HOURS_LEFT, trained)
    return expected.job_hours - trained if trained < expected.job_hours else None
