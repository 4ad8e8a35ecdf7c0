"""How an agent ends: soon, wherever a signal finds it, and with nothing that was staged lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from recpoint.catalog.persist import persist
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.agent_lock import DRAIN, AgentLock, agent_lock_path
from recpoint.catalog.staging.area import StagedRun
from recpoint.cli.reporting import exit_code
from recpoint.errors import StagingError
from recpoint.flows.agent.agent import Agent, run_agent
from recpoint.flows.agent.gate import PrefectGate
from tests.catalog_builder import new_run
from tests.interposed_store import InterposedStore
from tests.job_builder import stage_chain
from tests.polling import PATIENCE_SECONDS, until
from tests.slow_agent_program import UPLOADS

_ROOT = Path(__file__).parents[2]


def start(*command: str, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{_ROOT}"}
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, *command], stdout=file, stderr=file, env=environment
        )


@pytest.mark.parametrize("why", ["a signal", "its lock is another's"])
def test_jobs_that_outlast_the_end_of_their_agent_stay_staged(tmp_path: Path, why: str) -> None:
    staging, log = tmp_path / "staging", tmp_path / "log"
    refused = exit_code(StagingError("the lock", found="another", expected="none", next_step=""))
    jobs = []
    for name in (UPLOADS, "other"):
        run = new_run(tmp_path / name)
        run.claim(None)
        jobs += stage_chain(run, staging, count=1)
    process = start("-m", "tests.slow_agent_program", str(staging), log=log)
    with ExitStack() as held:
        held.callback(process.wait)
        held.callback(process.kill)
        until(lambda: {"uploading", "looking"} <= set(log.read_text().replace("root ", "").split()))
        if why == "a signal":
            process.send_signal(signal.SIGTERM)
        else:
            agent_lock_path(staging).unlink()
            held.enter_context(AgentLock(staging))
        assert process.wait(PATIENCE_SECONDS) == (0 if why == "a signal" else refused)
    said = log.read_text()
    assert said.count("stays staged") == 2 and "Traceback" not in said, said
    assert ("a lock held by process" in said) == (why != "a signal")
    assert all(job.exists() for job in jobs)
    assert run_agent(staging, once=True, prefect="off", consolidate="off") == 0
    for job in jobs:
        answer = job_files.read_outcome(StagedRun(job.parents[1]).outcomes_directory / job.name)
        assert answer.result == "committed"


@pytest.mark.slow
def test_what_fails_since_the_agent_ends_is_held_against_no_job(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = stage_chain(run, tmp_path / "staging", count=1)
    agent = Agent(tmp_path / "staging", gate=PrefectGate(enabled=False), consolidate="off")
    tries: list[str] = []

    def before(call: str, key: str) -> None:
        tries.append(key)
        if len(tries) == 5:  # after which it would be rejected
            agent.stop()
        raise LookupError("nobody thought of this")

    store = InterposedStore(run.store, before=before)
    monkeypatch.setattr(persist, "open_store", lambda url, timeouts: store)
    serving = threading.Thread(target=agent.serve)
    serving.start()
    serving.join()
    assert len(tries) == 5 and job.exists()


def test_a_signal_is_obeyed_wherever_it_finds_the_main_thread(tmp_path: Path) -> None:
    """An Event that the handler set and the main thread waited on kept both for ever."""
    for number, waits in enumerate((False, True)):
        log = tmp_path / f"log{number}"
        command = "-m", "tests.signalled_agent_program", str(tmp_path / "staging")
        with AgentLock(tmp_path / "staging", DRAIN) if waits else nullcontext():
            process = start(*command, log=log)
            try:
                assert process.wait(PATIENCE_SECONDS) == 0, log.read_text()
            finally:
                process.kill()
                process.wait()
        assert "signalled" in log.read_text()
