"""What may happen while a window is open: faults, forks, ends, and what it takes of memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from recpoint import Checkpointer, Lookahead
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.errors import SettingsError
from recpoint.kernels import dirty_bitmap
from recpoint.kernels.native import library
from recpoint.lookahead.plan import plan_table
from recpoint.trainer_plugin.snapshot.window import Window
from tests.polling import PATIENCE_SECONDS, until
from tests.running_parts import pipeline_of
from tests.training_builder import Place, checkpointer, simple_training
from tests.unit.trainer_plugin.test_copied_ahead import USERS, Job, _compare


def window_of(job: Job) -> Window:
    """The window, which is open."""
    pipeline = pipeline_of(job.checkpoints)
    assert pipeline.ahead is not None
    window = pipeline.ahead.window
    assert isinstance(window, Window)
    return window


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[tuple[Job, Job]]:
    """A plain training, and one whose window is open; both have committed a checkpoint."""
    plain, ahead = Job(tmp_path / "plain"), Job(tmp_path / "ahead", window=12)
    for job in (plain, ahead):
        for _ in range(20):
            job.batch()
    _compare(plain, ahead)
    for job in (plain, ahead):
        for _ in range(15):
            job.batch()
    assert window_of(ahead).reason is None
    yield plain, ahead
    plain.checkpoints.close(final=False)
    ahead.checkpoints.close(final=False)


def to_the_cut(plain: Job, ahead: Job) -> str | None:
    """Train until both have a checkpoint of the same bytes; why it was a plain cut."""
    for job in (plain, ahead):
        while job.done % 20:
            job.batch()
    _compare(plain, ahead)
    why: str | None = ahead.copied.why_plain
    return why


def restored(place: Place) -> dict[str, torch.Tensor]:
    target = MemoryTarget()
    restore(Run.open(open_store(place.run)), target)
    return {name: table.values for name, table in target.tables.items()}


# Faults.


def test_a_slot_that_is_removed_in_a_window_makes_the_cut_plain(jobs: tuple[Job, Job]) -> None:
    plain, ahead = jobs
    window = window_of(ahead)
    until(lambda: window._copier is not None and window._copier.copied()[0] > 0)
    window.slot.path.unlink()
    assert "removed" in str(to_the_cut(plain, ahead))


def test_a_window_that_cannot_hand_rows_over_makes_the_cut_plain(
    jobs: tuple[Job, Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ahead = jobs
    window = window_of(ahead)
    until(lambda: window._copier is not None)

    def fails(*_: Any) -> int:
        raise OSError("the native call failed")

    with monkeypatch.context() as patched:
        patched.setattr(library, "hand_over", fails)
        for job in (plain, ahead):
            job.batch()
    assert to_the_cut(plain, ahead) == "the native call failed"


def test_marks_stay_if_a_window_finds_no_memory(
    jobs: tuple[Job, Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ahead = jobs
    to_the_cut(plain, ahead)
    until(lambda: ahead.checkpoints.stats.committed == 2)  # which gives a bitmap back
    trackers = list(ahead.checkpoints._parts.trackers.values())
    trackers[-1]._spare.clear()  # so that the last table needs one more bitmap

    def fails(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no memory for one more bitmap")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros_like", fails)
        for job in (plain, ahead):
            for _ in range(15):
                job.batch()
        assert all(tracker.aside is None for tracker in trackers)
    assert to_the_cut(plain, ahead) is None  # there was memory again, and a window


def test_rows_that_were_marked_before_the_window_are_not_taken_for_unmarked(
    tmp_path: Path,
) -> None:
    every_row: dict[str, Any] = {"verify_unmarked_rows": USERS}
    plain = Job(tmp_path / "plain", **every_row)
    ahead = Job(tmp_path / "ahead", window=12, **every_row)
    for _ in range(3):
        for job in (plain, ahead):
            job.batch()
        assert to_the_cut(plain, ahead) is None
    assert ahead.checkpoints.stats.unmarked_rows == 0
    for job in (plain, ahead):
        for _ in range(15):
            job.batch()
        job.model.users.weight.detach().numpy()[USERS - 1] += 1  # torch does not count this write
    assert "'users'" in str(to_the_cut(plain, ahead))
    assert ahead.checkpoints.stats.unmarked_rows == 1
    plain.checkpoints.close(final=False)
    ahead.checkpoints.close(final=False)


# Forks and ends.


class _Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def test_a_loader_forks_workers_while_a_window_is_open(jobs: tuple[Job, Job]) -> None:
    plain, ahead = jobs
    loader = DataLoader(_Numbers(), num_workers=2, multiprocessing_context="fork", timeout=120)
    assert sorted(int(number) for number in loader) == list(range(8))
    assert to_the_cut(plain, ahead) is None


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_leaves_the_window_to_its_parent(jobs: tuple[Job, Job]) -> None:
    plain, ahead = jobs
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ahead.checkpoints.close()  # as where it leaves the `with` block
            pipeline = pipeline_of(ahead.checkpoints)
            assert pipeline.ahead is not None
            pipeline.ahead._at_exit()
            del pipeline.ahead.window
            code = 0
        finally:
            os._exit(code)
    found: list[int] = []

    def has_ended() -> bool:
        ended, status = os.waitpid(child, os.WNOHANG)
        found.append(status)
        return ended == child

    try:
        until(has_ended)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    assert found[-1] == 0
    assert to_the_cut(plain, ahead) is None


_PROGRAM = """
    import sys
    from pathlib import Path

    import torch

    from tests.running_parts import pipeline_of
    from tests.unit.trainer_plugin.test_copied_ahead import Job

    torch.sparse.check_sparse_tensor_invariants.disable()
    job = Job(Path(sys.argv[1]), window=12)
    for _ in range(15):
        job.batch()
    window = pipeline_of(job.checkpoints).ahead.window
    assert window is not None and window.reason is None
    print("ends", flush=True)
"""


def test_a_process_that_ends_without_close_in_a_window(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM), str(tmp_path)],
        timeout=PATIENCE_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "ends\n"), ended.stderr


@pytest.mark.parametrize("final", [True, False])
def test_close_in_a_window(tmp_path: Path, final: bool) -> None:
    job = Job(tmp_path, window=12)
    with job.place.agent():
        for _ in range(15):
            job.batch()
        thread = window_of(job)._thread
        job.checkpoints.close(final=final)
    assert not thread.is_alive()
    if final:
        found = restored(job.place)
        assert torch.equal(found["users"], job.model.users.weight.detach())
        assert torch.equal(found["items"], job.model.items.weight.detach())


def test_sigterm_in_a_window_takes_a_last_checkpoint(tmp_path: Path) -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        job = Job(tmp_path, window=12, handle_sigterm=True)
        with job.place.agent():
            for _ in range(14):
                job.batch()
            window = window_of(job)
            until(lambda: window._copier is not None)  # planned
            assert window.reason is None
            os.kill(os.getpid(), signal.SIGTERM)
            job.batch()
        assert told == [signal.SIGTERM]  # handed on after the last checkpoint
        copied = job.checkpoints.stats.copied
        job.checkpoints.close()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert copied is not None and copied.why_plain is None
    found = restored(job.place)
    assert torch.equal(found["users"], job.model.users.weight.detach())
    assert torch.equal(found["items"], job.model.items.weight.detach())


# What is refused.


def test_rows_that_are_quantized_in_the_cut_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r'Lookahead.*found Precision\(place="device"\)'):
        Job(tmp_path, window=12, tables={"users": 8}, place="device")


def test_a_lookahead_in_a_lookahead_is_refused() -> None:
    reader = Lookahead(simple_training().reader, ids=lambda batch: {})
    with pytest.raises(SettingsError, match=r"^Lookahead\(reader\): found a Lookahead"):
        Lookahead(reader)


# Memory.


def test_memory_follows_the_batches_and_the_window(jobs: tuple[Job, Job]) -> None:
    plain, ahead = jobs
    assert plain.checkpoints.lookahead_bytes == 0
    window = window_of(ahead)
    until(lambda: window._copier is not None)
    reader = ahead.reader
    bitmaps = sum(tracker.bitmap_bytes for tracker in ahead.checkpoints._parts.trackers.values())
    found = ahead.checkpoints.lookahead_bytes - reader.held_bytes - 2 * bitmaps
    assert found == sum(plan.size_bytes for plan in window._plans) > 0
    to_the_cut(plain, ahead)
    assert ahead.checkpoints.lookahead_bytes == reader.held_bytes > 0
    ahead.checkpoints.close(final=False)
    assert ahead.checkpoints.lookahead_bytes == reader.held_bytes


@pytest.mark.parametrize("is_full", [True, False])
def test_a_plan_follows_the_rows_of_the_window_and_not_the_table(is_full: bool) -> None:
    def plan_bytes(rows: int, looked_up: int) -> int:
        marked = None if is_full else dirty_bitmap.new(rows)
        draw = torch.Generator().manual_seed(rows)
        ids = torch.randint(0, rows, (looked_up,), generator=draw)
        seen = dirty_bitmap.new(rows)
        return plan_table([ids, ids], rows=rows, marked=marked, seen=seen).size_bytes

    for looked_up in (100, 10_000):
        # Of the table: 8 bytes for each 2,048 rows.
        for rows in (1 << 16, 1 << 22):
            assert plan_bytes(rows, looked_up) <= 16 * looked_up + rows // 256 + 100


def test_a_checkpointer_without_lookahead_takes_nothing(place: Place) -> None:
    checkpoints: Checkpointer = checkpointer(simple_training(), place)
    assert checkpoints.lookahead_bytes == 0
    assert not StagedRun(place.run_directory).staged_jobs()
