"""Jobs of several ranks: each stages its part, and none waits for one that is gone."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed

from tests.fault.rank_jobs import RankJob
from tests.fault.rank_lives import BATCH, ROWS, announcing_rank, disagreeing_rank
from tests.forked import ForkedProcess
from tests.polling import PATIENCE_SECONDS


@pytest.fixture
def job(tmp_path: Path) -> RankJob:
    return RankJob(tmp_path)


def test_each_rank_stages_its_part_of_the_same_checkpoints(job: RankJob) -> None:
    lives = job.train(2, 4, settings={"jobs": 3, "close_seconds": 0.0})
    assert [life.exit_code for life in lives] == [0, 0]
    assert lives[0].told["state"] == lives[1].told["state"]
    bounds = [life.told["bound"] for life in lives]
    assert [life.told["host_bound"] for life in lives] == [sum(bounds), sum(bounds)]
    jobs = job.staged_jobs()
    # With the state that Adam has made, which is in none of them at the start.
    assert all(3 * one.slot_bytes <= bounds[one.rank] for one in jobs)
    assert [(one.step, one.rank, one.ranks) for one in jobs] == [
        (2, 0, 2),
        (2, 1, 2),
        (4, 0, 2),
        (4, 1, 2),
    ]
    for one, other in (jobs[:2], jobs[2:]):
        assert one.ref == other.ref  # the attempt too
        assert (one.base, one.parent) == (other.base, other.parent)
        names = [table.spec.name for table in one.tables]
        assert names == [table.spec.name for table in other.tables] == ["users", "items"]
        shards = [[(t.first_row, t.shard_rows) for t in part.tables] for part in (one, other)]
        half = (ROWS + 1) // 2
        # What is replicated is stored once.
        assert shards == [[(0, ROWS), (0, half)], [(0, 0), (half, ROWS + 1 - half)]]
    assert [one.kind for one in jobs] == ["full", "full", "increment", "increment"]
    rows = sum(table.row_count for one in jobs[2:] for table in one.tables[1:])
    assert 0 < rows <= 4 * BATCH


_SOON = {"drain_seconds": 5.0, "close_seconds": 5.0, "ranks_seconds": 20.0}


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_wait_for_one_that_is_gone_name_it(job: RankJob, rank: int) -> None:
    lives = job.train(2, 40, only=rank, kill="exchange a checkpoint", settings=_SOON)
    assert not lives[rank].told and lives[1 - rank].exit_code == 1
    assert lives[1 - rank].told["lost"].startswith(f"rank {rank} of 2: ")


def test_a_signal_takes_a_final_checkpoint_on_all_ranks_whatever_the_end_waits(
    job: RankJob,
) -> None:
    settings = {"interval_batches": 10**6, "close_seconds": 0.0}
    lives = job.train(2, 10**6, only=1, terminate_at=3, settings=settings)
    assert [life.exit_code for life in lives] == [-signal.SIGTERM] * 2
    one, other = job.staged_jobs()
    assert one.ref == other.ref and one.step >= 3


def test_training_that_outlives_the_signal_is_not_sent_it_again(job: RankJob) -> None:
    settings = {"interval_batches": 10**6, "close_seconds": 0.0}
    lives = job.train(2, 12, terminate_at=3, outlive_signals=True, settings=settings)
    assert [life.exit_code for life in lives] == [0, 0]
    assert [life.told["signals"] for life in lives] == [1, 1]


def test_the_end_of_a_life_before_ends_no_other_one_over_the_same_store(tmp_path: Path) -> None:
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True
    )
    for life in range(2):
        told = [tmp_path / f"told-{life}-{rank}" for rank in range(2)]
        processes = [
            ForkedProcess(
                target=announcing_rank,
                args=(store.port, str(tmp_path / f"meeting-{life}"), rank, str(told[rank])),
                daemon=True,
            )
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(PATIENCE_SECONDS)
            assert process.exitcode == 0
        found = [json.loads(path.read_text()) for path in told]
        assert found == [{"old": False, "stop_after": 9}] * 2


def test_ranks_that_differ_are_told_how_and_nobody_waits(tmp_path: Path) -> None:
    told = [tmp_path / f"told-{rank}" for rank in range(2)]
    processes = [
        ForkedProcess(
            target=disagreeing_rank,
            args=(str(tmp_path / "meeting"), rank, str(told[rank])),
            daemon=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0
    first, second = (json.loads(path.read_text()) for path in told)
    assert first == second
    assert "rank 0 at a checkpoint after batch 6, rank 1 at the end of training" in first["kinds"]
    assert "rank 0 at a checkpoint after batch 6, rank 1 at a checkpoint after" in first["batches"]
    assert first["policy"].startswith(
        "policy: found OneShot(full_every=None) on rank 1, Consecutive"
    )
    assert "20 on rank 1, 10 on rank 0" in first["interval"]
    assert first["rewinds"].startswith("Options.rewinds: found 3 on rank 1, 0 on rank 0")
    assert first["default_device"] == [[0], [1]] and first["gathered"] == ["0", "11"]
    assert first["numbers"] == [1, 8]
