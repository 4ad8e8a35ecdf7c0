"""The fixture that most tests of serving begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.catalog_builder import new_run, tables
from tests.followed_run import Trainer


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """A trainer of a run that has no checkpoint yet."""
    run = new_run(tmp_path / "run")
    run.claim(None)
    return Trainer(run, tables())
