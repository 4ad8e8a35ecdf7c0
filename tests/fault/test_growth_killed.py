"""SIGKILL in each batch around a growth: the run goes on to the very bits of one never killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.fault.growth_lives import LAST_BATCH, Kind, growing_life
from tests.forked import ForkedProcess
from tests.polling import PATIENCE_SECONDS

pytestmark = pytest.mark.nightly("loops")


def live(place: Path, kind: Kind, kill_in: int | None = None) -> dict[str, torch.Tensor] | None:
    """Run one life; return the rows of a whole one."""
    place.mkdir(exist_ok=True)
    process = ForkedProcess(
        target=growing_life,
        kwargs={"place": str(place), "kind": kind, "kill_in": kill_in},
        daemon=True,
    )
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == (0 if kill_in is None else -signal.SIGKILL)
    return None if kill_in else torch.load(place / "rows.pt")


@pytest.mark.parametrize("kind", ["plain", "memory", "files"])
def test_a_run_that_is_killed_around_a_growth_ends_with_the_same_rows(
    tmp_path: Path, kind: Kind
) -> None:
    """Before the growth, before the full that follows it, and after."""
    whole = live(tmp_path / "whole", kind)
    assert whole is not None and len(whole["values"]) == 90
    for kill_in in range(3, LAST_BATCH + 1):
        place = tmp_path / f"killed-{kill_in}"
        live(place, kind, kill_in)
        resumed = live(place, kind)
        assert resumed is not None and resumed.keys() == whole.keys()
        assert all(torch.equal(resumed[name], whole[name]) for name in whole)
