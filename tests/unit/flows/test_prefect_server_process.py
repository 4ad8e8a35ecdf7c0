"""Garbage of a Prefect server: collected where nobody but the collection waits for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_cursor_that_is_garbage_does_not_stop_who_ends_what_its_connection_waits_for(
    tmp_path: Path,
) -> None:
    # By itself the program ends after 20 s with: database is locked collected.
    ended = subprocess.run(
        [sys.executable, "-m", "recpoint.flows.prefect_server_process"]
        + ["tests.cursor_in_a_cycle", tmp_path / "db"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "stored collected\n"), ended.stderr
