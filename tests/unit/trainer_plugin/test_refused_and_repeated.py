"""A checkpoint is refused, training goes back, and the same step is cut again (maxtext#5260).

The second checkpoint of a step must not be taken for the refused one: it is stored, with the rows
of its own cut.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from recpoint import Checkpointer
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from tests.training_builder import (
    Place,
    checkpointer,
    everything,
    reject,
    simple_training,
    train,
    until,
)


def _has_committed(ckpt: Checkpointer, count: int) -> bool:
    return ckpt.stats.committed == count


@pytest.mark.parametrize("error_type", ["StagingError", "DigestMismatch"])
def test_a_step_that_was_refused_is_stored_after_a_rewind(place: Place, error_type: str) -> None:
    expected = simple_training()
    for _ in range(3):
        expected.batch()
    expected_state = everything(expected)  # with the random numbers that come next
    first = simple_training()
    ckpt = checkpointer(first, place, interval_batches=1)
    ckpt.restore()
    train(first, ckpt, 1)
    until(lambda: ckpt.stats.staged == 1)
    place.persist_all()
    until(lambda: ckpt.stats.committed == 1)
    train(first, ckpt, 1)
    until(lambda: ckpt.stats.staged == 2)
    reject(StagedRun(place.run_directory).staged_jobs()[0], error_type)
    until(lambda: ckpt.stats.failed == 1)
    ckpt.close(final=False)

    second = simple_training(2)
    with place.agent(), checkpointer(second, place, interval_batches=1) as again:
        report = again.restore()
        assert report is not None and again.batches_done == 1
        for committed in (1, 2):
            train(second, again, 1)
            until(partial(_has_committed, again, committed))
    assert everything(second) == expected_state
    run = Run.open(open_store(place.run))
    assert [(name.step, name.generation) for name in run.live_line()] == [(3, 2), (2, 2), (1, 1)]
    target = MemoryTarget()
    restore(run, target)
    assert torch.equal(target.tables["users"].values, expected.model.users.weight.detach())
