"""What the system, a device or a user's object answers between two batches ends no training."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from recpoint.catalog.restore import MemoryTarget, restore
from recpoint.catalog.run import Run
from recpoint.catalog.store import open_store
from recpoint.trainer_plugin.observation import observe
from tests.training_builder import Place, Training, checkpointer, simple_training, train


def assert_restores(place: Place, training: Training) -> None:
    """The newest checkpoint holds exactly what training has now."""
    target = MemoryTarget()
    restore(Run.open(open_store(place.run)), target)
    assert torch.equal(target.tables["users"].values, training.model.users.weight.detach())
    assert torch.equal(target.tables["items"].values, training.model.items.weight.detach())


@pytest.fixture(params=[errno.ENOLCK, errno.EIO, errno.ENOTSUP], ids=errno.errorcode.get)
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have no lock of this process be answered, as on NFS whose lock daemon is gone."""

    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    return lambda: monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.parametrize("when_busy", ["skip", "wait", "cancel"])
def test_a_file_system_that_does_not_say_who_has_a_lock(
    place: Place,
    when_busy: str,
    no_locks: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = simple_training()
    settings: dict[str, Any] = {"when_busy": when_busy, "busy_wait_seconds": 0.3}
    ckpt = checkpointer(training, place, interval_batches=1, close_wait_seconds=0.3, **settings)
    with place.agent():
        pass  # there was one before
    ckpt.restore()
    no_locks()
    train(training, ckpt, 3)
    ckpt.checkpoint()
    assert ckpt.stats.failed == 0 and ckpt.stats.skipped > 0
    assert not observe(ckpt).agent_running, "as when the lock was last answered"
    (told,) = [record.getMessage() for record in caplog.records if "lock" in record.message]
    assert f"{place.staging / 'agent.lock'}: found " in told
    assert "; expected " in told and "RECPOINT_STAGING" in told, "once, in full"
    monkeypatch.undo()
    assert not observe(ckpt).agent_running
    no_locks()
    ckpt.close()
    assert ckpt.stats.staged == 1
    monkeypatch.undo()
    second = checkpointer(training, place)
    with place.agent():
        report = second.restore()
        second.close(final=False)
    assert report is not None and report.restored.step == 1


def test_an_agent_is_waited_for_while_no_lock_is_answered(
    place: Place, no_locks: Callable[[], None]
) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    with place.agent():
        ckpt.restore()
        train(training, ckpt, 1)
        no_locks()
        train(training, ckpt, 1)
        assert observe(ckpt).agent_running
        ckpt.close()
    assert ckpt.stats.committed >= 1 and ckpt.stats.failed == 0
    assert_restores(place, training)
