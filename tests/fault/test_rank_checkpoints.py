"""Checkpoints of several ranks from the cut to the restore, on other ranks and at an end."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import numpy as np
import pytest

from recpoint.catalog.persist import plan
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.catalog.store.store import open_store
from recpoint.trainer_plugin.state import rng
from tests.fault.rank_jobs import WAITING, RankJob, require_same_end
from tests.fault.rank_lives import BATCH, SAMPLES
from tests.training_builder import InlineAgent


@pytest.fixture
def job(tmp_path: Path) -> RankJob:
    return RankJob(tmp_path)


def test_another_number_of_ranks_goes_on_where_the_others_stopped(job: RankJob) -> None:
    samples: list[int] = []
    state, batches, drawn = None, 0, None
    with InlineAgent(job.staging):
        # Extras are those of the rank of the same number; of one that was not there, of rank 0.
        for ranks, origins in ((4, [0, 1, 2, 3]), (2, [0, 1]), (1, [0]), (3, [0, 0, 0])):
            batches += 3
            lives = job.train(ranks, batches, settings=WAITING)
            assert [life.exit_code for life in lives] == [0] * ranks
            assert [life.told["origin"] for life in lives] == origins
            # So it is with the generators: rank 0 has gone on with its own through all lives.
            assert drawn in (None, lives[0].told["drawn"][:2])
            drawn = lives[0].told["drawn"][:2]
            for life in lives:
                assert state in (None, life.told["restored_state"])
                samples += life.told["samples"]
            state = lives[0].told["state"]
            (run,) = [run.path for run in staged_runs(job.staging)]
            of_ranks = {path.name[:6] for path in StagedRun(run).slots_directory.iterdir()}
            assert of_ranks == {f"r{rank:05d}" for rank in range(ranks)}
        # The reader of three ranks cannot be divided between two, and that is said.
        refused = job.train(2, batches, divisible=False, settings=WAITING)
    for life in refused:
        assert life.exit_code == 1
        assert "the readers of 3 ranks" in life.told["refused"]
        assert "give the reader load_state_dicts(states, rank, ranks)" in life.told["refused"]
    # Those that were not there have drawn from new ones, named after checkpoint and rank.
    attempt = restored_attempt(job.url, step=9)
    with rng.untouched():
        for rank, life in enumerate(lives[1:], start=1):
            rng.seed(f"{attempt}|{rank}")
            assert life.told["drawn"][:2] == [random.random(), float(np.random.random())]
    assert len(samples) == len(set(samples)) == 3 * BATCH * (4 + 2 + 1 + 3)
    order = np.random.default_rng(5).permutation(SAMPLES)
    assert set(samples) == set(order[: len(samples)].tolist())


def restored_attempt(url: str, *, step: int) -> str:
    """The name of the checkpoint of a step."""
    run = Run.open(open_store(url))
    (name,) = (name for name in run.live_line() if name.step == step)
    return run.manifest(*name).attempt


def test_a_signal_to_one_rank_ends_all_after_the_same_batch(job: RankJob) -> None:
    with InlineAgent(job.staging):
        lives = job.train(
            2, 10**6, only=1, terminate_at=3, settings=WAITING | {"interval_batches": 10**6}
        )
        assert [life.exit_code for life in lives] == [-signal.SIGTERM] * 2
    (name,) = Run.open(open_store(job.url)).live_line()
    assert name.step >= 3


@pytest.mark.parametrize("known", [False, True])
def test_the_last_batch_is_stored_when_one_rank_loses_its_part_of_it(
    job: RankJob, known: bool
) -> None:
    with InlineAgent(job.staging):
        lives = job.train(2, 4, only=1, unstaged=4, end_once_staged=known, settings=WAITING)
    assert [life.exit_code for life in lives] == [0, 0]
    newest = Run.open(open_store(job.url)).live_line()[0]
    assert newest.step == 4 and lives[1].told["failed"] == 1


def test_dense_layers_in_uneven_pieces_go_to_any_number_of_ranks(
    job: RankJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several chunks of each tree, as those of large models have: the first has the tree itself.
    monkeypatch.setattr(plan, "CHUNK_BYTES", 512)
    other = RankJob(tmp_path / "uninterrupted")
    with InlineAgent(other.staging):
        uninterrupted = other.train(2, 4, shard_dense=True, settings=WAITING)
    state, batches = None, 0
    stored: dict[int, set[str]] = {}
    with InlineAgent(job.staging):
        # Pieces of each rank, and the ranks of the checkpoint before whose trees it reads: its own,
        # that of rank 0, and those that have some of its pieces; of others only the reader's state.
        for ranks, pieces, trees in (
            (2, [4, 3], [set(), set()]),
            (2, [4, 3], [{0}, {0, 1}]),
            (3, [3, 3, 1], [{0}, {0, 1}, {0, 1}]),
            # Two copies of two pieces.
            (4, [4, 3, 4, 3], [{0, 1}, {0, 1, 2}, {0, 1, 2}, {0, 1, 2}]),
            (1, None, [{0, 1, 2, 3}]),  # whole
            (2, [4, 3], [{0}, {0}]),
        ):
            batches += 2
            lives = job.train(ranks, batches, shard_dense=pieces is not None, settings=WAITING)
            assert [life.exit_code for life in lives] == [0] * ranks
            for rank, life in enumerate(lives):
                # Weight and bias of the hidden layer; those of the last are on the first rank only.
                assert life.told["pieces"][:2] == ([] if pieces is None else [pieces[rank]] * 2)
                assert state in (None, life.told["restored_state"])
                assert life.told["state"] != life.told["restored_state"]
                divided = len(stored) != ranks
                for held, chunks in stored.items():
                    read = chunks.intersection(life.told["chunks_read"])
                    some = {min(chunks)} if divided else set()
                    assert read == (chunks if held in trees[rank] else some), (rank, held)
            stored = state_chunks(job.url)
            assert len(stored) == ranks and all(len(chunks) > 2 for chunks in stored.values())
            state = lives[0].told["state"]
            if batches == 4:
                require_same_end(lives, uninterrupted)
                # Of the sharded table each has read its rows, of the replicated one all.
                tables = {key.rsplit("/r", 1)[1][:12] for key in lives[1].told["chunks_read"]}
                assert {key for key in tables if "-t0" in key} == {
                    "00000-t00000",
                    "00001-t00001",
                }


def state_chunks(url: str) -> dict[int, set[str]]:
    """Of the newest checkpoint, by rank: the keys of its state chunks."""
    run = Run.open(open_store(url))
    found: dict[int, set[str]] = {}
    for entry in run.manifest(*run.live_line()[0]).chunks:
        if entry.content == "state":
            found.setdefault(entry.rank, set()).add(entry.key)
    return found
