"""Records what a checkpoint's state went through and how its width was chosen (format §4)."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from recpoint.format.records import Milliseconds, Part

__all__ = ["MAX_COUNT", "RULE_BITS", "ChosenPrecision", "History", "RuleBits"]

#: The widths in bits among which the rule of expected restores chooses.
RuleBits = Literal[2, 3, 4, 8]
RULE_BITS: tuple[RuleBits, ...] = get_args(RuleBits)

#: The largest time in milliseconds, and the largest count, that a record can hold.
MAX_COUNT = 2**53 - 1

_Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class ChosenPrecision(Part):
    """The width that the rule of expected restores chose for the tables under this rule.

    `expected_milli` counts thousandths of a restore, past restores included. It is the largest
    value that any decision on this line has found so far; None: not known. `fallen_back`: more
    restores happened than `expected_milli` allows for the whole job, so all its later checkpoints
    have 8 bits. `reason` is for people and says what was expected at this decision.
    """

    bits: RuleBits
    expected_milli: _Count | None
    fallen_back: bool
    reason: Annotated[str, Field(max_length=500)]

    @model_validator(mode="after")
    def _cautious(self) -> Self:
        if self.bits != 8 and (self.fallen_back or self.expected_milli is None):
            raise ValueError("bits must be 8 if fallen_back is true or expected_milli is null")
        return self


class History(Part):
    """What the state went through on its line since training began, and when the next cut was due.

    `trained_ms` is time by the trainers' monotonic clocks; it leaves out what was lost with a
    trainer. `lossy_restores` counts restores from checkpoints with quantized rows. `precision` is
    None if no table is under the rule of expected restores. `due_ms` or `due_batches` is the time,
    or the batches, from this cut to the next one by the trainer's settings. Both are None if the
    trainer did not know yet.
    """

    trained_ms: Milliseconds
    lossy_restores: _Count
    precision: ChosenPrecision | None
    due_ms: Milliseconds | None = None
    due_batches: _Count | None = None

    @model_validator(mode="after")
    def _due_once(self) -> Self:
        if self.due_ms is not None and self.due_batches is not None:
            raise ValueError("the next checkpoint is due after a time or after batches, not both")
        return self
