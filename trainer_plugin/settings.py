"""Defines a Checkpointer's settings and checks each one once, when it is built.

How often a job fails and how long it will train: as the user says, or estimated from its past.
Times come from the trainers' monotonic clocks and are carried from checkpoint to checkpoint, so
hosts whose clocks disagree make no difference.

The settings of a Checkpointer, grouped by subject; each is checked when it is built. Numbers may be
numpy's; they are kept as Python's. Defaults are written only here and in the signature of
`Checkpointer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from recpoint.embeddings.home.initial import Initial, Uniform
from recpoint.errors import SettingsError
from recpoint.format.history import ChosenPrecision
from recpoint.format.job import QUANTIZERS, QuantizerName
from recpoint.trainer_plugin.loss_setting import Loss
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


#: A job of unknown length is assumed to train again as long as it has trained, but at least this.
LEAST_HOURS_LEFT = 7 * 24.0

MS_PER_HOUR = 3_600_000
_MOST = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ExpectedFailures:
    """Says how often you expect a job to fail; what you leave out is estimated from its past.

    Numbers may be numpy's; they are kept as Python's.

    Attributes:
        per_node_hour: failures and other restarts of one node in an hour of training.
        nodes: number of nodes of the job; the job restarts if any one of them fails.
        job_hours: how long the whole job trains, in hours.

    Raises:
        SettingsError: a value is out of range, or means nothing without another one.
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
                expected = "per_node_hour too: past restarts are counted for all nodes together"
                raise refused_setting("ExpectedFailures.nodes", self.nodes, expected)
            if self.job_hours is None:
                raise refused_setting(
                    "ExpectedFailures", "neither is given", "per_node_hour or job_hours"
                )


@dataclass(frozen=True, kw_only=True)
class Past:
    """Describes what happened before a trainer's start, on the line of checkpoints it continues.

    Attributes:
        trained_ms: training time that the restored checkpoint holds, in milliseconds.
        restarts: starts of trainers on the line after the first start, including this one.
        lossy_restores: restores from quantized rows that the state has been through, including this
            one.
        precision: the precision that the rule chose for the restored checkpoint. If checkpoints are
            left behind and the job had fallen back by then, it is the precision chosen for those.
    """

    trained_ms: int = 0
    restarts: int = 0
    lossy_restores: int = 0
    precision: ChosenPrecision | None = None


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Holds the failure rate of a job, and where the number comes from.

    Attributes:
        per_hour: failures in an hour of training; infinite if nothing is known.
        source: where the number comes from, for the log.
    """

    per_hour: float
    source: str


def failure_rate(
    expected: ExpectedFailures | None, past: Past, *, trained_ms: int, assumed_hours: float = 0.0
) -> Rate:
    """Return the rate that the user gave, or else (restarts so far + 1) / (time trained so far).

    The added restart stands for the next failure, which may come at once: few restarts in a short
    time say little.

    Args:
        expected: the user's setting.
        past: what happened before this trainer's start.
        trained_ms: training time so far, including this trainer's, in milliseconds.
        assumed_hours: hours assumed to have passed without a failure, added to the time trained, so
            that there is a finite rate from the start.
    """
    if expected is not None and expected.per_node_hour is not None:
        return Rate(per_hour=expected.per_node_hour * expected.nodes, source="settings")
    hours = trained_ms / MS_PER_HOUR + assumed_hours
    source = f"{past.restarts} restarts so far and one to come in {hours:.3g} h"
    if assumed_hours:
        source += f", of which {assumed_hours:g} h are assumed"
    return Rate(per_hour=(past.restarts + 1) / hours if hours > 0 else math.inf, source=source)


def hours_left(expected: ExpectedFailures | None, *, trained_ms: int) -> float | None:
    """Return the hours of training that are left; None if the job already exceeds `job_hours`.

    Args:
        expected: the user's setting.
        trained_ms: training time so far, in milliseconds.
    """
    trained = trained_ms / MS_PER_HOUR
    if expected is None or expected.job_hours is None:
        return max(LEAST_HOURS_LEFT, trained)
    return expected.job_hours - trained if trained < expected.job_hours else None


#: Bits of a stored row's values; "lossless" keeps the bytes.
FixedBits = Literal["lossless", 2, 3, 4, 5, 6, 8]

#: The same as a setting; "auto" follows the number of restores that the job has to expect.
Bits = FixedBits | Literal["auto"]
BIT_WIDTHS: tuple[Bits, ...] = ("lossless", "auto", 2, 3, 4, 5, 6, 8)

#: Bits of a stored value of element-wise optimizer state.
StateBits = Literal["lossless", 8, 16]
STATE_BITS: tuple[StateBits, ...] = ("lossless", 8, 16)

#: Where rows are quantized.
Where = Literal["auto", "host", "device"]
PLACES: tuple[Where, ...] = ("auto", "host", "device")

OnError = Literal["continue", "raise"]
ON_ERROR: tuple[OnError, ...] = ("continue", "raise")

OnSuperseded = Literal["warn", "raise"]
ON_SUPERSEDED: tuple[OnSuperseded, ...] = ("warn", "raise")

WhenBusy = Literal["skip", "wait", "cancel"]
WHEN_BUSY: tuple[WhenBusy, ...] = ("skip", "wait", "cancel")

_MAX_SLOTS = 1_000
_MOST_ROWS = (1 << 63) - 1
_MOST_BATCHES_AHEAD = 1_000
_MOST_REWINDS = 1_000_000
#: Batches that a training loop takes before it trains them.
MOST_IN_FLIGHT = 1023


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Sets how many bits store a table's rows and their optimizer state, and how to round them.

    Dense layers are always stored exactly.

    Attributes:
        bits: bits of each value, for all tables that `tables` does not name: "lossless", 8, 6, 5,
            4, 3 or 2; "auto": as few as the expected number of restores allows (see
            `recpoint.ExpectedFailures`); a `recpoint.Loss`: as few for each row as a loss allows.
        tables: table name -> bits of its rows, as in `bits`, and no `Loss`. With a `Loss` in
            `bits`: "lossless" or 8.
        small_table_values: a table with at most this many values is stored exactly, whatever `bits`
            says, unless `tables` names it. The default of 16,384 values takes 64 KiB as float32:
            fewer bits would save next to nothing, and most samples often share these rows. 0: no
            table is exempt.
        quantizer: how the scale and offset of a row are found if it is stored in fewer bits:
            "asymmetric" (from its least to its greatest value), "symmetric", "greedy"
            (Check-N-Run's search) or "refit" (a grid and least squares). "auto": "asymmetric" for 8
            bits; for fewer bits "refit", unless "asymmetric" is as good. For a search, the agent
            chooses the parameters of each table, on a sample of the rows it stores.
        place: where rows are quantized. "host": by the agent. "device": by the trainer during the
            cut, on the table's device; this copies fewer bytes, but lengthens the stall for tables
            on the CPU. "auto": like "device" for tables on a GPU, like "host" for others. The
            stored chunks are the same. With "device", unquantized values are still staged for
            float64 tables, if codes would take more room, or if the GPU has no memory to spare. If
            the quantizer has parameters to choose, values are also staged until the agent has
            reported its choice: in fulls, at the start of a chain, and again once the job has
            trained twice as far as at the last choice.
        state: bits of each value of optimizer state with several float32 values for each row
            (Adagrad's sum, Adam's moments). "lossless" keeps the bytes. 16: values are rounded to
            bfloat16; non-negative values stay non-negative, zero stays zero, and the relative error
            is at most 2^-8. 8: second moments (Adagrad's `sum`, Adam's `exp_avg_sq`) are stored on
            a logarithmic grid of 255 values for each row. Zero and only zero is restored as zero,
            and their order stays. The relative error is at most 1/64 in a row whose values differ
            by up to a factor of 128, and twice that if the factor is squared. Other state is
            rounded to bfloat16. State with one value for each row is always stored exactly. None: 8
            with a `Loss` in `bits`, otherwise "lossless".
        residual: whether rows of increments are stored as their differences from what the full of
            their chain decodes to. These span less than the rows do, so that the same bits say
            more. Only for tables stored in fewer bits, but for float64. The agent reads the full
            for it, values are staged whatever `place` says, and merges leave the full as it is.
            None: only with a `Loss` in `bits`.

    Raises:
        SettingsError: a value is not allowed; the message names the field.
    """

    bits: Bits | Loss = "lossless"
    tables: Mapping[str, Bits] = field(default_factory=dict)
    small_table_values: int = 1 << 14
    quantizer: QuantizerName = "auto"
    place: Where = "auto"
    state: StateBits | None = None
    residual: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tables, Mapping):
            expected = "a mapping from table names to bits"
            raise refused_setting("Precision.tables", self.tables, expected)
        most = _MOST_ROWS
        keep(
            self,
            bits=_checked_bits("Precision.bits", self.bits),
            tables={  # a copy, so that a later change by the caller cannot bypass the check
                table: checked_choice(f"Precision.tables[{table!r}]", bits, BIT_WIDTHS)
                for table, bits in self.tables.items()
            },
            small_table_values=checked_whole(
                "Precision.small_table_values", self.small_table_values, 0, most
            ),
            quantizer=checked_choice("Precision.quantizer", self.quantizer, QUANTIZERS),
            place=checked_choice("Precision.place", self.place, PLACES),
            state=checked_choice("Precision.state", self._own_state, STATE_BITS),
            residual=checked_flag("Precision.residual", self._own_residual),
        )
        if self.residual and {self.bits, *self.tables.values()} == {"lossless"}:
            expected = "False, or fewer bits: rows that are stored exactly have no residuals"
            raise refused_setting("Precision.residual", self.residual, expected)
        if self.by_loss is not None:
            self._check_by_loss()

    @property
    def by_loss(self) -> Loss | None:
        """The loss that gives each row its width; None: none does."""
        return self.bits if isinstance(self.bits, Loss) else None

    @property
    def _own_state(self) -> Any:
        by_default = "lossless" if self.by_loss is None else 8
        return by_default if self.state is None else self.state

    @property
    def _own_residual(self) -> Any:
        return self.by_loss is not None if self.residual is None else self.residual

    def _check_by_loss(self) -> None:
        for table, bits in self.tables.items():
            if bits not in ("lossless", 8):
                expected = '"lossless" or 8 with bits=Loss(...)'
                raise refused_setting(f"Precision.tables[{table!r}]", bits, expected)
        if self.quantizer not in ("auto", "asymmetric"):
            expected = '"auto" or "asymmetric" with bits=Loss(...)'
            raise refused_setting("Precision.quantizer", self.quantizer, expected)
        if self.place == "device":
            expected = '"auto" or "host" with bits=Loss(...), whose widths the agent chooses'
            raise refused_setting("Precision.place", self.place, expected)


def as_precision(bits: Precision | Bits | Loss) -> Precision:
    """Return the precision itself, or a precision of the given width with all other defaults.

    Raises:
        SettingsError: `bits` is neither a precision, a width nor a loss.
    """
    if isinstance(bits, Precision):
        return bits
    return Precision(bits=_checked_bits("bits", bits, otherwise=", a recpoint.Precision"))


def _checked_bits(setting: str, bits: Any, *, otherwise: str = "") -> Bits | Loss:
    if isinstance(bits, Loss):
        return bits
    return checked_choice(setting, bits, BIT_WIDTHS, otherwise=f"{otherwise}, or a recpoint.Loss")


@dataclass(frozen=True, kw_only=True)
class Staging:
    """Sets where checkpoints wait for the agent, how many may, and what happens when as many do.

    Attributes:
        directory: the staging area, on this host. None: $RECPOINT_STAGING if it is set, else
            `recpoint-UID` in /dev/shm, else `recpoint-UID` in the temporary directory; the agent
            looks there too.
        jobs: how many checkpoints may wait for the agent; each takes the bytes of a full checkpoint
            in the staging area.
        when_busy: what happens if a checkpoint is due while `jobs` earlier ones are not finished.
            "skip": it is skipped, and its rows are in the next checkpoint. "wait": training waits
            for the agent at most `busy_wait_seconds`, then skips the checkpoint. "cancel": the
            agent is asked to drop the earlier checkpoint. Training does not wait; at the first
            batch after the drop, if that is within `busy_wait_seconds`, it takes one checkpoint
            with the rows of both. A checkpoint taken in this way cannot be dropped in turn.
            "cancel" works only with `jobs=1` and one rank.
        busy_wait_seconds: how long "wait" and "cancel" wait, in seconds; see `when_busy`.
        at_servers: embedding servers stage the rows that they have, each on its own host, in this
            same directory there. Each of these hosts needs an agent. Otherwise the rows go to the
            trainers' hosts over the network.

    Raises:
        SettingsError: a value is not allowed; the message names the field.
    """

    directory: str | Path | None = None
    jobs: int = 1
    when_busy: WhenBusy = "skip"
    busy_wait_seconds: float = 60.0
    at_servers: bool = False

    def __post_init__(self) -> None:
        keep(
            self,
            at_servers=checked_flag("Staging.at_servers", self.at_servers),
            directory=_path("Staging.directory", self.directory),
            jobs=checked_whole("Staging.jobs", self.jobs, 1, _MAX_SLOTS),
            when_busy=checked_choice("Staging.when_busy", self.when_busy, WHEN_BUSY),
            busy_wait_seconds=checked_seconds("Staging.busy_wait_seconds", self.busy_wait_seconds),
        )
        if self.when_busy == "cancel" and self.jobs != 1:
            # With several jobs, the later increments depend on the one that would be dropped.
            raise refused_setting("Staging.jobs", self.jobs, '1 with when_busy="cancel"')


def as_staging(staging: Staging | str | Path | None) -> Staging:
    """Return the staging itself, or a staging whose directory is the given path (or None).

    Raises:
        SettingsError: `staging` is none of these.
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
    """Sets how long a trainer waits for the agent and other ranks, in seconds; 0: not at all.

    Attributes:
        close_seconds: how long the end of training waits for the agent, also after SIGTERM.
        drain_seconds: how long a start waits for the agent to finish checkpoints staged earlier.
        ranks_seconds: how long a rank may be behind the others if several ranks train one model and
            agree about a checkpoint or restore one; after that, training ends with `RankLost`.
            After SIGTERM, the ranks look for a common last batch for at most this long. It must be
            more than 0, and longer than any wait for the agent.

    Raises:
        SettingsError: a value is not allowed; the message names the field.
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
    """Sets what a Checkpointer does besides taking checkpoints, and what it may assume.

    Attributes:
        on_error: what training does after an error in a checkpoint. "continue": it goes on.
            "raise": the next `step` raises the error.
        on_superseded: what training does after another trainer has started on the run, so that
            nothing more of this trainer is stored. "warn": it goes on, and a warning is repeated
            at growing distances and at the end. "raise": the next `step` raises StaleWriter, also
            with `on_error="continue"`.
        handle_sigterm: take a final checkpoint on SIGTERM, then pass the signal on.
        row_local_optimizers: optimizer classes that change only the rows looked up.
        verify_unmarked_rows: how many rows of each table to check at each cut, drawn at random. A
            row that nothing has marked must be the same as at the cut before, and so must its row
            states. If it is not, something changed the table unnoticed, for instance through numpy:
            the log names the row, `stats` counts it, and the whole table is stored. The stall grows
            by the time to copy and digest these rows; for tables on a GPU it waits for the GPU. 0:
            no row is checked.
        announce: print one line to stderr if a run begins, is restored or goes back to an earlier
            checkpoint. With several ranks, only rank 0 prints it. The log (logger "recpoint") has
            more detail.
        copy_fulls_ahead: how many batches before a full is due a thread begins to copy its rows,
            1 to 1,000. The stall then copies only rows that have changed since. There may be
            several ranks. Of tables on a GPU, a piece or two of 32 MiB are copied after each batch;
            this was run on no device. A write that torch does not count and nobody marks
            may be missing in the full if it comes while rows are copied; each full compares some
            rows, and is copied in its stall if one differs. None: fulls of tables on the CPU are
            copied ahead, early enough, once a full has stalled this process for more than 50 ms; a
            `Lookahead` has all its checkpoints copied ahead. 0 or False: a full is copied in its
            stall.
        copy_share: a thread may copy rows before a checkpoint (`copy_fulls_ahead`, `Lookahead`),
            not of tables on a GPU. This is the share of its time that it copies, above 0 and at
            most 1. It pauses for the rest, so that training keeps memory bandwidth.
        rewinds: how often a loop over `Checkpointer.batches` goes back to the newest checkpoint,
            in this process, when an embedding server is lost. The loop then yields the batches
            after that checkpoint again, and `stats` begins anew. A loss in the middle of the
            restore counts as another one. With several ranks, all go back together. 0: the loop
            raises ServerLost, or RankLost if another rank has found it first.
        grow: name of a table -> the rule for first values of rows that a restored checkpoint lacks,
            such as `recpoint.embeddings.Uniform(seed=0)`. `restore()` takes a table that is named
            here with more rows than it has in the checkpoint; the checkpoint after that is a full.
            The row states of new rows begin as the optimizer begins them. The rule is called as
            `embeddings.home.initial.Initial` says, and must give the same values at each start and
            on each rank. It is not asked if the checkpoint has all rows.
        in_flight: how many batches the training loop takes before it trains them, beside the one in
            training, as a prefetcher does: 0 to 1,023. Checkpoints hold the position of the last
            batch that is trained, and memory holds one position for each batch that is taken, some
            10 KB and the loader's own state. 0: the loop takes no batch ahead, so a batch that it
            has left out counts as trained. None: a pipeline of TorchRec is recognized, and any
            other loop that takes a batch ahead is refused.

    Raises:
        SettingsError: a value is not allowed; the message names the field.
    """

    on_error: OnError = "continue"
    on_superseded: OnSuperseded = "warn"
    handle_sigterm: bool = True
    row_local_optimizers: Sequence[type] = ()
    verify_unmarked_rows: int = 0
    announce: bool = True
    copy_fulls_ahead: int | None = None
    copy_share: float = 0.5
    rewinds: int = 0
    in_flight: int | None = None
    grow: Mapping[str, Initial] = field(default_factory=dict)

    def __post_init__(self) -> None:
        row_local = tuple(several("Options.row_local_optimizers", self.row_local_optimizers))
        for optimizer in row_local:
            if not isinstance(optimizer, type):
                expected = "optimizer classes"
                raise refused_setting("Options.row_local_optimizers", optimizer, expected)
        keep(
            self,
            on_error=checked_choice("Options.on_error", self.on_error, ON_ERROR),
            on_superseded=checked_choice(
                "Options.on_superseded", self.on_superseded, ON_SUPERSEDED
            ),
            handle_sigterm=checked_flag("Options.handle_sigterm", self.handle_sigterm),
            row_local_optimizers=row_local,
            verify_unmarked_rows=checked_whole(
                "Options.verify_unmarked_rows", self.verify_unmarked_rows, 0, _MOST_ROWS
            ),
            announce=checked_flag("Options.announce", self.announce),
            copy_fulls_ahead=_batches_ahead(self.copy_fulls_ahead),
            copy_share=checked_number("Options.copy_share", self.copy_share, highest=1, zero=False),
            rewinds=checked_whole("Options.rewinds", self.rewinds, 0, _MOST_REWINDS),
            in_flight=None
            if self.in_flight is None
            else checked_whole("Options.in_flight", self.in_flight, 0, MOST_IN_FLIGHT),
            grow=_rules("Options.grow", self.grow),
        )


def _batches_ahead(batches: Any) -> int | None:
    if batches is None:
        return None
    if batches is False:
        return 0
    return checked_whole("Options.copy_fulls_ahead", batches, 0, _MOST_BATCHES_AHEAD)


def _rules(setting: str, rules: Any) -> dict[str, Initial]:
    if not isinstance(rules, Mapping):
        raise refused_setting(setting, rules, "a mapping from table names to first values")
    for name, rule in rules.items():
        if not isinstance(name, str):
            raise refused_setting(setting, name, "a table's name")
        if not callable(rule):
            expected = "a rule such as recpoint.embeddings.Uniform(seed=0)"
            raise refused_setting(f"{setting}[{name!r}]", rule, expected)
    return dict(rules)  # a copy, so that a later change by the caller cannot bypass the check


def _rule_text(rule: Initial) -> str:
    """Return a text that is equal on all ranks for equal rules; it has no address in memory."""
    if isinstance(rule, Uniform):
        return repr(rule)
    return getattr(rule, "__qualname__", type(rule).__qualname__)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Holds all settings of one Checkpointer, for its parts; `Checkpointer` describes each.

    Raises:
        SettingsError: a value is not allowed; the message names the parameter of `Checkpointer`.
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
        """The settings that must be equal on all ranks of a job, by name."""
        by_loss = self.precision.by_loss
        return {
            "interval_batches": self.interval_batches,
            "interval_seconds": self.interval_seconds,
            "policy": self.policy,
            "Loss": None if by_loss is None else [by_loss.increase, by_loss.share],
            "Staging.jobs": self.staging.jobs,
            "Staging.when_busy": self.staging.when_busy,
            "Staging.at_servers": self.staging.at_servers,
            "Timeouts.ranks_seconds": self.timeouts.ranks_seconds,
            "Options.on_superseded": self.options.on_superseded,
            "Options.handle_sigterm": self.options.handle_sigterm,
            "Options.rewinds": self.options.rewinds,
            "Options.in_flight": self.options.in_flight,
            "Options.grow": {
                name: _rule_text(rule) for name, rule in sorted(self.options.grow.items())
            },
        }

    def check_ranks(self, count: int) -> None:
        """Check that the settings suit a job of `count` ranks.

        Raises:
            SettingsError: one of them does not.
        """
        staging, timeouts = self.staging, self.timeouts
        if count > 1 and staging.when_busy == "cancel":
            expected = f'"skip" or "wait" with {count} ranks'
            raise refused_setting("Staging.when_busy", staging.when_busy, expected)
        longest = max(timeouts.drain_seconds, timeouts.close_seconds)
        if staging.when_busy == "wait":
            longest = max(longest, staging.busy_wait_seconds)
        if count > 1 and timeouts.ranks_seconds <= longest:
            # Otherwise the others would take a rank that waits for its agent as lost.
            raise refused_setting(
                "Timeouts.ranks_seconds",
                timeouts.ranks_seconds,
                f"more than the longest wait for the agent, {longest:g} s",
            )

    def _check_interval(self) -> None:
        if (self.interval_batches is None) == (self.interval_seconds is None):
            has_both = self.interval_batches is not None
            raise SettingsError(
                "interval_batches, interval_seconds",
                found="both" if has_both else "neither",
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
