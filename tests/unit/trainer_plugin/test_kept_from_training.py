"""What the system, a device or a user's object answers between two batches ends no training."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recpoint import Checkpointer
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.errors import SettingsError
from recpoint.format.job import Outcome
from recpoint.format.manifest import Quantizer
from recpoint.kernels import dirty_bitmap
from tests.running_parts import pipeline_of
from tests.training_builder import (
    DIM,
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
    ckpt = checkpointer(training, place, interval_batches=1, close_seconds=0.3, **settings)
    with place.agent():
        pass  # there was one before
    ckpt.restore()
    no_locks()
    train(training, ckpt, 3)
    ckpt.checkpoint()
    assert ckpt.stats.failed == 0 and ckpt.stats.skipped > 0
    assert not ckpt.observe().agent_running, "as when the lock was last answered"
    (told,) = [record.getMessage() for record in caplog.records if "lock" in record.message]
    assert f"{place.staging / 'agent.lock'}: found " in told
    assert "; expected " in told and "RECPOINT_STAGING" in told, "once, in full"
    monkeypatch.undo()
    assert not ckpt.observe().agent_running
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
        assert ckpt.observe().agent_running
        ckpt.close()
    assert ckpt.stats.committed >= 1 and ckpt.stats.failed == 0
    assert_restores(place, training)


def test_rows_of_all_tables_stay_dirty_where_one_has_no_memory_for_a_cut(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, jobs=2)
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
    ckpt = checkpointer(training, place, interval_batches=1, jobs=2)
    ckpt.restore()
    train(training, ckpt, 2)
    until(lambda: ckpt.stats.staged == 2)
    for pending in pipeline_of(ckpt)._ledger._pending.values():
        dirty = pending.dirty["users"]
        object.__setattr__(dirty, "bitmap", torch.stack([dirty.bitmap, dirty.bitmap], 1)[:, 0])
    if fate == "lost":
        for path in StagedRun(place.run_directory).staged_jobs():
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
    (job_file,) = StagedRun(place.run_directory).staged_jobs()
    job = job_files.read_job(job_file)
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
    job_files.finish(job_file, outcome)


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


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_method_of_a_later_release_is_left_to_its_agent(place: Place, where: str) -> None:
    training = simple_training()
    settings: dict[str, Any] = {"bits": 4, "place": where}
    ckpt = checkpointer(training, place, interval_batches=4, **settings)
    ckpt.restore()
    train(training, ckpt, 4)
    until(lambda: ckpt.stats.staged == 1)
    answer(place, table=0, method="clustered")
    until(lambda: ckpt.stats.committed == 1)
    train(training, ckpt, 1)
    assert ckpt.checkpoint()
    until(lambda: ckpt.stats.staged == 2)
    (job_file,) = StagedRun(place.run_directory).staged_jobs()
    assert [table.method for table in job_files.read_job(job_file).tables] == [None, None]
    assert ckpt.stats.failed == 0
    ckpt.close(final=False)


def adagrad_training() -> Training:
    training = simple_training()
    adagrad = torch.optim.Adagrad(training.model.parameters(), lr=0.1)
    training.optimizers = [adagrad]
    return training


def test_hyperparameters_that_are_not_there_while_they_are_loaded(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    training = adagrad_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    train(training, ckpt, 1)
    place_all(ckpt, place)
    (adagrad,) = training.optimizers
    older = adagrad.state_dict()
    del older["param_groups"][0]["eps"]
    adagrad.load_state_dict(older)
    adagrad.param_groups[0]["eps"] = 1e-10
    train(training, ckpt, 1)
    assert "could not be marked ('eps')" in caplog.text
    with place.agent():
        ckpt.close()
    assert (ckpt.stats.committed, ckpt.stats.failed) == (2, 0)
    assert_restores(place, training)


def place_all(ckpt: Checkpointer, place: Place) -> None:
    """Store what has been cut."""
    done = ckpt.stats.committed
    until(lambda: ckpt.stats.staged == done + 1)
    place.persist_all()
    until(lambda: ckpt.stats.committed == done + 1)


def test_a_hyperparameter_for_each_column(place: Place) -> None:
    training = adagrad_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    train(training, ckpt, 1)
    place_all(ckpt, place)
    (adagrad,) = training.optimizers
    group = adagrad.param_groups[0]
    own = [training.model.users.weight, training.model.items.weight]
    rest = [one for one in group["params"] if not any(one is table for table in own)]
    group["params"], group["eps"] = own, torch.full((DIM,), 1e-10)
    adagrad.add_param_group({"params": rest, "eps": 1e-10})
    for _ in range(2):
        group["eps"] = group["eps"] * 2  # another array each time
        train(training, ckpt, 1)
        place_all(ckpt, place)
    ckpt.close()
    assert (ckpt.stats.committed, ckpt.stats.failed) == (3, 0)
    assert_restores(place, training)


def test_a_disk_that_reports_an_error_when_files_are_closed(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As NFS does of what it could not write; the files are closed nevertheless."""
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    with place.agent():
        ckpt.restore()
        train(training, ckpt, 1)
        area, close = ckpt._parts.area, os.close
        broken = {area._lock, *(slot._descriptor for slot in area._slots.values())}
        assert len(broken) == 2 and None not in broken

        def fail(descriptor: int) -> None:
            close(descriptor)
            if descriptor in broken:
                broken.remove(descriptor)
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        monkeypatch.setattr(os, "close", fail)
        ckpt.close()
    assert not broken
    told = [record.getMessage() for record in caplog.records if "quota" in record.getMessage()]
    assert len(told) == 2 and "r00000-0.bin" in told[0] and "trainer.lock" in told[1]
    monkeypatch.undo()
    assert_restores(place, training)
    second = checkpointer(simple_training(7), place)
    assert second.restore() is not None, "nobody holds the lock"
    second.close(final=False)


def test_a_working_directory_that_is_removed_while_training(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.chdir(scratch)
    monkeypatch.setenv("RECPOINT_STAGING", "../staging")
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, directory=None, close_seconds=0.0)
    ckpt.restore()
    scratch.rmdir()
    train(training, ckpt, 3)
    until(lambda: ckpt.stats.staged == 1)
    ckpt.close()
    assert ckpt.stats.skipped >= 2 and f"recpoint agent --staging {scratch}" in caplog.text


def test_a_monitor_looks_at_a_disk_that_does_not_answer(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = checkpointer(simple_training(), place)
    ckpt.restore()
    look = os.stat

    def no_answer(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
        if str(path).startswith(str(place.staging)):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return look(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", no_answer)
    assert ckpt.observe().staging_free_bytes is None
    monkeypatch.undo()
    assert ckpt.observe().staging_free_bytes is not None
    ckpt.close(final=False)


def test_an_error_without_a_text(place: Place) -> None:
    class Speechless(Exception):
        def __str__(self) -> str:
            raise KeyError("text")

    def broken(*_: object) -> Any:
        raise Speechless

    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    vars(training.reader)["state_dict"] = broken
    train(training, ckpt, 2)
    assert ckpt.stats.failed == 2
    assert ckpt.stats.last_error == "Speechless: its message cannot be read (KeyError)"
    del vars(training.reader)["state_dict"]
    with place.agent():
        ckpt.close()
    assert_restores(place, training)


def test_a_generator_that_cannot_be_stored(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, close_seconds=0.0)
    ckpt.restore()
    own = np.random.mtrand.get_bit_generator()
    np.random.mtrand.set_bit_generator(np.random.PCG64(1))
    try:
        train(training, ckpt, 2)
        error = ckpt.stats.last_error or ""
        assert ckpt.stats.failed == 2 and ckpt.stats.staged == 0
        assert (
            "SettingsError" in error and "found a PCG64" in error and "set_bit_generator" in error
        )
        with pytest.raises(SettingsError, match="found a PCG64"):
            checkpointer(training, place)
        ckpt.close()
    finally:
        np.random.mtrand.set_bit_generator(own)
    assert ckpt.stats.failed == 3
