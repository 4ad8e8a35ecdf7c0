"""Why an agent cannot store is said where the training is watched: in the trainer's own log."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from recpoint.catalog.staging.agent_trouble import read_trouble
from recpoint.catalog.staging.area import StagedRun
from tests.fault.lives import serving
from tests.training_builder import Place, checkpointer, simple_training, train, until


def test_the_trainer_says_why_its_agent_cannot_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, close_seconds=0.0)
    ckpt.restore()
    os.rename(place.run, tmp_path / "away")
    with serving(place.staging, {}, log=tmp_path / "agent.log"):
        until(ckpt._parts.area.agent_is_running)
        train(training, ckpt, 1)
        trouble = until(lambda: read_trouble(StagedRun(place.run_directory), place.run))
        assert trouble is not None and trouble.next_step
        caplog.clear()
        train(training, ckpt, 6)  # of which none is the eighth in a row
        told = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
        assert len(told) == 1, "once for one cause"
        assert trouble.error in told[0] and told[0].endswith(f"Next: {trouble.next_step}")
        stats = ckpt.stats
        assert trouble.error in (stats.agent_error or "")
        assert (stats.failed, stats.last_error, stats.skipped) == (0, None, 6)

        caplog.clear()
        ckpt.close()
        told = [one.getMessage() for one in caplog.records if "training ends" in one.getMessage()]
        assert len(told) == 1 and trouble.error in told[0]
        assert told[0].endswith(f"Next: {trouble.next_step}")


def test_what_is_stored_at_last_is_no_error_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    away = tmp_path / "away"
    with serving(place.staging, {}, log=tmp_path / "agent.log"):
        until(ckpt._parts.area.agent_is_running)
        for _ in range(2):
            os.rename(place.run, away)
            train(training, ckpt, 1)
            until(lambda: read_trouble(StagedRun(place.run_directory), place.run))
            caplog.clear()
            train(training, ckpt, 2)
            assert sum("cannot store them" in text for text in caplog.messages) == 1, "anew"
            assert ckpt.stats.agent_error is not None
            os.rename(away, place.run)
            until(lambda: ckpt.stats.committed == ckpt.stats.staged)
            assert ckpt.stats.agent_error is None
        ckpt.close()
    assert "training ends with" not in caplog.text
