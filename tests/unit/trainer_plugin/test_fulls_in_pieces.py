"""Fulls that are copied in pieces between batches, as tables on a GPU are, by copies that are late.

Here the tables are in the host's memory. What a GPU does beside is in tests/gpu.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recpoint import Checkpointer, Consecutive, Options, Precision
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.assembly import why_no_fulls_ahead
from recpoint.trainer_plugin.pipeline import ahead as ahead_module
from recpoint.trainer_plugin.snapshot import cut, piece_window
from recpoint.trainer_plugin.snapshot.device_copies import HostCopies
from recpoint.trainer_plugin.snapshot.piece_copier import PieceCopier
from recpoint.trainer_plugin.snapshot.piece_window import PieceWindow
from tests.late_copies import LateCopies
from tests.polling import until
from tests.running_parts import pipeline_of
from tests.unit.trainer_plugin.test_copied_ahead import ITEMS, USERS, Job, _compare

_WINDOW: dict[str, Any] = {"copy_fulls_ahead": 12}
_ALWAYS_FULL = Consecutive(full_every=1)


class LateJobs:
    """Two trainings, of which the second copies its fulls in pieces, late.

    Attributes:
        plain, ahead: the trainings.
        late: the second one's device; `called` is what its last window called.
        piece_bytes: bytes of its pieces, from the next window on.
    """

    def __init__(
        self, directory: Path, patch: pytest.MonkeyPatch, seed: int = 0, **settings: Any
    ) -> None:
        self.draw = random.Random(seed)
        self.piece_bytes = 96 << 10
        chosen = {"policy": _ALWAYS_FULL, **settings}
        self.plain = Job(directory / "plain", **{**chosen, "copy_fulls_ahead": 0})
        self.ahead = Job(directory / "ahead", **{**_WINDOW, **chosen})
        self.late = LateCopies(
            HostCopies(), self.draw, arrives=0.8, tables=lambda: self.arrays(self.ahead)
        )
        for module in (cut, ahead_module):
            patch.setattr(module, "are_copied_in_pieces", lambda tables: True)
        patch.setattr(piece_window, "copies_of", self._copies_of)

    def _copies_of(self, _device: torch.device) -> LateCopies:
        self.late.piece_bytes = self.piece_bytes
        self.late.called.clear()
        return self.late

    @property
    def both(self) -> tuple[Job, Job]:
        return self.plain, self.ahead

    @property
    def window(self) -> PieceWindow | None:
        pipeline = pipeline_of(self.ahead.checkpoints)
        assert pipeline.ahead is not None
        window = pipeline.ahead.window
        assert window is None or isinstance(window, PieceWindow)
        return window

    @staticmethod
    def arrays(job: Job) -> list[Tensor]:
        """Values and row states of all tables."""
        weights = [job.model.users.weight, job.model.items.weight]
        states = [
            state
            for optimizer in job.optimizers
            for weight in weights
            for state in optimizer.state.get(weight, {}).values()
            if isinstance(state, Tensor) and state.shape == weight.shape
        ]
        return [*weights, *states]

    def batch(self) -> None:
        for job in self.both:
            job.batch()
        self.late.note_contents()
        window = self.window
        if window is not None and window.reason is None:
            until(window._room.done)
            moves = [
                buffer.move for copier in window._copiers.values() for buffer in copier._buffers
            ]
            until(lambda: all(move is None or move.done() for move in moves))

    def train(self, batches: int) -> list[str | None]:
        """Train both, and compare their fulls; return why each was not copied ahead."""
        reasons = []
        for _ in range(batches):
            self.batch()
            if self.ahead.done % 20 == 0:
                reasons.append(self.ahead.copied.why_plain)
                _compare(*self.both)
        return reasons

    def close(self) -> None:
        for job in self.both:
            job.checkpoints.close(final=False)


@pytest.mark.parametrize(
    ("seed", "optimizer", "sparse"),
    [(1, "sgd", True), (2, "adagrad", False), (3, "sparse_adam", True), (4, "adagrad", True)],
)
def test_staged_bytes_equal_those_of_a_plain_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, optimizer: str, sparse: bool
) -> None:
    jobs = LateJobs(tmp_path, monkeypatch, seed, optimizer=optimizer, sparse=sparse)
    assert jobs.train(40) == [None, None]
    copied = jobs.ahead.copied
    assert copied.rows_before > USERS // 2 and copied.rows_in_stall > 0
    assert copied.rows_before + copied.rows_in_stall >= USERS + ITEMS
    assert copied.bytes_before > 0 and copied.bytes_in_stall > 0
    # Nothing is copied before the device was idle, and no row again before it is idle again.
    calls = " ".join(jobs.late.called)
    opening, meanwhile, again, at_end = calls.split("wait for all")
    assert opening == "buffer buffer " and at_end == ""
    assert "follow training copy" in meanwhile and "gather" not in meanwhile
    assert "gather" in again and "follow training" not in again
    jobs.close()


def test_without_the_second_copy_the_bytes_would_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison at the cut finds what a lost mark would leave, and makes the cut plain."""
    jobs = LateJobs(tmp_path, monkeypatch)
    monkeypatch.setattr(PieceCopier, "copy_again", lambda *_: 0)
    assert jobs.train(20) == ["rows that were copied before had changed, and nothing marked them"]
    assert jobs.ahead.checkpoints.stats.unmarked_rows > 0
    jobs.close()


def test_marks_by_hand_and_accumulated_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = LateJobs(tmp_path, monkeypatch, accumulate=4)
    jobs.piece_bytes = 128 << 10  # pieces are copied after each step of the optimizer
    changed_ids = torch.arange(0, USERS, 7)
    for _ in range(15):
        jobs.batch()
    for job in jobs.both:  # these rows may be copied by now
        with torch.no_grad():
            job.model.users.weight[changed_ids] += 1
        job.checkpoints.mark("users", changed_ids)
    assert jobs.train(5) == [None]
    jobs.close()


def test_a_table_that_is_dirty_as_a_whole_is_copied_in_the_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = LateJobs(tmp_path, monkeypatch)
    for _ in range(3):
        jobs.batch()
    for job in jobs.both:
        job.checkpoints.mark_all("items")
    assert jobs.train(17) == [None]
    assert jobs.ahead.copied.rows_in_stall >= ITEMS
    jobs.close()


def test_a_window_that_cannot_hold_makes_the_cut_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = LateJobs(tmp_path, monkeypatch)
    reasons = []
    for _ in range(15):
        jobs.batch()
    for job in jobs.both:  # torch counts the change, and nobody says which rows it is of
        with torch.no_grad():
            job.model.items.weight.mul_(0.9)
    reasons += jobs.train(15)
    for job in jobs.both:
        job.model.users.weight.share_memory_()
    reasons += jobs.train(20)
    for job in jobs.both:
        job.model.users.weight = nn.Parameter(job.model.users.weight.detach().clone())
        job.optimizers[0].param_groups[0]["params"][0] = job.model.users.weight
    reasons += jobs.train(20)
    assert reasons[0] == "every row of table 'items' became dirty"
    assert reasons[1] == "table 'users' lies in other memory"
    assert reasons[2] is not None
    jobs.close()


def test_a_cut_before_its_time_and_the_end_of_training_within_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = LateJobs(tmp_path, monkeypatch)
    jobs.piece_bytes = 16 << 10
    for _ in range(9):
        jobs.batch()
    assert all(job.checkpoints.checkpoint() for job in jobs.both)
    too_few = "too few rows were copied before: open its window earlier"
    assert jobs.ahead.copied.why_plain == too_few
    _compare(*jobs.both)
    jobs.piece_bytes = 96 << 10
    for _ in range(20):
        jobs.batch()
    assert jobs.ahead.copied.why_plain is None
    _compare(*jobs.both)
    for _ in range(12):
        jobs.batch()
    assert jobs.window is not None and jobs.window.reason is None
    marks = {name: tracker.aside for name, tracker in _trackers(jobs.ahead).items()}
    assert all(aside is not None for aside in marks.values())
    jobs.close()
    assert all(tracker.aside is None for tracker in _trackers(jobs.ahead).values())


def test_a_cut_that_fails_within_a_window_gives_marks_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = LateJobs(tmp_path, monkeypatch)
    for _ in range(19):
        jobs.batch()
    with monkeypatch.context() as patch:

        def fails(*_: Any) -> None:
            raise RuntimeError("the device has no memory")

        patch.setattr(PieceCopier, "copy_again", fails)
        jobs.batch()
    assert jobs.ahead.copied.why_plain == "the device has no memory"
    _compare(*jobs.both)
    assert jobs.train(20) == [None]
    jobs.close()


def test_without_buffers_the_cut_is_plain_and_no_window_opens_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = LateJobs(tmp_path, monkeypatch)
    asked: list[int] = []

    def refuse(_device: LateCopies, size_bytes: int) -> Tensor:
        asked.append(size_bytes)
        raise RuntimeError(f"{size_bytes} bytes of the host's memory could not be pinned (none)")

    monkeypatch.setattr(LateCopies, "buffer", refuse)
    assert jobs.train(20) == ["98304 bytes of the host's memory could not be pinned (none)"]
    assert asked == [98_304]
    jobs.close()


def test_by_default_no_window_opens_where_a_table_is_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = LateJobs(tmp_path, monkeypatch, copy_fulls_ahead=None)
    pipeline = pipeline_of(jobs.ahead.checkpoints)
    assert pipeline.ahead is not None
    # As after a long stall: fulls of tables on the CPU would have a window now.
    monkeypatch.setattr(type(pipeline.ahead._lead), "is_due", lambda *_: True)
    (reason,) = jobs.train(20)
    assert reason is not None and reason.startswith("a table is on a device, where only a number")
    jobs.close()


def test_rows_that_a_gpu_quantizes_and_other_devices_are_refused(tmp_path: Path) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    exact, coded = Precision(), Precision(tables={"users": 8})
    assert why_no_fulls_ahead({"users": cpu}, coded) is None
    assert why_no_fulls_ahead({"users": gpu}, exact) is None
    assert why_no_fulls_ahead({"users": gpu}, Precision(bits=8, place="host")) is None
    refused = why_no_fulls_ahead({"items": cpu, "users": gpu}, coded)
    assert refused == "table 'users' on cuda:0, whose rows Precision(place='auto') quantizes there"
    assert why_no_fulls_ahead({"users": torch.device("meta")}, exact) == "table 'users' on meta"
    model = nn.Embedding(9, 2, sparse=True)
    with pytest.raises(SettingsError, match=r"Options\(copy_fulls_ahead=3\): found Precision"):
        Checkpointer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            run=str(tmp_path),
            interval_batches=2,
            options=Options(copy_fulls_ahead=3),
            bits=Precision(bits=8, place="device"),
        )


def _trackers(job: Job) -> Any:
    return pipeline_of(job.checkpoints)._trackers


@pytest.mark.nightly("loops")
@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_between_two_batches_costs_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    jobs = LateJobs(
        tmp_path,
        monkeypatch,
        seed,
        optimizer=draw.choice(["sgd", "adagrad", "sparse_adam"]),
        accumulate=draw.choice([1, 1, 2]),
        copy_fulls_ahead=draw.choice([3, 12, 19]),
    )
    jobs.piece_bytes = draw.choice([8, 64, 256, 2_000]) << 10
    reasons = []
    for _ in range(60):
        event = draw.choice(12 * ["nothing"] + ["marked", "deleted", "all", "uncounted", "moved"])
        rows = torch.tensor(draw.sample(range(ITEMS), 40))
        for job in jobs.both:
            weight = job.model.items.weight
            with torch.no_grad():
                if event == "marked":
                    weight[rows] += 1
                    job.checkpoints.mark("items", rows)
                elif event == "deleted":
                    job.checkpoints.delete_rows("items", rows)
                elif event == "all":
                    job.checkpoints.mark_all("items")
                elif event == "uncounted":  # torch counts it, and nobody says which rows it is of
                    weight[rows] += 1
                elif event == "moved":
                    job.model.users.weight.data = job.model.users.weight.data.clone()
        reasons += jobs.train(1)
    assert len(reasons) == 3
    jobs.close()
