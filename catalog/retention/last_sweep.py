"""Notes when an agent last swept a run of its staging area, and if that was the last time (§7)."""

from __future__ import annotations

from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.notes import read_note, write_note_durably
from recpoint.catalog.store.contract import now_ms
from recpoint.format.notes import SWEEP_NOTE, SweepNote

__all__ = ["last_sweep", "note_sweep", "swept_ms"]


def note_sweep(staged_run: StagedRun, *, ended_ms: int | None = None) -> None:
    """Note that a run was swept now, or that the wait for its first sweep begins.

    Args:
        staged_run: the run.
        ended_ms: see `SweepNote`.

    Raises:
        StagingRefused: the directory belongs to another user.
        OSError: the note cannot be written.
    """
    write_note_durably(staged_run, SWEEP_NOTE, SweepNote(at_ms=now_ms(), ended_ms=ended_ms))


def last_sweep(staged_run: StagedRun) -> SweepNote | None:
    """Return the note of the last sweep; None if there is none or it is damaged."""
    return read_note(staged_run, SWEEP_NOTE)


def swept_ms(staged_run: StagedRun) -> int | None:
    """Return `SweepNote.at_ms` of a run; None as for `last_sweep`."""
    note = last_sweep(staged_run)
    return None if note is None else note.at_ms
