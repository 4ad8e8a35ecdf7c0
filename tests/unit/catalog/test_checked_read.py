"""Damage that happens on the way to the reader is not damage of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recpoint.catalog.check.check import check
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.commit import commit
from recpoint.catalog.run.run import Run
from recpoint.errors import FormatError
from recpoint.format.naming import CHUNKS_PREFIX, GENERATION_KEY, MANIFEST_KEY, RUN_KEY
from recpoint.testing.faults import Fault, FaultStore
from tests.catalog_builder import build, new_run, publish, tables, upload

KINDS = [RUN_KEY, GENERATION_KEY.prefix, MANIFEST_KEY.prefix, CHUNKS_PREFIX]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A full at step 1 and an increment at step 2."""
    run = new_run(tmp_path / "run")
    run.claim(None)
    full = publish(run, build(run, tables(), step=1, generation=1, state={"step": 1}))
    dirty = [torch.tensor([1]), torch.tensor([2])]
    later = build(
        run, tables(seed=2), step=2, generation=1, parent=full, dirty=dirty, state={"step": 2}
    )
    publish(run, later)
    return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [Fault.flip, Fault.short])
def test_what_was_damaged_once_on_its_way_is_read_again(
    run: Run, kind: str, fault: Callable[..., Fault]
) -> None:
    shaky = FaultStore(run.store, [fault(key_contains=kind)])
    target = MemoryTarget()
    report = restore(Run.open(shaky), target)
    assert (report.restored.step, report.skipped) == (2, ())
    assert target.state[0] == {"step": 2}
    assert check(Run.open(FaultStore(run.store, [fault(key_contains=kind)])), level="full").ok


def test_a_trainer_starts_although_the_run_record_was_damaged_on_its_way(run: Run) -> None:
    shaky = FaultStore(run.store, [Fault.flip(key_contains=RUN_KEY)])
    assert Run.create(shaky).record == run.record


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_twice_is_damaged(run: Run, kind: str) -> None:
    store = FaultStore(run.store, [Fault.flip(key_contains=kind, times=2)])
    if kind in (RUN_KEY, GENERATION_KEY.prefix):
        with pytest.raises(FormatError, match=kind):
            restore(Run.open(store), MemoryTarget())
    else:
        report = restore(Run.open(store), MemoryTarget())
        assert report.restored.step == 1
        assert kind in report.skipped[0].error


def test_a_commit_that_is_read_back_damaged_is_still_ours(run: Run) -> None:
    full = build(run, tables(), step=3, generation=1)
    upload(run.store, full)
    key = f"{MANIFEST_KEY.prefix}000000000003"
    faults = [Fault.lost_reply(key_contains=key), Fault.flip(key_contains=key, times=2)]
    assert commit(Run.open(FaultStore(run.store, faults)), full.manifest) == "already"
