"""Checks every setting of a Checkpointer once, when it is built."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from recpoint.errors import SettingsError
from recpoint.format.history import ChosenPrecision
from recpoint.format.job import QUANTIZERS, QuantizerName
from recpoint.trainer_plugin.policy import Policy
from recpoint.trainer_plugin.setting_checks import (
    checked_choice,
    checked_flag,
    checked_number,
    checked_seconds,
    checked_whole,
    instance_of,
    keep,
    refused_setting,
    several,
)

__all__ = [
    "Bits",
    "ExpectedFailures",
    "FixedBits",
    "MS_PER_HOUR",
    "Options",
    "Past",
    "Precision",
    "Rate",
    "Settings",
    "Staging",
    "StateBits",
    "Timeouts",
    "WhenBusy",
    "Where",
    "as_precision",
    "as_staging",
    "failure_rate",
    "hours_left",
]


# How often a job fails and how long it goes on: what was said, or what its past suggests. Pure.
#
# Time is that of the trainers' monotonic clocks, carried from checkpoint to checkpoint: clocks of
# hosts that disagree make no difference.


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


# The settings of a checkpointer, grouped by what they are about, each checked when it is built.
#
# Numbers may be numpy's, and are kept as Python's. A default stands here, or in the signature of
# `Checkpointer`, and nowhere else.


#: What a row can be stored in; "lossless" keeps the bytes.
FixedBits = Literal["lossless", 2, 3, 4, 8]

#: The same as a setting: "auto" follows the restores that the job has to expect.
Bits = FixedBits | Literal["auto"]
BIT_WIDTHS: tuple[Bits, ...] = ("lossless", "auto", 2, 3, 4, 8)

#: What a value of element-wise optimizer state can be stored in.
StateBits = Literal["lossless", 16]
STATE_BITS: tuple[StateBits, ...] = ("lossless", 16)

#: Where rows are quantized.
Where = Literal["auto", "host", "device"]
PLACES: tuple[Where, ...] = ("auto", "host", "device")

OnError = Literal["continue", "raise"]
ON_ERROR: tuple[OnError, ...] = ("continue", "raise")

WhenBusy = Literal["skip", "wait", "cancel"]
WHEN_BUSY: tuple[WhenBusy, ...] = ("skip", "wait", "cancel")

_MAX_SLOTS = 1_000
_MOST_ROWS = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class Precision:
    """In how many bits rows and their optimizer state are stored, and how they are rounded.

    Dense layers are exact in any case.

    Attributes:
        bits: of all tables that `tables` does not name: "lossless", or 8, 4, 3 or 2 bits a value;
            "auto": as few as the restores that the job has to expect allow, see
            `recpoint.ExpectedFailures`.
        tables: table name -> bits of its rows, as `bits`.
        small_table_values: a table of at most so many values that `tables` does not name is stored
            exactly, whatever `bits` says: 16,384 take 64 KiB as float32, so that fewer bits save
            next to nothing, and such rows are often those that most samples share. 0: none.
        quantizer: how the scale and offset of a row stored in fewer bits are found: "asymmetric"
            (from its least to its greatest value), "symmetric", "greedy" (Check-N-Run's search),
            "refit" (a grid and least squares); "auto": "asymmetric" for 8 bits, for fewer "refit"
            unless "asymmetric" is as good. The agent chooses a search's parameters for each table,
            on a sample of the rows it stores.
        place: where rows are quantized: "host": by the agent. "device": by the trainer, where their
            table lives, in the cut: less to copy, and a longer stall for tables on the CPU; "auto":
            like "device" for tables on a GPU, like "host" for others. The chunks are the same.
            Values are staged nevertheless where codes would take more room or the GPU has none to
            spare, of float64 tables, and, for a quantizer with parameters to choose, where the
            agent is to choose them: in fulls, until it has told what it chose for this chain, and
            once the job has come twice as far as then.
        state: bits of optimizer state that has several float32 values a row (Adagrad's sum, Adam's
            moments). "lossless" keeps the bytes. 16: it is rounded to bfloat16: non-negative stays
            non-negative, zero stays zero, each value within 2^-8 of itself. One value a row is
            exact in any case.

    Raises:
        SettingsError: a value that cannot be; the field is named.
    """

    bits: Bits = "lossless"
    tables: Mapping[str, Bits] = field(default_factory=dict)
    small_table_values: int = 1 << 14
    quantizer: QuantizerName = "auto"
    place: Where = "auto"
    state: StateBits = "lossless"

    def __post_init__(self) -> None:
        if not isinstance(self.tables, Mapping):
            expected = "a mapping from table names to bits"
            raise refused_setting("Precision.tables", self.tables, expected)
        most = _MOST_ROWS
        keep(
            self,
            bits=checked_choice("Precision.bits", self.bits, BIT_WIDTHS),
            tables={  # what was checked is what is used
                table: checked_choice(f"Precision.tables[{table!r}]", bits, BIT_WIDTHS)
                for table, bits in self.tables.items()
            },
            small_table_values=checked_whole(
                "Precision.small_table_values", self.small_table_values, 0, most
            ),
            quantizer=checked_choice("Precision.quantizer", self.quantizer, QUANTIZERS),
            place=checked_choice("Precision.place", self.place, PLACES),
            state=checked_choice("Precision.state", self.state, STATE_BITS),
        )


def as_precision(bits: Precision | Bits) -> Precision:
    """The precision itself; of a width, the precision that has it, with the other defaults.

    Raises:
        SettingsError: it is neither.
    """
    if isinstance(bits, Precision):
        return bits
    otherwise = ", or a recpoint.Precision"
    return Precision(bits=checked_choice("bits", bits, BIT_WIDTHS, otherwise=otherwise))


@dataclass(frozen=True, kw_only=True)
class Staging:
    """Where checkpoints are staged for the agent, how many, and what happens when all wait.

    Attributes:
        directory: the staging area, on this host; None: $RECPOINT_STAGING, else `recpoint-UID` in
            /dev/shm, else in the temporary directory: where the agent looks, too.
        jobs: checkpoints that may wait for the agent; each takes the bytes of a full in the staging
            area.
        when_busy: what a checkpoint does that is due while `jobs` earlier ones are on their way.
            "skip": it is left out, and its rows are in the next one. "wait": training waits for the
            agent, at most `busy_wait_seconds`; then it is left out. "cancel": the agent is asked to
            drop the earlier one, and the due one is taken, rows of both, at the first batch after
            that, if that is within `busy_wait_seconds`; training does not wait. A checkpoint taken
            so is not dropped itself. For `jobs=1` and trainers of one rank only.
        busy_wait_seconds: see `when_busy`.

    Raises:
        SettingsError: a value that cannot be; the field is named.
    """

    directory: str | Path | None = None
    jobs: int = 1
    when_busy: WhenBusy = "skip"
    busy_wait_seconds: float = 60.0

    def __post_init__(self) -> None:
        keep(
            self,
            directory=_path("Staging.directory", self.directory),
            jobs=checked_whole("Staging.jobs", self.jobs, 1, _MAX_SLOTS),
            when_busy=checked_choice("Staging.when_busy", self.when_busy, WHEN_BUSY),
            busy_wait_seconds=checked_seconds("Staging.busy_wait_seconds", self.busy_wait_seconds),
        )
        if self.when_busy == "cancel" and self.jobs != 1:
            # Of several, the one at work is what the others stand on.
            raise refused_setting("Staging.jobs", self.jobs, '1 with when_busy="cancel"')


def as_staging(staging: Staging | str | Path | None) -> Staging:
    """The staging itself; of a path, or of None, the staging that is there.

    Raises:
        SettingsError: it is neither.
    """
    if isinstance(staging, Staging):
        return staging
    return Staging(directory=_path("staging", staging))


def _path(setting: str, value: Any) -> str | Path | None:
    if not isinstance(value, str | Path | None) or "\0" in str(value):
        raise refused_setting(setting, value, "the path of a directory")
    return value


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long a trainer waits for others, in seconds; 0: not at all.

    Attributes:
        close_seconds: how long the end of training waits for the agent, also after SIGTERM.
        drain_seconds: how long a start waits for the agent to finish what was staged before.
        ranks_seconds: where several ranks train one model: how long a rank may be behind the others
            when they agree about a checkpoint or restore one; then training ends with `RankLost`.
            As long they look, after SIGTERM, for a batch to stop after together. More than 0, and
            longer than any wait for the agent.

    Raises:
        SettingsError: a value that cannot be; the field is named.
    """

    close_seconds: float = 60.0
    drain_seconds: float = 30.0
    ranks_seconds: float = 600.0

    def __post_init__(self) -> None:
        keep(
            self,
            close_seconds=checked_seconds("Timeouts.close_seconds", self.close_seconds),
            drain_seconds=checked_seconds("Timeouts.drain_seconds", self.drain_seconds),
            ranks_seconds=checked_seconds("Timeouts.ranks_seconds", self.ranks_seconds, zero=False),
        )


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a checkpointer does besides checkpoints, and what it may rely on.

    Attributes:
        on_error: what an error of the checkpoint path does to training: "continue": nothing.
            "raise": the next `step` raises it.
        handle_sigterm: take a final checkpoint on SIGTERM, and hand the signal on.
        row_local_optimizers: optimizer classes that change no row but those looked up.
        verify_unmarked_rows: of each table, how many rows drawn at random each cut compares with
            what they, and their row states, were at the cut before: those that nothing has marked
            must be the same. Where one is not, something wrote to the table unnoticed, through
            numpy for instance: it is named in the log and counted in `stats`, and all of the table
            is stored. The stall takes the time to copy and digest so many rows; tables on a GPU
            are waited for. 0: no row is compared.
        announce: print one line to stderr when a run begins, is restored or goes back; of several
            ranks rank 0 does. The log (logger "recpoint") says more.

    Raises:
        SettingsError: a value that cannot be; the field is named.
    """

    on_error: OnError = "continue"
    handle_sigterm: bool = True
    row_local_optimizers: Sequence[type] = ()
    verify_unmarked_rows: int = 0
    announce: bool = True

    def __post_init__(self) -> None:
        row_local = tuple(several("Options.row_local_optimizers", self.row_local_optimizers))
        for optimizer in row_local:
            if not isinstance(optimizer, type):
                expected = "optimizer classes"
                raise refused_setting("Options.row_local_optimizers", optimizer, expected)
        keep(
            self,
            on_error=checked_choice("Options.on_error", self.on_error, ON_ERROR),
            handle_sigterm=checked_flag("Options.handle_sigterm", self.handle_sigterm),
            row_local_optimizers=row_local,
            verify_unmarked_rows=checked_whole(
                "Options.verify_unmarked_rows", self.verify_unmarked_rows, 0, _MOST_ROWS
            ),
            announce=checked_flag("Options.announce", self.announce),
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that one checkpointer was set to, for its parts; `Checkpointer` says what each is.

    Raises:
        SettingsError: a value that cannot be; the parameter of `Checkpointer` is named.
    """

    interval_batches: int | None
    interval_seconds: float | Literal["auto"] | None
    precision: Precision
    policy: Policy
    failures: ExpectedFailures | None
    staging: Staging
    timeouts: Timeouts
    options: Options

    def __post_init__(self) -> None:
        self._check_interval()
        if self.failures is not None:
            instance_of("failures", self.failures, ExpectedFailures)
        instance_of("timeouts", self.timeouts, Timeouts)
        instance_of("options", self.options, Options)

    @property
    def common(self) -> dict[str, Any]:
        """Those that all ranks of a job need to be given alike."""
        return {
            "interval_batches": self.interval_batches,
            "interval_seconds": self.interval_seconds,
            "policy": self.policy,
            "Staging.jobs": self.staging.jobs,
            "Staging.when_busy": self.staging.when_busy,
            "Timeouts.ranks_seconds": self.timeouts.ranks_seconds,
            "Options.handle_sigterm": self.options.handle_sigterm,
        }

    def check_ranks(self, count: int) -> None:
        """Whether they suit a job of so many ranks.

        Raises:
            SettingsError: they do not.
        """
        staging, timeouts = self.staging, self.timeouts
        if count > 1 and staging.when_busy == "cancel":
            expected = f'"skip" or "wait" with {count} ranks'
            raise refused_setting("Staging.when_busy", staging.when_busy, expected)
        longest = max(timeouts.drain_seconds, timeouts.close_seconds)
        if staging.when_busy == "wait":
            longest = max(longest, staging.busy_wait_seconds)
        if count > 1 and timeouts.ranks_seconds <= longest:
            # Else a rank that waits for its agent would be taken for one that is gone.
            raise refused_setting(
                "Timeouts.ranks_seconds",
                timeouts.ranks_seconds,
                f"more than the longest wait for the agent, {longest:g} s",
            )

    def _check_interval(self) -> None:
        if (self.interval_batches is None) == (self.interval_seconds is None):
            both = self.interval_batches is not None
            raise SettingsError(
                "interval_batches, interval_seconds",
                found="both" if both else "neither",
                expected="exactly one of them",
                next_step="set interval_batches=1000, or interval_seconds=300",
            )
        if self.interval_batches is not None:
            batches = checked_whole("interval_batches", self.interval_batches, 1, 10**12)
            keep(self, interval_batches=batches)
        elif self.interval_seconds != "auto":
            seconds = checked_seconds(
                "interval_seconds", self.interval_seconds, zero=False, otherwise=', or "auto"'
            )
            keep(self, interval_seconds=seconds)
