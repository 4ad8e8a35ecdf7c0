"""Simulates what failures cost a job that keeps parity, and one that has checkpoints alone.

The table is the paper's: 200 M rows of 128 F32 values with row-wise Adagrad's state, on five
servers. Rates were measured on other tables. Each failure is the loss of one server, and failures
come at random. Costs are in seconds of training without parity, failures and checkpoints:

- Checkpoints alone: each stalls training. A failure costs a restore and the work since the last
  checkpoint; a failure during a restore begins it again. A checkpoint counts as stored at once,
  which favours checkpoints.
- Parity: all training is slower by the measured ratio, and still slower until a lost server is
  recovered. If another server is lost by then, the job goes back to the last checkpoint, as above.
  Checkpoints are rarer: their interval is recpoint's for failures of this kind alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.fleet_model import dirty_share
from benchmarks.parity.gate import SERVERS
from benchmarks.parity.recovery import FORMS, Measured
from recpoint.trainer_plugin.schedule.schedule import choose
from recpoint.trainer_plugin.settings import Rate

__all__ = [
    "MTBF_HOURS",
    "TABLE",
    "Costs",
    "Table",
    "auto_seconds",
    "break_even_hours",
    "costs_of",
    "overhead_of_checkpoints",
    "overhead_of_parity",
]

MTBF_HOURS = (1, 4, 8, 16, 30)
_HOUR = 3_600.0
_FAILURES = 5_000
#: Where `break_even_hours` looks, and how often it halves that.
_LEAST_HOURS, _MOST_HOURS = 1.0, 10_000.0
_HALVINGS = 12
#: Restores that take longer than this times the mean time between failures never end in practice.
_MOST_EXPONENT = 500.0
#: Rounds in which an interval and the bytes of its checkpoints settle.
_ROUNDS = 20


@dataclass(frozen=True, kw_only=True)
class Table:
    """The table that is simulated.

    Attributes:
        rows: of all tables together.
        record_bytes: of a row with its state.
    """

    rows: int
    record_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of all rows."""
        return self.rows * self.record_bytes

    @property
    def server_bytes(self) -> float:
        """Of rows and parity rows on one server, with stripes of 4 and 1."""
        data, parity = FORMS["4+1"]
        return self.rows * (self.record_bytes + 1) * (1 + parity / data) / SERVERS


TABLE = Table(rows=200_000_000, record_bytes=4 * 128 + 4)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the simulated job takes.

    Attributes:
        stall_seconds: of a checkpoint.
        restore_seconds: of the whole table.
        stored_bytes: of checkpoints, stored in a second.
        steady: throughput with parity over without.
        recovering: throughput while a server is recovered, over that without parity.
        whole_seconds: from the loss of a server until all rows have parity again.
        table: the table.
    """

    stall_seconds: float
    restore_seconds: float
    stored_bytes: float
    steady: float
    recovering: float
    whole_seconds: float
    table: Table = TABLE

    @property
    def lost_seconds(self) -> float:
        """What a recovery costs: how much longer training takes while it runs."""
        return self.whole_seconds * max(0.0, 1 - self.recovering)

    def back_seconds(self, interval_seconds: float) -> float:
        """Return what a return to a checkpoint costs: the restore and half an interval's work."""
        return self.restore_seconds + interval_seconds / 2


def costs_of(
    measured: Measured,
    *,
    stall_seconds: float,
    restored_bytes: float,
    stored_bytes: float,
    table: Table = TABLE,
) -> Costs:
    """Compute the costs for a table from rates.

    Args:
        measured: beside training.
        stall_seconds: of a checkpoint. Caches are as large as in the measurement.
        restored_bytes: rows and states restored in a second.
        stored_bytes: the same, stored in a second.
        table: the table.
    """
    return Costs(
        stall_seconds=stall_seconds,
        restore_seconds=table.total_bytes / restored_bytes,
        stored_bytes=stored_bytes,
        steady=measured.steady,
        recovering=measured.recovering,
        whole_seconds=table.server_bytes / measured.rebuilt_bytes,
        table=table,
    )


def auto_seconds(costs: Costs, mtbf_hours: float) -> float:
    """Return recpoint's interval for failures as rare as this.

    A checkpoint takes longer to store if more rows have changed since the last one. How many that
    are is Check-N-Run's curve.
    """
    rate = Rate(per_hour=1 / mtbf_hours, source="the simulation")
    seconds = 60.0
    for _ in range(_ROUNDS):
        stored = dirty_share(seconds / 60) * costs.table.total_bytes / costs.stored_bytes
        choice = choose(rate, stall_seconds=costs.stall_seconds, persist_seconds=stored)
        seconds = choice.seconds
    return seconds


def overhead_of_checkpoints(
    costs: Costs, mtbf_hours: float, interval_seconds: float, *, seed: int = 1
) -> float:
    """Return the time that a job takes with checkpoints alone, over its work, minus 1."""
    chance = random.Random(seed)
    job = _Job(costs, interval_seconds, speed=1.0)
    for _ in range(_FAILURES):
        job.train(chance.expovariate(1 / (mtbf_hours * _HOUR)))
        job.go_back(mtbf_hours * _HOUR)
    return job.overhead


def overhead_of_parity(costs: Costs, mtbf_hours: float, *, seed: int = 1) -> float:
    """Return the same of a job with stripes of 4 and 1."""
    chance = random.Random(seed)
    mtbf_seconds = mtbf_hours * _HOUR
    # The chance of a second loss in time; the server that is being recovered cannot be the second.
    uncovered = 1 - math.exp(-costs.whole_seconds * (1 - 1 / SERVERS) / mtbf_seconds)
    interval = auto_seconds(costs, mtbf_hours / max(uncovered, 1e-9))
    job = _Job(costs, interval, speed=costs.steady)
    for _ in range(_FAILURES):
        job.train(chance.expovariate(1 / mtbf_seconds))
        while True:
            following = chance.expovariate(1 / mtbf_seconds)
            if following >= costs.whole_seconds:
                job.train(costs.whole_seconds, speed=costs.recovering)
                break
            job.train(following, speed=costs.recovering)
            if chance.random() < 1 - 1 / SERVERS:
                job.go_back(mtbf_seconds)
                break
            # The server that was being recovered is lost again, and its recovery begins anew.
    return job.overhead


class _Job:
    """A job in which time passes.

    Args:
        costs: what things take.
        interval_seconds: from one checkpoint to the next.
        speed: work done in a second, if nothing else is said.
    """

    def __init__(self, costs: Costs, interval_seconds: float, *, speed: float) -> None:
        self._costs, self._interval, self._speed = costs, interval_seconds, speed
        self._wall = self._stored = self._unsaved = self._clock = 0.0

    def train(self, seconds: float, *, speed: float | None = None) -> None:
        """Let time pass in which the job trains, and take checkpoints that are due."""
        speed = self._speed if speed is None else speed
        self._wall += seconds
        seconds_to_cut = self._interval - self._clock
        if seconds < seconds_to_cut:
            self._clock += seconds
            self._unsaved += speed * seconds
            return
        # From the checkpoint that is due, whole intervals with a stall before each.
        stall = self._costs.stall_seconds
        whole, remainder = divmod(seconds - seconds_to_cut, self._interval + stall)
        self._stored += self._unsaved + speed * (seconds_to_cut + whole * self._interval)
        self._clock = max(0.0, remainder - stall)
        self._unsaved = speed * self._clock

    def go_back(self, mtbf_seconds: float) -> None:
        """Forget the work since the last checkpoint, and restore it.

        What a restore takes on average, with failures that begin it again, has a closed form.
        """
        self._unsaved = self._clock = 0.0
        tries = math.expm1(min(self._costs.restore_seconds / mtbf_seconds, _MOST_EXPONENT))
        self._wall += mtbf_seconds * tries

    @property
    def overhead(self) -> float:
        """Time over work, minus 1; infinite if no work is left."""
        work = self._stored + self._unsaved
        return self._wall / work - 1 if work else math.inf


def break_even_hours(costs: Costs, intervals: Sequence[float]) -> float:
    """Return from which mean time between failures on checkpoints alone cost less than parity.

    Args:
        costs: of the job.
        intervals: of checkpoints, in seconds; recpoint's own counts, too.

    Returns:
        Hours, 1 to 10,000; an end if one way costs less all along.
    """

    def is_parity_dearer(hours: float) -> bool:
        candidates = [*intervals, auto_seconds(costs, hours)]
        least = min(overhead_of_checkpoints(costs, hours, interval) for interval in candidates)
        return least <= overhead_of_parity(costs, hours)

    low, high = _LEAST_HOURS, _MOST_HOURS
    if is_parity_dearer(low):
        return low
    if not is_parity_dearer(high):
        return high
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_parity_dearer(middle) else (middle, high)
    return high
