"""Checkpoints of several ranks from the cut to the restore, on other ranks and at an end."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from recpoint.catalog import staged
from recpoint.catalog.run import Run
from recpoint.catalog.store import open_store
from tests.fault.rank_jobs import WAITING, RankJob, require_same_end
from tests.fault.rank_lives import BATCH, SAMPLES
from tests.training_builder import InlineAgent


@pytest.fixture
def job(tmp_path: Path) -> RankJob:
    return RankJob(tmp_path)


def test_another_number_of_ranks_goes_on_where_the_others_stopped(job: RankJob) -> None:
    samples: list[int] = []
    state, batches = None, 0
    with InlineAgent(job.staging):
        for ranks in (4, 2, 1, 3):
            batches += 3
            lives = job.train(ranks, batches, settings=WAITING)
            assert [life.exit_code for life in lives] == [0] * ranks
            for life in lives:
                assert state in (None, life.told["restored_state"])
                samples += life.told["samples"]
            state = lives[0].told["state"]
            (run,) = staged.run_directories(job.staging)
            of_ranks = {path.name[:6] for path in staged.slots_directory(run).iterdir()}
            assert of_ranks == {f"r{rank:05d}" for rank in range(ranks)}
    assert len(samples) == len(set(samples)) == 3 * BATCH * (4 + 2 + 1 + 3)
    order = np.random.default_rng(5).permutation(SAMPLES)
    assert set(samples) == set(order[: len(samples)].tolist())


def test_a_signal_to_one_rank_ends_all_after_the_same_batch(job: RankJob) -> None:
    with InlineAgent(job.staging):
        lives = job.train(
            2, 10**6, only=1, terminate_at=3, settings=WAITING | {"interval_batches": 10**6}
        )
        assert [life.exit_code for life in lives] == [-signal.SIGTERM] * 2
    (name,) = Run.open(open_store(job.url)).live_line()
    assert name.step >= 3


def test_the_last_batch_is_stored_when_one_rank_loses_its_part_of_it(job: RankJob) -> None:
    with InlineAgent(job.staging):
        lives = job.train(2, 4, only=1, unstaged=4, settings=WAITING)
    assert [life.exit_code for life in lives] == [0, 0]
    newest = Run.open(open_store(job.url)).live_line()[0]
    assert newest.step == 4 and lives[1].told["failed"] == 1


def test_dense_layers_in_uneven_pieces_go_to_any_number_of_ranks(
    job: RankJob, tmp_path: Path
) -> None:
    other = RankJob(tmp_path / "uninterrupted")
    with InlineAgent(other.staging):
        uninterrupted = other.train(2, 4, shard_dense=True, settings=WAITING)
    state, batches = None, 0
    with InlineAgent(job.staging):
        for ranks, pieces in (
            (2, [4, 3]),
            (2, [4, 3]),
            (3, [3, 3, 1]),
            (4, [4, 3, 4, 3]),  # two copies of two pieces
            (1, None),  # whole
            (2, [4, 3]),
        ):
            batches += 2
            lives = job.train(ranks, batches, shard_dense=pieces is not None, settings=WAITING)
            assert [life.exit_code for life in lives] == [0] * ranks
            for rank, life in enumerate(lives):
                # Weight and bias of the hidden layer; those of the last are on the first rank only.
                assert life.told["pieces"][:2] == ([] if pieces is None else [pieces[rank]] * 2)
                assert state in (None, life.told["restored_state"])
                assert life.told["state"] != life.told["restored_state"]
            state = lives[0].told["state"]
            if batches == 4:
                require_same_end(lives, uninterrupted)
