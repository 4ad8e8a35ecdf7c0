"""`recpoint automations` where it cannot do its work."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from recpoint.errors import SettingsError
from recpoint.flows.automations import AlertSettings
from tests.forked_program import run_module


def refused(home: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    clean = {name: v for name, v in os.environ.items() if not name.startswith("PREFECT_")}
    homes = {"RECPOINT_HOME": str(home), "PREFECT_HOME": str(home)}
    done = run_module(
        ["recpoint", "automations", *arguments, "--json"],
        environment={**clean, **homes, **variables},
        directory=home,
    )
    assert done.returncode == 2, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_without_an_api_no_server_is_started(tmp_path: Path) -> None:
    found = refused(tmp_path, "apply")
    assert found["found"] == "no Prefect API" and found["next_step"] == "recpoint server start"
    assert not (tmp_path / "prefect.db").exists()


def test_an_api_that_does_not_answer(tmp_path: Path) -> None:
    found = refused(tmp_path, "list", PREFECT_API_URL="http://user:secret@127.0.0.1:9/api")
    assert found["subject"] == "http://127.0.0.1:9" and "no answer" in found["found"]


@pytest.mark.parametrize(
    "settings",
    [
        {"no_commit_seconds": 9.9},
        {"no_commit_seconds": float("nan")},
        {"no_commit_intervals": 1.0},
        {"no_commit_intervals": float("nan")},
        {"notify": "x"},
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        AlertSettings(**settings)
