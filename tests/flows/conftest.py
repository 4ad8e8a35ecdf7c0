"""Prefect for the tests of flows: one temporary server for all that run in this process."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import pytest
from prefect.settings import (
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    get_current_settings,
    temporary_settings,
)

from recpoint.catalog.run.run import Run
from tests.catalog_builder import new_run
from tests.prefect_database import place_database

if TYPE_CHECKING:
    from prefect.server.api.server import SubprocessASGIServer


def _port_of_this_worker() -> int:
    """A free port that no other worker looks at, nor the system when it connects somebody."""
    first = int(os.environ["RECPOINT_SERVER_PORT"]) + 5000
    for port in random.SystemRandom().sample(range(first, first + 100), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port from {first} on")


def _started(server: SubprocessASGIServer) -> subprocess.Popen[bytes]:
    """Its process, as Prefect starts it, but one in which garbage does not stop the server."""
    return subprocess.Popen(
        [sys.executable, "-m", "recpoint.flows.prefect_server_process"]
        + ["uvicorn", "--factory", "prefect.server.api.server:create_app"]
        + ["--host", "127.0.0.1", "--port", str(server.port)]
        + ["--log-level", "error", "--lifespan", "on"],
        env={
            **os.environ,
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT__SERVER_FINAL": "1",
            **get_current_settings().to_environment_variables(exclude_unset=True),
        },
    )


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Prefect server with an empty database."""
    # Imported here, because it takes seconds, which each worker would need to collect the tests.
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.testing import utilities

    def prepared() -> str:
        place = Path(mkdtemp())  # the harness removes it
        place_database(place / "prefect-test.db", tmp_path_factory)
        return str(place)

    with pytest.MonkeyPatch.context() as patch:
        # Its own choice is any port: taken by somebody before the server listens, some of the time.
        patch.setattr(utilities, "_find_available_port", _port_of_this_worker)
        patch.setattr(utilities, "mkdtemp", prepared)
        patch.setattr(SubprocessASGIServer, "_run_uvicorn_command", _started)
        with (
            utilities.prefect_test_harness(server_startup_timeout=400),
            temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
        ):
            yield


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose newest generation is 1."""
    run = new_run(tmp_path / "run")
    run.claim(None)
    return run
