"""`recpoint dashboard`: what is refused before it serves anything."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

pytest.importorskip("nicegui", reason="nicegui is not installed")


def dashboard(*arguments: str) -> tuple[int, dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-m", "recpoint", "dashboard", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, document = dashboard("run", "--port", port)
    assert code == 2 and document["subject"] == f"127.0.0.1:{port}"
    assert "in use" in str(document["found"]) and "--port" in str(document["next_step"])


def test_an_address_that_is_none() -> None:
    code, document = dashboard("run", "--host", "no.such.host.invalid", "--port", "0")
    assert code == 2 and document["error"] == "SettingsError"


def test_an_interval_that_is_none() -> None:
    code, document = dashboard("run", "--interval", "0")
    assert code == 2 and document["error"] == "UsageError"


def test_a_page_without_a_run() -> None:
    code, document = dashboard("--port", "0")
    assert code == 2 and document["error"] == "UsageError"
    assert "argument 'URL'" in str(document["found"])
    assert document["next_step"] == "recpoint dashboard --help"
