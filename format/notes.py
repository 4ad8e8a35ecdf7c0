"""Lists the notes in the staging area that are for people and for the next agent (format §7).

A note is a small JSON object without an envelope. No checkpoint depends on one, so a note that
cannot be read counts as missing, and fields that this release does not know are left alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

__all__ = [
    "CONSOLIDATION_NOTE",
    "MAX_NOTE_BYTES",
    "NEWEST_RUN_NOTE",
    "STATUS_NOTE",
    "SWEEP_NOTE",
    "TRAINING_NOTE",
    "ConsolidationNote",
    "NewestRunNote",
    "Note",
    "NoteKind",
    "StatusNote",
    "SweepNote",
    "TrainingNote",
]

MAX_NOTE_BYTES: Final = 65_536


def _integer_or_none(value: object) -> object:
    return value if type(value) is int else None


_OptionalMs = Annotated[int | None, BeforeValidator(_integer_or_none)]


class Note(BaseModel):
    """What a note holds; converts no values."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class TrainingNote(Note):
    """A trainer's note: the run that it trains, and whether it has ended."""

    run_url: str
    state: Literal["training", "ended"]
    at_ms: int


class StatusNote(Note):
    """What a trainer repeats of an agent's status: when it was written, and its last error.

    `failures` is the number of failed tries in a row.
    """

    alive_ms: int
    failures: int
    last_error: str


class SweepNote(Note):
    """When an agent swept a run last.

    Attributes:
        at_ms: time of the sweep, or since when the first one is waited for; in milliseconds since
            the epoch by this host's clock.
        ended_ms: if the sweep found nothing left to do after training had ended: the time of that
            end, by the trainer's clock. None: something was left, or training had not ended.
    """

    at_ms: int
    ended_ms: _OptionalMs = None


class ConsolidationNote(Note):
    """The URL of a run to consolidate in the background."""

    run_url: str


class NewestRunNote(Note):
    """The newest run that an agent has begun to store a job of.

    `told_ms`: Prefect was told that the training whose note has this `at_ms` has ended.
    """

    run: str
    run_url: str
    told_ms: _OptionalMs = None


NoteT = TypeVar("NoteT", bound=Note)


@dataclass(frozen=True)
class NoteKind(Generic[NoteT]):
    """One kind of note: the name of its file in a run's directory, and its contents."""

    file: str
    model: type[NoteT]

    def pack(self, note: NoteT) -> bytes:
        """Return a note's bytes."""
        fields: dict[str, Any] = note.model_dump(exclude_none=True)
        return (json.dumps(fields) + "\n").encode()

    def unpack(self, data: bytes) -> NoteT | None:
        """Return the note in `data`; None if it is damaged."""
        try:
            # json, because pydantic refuses names that are not UTF-8, which `pack` writes escaped.
            return self.model.model_validate(json.loads(data))
        except (ValueError, RecursionError):  # pydantic's errors are ValueErrors
            return None


TRAINING_NOTE: Final = NoteKind("trainer.json", TrainingNote)
STATUS_NOTE: Final = NoteKind("status.json", StatusNote)
SWEEP_NOTE: Final = NoteKind("sweep.json", SweepNote)
CONSOLIDATION_NOTE: Final = NoteKind("consolidate.json", ConsolidationNote)
NEWEST_RUN_NOTE: Final = NoteKind("silence.json", NewestRunNote)
