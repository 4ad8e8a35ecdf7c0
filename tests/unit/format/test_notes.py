"""Notes in the staging area: earlier releases read them, and theirs are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from recpoint.format.notes import (
    CONSOLIDATION_NOTE,
    NEWEST_RUN_NOTE,
    STATUS_NOTE,
    SWEEP_NOTE,
    TRAINING_NOTE,
    ConsolidationNote,
    NewestRunNote,
    NoteKind,
    StatusNote,
    SweepNote,
    TrainingNote,
)

#: Bytes as agents and trainers wrote them before notes had kinds.
WRITTEN: list[tuple[NoteKind[Any], bytes, Any]] = [
    (
        TRAINING_NOTE,
        b'{"run_url": "/r", "state": "ended", "at_ms": 7}\n',
        TrainingNote(run_url="/r", state="ended", at_ms=7),
    ),
    (SWEEP_NOTE, b'{"at_ms": 7}', SweepNote(at_ms=7)),
    (SWEEP_NOTE, b'{"at_ms": 7, "ended_ms": 6}', SweepNote(at_ms=7, ended_ms=6)),
    (CONSOLIDATION_NOTE, b'{"run_url": "/r"}', ConsolidationNote(run_url="/r")),
    (NEWEST_RUN_NOTE, b'{"run": "a", "run_url": "/r"}\n', NewestRunNote(run="a", run_url="/r")),
    (
        NEWEST_RUN_NOTE,
        b'{"run": "a", "run_url": "/r", "told_ms": 5}\n',
        NewestRunNote(run="a", run_url="/r", told_ms=5),
    ),
]


@pytest.mark.parametrize(("kind", "data", "note"), WRITTEN)
def test_notes_have_the_fields_that_earlier_releases_read(
    kind: NoteKind[Any], data: bytes, note: Any
) -> None:
    assert kind.unpack(data) == note
    assert json.loads(kind.pack(note)) == json.loads(data)


def test_a_status_is_read_among_fields_for_people() -> None:
    data = b'{"pid": 4, "alive_ms": 9, "failures": 2, "last_error": "x", "share": 0.5, "a": [null]}'
    assert STATUS_NOTE.unpack(data) == StatusNote(alive_ms=9, failures=2, last_error="x")


def test_a_status_may_name_a_file_that_is_not_utf_8() -> None:
    note = StatusNote(alive_ms=9, failures=2, last_error="/staging\udcff: no room")
    assert STATUS_NOTE.unpack(STATUS_NOTE.pack(note)) == note


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'{"at_ms": true}', b'{"at_ms": "7"}', b'{"at_ms": 7.5}', b"\xff"]
    + [b"[" * 60_000],
)
def test_a_damaged_note_counts_as_missing(data: bytes) -> None:
    assert SWEEP_NOTE.unpack(data) is None


def test_a_damaged_end_leaves_the_time_of_the_sweep() -> None:
    assert SWEEP_NOTE.unpack(b'{"at_ms": 7, "ended_ms": "x"}') == SweepNote(at_ms=7)
