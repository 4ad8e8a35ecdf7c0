"""Every setting of a checkpointer, checked once when it is built."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from recpoint.errors import SettingsError
from recpoint.format.job import QUANTIZERS, QuantizerName
from recpoint.format.manifest import MAX_CHAIN_LENGTH
from recpoint.trainer_plugin.failures import ExpectedFailures, as_float
from recpoint.trainer_plugin.policy import POLICIES, Policy, PolicyName

__all__ = [
    "BIT_WIDTHS",
    "Bits",
    "FixedBits",
    "OnError",
    "Where",
    "Settings",
    "StateBits",
    "WhenBusy",
    "ranks_wait",
    "several",
]

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
QUANTIZE_ON: tuple[Where, ...] = ("auto", "host", "device")

OnError = Literal["continue", "raise"]

WhenBusy = Literal["skip", "wait", "cancel"]
WHEN_BUSY: tuple[WhenBusy, ...] = ("skip", "wait", "cancel")

_Value = TypeVar("_Value")

_MAX_SLOTS = 1_000

SMALL_TABLE_VALUES = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one checkpointer. Numbers may be numpy's, and are kept as Python's.

    Attributes:
        interval_batches: batches from one checkpoint to the next; this or `interval_seconds`.
        interval_seconds: seconds from one checkpoint to the next, kept to a whole batch; "auto":
            from what a checkpoint is measured to cost and how often the job fails, see `interval`.
        bits: how rows are stored, for all tables that `table_bits` does not name: "lossless", 8, 4,
            3 or 2 bits a value; "auto": as few as the restores that the job has to expect allow,
            see `precision`.
        table_bits: table name -> how its rows are stored.
        small_table_values: a table of at most so many values that `table_bits` does not name is
            stored exactly, whatever `bits` says: 16,384 take 64 KiB as float32, so that fewer bits
            save next to nothing, and such rows are often those that most samples share. 0: none.
        failures: how often the job is expected to fail, for "auto"; None: as its past suggests.
        quantizer: how the scale and offset of a row stored in fewer bits are found: "asymmetric"
            (from its least to its greatest value), "symmetric", "greedy" (Check-N-Run's search),
            "refit" (a grid and least squares); "auto": "asymmetric" for 8 bits, for fewer "refit"
            unless "asymmetric" is as good. The agent chooses a search's parameters for each table,
            on a sample of the rows it stores.
        quantize_on: where rows are quantized: "host": by the agent. "device": by the trainer, where
            their table lives, in the cut: less to copy, and a longer stall for tables on the CPU;
            "auto": like "device" for tables on a GPU, like "host" for others. The chunks are the
            same. Values are staged nevertheless where codes would take more room or the GPU has
            none to spare, of float64 tables, and, for a quantizer with parameters to choose, where
            the agent is to choose them: in fulls, until it has told what it chose for this chain,
            and once the job has come twice as far as then.
        state_bits: 16: optimizer state of several float32 values a row (Adagrad's sum, Adam's
            moments) is rounded to bfloat16: non-negative stays non-negative, zero stays zero, each
            value within 2^-8 of itself. One value a row is exact in any case.
        policy: what a checkpoint holds. "consecutive": the rows changed since the one before, a
            restore reads the whole chain. "one_shot": the rows changed since the last full, a
            restore reads two. "intermittent": as "one_shot", and a full whenever one costs less
            than going on without (Check-N-Run's predictor). "continuous": as "consecutive", for
            chains that are consolidated in the background: a full only when that does not keep up.
        full_every: when a full is written in any case; 1: fulls only. For "consecutive" each
            n-th checkpoint is one; for "one_shot" and "intermittent" at most n checkpoints stand
            on one full, itself counted; for "continuous" a restore reads at most n manifests,
            consolidated ones counted as what they are. None: 16 for "consecutive", 64 for
            "continuous", else no bound.
        max_staged_jobs: checkpoints that may wait for the agent; each takes the bytes of a full
            in the staging area.
        when_busy: what a checkpoint does that is due while `max_staged_jobs` earlier ones are on
            their way. "skip": it is left out, and its rows are in the next one. "wait": training
            waits for the agent, at most `busy_wait_seconds`; then it is left out. "cancel": the
            agent is asked to drop the earlier one, and the due one is taken, rows of both, at the
            first batch after that, if that is within `busy_wait_seconds`; training does not wait. A
            checkpoint taken so is not dropped itself. For `max_staged_jobs=1` only.
        busy_wait_seconds: see `when_busy`.
        staging: the staging area; None: as `catalog.staging.staged.default_staging_root` says.
        on_error: what an error of the checkpoint path does to training: nothing, or stop it.
        row_local_optimizers: optimizer classes that change no row but those looked up.
        close_wait_seconds: how long the end of training waits for the agent, also after SIGTERM.
        drain_seconds: how long a start waits for the agent to finish what was staged before.
        ranks_wait_seconds: where several ranks train one model: how long a rank may be behind the
            others when they agree about a checkpoint or restore one; then training ends with
            `RankLost`. As long they look, after SIGTERM, for a batch to stop after together.
        handle_sigterm: take a final checkpoint on SIGTERM.
        verify_unmarked_rows: of each table, how many rows drawn at random each cut compares with
            what they, and their row states, were at the cut before: those that nothing has marked
            must be the same. Where one is not, something wrote to the table unnoticed, through
            numpy for instance: it is named in the log and counted in `stats`, and all of the table
            is stored. The stall takes the time to copy and digest so many rows; tables on a GPU
            are waited for. 0: no row is compared.
    """

    interval_batches: int | None = None
    interval_seconds: float | Literal["auto"] | None = None
    bits: Bits = "lossless"
    table_bits: Mapping[str, Bits] = field(default_factory=dict)
    small_table_values: int = SMALL_TABLE_VALUES
    failures: ExpectedFailures | None = None
    quantizer: QuantizerName = "auto"
    quantize_on: Where = "auto"
    state_bits: StateBits = "lossless"
    policy: PolicyName = "consecutive"
    full_every: int | None = None
    max_staged_jobs: int = 1
    when_busy: WhenBusy = "skip"
    busy_wait_seconds: float = 60.0
    staging: str | Path | None = None
    on_error: OnError = "continue"
    row_local_optimizers: Sequence[type] = ()
    close_wait_seconds: float = 60.0
    drain_seconds: float = 30.0
    ranks_wait_seconds: float = 600.0
    handle_sigterm: bool = True
    verify_unmarked_rows: int = 0

    def __post_init__(self) -> None:
        self._check_interval()
        self._one_of("bits", BIT_WIDTHS)
        if not isinstance(self.table_bits, Mapping):
            raise _refused("table_bits", self.table_bits, "a mapping from table names to bits")
        widths = {
            table: _chosen(f"table_bits[{table!r}]", bits, BIT_WIDTHS)
            for table, bits in self.table_bits.items()
        }
        object.__setattr__(self, "table_bits", widths)
        self._whole("small_table_values", 0, (1 << 63) - 1)
        if not isinstance(self.failures, ExpectedFailures | None):
            raise _refused("failures", self.failures, "a recpoint.ExpectedFailures")
        self._one_of("quantizer", QUANTIZERS)
        self._one_of("quantize_on", QUANTIZE_ON)
        self._one_of("state_bits", STATE_BITS)
        self._one_of("policy", POLICIES)
        if self.full_every is not None:
            self._whole("full_every", 1, MAX_CHAIN_LENGTH)
        self._whole("max_staged_jobs", 1, _MAX_SLOTS)
        self._one_of("when_busy", WHEN_BUSY)
        self._duration("busy_wait_seconds")
        if self.when_busy == "cancel" and self.max_staged_jobs != 1:
            # Of several, the one at work is what the others stand on.
            raise _refused("max_staged_jobs", self.max_staged_jobs, '1 with when_busy="cancel"')
        self._one_of("on_error", ("continue", "raise"))
        self._duration("close_wait_seconds")
        self._duration("drain_seconds")
        self._duration("ranks_wait_seconds")
        if self.ranks_wait_seconds == 0:
            raise _refused("ranks_wait_seconds", 0, "more than 0 seconds")
        if not isinstance(self.staging, str | Path | None) or "\0" in str(self.staging):
            raise _refused("staging", self.staging, "the path of a directory")
        if not isinstance(self.handle_sigterm, bool):
            raise _refused("handle_sigterm", self.handle_sigterm, "True or False")
        self._whole("verify_unmarked_rows", 0, (1 << 63) - 1)
        chosen = tuple(several("row_local_optimizers", self.row_local_optimizers))
        for optimizer in chosen:
            if not isinstance(optimizer, type):
                raise _refused("row_local_optimizers", optimizer, "optimizer classes")
        object.__setattr__(self, "row_local_optimizers", chosen)  # what was checked is what is used

    @property
    def chosen_policy(self) -> Policy:
        """When fulls are written, and what increments hold."""
        return Policy(name=self.policy, full_every=self.full_every)

    @property
    def common(self) -> dict[str, Any]:
        """Those that all ranks of a job need to be given alike."""
        names = (
            "interval_batches",
            "interval_seconds",
            "policy",
            "full_every",
            "max_staged_jobs",
            "when_busy",
            "ranks_wait_seconds",
            "handle_sigterm",
        )
        return {name: getattr(self, name) for name in names}

    def check_ranks(self, count: int) -> None:
        """Whether they suit a job of so many ranks.

        Raises:
            SettingsError: they do not.
        """
        if count > 1 and self.when_busy == "cancel":
            raise _refused("when_busy", self.when_busy, f'"skip" or "wait" with {count} ranks')
        longest = max(self.drain_seconds, self.close_wait_seconds)
        if self.when_busy == "wait":
            longest = max(longest, self.busy_wait_seconds)
        if count > 1 and self.ranks_wait_seconds <= longest:
            # Else a rank that waits for its agent would be taken for one that is gone.
            raise _refused(
                "ranks_wait_seconds",
                self.ranks_wait_seconds,
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
            self._whole("interval_batches", 1, 10**12)
        if self.interval_seconds is not None and self.interval_seconds != "auto":
            self._duration("interval_seconds", or_auto=True)
            if self.interval_seconds == 0:
                raise _refused("interval_seconds", 0, "more than 0 seconds")

    def _whole(self, setting: str, lowest: int, highest: int) -> None:
        checked = _checked_whole(setting, getattr(self, setting), lowest, highest)
        object.__setattr__(self, setting, checked)

    def _one_of(self, setting: str, choices: tuple[Any, ...]) -> None:
        object.__setattr__(self, setting, _chosen(setting, getattr(self, setting), choices))

    def _duration(self, setting: str, *, or_auto: bool = False) -> None:
        checked = _checked_seconds(setting, getattr(self, setting), or_auto=or_auto)
        object.__setattr__(self, setting, checked)


def ranks_wait(seconds: Any) -> float:
    """How long ranks wait while it is still being checked whether they were given what can work."""
    try:
        checked = _checked_seconds("ranks_wait_seconds", seconds)
    except SettingsError:
        checked = 0.0
    return checked or Settings.ranks_wait_seconds


def several(setting: str, values: Iterable[_Value]) -> list[_Value]:
    """The values of a setting that takes a sequence.

    Raises:
        SettingsError: it was given something else.
    """
    if not isinstance(values, Iterable):
        raise _refused(setting, values, "a list or tuple")
    return list(values)


def _refused(setting: str, found: Any, expected: str) -> SettingsError:
    return SettingsError(
        setting,
        found=f"{found!r:.200}",
        expected=expected,
        next_step=f"change {setting} where the Checkpointer is built",
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _checked_whole(setting: str, value: Any, lowest: int, highest: int) -> int:
    if not _is_whole(value) or not lowest <= int(value) <= highest:
        raise _refused(setting, value, f"a whole number, {lowest} to {highest}")
    return int(value)


def _checked_seconds(setting: str, value: Any, *, or_auto: bool = False) -> float:
    seconds = as_float(value)
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        auto = ', or "auto"' if or_auto else ""
        raise _refused(setting, value, "a finite number of seconds, 0 or more" + auto)
    return seconds


def _chosen(setting: str, value: Any, choices: tuple[_Value, ...]) -> _Value:
    """The choice that was given."""
    # True == 1 and 2.0 == 2: only whole numbers, numpy's too, are choices that are whole numbers.
    kind = int if _is_whole(value) else type(value)
    for choice in choices:
        if kind is type(choice) and value == choice:
            return choice
    raise _refused(setting, value, "one of " + ", ".join(repr(choice) for choice in choices))
