"""Prefect for the tests of flows: one temporary server for all that run in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from recpoint.catalog.run import Run
from tests.catalog_builder import new_run


@pytest.fixture(scope="session")
def prefect_api() -> Iterator[None]:
    """A Prefect server with an empty database."""
    with (
        prefect_test_harness(server_startup_timeout=120),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose newest generation is 1."""
    run = new_run(tmp_path / "run")
    run.claim(None)
    return run
