"""What the system, a device or a user's object answers between two batches ends no training."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from recpoint.catalog import staged
from recpoint.catalog.restore import MemoryTarget, restore
from recpoint.catalog.run import Run
from recpoint.catalog.store import open_store
from recpoint.format.job import Outcome
from recpoint.format.manifest import Quantizer
from recpoint.kernels import dirty_bitmap
from recpoint.trainer_plugin.observation import observe
from tests.training_builder import (
    ROWS,
    Place,
    Training,
    checkpointer,
    simple_training,
    train,
    until,
)


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


def test_rows_of_all_tables_stay_dirty_where_one_has_no_memory_for_a_cut(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, max_staged_jobs=2)
    ckpt.restore()
    train(training, ckpt, 1)
    until(lambda: ckpt.stats.staged == 1)
    make, items = torch.zeros_like, dirty_bitmap.new(ROWS // 2).numel()

    def no_memory(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        if tensor.numel() == items:
            raise torch.OutOfMemoryError("for the bitmap of items")
        return make(tensor, **options)

    monkeypatch.setattr(torch, "zeros_like", no_memory)
    train(training, ckpt, 1)
    assert "OutOfMemoryError" in (ckpt.stats.last_error or "")
    monkeypatch.undo()
    train(training, ckpt, 1)
    with place.agent():
        ckpt.close()
    assert (ckpt.stats.committed, ckpt.stats.failed) == (2, 1)
    assert_restores(place, training)


@pytest.mark.parametrize("fate", ["lost", "committed"])
def test_a_bitmap_that_cannot_be_used_again(place: Place, fate: str) -> None:
    """As on a GPU for which a kernel cannot be compiled; here no kernel takes the bitmap's form."""
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, max_staged_jobs=2)
    ckpt.restore()
    train(training, ckpt, 2)
    until(lambda: ckpt.stats.staged == 2)
    assert ckpt._pipeline is not None
    for pending in ckpt._pipeline._ledger._pending.values():
        dirty = pending.dirty["users"]
        object.__setattr__(dirty, "bitmap", torch.stack([dirty.bitmap, dirty.bitmap], 1)[:, 0])
    if fate == "lost":
        for path in staged.staged_jobs(place.run_directory):
            path.unlink()
    else:
        place.persist_all()
    until(lambda: ckpt.stats.committed + ckpt.stats.failed == 2)
    train(training, ckpt, 2)
    with place.agent():
        ckpt.close()
    assert ckpt.stats.failed == (2 if fate == "lost" else 0)
    assert_restores(place, training)


def answer(place: Place, *, table: int, method: str) -> None:
    """Answer the only job with what nobody stored, as no agent of this release does."""
    (job_file,) = staged.staged_jobs(place.run_directory)
    job = staged.read_job(job_file)
    outcome = Outcome(
        step=job.step,
        generation=job.generation,
        attempt=job.attempt,
        result="committed",
        error_type="",
        error="",
        stored_bytes=0,
        rank_bytes=0,
        links_to_read=1,
        quantizers=(
            Quantizer(
                table=table,
                rank=0,
                method=method,
                bins=1,
                ratio_permille=0,
                refits=0,
                sample_rows=1,
                seed=1,
            ),
        ),
        finished_ms=0,
    )
    staged.finish(job_file, outcome)


def test_an_outcome_about_tables_that_are_not_there(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    train(training, ckpt, 1)
    until(lambda: ckpt.stats.staged == 1)
    answer(place, table=7, method="refit")
    until(lambda: ckpt.stats.failed == 1)
    error = ckpt.stats.last_error or ""
    assert error.startswith("MalformedObject") and "/outcomes/" in error and "Next: " in error
    train(training, ckpt, 1)
    with place.agent():
        ckpt.close()
    assert ckpt.stats.committed == 1
    assert_restores(place, training)


@pytest.mark.parametrize("quantize_on", ["host", "device"])
def test_a_method_of_a_later_release_is_left_to_its_agent(place: Place, quantize_on: str) -> None:
    training = simple_training()
    settings: dict[str, Any] = {"bits": 4, "quantize_on": quantize_on}
    ckpt = checkpointer(training, place, interval_batches=4, **settings)
    ckpt.restore()
    train(training, ckpt, 4)
    until(lambda: ckpt.stats.staged == 1)
    answer(place, table=0, method="clustered")
    until(lambda: ckpt.stats.committed == 1)
    train(training, ckpt, 1)
    assert ckpt.checkpoint()
    until(lambda: ckpt.stats.staged == 2)
    (job_file,) = staged.staged_jobs(place.run_directory)
    assert [table.method for table in staged.read_job(job_file).tables] == [None, None]
    assert ckpt.stats.failed == 0
    ckpt.close(final=False)
