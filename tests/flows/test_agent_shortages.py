"""An agent on a host that is short of something, and one whose jobs fail as nobody foresaw."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recpoint.catalog.persist import persist
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.flows.agent.agent import Agent
from recpoint.flows.agent.gate import PrefectGate
from tests.interposed_store import InterposedStore
from tests.job_builder import stage_chain
from tests.polling import until

#: No host has room for a stack of this size, so that it starts no thread.
_NO_ROOM = 1 << 47

#: More than an agent makes with what nobody foresaw.
_MANY_TRIES = 6


@pytest.fixture
def stack() -> Iterator[None]:
    before = threading.stack_size()
    yield
    threading.stack_size(before)


@contextmanager
def serving(staging: Path) -> Iterator[Agent]:
    """An agent at work in this process, which ends as it should."""
    ends: list[int] = []
    agent = Agent(staging, gate=PrefectGate(enabled=False), consolidate="off")
    thread = threading.Thread(target=lambda: ends.append(agent.serve()))
    thread.start()
    try:
        yield agent
    finally:
        agent.stop()
        thread.join()
    assert ends == [0]


class _Tries(logging.Handler):
    """What the agent says of tries that failed; then there is room for threads again."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "next try" in record.getMessage():
            threading.stack_size(0)
            self.said.append(record.getMessage())


def result_of(job_file: Path) -> tuple[str, str]:
    outcome = job_files.read_outcome(
        StagedRun(job_file.parents[1]).outcomes_directory / job_file.name
    )
    return outcome.result, outcome.error


@pytest.mark.usefixtures("stack")
def test_a_host_that_starts_no_thread_for_an_upload_loses_no_checkpoint(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = stage_chain(run, tmp_path / "staging", count=3)
    short = {"yes": False}

    def before(call: str, key: str) -> None:
        if short["yes"]:
            threading.stack_size(_NO_ROOM)

    store = InterposedStore(run.store, before=before)
    monkeypatch.setattr(persist, "open_store", lambda url, timeouts: store)
    tries = _Tries()
    logging.getLogger("recpoint.persist").addHandler(tries)
    hold = jobs[2].rename(jobs[2].with_suffix(".later"))
    try:
        with serving(tmp_path / "staging"):
            until(lambda: not jobs[1].exists())
            short["yes"] = True
            hold.rename(jobs[2])
            until(lambda: len(tries.said) >= _MANY_TRIES or not jobs[2].exists())
            short["yes"] = False
            until(lambda: not jobs[2].exists())
    finally:
        logging.getLogger("recpoint.persist").removeHandler(tries)
    assert all("RuntimeError: can't start new thread" in said for said in tries.said)
    assert [result_of(job) for job in jobs] == [("committed", "")] * 3


@pytest.mark.usefixtures("stack")
def test_a_run_whose_thread_cannot_be_started_is_served_later(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    with serving(staging) as agent:
        threading.stack_size(_NO_ROOM)
        (job,) = stage_chain(run, staging, count=1)
        until(lambda: caplog.text.count("can't start new thread") >= 2)
        status = json.loads(StagedRun(job.parents[1]).status_path.read_text())
        assert status["last_error"] == "RuntimeError: can't start new thread"
        (seen,) = agent.observe().runs
        assert seen.facts.failures["other"] >= 2 and job.exists()
        threading.stack_size(0)
        until(lambda: not job.exists())
    assert result_of(job) == ("committed", "")


@pytest.mark.slow
@pytest.mark.parametrize(("failing", "result"), [(4, "committed"), (5, "rejected")])
def test_what_nobody_foresaw_is_tried_again_before_its_job_is_rejected(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, result: str
) -> None:
    first, second, third, other = stage_chain(run, tmp_path / "staging", count=4)
    tries: list[str] = []

    def before(call: str, key: str) -> None:
        if second.exists() and not first.exists() and len(tries) < failing:
            tries.append(key)
            raise LookupError("nobody thought of this")

    store = InterposedStore(run.store, before=before)
    monkeypatch.setattr(persist, "open_store", lambda url, timeouts: store)
    with serving(tmp_path / "staging"):
        until(lambda: not other.exists())
    assert len(tries) == failing
    found, error = result_of(second)
    assert found == result
    if result == "rejected":
        assert "LookupError: nobody thought of this" in error
        # They stand on it.
        assert [result_of(job)[0] for job in (first, third, other)] == [
            "committed",
            *["rejected"] * 2,
        ]
    else:
        assert [result_of(job)[0] for job in (first, third, other)] == ["committed"] * 3
