"""agent, server and demo: what they refuse, and what they say when there is nothing to do."""

from __future__ import annotations

import json
import logging
import subprocess
from pathlib import Path

import pytest

from recpoint.catalog.persist import upload
from recpoint.catalog.staging.agent_lock import AgentLock
from recpoint.cli import host
from recpoint.errors import StoreAccessDenied
from recpoint.installation import install_command
from tests.unit.cli.conftest import Invoke, SavedRun


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of its own, so that none that somebody uses is looked at or stopped."""
    monkeypatch.setenv("RECPOINT_HOME", str(tmp_path / "home"))


def test_an_agent_without_work_ends_when_told_to(recpoint: Invoke, tmp_path: Path) -> None:
    arguments = ("agent", "--once", "--prefect", "off", "--staging", tmp_path / "staging")
    ended = recpoint(*arguments, "--json")
    assert ended.code == 0
    assert ended.json == {"still_staged": 0}
    assert "0 checkpoints still staged" in recpoint(*arguments).stdout


def test_a_second_agent_is_refused(recpoint: Invoke, tmp_path: Path) -> None:
    with AgentLock(tmp_path):
        ended = recpoint("agent", "--once", "--prefect", "off", "--staging", tmp_path, "--json")
    assert ended.code == 2
    assert ended.json["error"] == "StagingError"
    assert "use the agent that runs" in str(ended.json)


def test_an_agent_knows_two_ways_to_use_prefect(recpoint: Invoke, tmp_path: Path) -> None:
    assert recpoint("agent", "--prefect", "maybe", "--staging", tmp_path).code == 2


@pytest.mark.parametrize("streams", ["0", "33", "many"])
def test_an_agent_refuses_numbers_of_uploads_that_cannot_work(
    recpoint: Invoke, tmp_path: Path, streams: str
) -> None:
    ended = recpoint("agent", "--once", "--upload-streams", streams, "--staging", tmp_path)
    assert ended.code == 2 and not any(tmp_path.iterdir())


def test_an_agent_uploads_no_more_at_once_than_it_may(
    recpoint: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_uploads", upload._uploads)
    arguments = ("agent", "--once", "--prefect", "off", "--staging", tmp_path)
    assert recpoint(*arguments, "--upload-streams", "3").code == 0
    assert upload._uploads.budget.most_at_once == 3


@pytest.mark.parametrize("period", ["", "1w", "-1h", "never", "0", "0.5"])
def test_an_agent_refuses_a_period_that_is_none(
    recpoint: Invoke, tmp_path: Path, period: str
) -> None:
    arguments = ("agent", "--once", "--prefect", "off", "--staging", tmp_path / "staging")
    assert recpoint(*arguments, f"--sweep-every={period}").code == 2
    assert recpoint(*arguments, "--sweep-every=off").code == 0


def test_no_server_is_no_error(recpoint: Invoke) -> None:
    assert recpoint("server", "status", "--json").json == {"running": False, "answers": False}
    assert recpoint("server", "status").stdout == "not running\n"
    ended = recpoint("server", "stop", "--json")
    assert (ended.code, ended.json) == (0, {"stopped": False})


def test_env_names_the_port_that_the_server_has(recpoint: Invoke, tmp_path: Path) -> None:
    """Not 4200, which another server may have."""
    refused = recpoint("server", "env", "--json")
    assert (refused.code, refused.json["next_step"]) == (2, "recpoint server start")
    ended = recpoint("server", "env")
    assert (ended.code, ended.stdout) == (2, "")
    (tmp_path / "home" / "prefect").mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as process:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        note = {"pid": process.pid, "port": 4273, "started": stat.rpartition(")")[2].split()[19]}
        (tmp_path / "home" / "prefect" / "server.json").write_text(json.dumps(note))
        try:
            line = recpoint("server", "env").stdout
            document = recpoint("server", "env", "--json").json
        finally:
            process.kill()
    assert line == "export PREFECT_API_URL=http://127.0.0.1:4273/api\n"
    assert document == {"PREFECT_API_URL": "http://127.0.0.1:4273/api"}


@pytest.mark.parametrize(
    "options", [["--bits", "7"], ["--interval", "0"], ["--steps", "10"], ["--store", "s3://"]]
)
def test_a_demo_that_shows_nothing_is_refused(
    recpoint: Invoke, tmp_path: Path, options: list[str]
) -> None:
    ended = recpoint("demo", "--dir", tmp_path / "demo", *options, "--json")
    assert ended.code == 2
    assert ended.json["error"] == "SettingsError"


def test_a_demo_leaves_a_directory_of_somebody_else_alone(recpoint: Invoke, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    ended = recpoint("demo", "--dir", tmp_path)
    assert ended.code == 2
    assert "was not made by a demo" in ended.stderr
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("command", [["agent"], ["demo"], ["server", "start"]])
def test_what_needs_prefect_says_how_to_get_it(
    recpoint: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(host, "find_spec", lambda package: None)
    monkeypatch.setenv("RECPOINT_STAGING", str(tmp_path / "staging"))
    found = recpoint(*command, "--json")
    assert found.code == 2
    assert found.json["subject"] == " ".join(["recpoint", *command])
    assert found.json["next_step"] == install_command("flows")
    assert ("--prefect off" in found.json["expected"]) == (command == ["agent"])


def test_a_staging_area_that_is_a_file_is_refused_by_name(
    recpoint: Invoke, tmp_path: Path, saved_run: SavedRun
) -> None:
    (tmp_path / "file").write_text("")
    for arguments in (["agent", "--once", "--prefect", "off"], ["sweep", saved_run.directory]):
        ended = recpoint(*arguments, "--staging", tmp_path / "file", "--json")
        assert ended.code == 2
        assert (ended.json["error"], ended.json["subject"]) == (
            "StagingError",
            str(tmp_path / "file"),
        )
        assert "--staging" in ended.json["next_step"]


def test_the_log_of_an_agent_is_about_checkpoints() -> None:
    def is_shown(name: str, level: int) -> bool:
        return host.worth_showing(logging.LogRecord(name, level, "", 0, "", (), None))

    assert is_shown("recpoint.persist", logging.INFO)
    assert is_shown("prefect.flow_runs", logging.WARNING)
    assert not is_shown("prefect.task_runs", logging.INFO)
    assert not is_shown("aiobotocore.credentials", logging.INFO)


def test_the_log_of_an_agent_has_no_traceback_of_an_error_that_says_what_to_do() -> None:
    def written(error: Exception) -> str:
        try:
            raise error
        except Exception as caught:
            info = (type(caught), caught, caught.__traceback__)
        record = logging.LogRecord("prefect.flow_runs", logging.ERROR, "", 0, "failed", (), info)
        text = host.LogFormat("%(message)s").format(record)
        assert record.exc_info, "other handlers have it"
        return text

    denied = StoreAccessDenied("key", found="403", expected="200", next_step="ask")
    assert written(denied) == "failed"
    assert "Traceback" in written(ZeroDivisionError())
