"""What the agent's log says of a try that failed as a flow: once, and Prefect keeps all it has."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from recpoint.catalog.persist.persist import PersistJob
from recpoint.catalog.run.run import Run
from recpoint.cli import host
from recpoint.flows.persist import run_persist
from tests.catalog_builder import tables
from tests.job_builder import stage


@pytest.mark.usefixtures("prefect_api")
def test_a_flow_that_fails_with_an_error_of_ours_is_told_by_us_alone(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = stage(run, tmp_path / "staging", tables(), step=1, generation=1)
    os.rename(tmp_path / "run", tmp_path / "away")
    assert run_persist(PersistJob.open(path)).state.name == "AwaitingRetry"
    told = [one for one in caplog.records if one.levelno >= logging.WARNING]
    of_prefect = [one.getMessage() for one in told if one.name == "prefect.flow_runs"]
    assert len(of_prefect) == 1 and "no run.json" in of_prefect[0], "other handlers have it"
    assert not [one for one in told if host.worth_showing(one)], "the agent says it, with its pause"


@pytest.mark.usefixtures("prefect_api")
def test_a_flow_that_fails_with_any_other_error_is_shown(
    run: Run,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = stage(run, tmp_path / "staging", tables(), step=2, generation=1)

    def broken(_: object) -> None:
        raise ZeroDivisionError("a fault of the program")

    monkeypatch.setattr(PersistJob, "find_done", broken)
    assert run_persist(PersistJob.open(path)).state.is_failed()
    shown = [one.getMessage() for one in caplog.records if host.worth_showing(one)]
    assert any("Encountered exception" in text and "a fault" in text for text in shown)
    assert any("Finished in state Failed" in text and "a fault" in text for text in shown)
    assert not any("Failed to write result" in text for text in shown)
