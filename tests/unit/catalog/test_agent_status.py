"""What a trainer takes from the agent's status file, and what it does not."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from recpoint.catalog.staging.agent_trouble import AgentTrouble, read_trouble
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.notes import write_status
from recpoint.catalog.store.durable import TEMPORARY_PREFIX
from recpoint.errors import StoreAccessDenied
from recpoint.flows.agent.runs import RunState

URL = "s3://bucket/run"
DENIED = StoreAccessDenied(
    f"{URL}/chunks/x", found="401 NoCredentialsError", expected="a write", next_step="give a key"
)


def failing(*, tries: int = 3, age_seconds: float = 0.0, **other: object) -> dict[str, Any]:
    """A status as the agent writes it, of a run that it cannot store."""
    state = RunState(failures=tries, last_error=f"{type(DENIED).__name__}: {DENIED}")
    alive_ms = int((time.time() - age_seconds) * 1000)
    return {"pid": 1, "alive_ms": alive_ms, **state.status(), **other}


def test_the_error_is_taken_apart(tmp_path: Path) -> None:
    write_status(StagedRun(tmp_path), failing())
    found = read_trouble(StagedRun(tmp_path), URL)
    assert found is not None and str(found) == f"StoreAccessDenied: {DENIED}"
    assert found.tries == 3 and found.next_step == "give a key"
    assert found.error.endswith("found 401 NoCredentialsError; expected a write")
    assert found.cause == ("StoreAccessDenied", "give a key")


def test_what_has_no_advice_is_told_as_it_is(tmp_path: Path) -> None:
    write_status(StagedRun(tmp_path), failing(last_error="OSError: no\nroom"))
    assert read_trouble(StagedRun(tmp_path), URL) == AgentTrouble("OSError: no room", "", 3)


def test_a_command_that_is_proposed_names_the_run(tmp_path: Path) -> None:
    write_status(StagedRun(tmp_path), failing(last_error="X: bad. Next: recpoint check URL"))
    found = read_trouble(StagedRun(tmp_path), URL)
    assert found is not None and found.next_step == f"recpoint check {URL}"


@pytest.mark.parametrize(
    "status",
    [
        failing(age_seconds=60),  # of an agent that is gone
        failing(age_seconds=-3600),  # the same, and then the clock was put back
        failing(alive_ms=10**400),
        failing(tries=0),  # a job that was rejected: its trainer is told
        failing(last_error=None),
        failing(last_error=["no", "text"]),
        failing(alive_ms="now"),
        {"pid": 1},
    ],
)
def test_what_says_nothing_of_now_is_passed_over(status: dict[str, Any], tmp_path: Path) -> None:
    write_status(StagedRun(tmp_path), failing())
    assert read_trouble(StagedRun(tmp_path), URL) is not None
    write_status(StagedRun(tmp_path), status)
    assert read_trouble(StagedRun(tmp_path), URL) is None


def test_what_is_wrong_is_told_where_no_second_file_can_be_written(tmp_path: Path) -> None:
    write_status(StagedRun(tmp_path), failing(last_error="StoreFull: " + "x" * 500))
    temporary = tmp_path / f"{TEMPORARY_PREFIX}status-{threading.get_ident()}"
    temporary.mkdir()  # what is in its way, as a disk that is full is
    write_status(StagedRun(tmp_path), failing(last_error="StagingFull: no room"))
    found = read_trouble(StagedRun(tmp_path), URL)
    assert found is not None and str(found) == "StagingFull: no room"
    StagedRun(tmp_path).status_path.unlink()
    with pytest.raises(OSError, match="status"):
        write_status(StagedRun(tmp_path), failing())


def test_what_there_is_no_room_for_leaves_what_was_told_before(tmp_path: Path) -> None:
    write_status(StagedRun(tmp_path), failing(last_error="StagingFull: no room"))
    before = StagedRun(tmp_path).status_path.read_bytes()
    (tmp_path / f"{TEMPORARY_PREFIX}status-{threading.get_ident()}").mkdir()
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, kept[1]))  # a page, of a full disk
    try:
        with pytest.raises(OSError, match="too large"):
            write_status(StagedRun(tmp_path), failing(last_error="StagingFull: " + "x" * 5000))
        assert StagedRun(tmp_path).status_path.read_bytes() == before
        write_status(StagedRun(tmp_path), failing(last_error="StagingFull: " + "x" * 500))
        write_status(StagedRun(tmp_path), failing(last_error="StagingFull: still"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert str(read_trouble(StagedRun(tmp_path), URL)) == "StagingFull: still"


@pytest.mark.parametrize("data", [b"", b"[" * 60_000, b"[]", b"\xff", b'{"a": 1', b" " * 70_000])
def test_a_damaged_file_says_nothing(data: bytes, tmp_path: Path) -> None:
    assert read_trouble(StagedRun(tmp_path), URL) is None  # there is none
    StagedRun(tmp_path).status_path.write_bytes(data)
    assert read_trouble(StagedRun(tmp_path), URL) is None
    StagedRun(tmp_path).status_path.unlink()
    StagedRun(tmp_path).status_path.mkdir()
    assert read_trouble(StagedRun(tmp_path), URL) is None
