"""An agent and the Prefect server it starts: absent, there, hanging, killed; jobs never wait."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.flows import prefect_server
from recpoint.flows.agent.gate import PrefectGate
from tests.agent_process import AgentProcess
from tests.catalog_builder import tables
from tests.job_builder import stage
from tests.polling import until
from tests.prefect_api import ask
from tests.prefect_database import place_database

#: From staged to answered: the bound that a hanging API must not break. Prefect's client would wait
#: for minutes.
_BOUND_SECONDS = 60.0

#: An agent leaves an API that was slow alone for up to two minutes, more than once.
_SHOWN_SECONDS = 600.0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home without any Prefect configuration, whose server is stopped at the end."""
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RECPOINT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    yield tmp_path / "home"
    prefect_server.stop_server()


def flow_run_states(url: str) -> dict[str, str]:
    """State by name of all flow runs of a server."""
    return {run["name"]: run["state_type"] for run in ask(f"{url}/flow_runs/filter", {})}


@pytest.mark.slow
def test_jobs_are_committed_whatever_the_server_does(
    run: Run, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, home: Path
) -> None:
    place_database(home / "prefect" / "prefect.db", tmp_path_factory)
    staging = tmp_path / "staging"
    step = 0

    def persist_one() -> str:
        """Stage a job and wait for its answer; its flow run's name."""
        nonlocal step
        step += 1
        path = stage(run, staging, tables(bits=4), step=step, generation=1, slot=step)
        until(lambda: not path.exists(), seconds=_BOUND_SECONDS)
        answer = job_files.read_outcome(path.parent.parent / "outcomes" / path.name)
        assert answer.result == "committed"
        return f"persist run step {step} rank 0"

    def persist_one_bare(agent: AgentProcess) -> None:
        """Stage a job that has to be committed without Prefect."""
        before = agent.logged("committed without Prefect")
        persist_one()
        until(lambda: agent.logged("committed without Prefect") > before)

    def persist_until_shown(url: str) -> None:
        """Stage jobs until one is to be seen as a completed flow run.

        Not the first for sure: on a busy machine an API that has just come up is slow enough to be
        given up once more, and SQLite may be locked for a minute.
        """
        deadline = time.monotonic() + _SHOWN_SECONDS
        while time.monotonic() < deadline:
            name = persist_one()
            seen = time.monotonic() + 10
            while time.monotonic() < seen:
                if flow_run_states(url).get(name) == "COMPLETED":
                    return
                time.sleep(0.1)
        raise TimeoutError(f"no flow run was completed within {_SHOWN_SECONDS} s")

    with AgentProcess(staging, tmp_path / "log", prefect="auto") as agent:
        # The server is not there yet, however fast it comes up, and nobody waits for it.
        until(lambda: agent.logged("serving") > 0)
        starting = until(prefect_server.running_server)
        os.killpg(starting.pid, signal.SIGSTOP)
        persist_one_bare(agent)
        assert agent.logged("Prefect is at") == 0
        os.killpg(starting.pid, signal.SIGCONT)
        until(lambda: agent.logged("Prefect is at") >= 1, seconds=_SHOWN_SECONDS)
        server = prefect_server.running_server()
        assert server is not None
        run_dir = StagedRun.of(staging, run.url).path
        shown = prefect_server.ui_url(server.url)
        until(lambda: shown in StagedRun(run_dir).status_path.read_text())

        # There: the flow is run, and to be seen.
        persist_until_shown(server.url)

        # Hanging.
        os.killpg(server.pid, signal.SIGSTOP)
        persist_one_bare(agent)
        persist_one_bare(agent)
        os.killpg(server.pid, signal.SIGCONT)
        persist_until_shown(server.url)

        # Killed while it is used.
        os.killpg(server.pid, signal.SIGKILL)
        persist_one_bare(agent)
        assert prefect_server.running_server() != server

        stopped = time.monotonic()
        assert agent.terminate() == 0
        assert time.monotonic() - stopped < _BOUND_SECONDS
    assert len(run.live_line()) == step


@pytest.mark.nightly("prefect")
def test_a_store_that_is_away_is_one_line_a_try_and_one_flow_run(
    run: Run, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, home: Path
) -> None:
    place_database(home / "prefect" / "prefect.db", tmp_path_factory)
    staging = tmp_path / "staging"

    def flow_run(url: str) -> dict[str, Any] | None:
        found = ask(f"{url}/flow_runs/filter", {})
        assert len(found) <= 1
        return found[0] if found else None

    with AgentProcess(staging, tmp_path / "log", prefect="auto") as agent:
        until(lambda: agent.logged("Prefect is at") >= 1, seconds=_SHOWN_SECONDS)
        server = prefect_server.running_server()
        assert server is not None
        os.rename(tmp_path / "run", tmp_path / "away")
        path = stage(run, staging, tables(), step=1, generation=1)
        until(lambda: (flow_run(server.url) or {}).get("run_count", 0) >= 2)
        os.rename(tmp_path / "away", tmp_path / "run")
        until(lambda: not path.exists())
        until(lambda: (flow_run(server.url) or {})["state_type"] == "COMPLETED")
        assert agent.terminate() == 0
        # The server outlives the agent, and the agent says so.
        left = f"the local Prefect server (process {server.pid}, "
        assert agent.logged(left) == agent.logged("recpoint server stop ends it") == 1
        assert prefect_server.running_server() == server
    lines = (tmp_path / "log").read_text().splitlines()
    # The command recpoint agent leaves Prefect's own line out: tests/flows/test_agent_log.py.
    tries = [x for x in lines if "no run.json" in x and "Finished in state AwaitingRetry" not in x]
    assert len(tries) >= 2 and all("stays staged, next try in" in line for line in tries)
    assert not [line for line in lines if "Traceback" in line]


@pytest.mark.nightly("prefect")
def test_an_api_that_wants_the_key_in_its_url_is_used(
    run: Run,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database = home / "prefect" / "prefect.db"
    place_database(database, tmp_path_factory)
    with monkeypatch.context() as patch:
        patch.setenv("PREFECT_SERVER_API_AUTH_STRING", "me:S3cret-word")
        server = prefect_server.start_server()
    until(lambda: prefect_server.is_healthy(server.url), seconds=_SHOWN_SECONDS)
    with_key = server.url.replace("://", "://me:S3cret-word@")
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect" / "profiles.toml").write_text(
        f'active = "team"\n[profiles.team]\nPREFECT_API_URL = "{with_key}"\n'
    )
    steps = itertools.count(1)

    def persisted_by_a_flow() -> bool:
        step = next(steps)
        path = stage(run, tmp_path / "staging", tables(), step=step, generation=1, slot=step)
        until(lambda: not path.exists(), seconds=_BOUND_SECONDS)
        with closing(sqlite3.connect(database, timeout=_BOUND_SECONDS)) as connection:
            (seen,) = connection.execute(
                "SELECT count(*) FROM events WHERE event = 'recpoint.checkpoint.committed'"
            ).fetchone()
        return bool(seen)

    with AgentProcess(tmp_path / "staging", tmp_path / "log", prefect="auto") as agent:
        until(lambda: agent.logged("Prefect is at") > 0, seconds=_SHOWN_SECONDS)
        until(persisted_by_a_flow, seconds=_SHOWN_SECONDS)

        # Away while nobody asks for it.
        opened = agent.logged("Prefect is at")
        os.killpg(server.pid, signal.SIGSTOP)
        until(lambda: agent.logged(f"back: {server.url} does not answer") > 0)
        os.killpg(server.pid, signal.SIGCONT)
        until(lambda: agent.logged("Prefect is at") > opened, seconds=_SHOWN_SECONDS)
        assert agent.terminate() == 0
        assert agent.logged("S3cret") == agent.logged("Unable to connect") == 0


@pytest.mark.nightly("prefect")
def test_a_server_that_cannot_start_is_told_of_and_left_alone(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = prefect_server.server_directory()
    directory.mkdir(parents=True)
    (directory / "prefect.db").write_bytes(b"no database" * 1000)
    gate = PrefectGate(enabled=True)
    gate.start()
    try:
        until(lambda: "ended before it answered" in caplog.text)
        assert "without Prefect for 5 s or more" in caplog.text
        assert f"see {directory / 'server.log'}" in caplog.text
        until(lambda: "without Prefect for 10 s or more" in caplog.text)  # the second one
        assert gate.persist_flow() is None and prefect_server._started.keys() <= {0}
    finally:
        gate.stop()


def test_a_server_is_started_once_and_stopped_with_all_its_processes(home: Path) -> None:
    assert prefect_server.running_server() is None
    assert prefect_server.stop_server() is False
    server = prefect_server.start_server()
    assert prefect_server.start_server() == server
    assert prefect_server.running_server() == server
    os.killpg(server.pid, signal.SIGSTOP)
    assert not prefect_server.is_healthy(server.url, timeout_seconds=0.3)
    assert prefect_server.stop_server() is True
    assert prefect_server.running_server() is None
    with pytest.raises(ProcessLookupError):
        os.killpg(server.pid, 0)
    with pytest.raises(ChildProcessError):  # waited for: no zombie of it is left
        os.waitpid(server.pid, os.WNOHANG)


def test_servers_that_start_at_once_have_ports_of_their_own(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before either of them listens."""
    other = tmp_path / "other"
    mine = prefect_server.start_server()
    try:
        monkeypatch.setenv("RECPOINT_HOME", str(other))
        theirs = prefect_server.start_server()
        assert prefect_server.stop_server() is True
    finally:
        monkeypatch.setenv("RECPOINT_HOME", str(home))
    assert mine.port != theirs.port
    # What a server has claimed goes with it.
    assert prefect_server.stop_server() is True
    monkeypatch.setenv("RECPOINT_SERVER_PORT", str(mine.port))
    assert prefect_server.start_server().port == mine.port


def test_the_process_of_another_program_is_never_taken_for_the_server(home: Path) -> None:
    directory = prefect_server.server_directory()
    directory.mkdir(parents=True)
    foreign = {"pid": os.getpid(), "port": 4200, "started": "1"}
    (directory / "server.json").write_text(json.dumps(foreign))
    assert prefect_server.running_server() is None
    assert prefect_server.stop_server() is False
    for text in ("", "{", "[]", '{"pid": "x"}'):
        (directory / "server.json").write_text(text)
        assert prefect_server.running_server() is None


def test_a_configured_api_is_found_in_environment_and_profile(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prefect_server.configured_url() is None
    (tmp_path / "prefect").mkdir(exist_ok=True)
    (tmp_path / "prefect" / "profiles.toml").write_text(
        'active = "team"\n[profiles.team]\nPREFECT_API_URL = "http://prefect.example/api"\n'
    )
    assert prefect_server.configured_url() == "http://prefect.example/api"
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert prefect_server.configured_url() == "http://127.0.0.1:9/api"
    assert not prefect_server.is_healthy("http://127.0.0.1:9/api")
    assert prefect_server.ui_url("http://127.0.0.1:9/api/") == "http://127.0.0.1:9"
    with_key = "https://me:secret@prefect.example:8/at/api"
    assert prefect_server.ui_url(with_key) == "https://prefect.example:8/at"
