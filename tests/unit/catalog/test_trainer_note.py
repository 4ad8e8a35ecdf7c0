"""What a trainer says of itself, and what is believed of it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from recpoint.catalog.staging import locks
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.trainer_note import (
    NoteState,
    read_trainer_note,
    trainer_state,
    write_trainer_note,
)
from recpoint.errors import StagingError
from recpoint.trainer_plugin.pipeline import handoff
from tests.polling import until
from tests.training_builder import Place, checkpointer, simple_training, train

URL = "s3://bucket/ads"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = StagedRun.of(tmp_path, URL).path
    directory.mkdir()
    return directory


def test_a_note_is_read_as_it_was_written_and_replaced_whole(run_dir: Path) -> None:
    assert read_trainer_note(StagedRun(run_dir)) is None
    write_trainer_note(StagedRun(run_dir), URL, "training")
    first = read_trainer_note(StagedRun(run_dir))
    assert first is not None and first[:2] == (URL, "training") and first.at_ms > 1.7e12
    write_trainer_note(StagedRun(run_dir), URL, "ended")
    assert (note := read_trainer_note(StagedRun(run_dir))) is not None and note.state == "ended"
    assert [path.name for path in run_dir.iterdir()] == ["trainer.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 60_000,
        "null",
        '{"run_url": 3, "state": "ended", "at_ms": 1}',
        '{"run_url": "s3://bucket/ads", "state": "asleep", "at_ms": 1}',
        '{"run_url": "s3://bucket/ads", "state": ["ended"], "at_ms": 1}',
        '{"run_url": "s3://bucket/ads", "state": "ended", "at_ms": "soon"}',
        '{"run_url": "s3://bucket/ads", "state": "ended", "at_ms": 1e999}',
        '{"run_url": "s3://bucket/other", "state": "ended", "at_ms": 1}',
        '{"run_url": "s3://key:secret@bucket/ads", "state": "ended", "at_ms": 1}',
        '{"run_url": "s3://bucket/ads", "state": "ended", "at_ms": 1}' + " " * 70_000 + "x",
    ],
)
def test_a_note_that_is_none_says_nothing(run_dir: Path, text: str) -> None:
    (run_dir / "trainer.json").write_text(text)
    note = read_trainer_note(StagedRun(run_dir))
    if text.endswith("x"):  # cut off where reading stops, and whole until there
        assert note is not None and note.state == "ended"
    else:
        assert note is None


def test_what_became_of_a_trainer_follows_from_lock_and_note(run_dir: Path) -> None:
    assert trainer_state(StagedRun(run_dir), None) == "unknown"
    write_trainer_note(StagedRun(run_dir), URL, "training")
    assert trainer_state(StagedRun(run_dir), read_trainer_note(StagedRun(run_dir))) == "lost"
    lock = locks.acquire(StagedRun(run_dir).trainer_lock_path(), expected="", next_step="")
    assert trainer_state(StagedRun(run_dir), read_trainer_note(StagedRun(run_dir))) == "training"
    locks.release(lock)
    write_trainer_note(StagedRun(run_dir), URL, "ended")
    assert trainer_state(StagedRun(run_dir), read_trainer_note(StagedRun(run_dir))) == "ended"


@pytest.mark.parametrize("state", ["training", "ended"])
def test_nothing_is_said_of_a_trainer_whose_lock_is_not_answered(
    run_dir: Path, state: NoteState, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trainer_note(StagedRun(run_dir), URL, state)
    locks.release(locks.acquire(StagedRun(run_dir).trainer_lock_path(), expected="", next_step=""))

    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert trainer_state(StagedRun(run_dir), read_trainer_note(StagedRun(run_dir))) == "unknown"


def state_of(place: Place) -> str:
    note = read_trainer_note(StagedRun(place.run_directory))
    assert note is None or note.run_url == place.run
    return trainer_state(StagedRun(place.run_directory), note)


@pytest.mark.parametrize("final", [True, False])
def test_a_trainer_that_closes_has_ended(tmp_path: Path, final: bool) -> None:
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    training = simple_training()
    ckpt = checkpointer(training, place, close_seconds=0.0)
    ckpt.restore()
    assert state_of(place) == "training"
    train(training, ckpt, 1)
    ckpt.close(final=final)
    assert state_of(place) == "ended"


def test_a_trainer_shows_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "BEAT_SECONDS", 0.01)
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    with checkpointer(simple_training(), place, close_seconds=0.0) as ckpt:
        ckpt.restore()
        os.utime(place.run_directory / "trainer.json", (1, 1))
        until(lambda: seen_ms(place) > 1_000)
        (place.run_directory / "trainer.json").unlink()
        assert state_of(place) == "training"
    assert state_of(place) == "ended"


def seen_ms(place: Place) -> int:
    note = read_trainer_note(StagedRun(place.run_directory))
    assert note is not None
    return note.seen_ms


def test_a_trainer_that_an_error_stops_is_lost_until_the_next_one(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    with pytest.raises(ZeroDivisionError), checkpointer(simple_training(), place) as ckpt:
        ckpt.restore()
        raise ZeroDivisionError
    assert state_of(place) == "lost"
    with checkpointer(simple_training(), place, close_seconds=0.0) as ckpt:
        ckpt.restore()
        assert state_of(place) == "training"
    assert state_of(place) == "ended"


def test_a_trainer_that_never_had_the_run_says_nothing_of_it(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    with checkpointer(simple_training(), place, close_seconds=0.0) as ckpt:
        ckpt.restore()
        second = checkpointer(simple_training(), place)
        with pytest.raises(StagingError):
            second.restore()
        second.close()
        assert state_of(place) == "training"
