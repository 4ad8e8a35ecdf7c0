"""Ranks that die by SIGKILL at any point of a checkpoint cost no batch, and leave nothing behind.

The points are the steps that a rank takes on disk and its exchanges with the others, from the batch
before a checkpoint to the end of training.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from recpoint.catalog import staged
from recpoint.catalog.check import check
from recpoint.catalog.run import Run
from recpoint.catalog.store import open_store
from recpoint.catalog.sweep import execute, plan_sweep
from recpoint.testing.seaweed import SeaweedServer
from tests.fault.kill_points import at_every_step
from tests.fault.lives import serving
from tests.fault.rank_jobs import WAITING, Life, RankJob, require_same_end
from tests.fault.rank_lives import BATCH, SAMPLES
from tests.training_builder import InlineAgent

#: A checkpoint is cut after every second batch and at the end.
_COMMITTED, _KILLED_FROM, _CUT, _END = 2, 3, 4, 5
_TORCHRUN_SECONDS = 240.0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Life]]:
    """Number of ranks -> how they end when none of them is killed."""
    found = {}
    for ranks in (2, 4):
        job = RankJob(tmp_path_factory.mktemp("uninterrupted"))
        with InlineAgent(job.staging):
            found[ranks] = job.train(ranks, _END, settings=WAITING)
    return found


def killed_at(
    place: Path, kill: int, *, rank: int, expected: list[Life], kill_from: int = _KILLED_FROM
) -> bool:
    """Whether `rank` was killed; what it left is right in any case."""
    job, ranks = RankJob(place), len(expected)
    with InlineAgent(job.staging):
        first = job.train(ranks, _CUT, only=rank, kill=kill, kill_from=kill_from, settings=WAITING)
        killed = first[rank].exit_code == -signal.SIGKILL
        assert killed or [life.exit_code for life in first] == [0] * ranks
        second = job.train(ranks, _END, settings=WAITING)
    # All go on from one checkpoint that was committed.
    (begun,) = {life.told["begun"] for life in second}
    assert begun in ({0, _COMMITTED, _CUT} if kill_from == 0 else {_COMMITTED, _CUT})
    assert killed or begun == _CUT
    require_same_end(second, expected)
    require_whole(job.url)
    return killed


def require_whole(url: str) -> None:
    """That the last checkpoint is there, and after a sweep nothing that is not of some."""
    run = Run.open(open_store(url))
    assert run.live_line()[0].step == _END
    execute(run, plan_sweep(run, grace_seconds=0))  # of a checkpoint that never was
    report = check(run, level="full")
    assert report.ok and not report.findings


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_two_is_killed_at_every_point(
    tmp_path: Path, uninterrupted: dict[int, list[Life]], rank: int
) -> None:
    points = at_every_step(
        lambda kill: killed_at(tmp_path / str(kill), kill, rank=rank, expected=uninterrupted[2])
    )
    assert points > 10


@pytest.mark.parametrize(
    ("rank", "kill", "kill_from"), [(0, 8, 0), (3, 2, _KILLED_FROM), (2, 7, _KILLED_FROM)]
)
def test_a_rank_of_four_is_killed(
    tmp_path: Path,
    uninterrupted: dict[int, list[Life]],
    rank: int,
    kill: int,
    kill_from: int,
) -> None:
    expected = uninterrupted[4]
    assert killed_at(tmp_path, kill, rank=rank, expected=expected, kill_from=kill_from)


def test_two_hosts_with_an_agent_each_over_one_s3_server(
    tmp_path: Path,
    uninterrupted: dict[int, list[Life]],
    s3_environment: SeaweedServer,
    s3_run_url: str,
) -> None:
    environment = s3_environment.environment()
    hosts = [tmp_path / "host-a", tmp_path / "host-b"]
    job = RankJob(tmp_path, url=s3_run_url, hosts=hosts, environment=environment)
    with serving(hosts[0], environment), serving(hosts[1], environment):
        first = job.train(2, _CUT, only=1, kill=6, kill_from=_KILLED_FROM, settings=WAITING)
        assert first[1].exit_code == -signal.SIGKILL
        second = job.train(2, _END, settings=WAITING)
    require_same_end(second, uninterrupted[2])
    assert {life.told["begun"] for life in second} == {_COMMITTED}
    require_whole(s3_run_url)
    for rank, host in enumerate(hosts):  # neither has seen anything of the other
        (run,) = staged.run_directories(host)
        slots = {path.name[:6] for path in staged.slots_directory(run).iterdir()}
        assert slots == {f"r{rank:05d}"}


def torchrun(ranks: int, told: Path, **given: object) -> dict[str, Life]:
    """What ranks told that torchrun has started, by life and rank; it has ended well."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    arguments = json.dumps({"told": str(told), "settings": WAITING, **given})
    ended = subprocess.run(
        [*command, "-m", "tests.fault.torchrun_life", arguments],
        capture_output=True,
        text=True,
        timeout=_TORCHRUN_SECONDS,
        # Else ranks that torchrun restarts meet in the store of those before, and may find the
        # address of one that is dead (torch 2.13).
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    files = told.parent.glob(f"{told.name}-*")
    return {
        file.name.removeprefix(f"{told.name}-"): Life(json.loads(file.read_text()), 0)
        for file in sorted(files)
    }


def test_torchrun_restarts_all_and_another_one_goes_on_with_more(
    tmp_path: Path, uninterrupted: dict[int, list[Life]]
) -> None:
    common = {"url": str(tmp_path / "run"), "staging": str(tmp_path / "staging")}
    with InlineAgent(tmp_path / "staging"):
        two = torchrun(2, tmp_path / "two", **common, until_batch=_END, killed=1, killed_after=_CUT)
        three = torchrun(3, tmp_path / "three", **common, until_batch=_END + 2)
    restarted = [two["1-0"], two["1-1"]]
    assert "0-1" not in two and {life.told["begun"] for life in restarted} == {_COMMITTED}
    require_same_end(restarted, uninterrupted[2])
    assert three.keys() == {"0-0", "0-1", "0-2"}
    samples = [life.told["samples"] for life in (*restarted, *three.values())]
    for life in three.values():
        assert life.told["begun"] == _END
        assert life.told["restored_state"] == restarted[0].told["state"]
    # Each sample behind the checkpoint that they went on from, once.
    order = np.random.default_rng(5).permutation(SAMPLES)
    first, last = 2 * _COMMITTED * BATCH, (2 * _END + 3 * 2) * BATCH
    assert sorted(sum(samples, [])) == sorted(order[first:last].tolist())
