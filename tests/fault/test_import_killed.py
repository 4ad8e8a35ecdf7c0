"""An import that is killed at its steps: no committed checkpoint, or a whole one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import NothingToRestore
from tests.fault.kill_points import Death, at_steps, ended
from tests.fault.lives import import_life
from tests.forked import ForkedProcess


def _whole(url: str, values: torch.Tensor) -> bool:
    """Whether the run has a checkpoint, which must then hold these rows."""
    target = MemoryTarget()
    try:
        restore(Run.open(open_store(url)), target)
    except NothingToRestore:
        return False
    assert torch.equal(target.tables["users"].values, values)
    return True


@pytest.mark.nightly("kills")
def test_killed_at_each_kind_of_step(tmp_path: Path) -> None:
    values = torch.arange(600.0).reshape(100, 6)
    torch.save({"users.weight": values, "top": torch.ones(3)}, tmp_path / "a.pt")
    numbers = itertools.count()

    def attempt(death: Death) -> bool:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        url = str(folder / "run")
        arguments = {"source": str(tmp_path / "a.pt"), "url": url, "scratch": str(folder)}
        first = ForkedProcess(target=import_life, kwargs={**arguments, **death._asdict()})
        first.start()
        killed = ended(first) != 0
        assert _whole(url, values) or killed
        if not _whole(url, values):  # the command, run again, writes it
            again = ForkedProcess(target=import_life, kwargs=arguments)
            again.start()
            assert ended(again) == 0 and _whole(url, values)
        return killed

    assert at_steps(attempt, tmp_path / "steps") > 10
