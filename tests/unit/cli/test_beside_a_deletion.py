"""Commands that read, beside a deletion that was announced just before (format §6.6)."""

from __future__ import annotations

from pathlib import Path

import pytest

from recpoint.catalog.run import going
from recpoint.catalog.run.deletions import announce
from recpoint.catalog.run.validations import verdicts
from recpoint.format.naming import MANIFEST_KEY
from tests.unit.cli.conftest import Invoke, SavedRun


@pytest.fixture(autouse=True)
def waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(going, "_WAIT_SECONDS", 0.0)


@pytest.mark.parametrize("command", ["restore", "restore into files", "seed", "validate"])
def test_what_is_named_and_goes_is_refused(
    recpoint: Invoke, saved_run: SavedRun, tmp_path: Path, command: str
) -> None:
    announce(saved_run.run, (MANIFEST_KEY.of(25, 1),))
    to = tmp_path / ("files" if "files" in command else "one.pt")
    if "files" in command:
        to.mkdir()
    options = ["--to", to] if command.startswith("restore") else []
    arguments = [command.split()[0], saved_run.directory, *options]
    ended = recpoint(*arguments, "--step", 25, "--generation", 1)
    assert ended.code == 1 and "it is being deleted" in ended.stderr
    assert "recpoint list" in ended.stderr
    assert not to.exists() or not list(to.iterdir())
    assert not verdicts(saved_run.run)
    assert recpoint(*arguments, "--step", 20).code == 0
