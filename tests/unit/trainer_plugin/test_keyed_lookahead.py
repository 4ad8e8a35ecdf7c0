"""Rows of keyed tables are copied before a cut, although keys change their rows meanwhile."""

from __future__ import annotations

import pytest
from torch import nn

from recpoint import Checkpointer, LeastRecent, LeastUsed
from recpoint.catalog.check.validate import validate
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.naming import ManifestName
from recpoint.trainer_plugin.snapshot.window import Window
from tests.keyed_training import KeyedTraining, keyed_checkpointer, state_of
from tests.running_parts import pipeline_of
from tests.training_builder import Place, until

LAST = 26


def wait_for_plan(ckpt: Checkpointer) -> None:
    """Wait until the open window, if there is one, has planned which rows it copies."""
    ahead = pipeline_of(ckpt).ahead
    if ahead is not None and isinstance(ahead.window, Window):
        window = ahead.window
        until(lambda: window._copier is not None or window.reason is not None)


@pytest.mark.parametrize(
    ("rule", "sparse"),
    [(LeastRecent(ttl_batches=4), True), (LeastUsed(), False)],
    ids=["recent", "used"],
)
def test_rows_are_copied_before_increments(place: Place, rule: object, sparse: bool) -> None:
    uninterrupted = KeyedTraining(12, evict=rule, sparse=sparse)
    for _ in range(LAST):
        uninterrupted.batch()
    for last in (17, LAST):
        training = KeyedTraining(12, evict=rule, sparse=sparse, window=6)
        settings = {"interval_batches": 5, "when_busy": "wait", "verify_unmarked_rows": 1000}
        with place.agent(), keyed_checkpointer(training, place, **settings) as ckpt:
            ckpt.restore()
            for keys, target in ckpt.batches(total=last):
                wait_for_plan(ckpt)
                nn.functional.mse_loss(training.model(keys), target).backward()
                training.step()
    assert training.model.users.slots.evicted > 9
    assert state_of(training) == state_of(uninterrupted)
    run = Run.open(open_store(place.run))
    manifests = [run.manifest(step, generation) for step, generation in ((10, 1), (15, 1), (22, 2))]
    assert [manifest.kind for manifest in manifests] == ["increment"] * 3
    assert any(manifest.copied_ahead is not None for manifest in manifests)
    assert validate(run, ManifestName(22, 2), level="full").passed
