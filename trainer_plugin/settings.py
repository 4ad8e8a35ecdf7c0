"""Every setting of a checkpointer, checked once when it is built."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from recpoint.errors import SettingsError
from recpoint.format.job import QUANTIZERS, QuantizerName

__all__ = ["BIT_WIDTHS", "Bits", "OnError", "Settings", "StateBits", "several"]

#: What a row can be stored in; "lossless" keeps the bytes.
Bits = Literal["lossless", 2, 3, 4, 8]
BIT_WIDTHS: tuple[Bits, ...] = ("lossless", 2, 3, 4, 8)

#: What a value of element-wise optimizer state can be stored in.
StateBits = Literal["lossless", 16]
STATE_BITS: tuple[StateBits, ...] = ("lossless", 16)

OnError = Literal["continue", "raise"]

_Value = TypeVar("_Value")

_MAX_SLOTS = 1_000
_MAX_CHAIN = 10_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one checkpointer.

    Attributes:
        interval_batches: batches from one checkpoint to the next; this or `interval_seconds`.
        interval_seconds: seconds from one checkpoint to the next, kept to a whole batch.
        bits: how rows are stored, for all tables that `table_bits` does not name.
        table_bits: table name -> how its rows are stored.
        quantizer: how the scale and offset of a row stored in fewer bits are found: "asymmetric"
            (from its least to its greatest value), "symmetric", "greedy" (Check-N-Run's search),
            "refit" (a grid and least squares); "auto": "asymmetric" for 8 bits, for fewer "refit"
            unless "asymmetric" is as good. The agent chooses a search's parameters for each table,
            on a sample of the rows it stores.
        state_bits: 16: optimizer state of several float32 values a row (Adagrad's sum, Adam's
            moments) is rounded to bfloat16: non-negative stays non-negative, zero stays zero, each
            value within 2^-8 of itself. One value a row is exact in any case.
        full_every: a full after this many checkpoints of one chain; 1: fulls only.
        max_staged_jobs: checkpoints that may wait for the agent; each takes the bytes of a full
            in the staging area.
        staging: the staging area; None: as `catalog.staged.default_staging_root` says.
        on_error: what an error of the checkpoint path does to training: nothing, or stop it.
        row_local_optimizers: optimizer classes that change no row but those looked up.
        close_wait_seconds: how long the end of training waits for the agent.
        drain_seconds: how long a start waits for the agent to finish what was staged before.
        handle_sigterm: take a final checkpoint on SIGTERM.
    """

    interval_batches: int | None = None
    interval_seconds: float | None = None
    bits: Bits = "lossless"
    table_bits: Mapping[str, Bits] = field(default_factory=dict)
    quantizer: QuantizerName = "auto"
    state_bits: StateBits = "lossless"
    full_every: int = 16
    max_staged_jobs: int = 1
    staging: str | Path | None = None
    on_error: OnError = "continue"
    row_local_optimizers: Sequence[type] = ()
    close_wait_seconds: float = 60.0
    drain_seconds: float = 30.0
    handle_sigterm: bool = True

    def __post_init__(self) -> None:
        self._check_interval()
        _choice("bits", self.bits, BIT_WIDTHS)
        if not isinstance(self.table_bits, Mapping):
            raise _refused("table_bits", self.table_bits, "a mapping from table names to bits")
        for table, bits in self.table_bits.items():
            _choice(f"table_bits[{table!r}]", bits, BIT_WIDTHS)
        _choice("quantizer", self.quantizer, QUANTIZERS)
        _choice("state_bits", self.state_bits, STATE_BITS)
        _whole("full_every", self.full_every, 1, _MAX_CHAIN)
        _whole("max_staged_jobs", self.max_staged_jobs, 1, _MAX_SLOTS)
        _choice("on_error", self.on_error, ("continue", "raise"))
        _duration("close_wait_seconds", self.close_wait_seconds)
        _duration("drain_seconds", self.drain_seconds)
        if not isinstance(self.staging, str | Path | None) or "\0" in str(self.staging):
            raise _refused("staging", self.staging, "the path of a directory")
        if not isinstance(self.handle_sigterm, bool):
            raise _refused("handle_sigterm", self.handle_sigterm, "True or False")
        chosen = tuple(several("row_local_optimizers", self.row_local_optimizers))
        for optimizer in chosen:
            if not isinstance(optimizer, type):
                raise _refused("row_local_optimizers", optimizer, "optimizer classes")
        object.__setattr__(self, "row_local_optimizers", chosen)  # what was checked is what is used

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
            _whole("interval_batches", self.interval_batches, 1, 10**12)
        if self.interval_seconds is not None:
            _duration("interval_seconds", self.interval_seconds)
            if self.interval_seconds == 0:
                raise _refused("interval_seconds", 0, "more than 0 seconds")


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


def _whole(setting: str, value: Any, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise _refused(setting, value, f"a whole number, {lowest} to {highest}")


def _duration(setting: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        raise _refused(setting, value, "a finite number of seconds, 0 or more")


def _choice(setting: str, value: Any, choices: tuple[Any, ...]) -> None:
    # True == 1 and 2.0 == 2: the type has to be the choice's own.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise _refused(setting, value, "one of " + ", ".join(repr(choice) for choice in choices))
