"""Writes notes of a staging area as an agent leaves them."""

from __future__ import annotations

from pathlib import Path

from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.notes import write_note_durably
from recpoint.format.notes import CONSOLIDATION_NOTE, ConsolidationNote

__all__ = ["note_to_consolidate"]


def note_to_consolidate(run_dir: Path, run_url: str) -> None:
    """Note a run as one to consolidate in the background."""
    write_note_durably(StagedRun(run_dir), CONSOLIDATION_NOTE, ConsolidationNote(run_url=run_url))
