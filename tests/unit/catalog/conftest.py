"""What most tests of the catalog begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from recpoint.catalog.run.run import Run
from tests.catalog_builder import new_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose newest generation is 1."""
    run = new_run(tmp_path / "run")
    run.claim(None)
    return run
