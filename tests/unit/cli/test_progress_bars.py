"""Long work shows a bar on a terminal, and says on it how far it is."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from recpoint.catalog.check.check import check
from recpoint.catalog.retention.sweep import plan_sweep
from recpoint.cli import reporting
from recpoint.serving.follower import Follower
from tests.unit.cli.conftest import Invoke, SavedRun


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is drawn on the terminal where progress goes."""
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100)
    monkeypatch.setattr(reporting, "progress_console", lambda: console)
    return drawn


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["check", "URL"], "reading manifests"),
        (["check", "URL", "--level", "full"], "checking"),
        (["validate", "URL"], "validating"),
        (["sweep", "URL", "--dry-run"], "looking for orphans"),
        (["retain", "URL", "--keep-last", "1", "--dry-run"], "reading manifests"),
        (["consolidate", "URL"], "merging"),
        (["follow", "URL", "--once"], "reading"),
    ],
)
def test_a_bar_is_drawn_and_none_where_json_is_asked_for(
    recpoint: Invoke,
    saved_run: SavedRun,
    terminal: io.StringIO,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    shown: str,
) -> None:
    monkeypatch.setenv("RECPOINT_STAGING", str(tmp_path / "staging"))
    command = [str(saved_run.directory) if one == "URL" else one for one in arguments]
    assert recpoint(*command, "--json").code in (0, 1)
    assert terminal.getvalue() == ""
    assert recpoint(*command).code in (0, 1)
    assert shown in terminal.getvalue()


def test_a_check_tells_of_each_manifest_and_each_byte(saved_run: SavedRun) -> None:
    steps: list[tuple[str, int, int]] = []
    told: list[tuple[int, int]] = []
    report = check(
        saved_run.run,
        level="full",
        on_step=lambda *step: steps.append(step),
        on_progress=lambda *read: told.append(read),
    )
    assert steps == [("reading manifests", number, 4) for number in range(1, 5)]
    assert len(told) == report.chunks_read
    assert told[-1] == (report.bytes_read, report.bytes_read)
    assert {total for _, total in told} == {report.bytes_read}
    assert sorted(told) == told


def test_a_sweep_tells_of_each_manifest_that_it_reads(saved_run: SavedRun) -> None:
    steps: list[tuple[str, int, int]] = []
    plan_sweep(saved_run.run, grace_seconds=3600.0, on_step=lambda *step: steps.append(step))
    assert steps == [("looking for orphans", number, 4) for number in range(1, 5)]


def test_a_follower_tells_of_what_it_reads(saved_run: SavedRun) -> None:
    told: list[tuple[int, int]] = []
    follower = Follower(str(saved_run.directory))
    assert follower.poll(on_progress=lambda *read: told.append(read))
    assert told[-1][0] == told[-1][1] == follower.status.bytes_read > 0
    told.clear()
    assert not follower.poll(on_progress=lambda *read: told.append(read))
    assert told == []
