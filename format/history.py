"""What the state in a checkpoint has been through, and how its width was chosen (format §4)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from recpoint.format.records import Milliseconds, Part

__all__ = ["MAX_COUNT", "History", "ChosenPrecision", "RuleBits"]

#: What the rule of expected restores chooses among.
RuleBits = Literal[2, 3, 4, 8]

#: The greatest time and count that a record can hold.
MAX_COUNT = 2**53 - 1

_Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class ChosenPrecision(Part):
    """The width that the rule of expected restores chose, for the tables that are under it.

    `expected_milli` is in thousandths of a restore, those that have happened included, and the most
    that any decision on this line came to so far; None: not known. `fallen_back`: there were more
    restores than the `expected_milli` of the whole job, and all later checkpoints of the job have 8
    bits. `reason` is for people, and says what was expected when this was decided.
    """

    bits: RuleBits
    expected_milli: _Count | None
    fallen_back: bool
    reason: Annotated[str, Field(max_length=500)]

    @model_validator(mode="after")
    def _cautious(self) -> Self:
        if self.bits != 8 and (self.fallen_back or self.expected_milli is None):
            raise ValueError("8 bits where nothing is expected any more, or nothing is known")
        return self


class History(Part):
    """What the state has been through since its training began, on the line it is on; and when its
    trainer meant to take the next checkpoint.

    `trained_ms` is time by the trainers' monotonic clocks; what was lost with a trainer is not in
    it. `lossy_restores` counts restores from checkpoints that held quantized rows. `precision` is
    None where no table is under the rule. `due_ms` and `due_batches`: time, or batches, from this
    cut to the next one as its trainer's settings had it; both None: it did not know yet.
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
