"""Fulls of tables on a GPU, copied in pieces before their cuts, equal those of plain cuts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recpoint import Consecutive
from recpoint.trainer_plugin.snapshot import piece_window
from recpoint.trainer_plugin.snapshot.device_copies import CudaCopies, DeviceCopies
from recpoint.trainer_plugin.snapshot.piece_window import PieceWindow
from tests.polling import until
from tests.running_parts import pipeline_of
from tests.unit.trainer_plugin.test_copied_ahead import USERS, Job, _compare

pytestmark = pytest.mark.gpu

_SPIN_CYCLES = 200_000_000
_FULLS: dict[str, Any] = {"policy": Consecutive(full_every=1)}


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("copies on the host have tests of their own")
    return device


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Sums of a GPU in a fixed order, so that two runs can be compared bit for bit."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces, as a large table has."""

    def copies_of(device: torch.device) -> DeviceCopies:
        copies = CudaCopies(device)
        copies.piece_bytes = 96 << 10
        return copies

    monkeypatch.setattr(piece_window, "copies_of", copies_of)


def jobs_on(gpu: torch.device, directory: Path, **settings: Any) -> tuple[Job, Job]:
    """A plain training, and one whose fulls are copied ahead."""
    plain = Job(directory / "plain", device=gpu, **{**_FULLS, **settings, "copy_fulls_ahead": 0})
    ahead = Job(directory / "ahead", device=gpu, **{**_FULLS, **settings, "copy_fulls_ahead": 12})
    return plain, ahead


def window_of(job: Job) -> PieceWindow | None:
    pipeline = pipeline_of(job.checkpoints)
    assert pipeline.ahead is not None
    window = pipeline.ahead.window
    assert window is None or isinstance(window, PieceWindow)
    return window


def train(plain: Job, ahead: Job, batches: int) -> list[str | None]:
    """Train both, and compare their fulls; return why each was not copied ahead."""
    reasons = []
    for _ in range(batches):
        for job in (plain, ahead):
            job.batch()
        window = window_of(ahead)
        if window is not None and window.reason is None:
            until(window._room.done)
        if ahead.done % 20 == 0:
            reasons.append(ahead.copied.why_plain)
            _compare(plain, ahead)
    return reasons


def close(*jobs: Job) -> None:
    for job in jobs:
        job.checkpoints.close(final=False)


@pytest.mark.usefixtures("deterministic", "small_pieces")
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "sparse"),
    [("sgd", True), ("adagrad", False), ("adagrad", True), ("sparse_adam", True)],
)
def test_staged_bytes_equal_those_of_a_plain_cut(
    gpu: torch.device, tmp_path: Path, optimizer: str, sparse: bool, own_stream: bool
) -> None:
    plain, ahead = jobs_on(gpu, tmp_path, optimizer=optimizer, sparse=sparse)
    stream = torch.cuda.Stream(gpu) if own_stream else torch.cuda.current_stream(gpu)
    with torch.cuda.stream(stream):
        assert train(plain, ahead, 40) == [None, None]
    assert ahead.copied.rows_before > USERS // 2 and ahead.copied.rows_in_stall > 0
    close(plain, ahead)


@pytest.mark.usefixtures("deterministic", "small_pieces")
def test_updates_and_marks_that_the_device_has_not_reached_at_the_cut_are_in_it(
    gpu: torch.device, tmp_path: Path
) -> None:
    plain, ahead = jobs_on(gpu, tmp_path)
    for done in range(1, 21):
        for job in (plain, ahead):
            torch.cuda._sleep(_SPIN_CYCLES // 10 if done in (8, 12, 20) else 1)
            job.batch()
        window = window_of(ahead)
        if window is not None and window.reason is None:
            until(window._room.done)
    assert ahead.copied.why_plain is None
    _compare(plain, ahead)
    close(plain, ahead)


@pytest.mark.usefixtures("deterministic", "small_pieces")
def test_a_table_that_moves_in_a_window_makes_the_cut_plain(
    gpu: torch.device, tmp_path: Path
) -> None:
    plain, ahead = jobs_on(gpu, tmp_path)
    train(plain, ahead, 15)
    for job in (plain, ahead):
        weight = job.model.users.weight
        weight.data = weight.data.clone()
    torch.cuda.empty_cache()
    (reason,) = train(plain, ahead, 5)
    assert reason == "table 'users' lies in other memory"
    assert train(plain, ahead, 20) == [None]
    close(plain, ahead)


@pytest.mark.usefixtures("deterministic", "small_pieces")
def test_a_graph_may_be_captured_while_a_window_is_open(gpu: torch.device, tmp_path: Path) -> None:
    plain, ahead = jobs_on(gpu, tmp_path)
    train(plain, ahead, 12)
    window = window_of(ahead)
    assert window is not None and window.reason is None
    graph, source = torch.cuda.CUDAGraph(), torch.ones(8, device=gpu)
    with torch.cuda.graph(graph):
        doubled = source * 2
    graph.replay()
    assert doubled.tolist() == [2.0] * 8
    assert train(plain, ahead, 8) == [None]
    close(plain, ahead)


def test_a_copy_waits_for_what_training_was_given_and_for_nothing_later(
    gpu: torch.device,
) -> None:
    copies = CudaCopies(gpu)
    out = copies.buffer(1 << 20)
    assert out.is_pinned()
    source = torch.zeros(1 << 20, dtype=torch.uint8, device=gpu)
    torch.cuda._sleep(_SPIN_CYCLES)
    source.fill_(3)
    copies.follow_training()
    arrival = copies.copy([source], [out])
    assert not arrival.is_there()
    arrival.wait()
    assert arrival.is_there() and bool((out == 3).all())
    copies.follow_training()
    torch.cuda._sleep(_SPIN_CYCLES)
    copies.copy([source], [out]).wait()
    assert not torch.cuda.current_stream(gpu).query()  # training is still at work
    copies.wait_for_all()
    assert torch.cuda.current_stream(gpu).query()


@pytest.mark.parametrize("row_bytes", [1, 4, 32, 260])
def test_rows_are_gathered_byte_for_byte(gpu: torch.device, row_bytes: int) -> None:
    copies = CudaCopies(gpu)
    source = torch.randint(0, 256, (5_000, row_bytes), dtype=torch.uint8, device=gpu)
    ids = torch.arange(3, 5_000, 17)
    out = copies.buffer(ids.numel() * row_bytes).view(ids.numel(), row_bytes)
    copies.gather(source, ids, out)
    assert torch.equal(out, source.cpu()[ids])
