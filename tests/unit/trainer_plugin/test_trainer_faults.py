"""What goes wrong with a checkpoint never reaches training, and costs no row."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from recpoint import Checkpointer
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import locks
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store import durable
from recpoint.catalog.store.store import open_store
from recpoint.errors import StagingError
from recpoint.trainer_plugin.snapshot.area_room import SmallStagingArea
from tests.polling import PATIENCE_SECONDS
from tests.running_parts import pipeline_of
from tests.training_builder import (
    Place,
    Training,
    checkpointer,
    simple_training,
    train,
    until,
)


@pytest.fixture(autouse=True)
def no_observer_stays() -> Iterator[None]:
    yield
    durable.set_observer(None)


def assert_restores(place: Place, training: Training) -> None:
    """The newest checkpoint holds exactly what training has now."""
    target = MemoryTarget()
    restore(Run.open(open_store(place.run)), target)
    assert torch.equal(target.tables["users"].values, training.model.users.weight.detach())
    assert torch.equal(target.tables["items"].values, training.model.items.weight.detach())


class Mount:
    """A tmpfs of its own, which can be full or read-only like a disk."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        path.mkdir()
        self._run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path))

    def read_only(self, yes: bool) -> None:
        self._run("mount", "-o", f"remount,{'ro' if yes else 'rw'}", str(self.path))

    def close(self) -> None:
        self._run("umount", "-l", str(self.path))

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def full_disk(
    mount: Mount | None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path | None, Callable[[], None]]]:
    """A file system with room for directories and a lock, and what makes it roomy again."""
    if mount is None:

        def no_space(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", no_space)
        yield None, monkeypatch.undo
        return
    ballast = mount.path / "ballast"
    left = os.statvfs(mount.path)
    ballast.write_bytes(bytes((left.f_bavail - 2) * left.f_frsize))
    yield mount.path, ballast.unlink


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount | None]:
    """A real small file system; None where this user may not mount one."""
    try:
        mounted = Mount(tmp_path / "mounted", 1 << 20)
    except subprocess.CalledProcessError:
        yield None
        return
    yield mounted
    mounted.read_only(False)
    mounted.close()


def test_a_full_disk(place: Place, full_disk: tuple[Path | None, Callable[[], None]]) -> None:
    path, make_room = full_disk
    training = simple_training()
    if path is None:
        ckpt = checkpointer(training, place, interval_batches=1)
    else:
        place.staging = path / "staging"
        with pytest.warns(SmallStagingArea):
            ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    train(training, ckpt, 4)
    stats = ckpt.stats
    assert stats.staged == 0 and stats.failed >= 4
    assert stats.last_error is not None and stats.last_error.startswith("StagingFull")
    assert "r00000-0.bin" in stats.last_error and "RECPOINT_STAGING" in stats.last_error
    make_room()
    train(training, ckpt, 1)
    with place.agent():
        ckpt.close()
    assert ckpt.stats.committed == 1
    assert_restores(place, training)


def test_a_slot_that_is_removed_while_it_is_written_is_no_checkpoint(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=2)
    ckpt.restore()
    with place.agent():
        train(training, ckpt, 2)
        until(lambda: ckpt.stats.committed == 1)
        state_dict = training.reader.state_dict

        def more_of_it() -> dict[str, Any]:
            # Rows are in the slot by now, or on their way; this no longer fits behind them.
            for slot in (place.run_directory / "slots").iterdir():
                slot.unlink()
            return {**state_dict(), "more": torch.zeros(100_000)}

        training.reader.state_dict = more_of_it  # type: ignore[method-assign]
        train(training, ckpt, 2)
        assert ckpt.stats.failed == 1
        assert "r00000-0.bin: found another file, or no file" in str(ckpt.stats.last_error)
        training.reader.state_dict = state_dict  # type: ignore[method-assign]
        train(training, ckpt, 2)
        until(lambda: ckpt.stats.committed == 2)
        ckpt.close()
    assert_restores(place, training)


def test_a_disk_that_optimizer_state_does_not_fit_on_is_told_before_a_checkpoint_fails(
    place: Place, mount: Mount | None, caplog: pytest.LogCaptureFixture
) -> None:
    if mount is None:
        pytest.skip("needs to mount a tmpfs")
    training = simple_training()
    training.model.users = torch.nn.Embedding(16_000, 6, sparse=True)
    training.optimizers = [torch.optim.SparseAdam([training.model.users.weight])]
    for parameter in (*training.model.items.parameters(), *training.model.top.parameters()):
        parameter.requires_grad_(False)
    training.model.norm.requires_grad_(False)
    place.staging = mount.path / "staging"
    ckpt = checkpointer(training, place, interval_batches=10**6)  # a warning is an error here
    ckpt.restore()
    train(training, ckpt, 2)
    (told,) = [text for text in caplog.messages if "bytes are free" in text]
    assert f"may take {ckpt.memory_bound_bytes} bytes" in told and "RECPOINT_STAGING" in told
    assert ckpt.stats.failed == 0
    assert not ckpt.checkpoint()
    assert (ckpt.stats.last_error or "").startswith("StagingFull")
    ckpt.close(final=False)


def test_a_disk_that_becomes_read_only(place: Place, mount: Mount | None) -> None:
    if mount is None:
        pytest.skip("needs the right to mount a file system")
    place.staging = mount.path / "staging"
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    train(training, ckpt, 1)
    until(lambda: ckpt.stats.staged == 1)
    place.persist_all()
    until(lambda: ckpt.stats.committed == 1)
    pinned = ckpt._parts.area.free_slot(set())
    pinned.close()  # a file open for writing would keep the file system writable
    lock = ckpt._parts.area._lock
    assert lock is not None
    locks.release(lock)
    ckpt._parts.area._lock = None
    mount.read_only(True)
    train(training, ckpt, 2)
    assert ckpt.stats.failed == 2 and "Read-only" in (ckpt.stats.last_error or "")
    mount.read_only(False)
    train(training, ckpt, 1)
    with place.agent():
        ckpt.close()
    assert_restores(place, training)


def test_a_staging_area_that_is_removed_while_training(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    train(training, ckpt, 1)
    until(lambda: ckpt.stats.staged == 1)
    shutil.rmtree(place.staging)
    until(lambda: ckpt.stats.failed == 1)
    assert "neither the job nor an outcome" in (ckpt.stats.last_error or "")
    train(training, ckpt, 1)
    with place.agent():
        ckpt.close()
    assert_restores(place, training)


@pytest.mark.parametrize("occupied", ["staging", "parent"])
def test_a_staging_area_that_cannot_be_made_is_told_at_the_start(
    place: Place, occupied: str
) -> None:
    place.staging.parent.mkdir(exist_ok=True)
    place.staging.write_text("a file")
    if occupied == "parent":
        place.staging = place.staging / "below"
    ckpt = checkpointer(simple_training(), place)
    with pytest.raises(StagingError) as caught:
        ckpt.restore()
    assert "RECPOINT_STAGING" in caught.value.next_step


def steps_of_one_checkpoint(place: Place) -> list[str]:
    """The names of all durable steps of the background thread for one checkpoint."""
    seen: list[str] = []
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()

    def observe(name: str) -> None:
        if threading.current_thread().name == "recpoint":
            seen.append(name)

    durable.set_observer(observe)
    train(training, ckpt, 1)
    until(lambda: ckpt.stats.staged == 1)
    durable.set_observer(None)
    ckpt.close(final=False)
    return seen


def reached(seen: list[str], at: int) -> bool:
    return len(seen) > at


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_every_step_of_the_background_thread_may_fail(
    place: Place, tmp_path: Path, kind: type[BaseException]
) -> None:
    """OSError: an error of the disk. SystemExit: the thread itself dies."""
    names = steps_of_one_checkpoint(Place(str(tmp_path / "other"), tmp_path / "other-staging"))
    assert len(names) >= 5
    for at in range(len(names)):
        here = Place(f"{place.run}-{kind.__name__}-{at}", place.staging)
        training = simple_training()
        ckpt = checkpointer(training, here, interval_batches=1)
        ckpt.restore()
        seen: list[str] = []

        def fail(name: str, at: int = at, seen: list[str] = seen) -> None:
            if threading.current_thread().name == "recpoint":
                seen.append(name)
                if len(seen) == at + 1:
                    raise kind(f"at {name}")

        durable.set_observer(fail)
        train(training, ckpt, 1)
        until(partial(reached, seen, at))
        assert seen[at] == names[at]
        durable.set_observer(None)
        train(training, ckpt, 1)  # a dead thread is noticed and replaced here
        with here.agent():
            ckpt.close()
        assert ckpt.stats.committed >= 1, names[at]
        assert_restores(here, training)


@contextmanager
def no_more_threads() -> Iterator[None]:
    """A stack that no memory holds: whoever starts a thread gets what a full container answers."""
    threading.stack_size(1 << 50)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        yield
    finally:
        threading.stack_size(0)


def background_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "recpoint"]


def let_thread_die(training: Training, ckpt: Checkpointer, at: str = "write ") -> None:
    """Train one batch, whose checkpoint kills the background thread at a durable step."""
    (thread,) = background_threads()

    def die(name: str) -> None:
        if threading.current_thread() is thread and name.startswith(at):
            raise SystemExit(name)

    durable.set_observer(die)
    train(training, ckpt, 1)
    thread.join(PATIENCE_SECONDS)
    durable.set_observer(None)
    assert not background_threads()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("at", ["write ", "rename "])
def test_a_thread_that_died_and_cannot_be_started(place: Place, at: str) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    let_thread_die(training, ckpt, at)
    with no_more_threads():
        train(training, ckpt, 3)
        assert not ckpt.checkpoint()
        assert (ckpt.stats.failed, ckpt.stats.skipped, ckpt.stats.staged) == (5, 0, 0)
        assert "can't start new thread" in (ckpt.stats.last_error or "")
    train(training, ckpt, 1)
    until(lambda: ckpt.stats.staged == 1)
    with place.agent():
        ckpt.close()
    assert ckpt.stats.committed == 1
    assert_restores(place, training)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_training_ends_where_no_thread_can_be_started(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    let_thread_die(training, ckpt)
    with no_more_threads():
        ckpt.close()
    assert (ckpt.stats.failed, ckpt.stats.staged) == (2, 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_with_on_error_raise_a_thread_that_cannot_be_started_is_raised(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, on_error="raise")
    ckpt.restore()
    let_thread_die(training, ckpt)
    with no_more_threads():
        with pytest.raises(StagingError, match="the background thread died"):
            train(training, ckpt, 1)  # the first of two
        with pytest.raises(StagingError, match="can't start new thread") as caught:
            train(training, ckpt, 1)
    assert "pids.max" in caught.value.next_step
    ckpt.close(final=False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_during_a_cut_and_cannot_be_started(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1, jobs=2)
    ckpt.restore()
    (thread,) = background_threads()
    at_work, to_die = threading.Event(), threading.Event()

    def die(_: str) -> None:
        if threading.current_thread() is thread:
            at_work.set()
            to_die.wait(PATIENCE_SECONDS)
            raise SystemExit

    durable.set_observer(die)
    train(training, ckpt, 1)
    assert at_work.wait(PATIENCE_SECONDS)
    with ExitStack() as full:
        state = training.reader.state_dict

        def last_words() -> Any:
            full.enter_context(no_more_threads())
            to_die.set()
            thread.join(PATIENCE_SECONDS)
            return state()

        vars(training.reader)["state_dict"] = last_words
        train(training, ckpt, 1)
        del vars(training.reader)["state_dict"]
        durable.set_observer(None)
        assert ckpt.stats.failed == 2 and ckpt.stats.staged == 0
    train(training, ckpt, 1)
    with place.agent():
        ckpt.close()
    assert (ckpt.stats.committed, ckpt.stats.failed) == (1, 2)
    assert_restores(place, training)


def with_state_dict(
    place: Place, of: str, state_dict: Callable[[], Any]
) -> tuple[Training, Checkpointer]:
    """A training that has begun, of which one thing answers so when it is asked for its state."""
    training = simple_training()
    metric = torch.nn.Linear(1, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizers[0], 5)
    things = {"reader": training.reader, "schedulers[0]": scheduler, "extras['metric']": metric}
    ckpt = checkpointer(
        training, place, interval_batches=1, schedulers=[scheduler], extras={"metric": metric}
    )
    ckpt.restore()
    vars(things[of])["state_dict"] = state_dict
    return training, ckpt


@pytest.mark.parametrize("of", ["reader", "schedulers[0]", "extras['metric']"])
def test_an_error_of_a_state_dict_says_of_which(place: Place, of: str) -> None:
    error = ValueError("no state today")

    def broken() -> Any:
        raise error

    training, ckpt = with_state_dict(place, of, broken)
    train(training, ckpt, 2)
    assert ckpt.stats.failed == 2
    assert ckpt.stats.last_error == f"ValueError: no state today (from state_dict() of {of})"
    ckpt.close(final=False)


@pytest.mark.parametrize("of", ["reader", "schedulers[0]", "extras['metric']"])
def test_a_state_that_contains_itself_is_named(place: Place, of: str) -> None:
    around: dict[str, Any] = {}
    around["itself"] = [around, around]
    training, ckpt = with_state_dict(place, of, lambda: around)
    train(training, ckpt, 1)
    assert ckpt.stats.failed == 1
    said = str(ckpt.stats.last_error)
    assert "levels as JSON" in said and re.split(r"\W+", of)[0] in said, said
    ckpt.close(final=False)


def test_a_reader_that_fails_is_noted(place: Place) -> None:
    training = simple_training()

    def broken(*_: object) -> Any:
        raise RuntimeError("no state today")

    vars(training.reader).update(state_dict=broken, batches_until_checkpoint=broken)
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    train(training, ckpt, 2)
    assert ckpt.stats.failed >= 4 and "no state today" in (ckpt.stats.last_error or "")
    del vars(training.reader)["state_dict"], vars(training.reader)["batches_until_checkpoint"]
    train(training, ckpt, 1)
    with place.agent():
        ckpt.close()
    assert ckpt.stats.committed == 1
    assert_restores(place, training)


def test_a_stale_outcome_is_not_taken_for_an_answer(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    left = StagedRun(place.run_directory).outcome_path(1, 1, 0)
    left.write_bytes(b"left by somebody")
    train(training, ckpt, 1)
    until(lambda: ckpt.stats.staged == 1)
    assert not left.exists()
    with place.agent():
        ckpt.close()
    assert (ckpt.stats.committed, ckpt.stats.failed) == (1, 0)


def test_an_outcome_that_cannot_be_read(place: Place) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    train(training, ckpt, 1)
    until(lambda: ckpt.stats.staged == 1)
    StagedRun(place.run_directory).outcome_path(1, 1, 0).write_bytes(b"{}")
    StagedRun(place.run_directory).job_path(1, 1, 0).unlink()
    until(lambda: ckpt.stats.failed == 1)
    assert "MalformedObject" in (ckpt.stats.last_error or "")
    train(training, ckpt, 1)
    with place.agent():
        ckpt.close()
    assert_restores(place, training)


def test_a_disk_that_does_not_say_whether_a_job_is_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    look = os.stat

    def no_answer(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
        if str(path).endswith("-r00000.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return look(path, *arguments, **named)

    def no_write(name: str) -> None:
        if name.startswith("write "):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "stat", no_answer)
    durable.set_observer(no_write)
    train(training, ckpt, 1)
    pipeline = pipeline_of(ckpt)
    until(lambda: not pipeline._handoff.is_staging())
    train(training, ckpt, 2)
    assert ckpt.stats.failed == 0 and ckpt.stats.skipped == 2, "its slot may be in use"
    monkeypatch.undo()
    until(lambda: ckpt.stats.failed == 1)
    durable.set_observer(None)
    with place.agent():
        ckpt.close()
    assert ckpt.stats.committed == 1
    assert_restores(place, training)


def test_a_damaged_parent_costs_one_checkpoint_and_not_all_that_follow(place: Place) -> None:
    training = simple_training()
    with place.agent():
        ckpt = checkpointer(training, place, interval_batches=1)
        ckpt.restore()
        train(training, ckpt, 1)
        until(lambda: ckpt.stats.committed == 1)
        manifest = next(Path(place.run, "manifests").iterdir())
        manifest.write_bytes(manifest.read_bytes().replace(b'"stall_us":', b'"stall_us":1', 1))
        train(training, ckpt, 1)
        until(lambda: ckpt.stats.failed == 1)
        assert "DigestMismatch" in (ckpt.stats.last_error or "")
        assert f"recpoint check {place.run}" in (ckpt.stats.last_error or "")
        train(training, ckpt, 1)
        ckpt.close()
    assert (ckpt.stats.committed, ckpt.stats.failed) == (2, 1)
    assert_restores(place, training)


def test_nobody_else_on_the_host_can_read_what_is_staged(place: Place) -> None:
    place.staging.mkdir(mode=0o755)
    training = simple_training()
    ckpt = checkpointer(training, place, interval_batches=1)
    ckpt.restore()
    assert place.run_directory.stat().st_mode & 0o077 == 0
    ckpt.close(final=False)


def test_a_lock_that_cannot_be_opened_is_told_at_the_start(place: Place) -> None:
    ckpt = checkpointer(simple_training(), place)
    StagedRun(place.run_directory).trainer_lock_path().mkdir(parents=True)
    with pytest.raises(StagingError, match=r"trainer\.lock.*RECPOINT_STAGING"):
        ckpt.restore()


def test_the_error_that_ends_training_is_not_replaced_by_one_of_a_checkpoint(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = simple_training()

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with (
        pytest.raises(ZeroDivisionError),
        checkpointer(training, place, interval_batches=10, on_error="raise") as ckpt,
    ):
        ckpt.restore()  # reserves a slot, in vain; the next step would raise that
        raise ZeroDivisionError
    assert ckpt.stats.failed == 1
