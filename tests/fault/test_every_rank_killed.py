"""Ranks that die by SIGKILL at points of a checkpoint cost no batch, and leave nothing behind.

The points are the steps that a rank takes on disk and its exchanges with the others: those of a
start on a run that has a checkpoint, and those from the batch before a checkpoint to the end of
training. A rank that hangs is one more way to be gone. `make test` kills at a fixed sample of the
points; `make nightly` at all of them (`RUNS.md`).
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed

from recpoint.catalog.check.check import check
from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import staged_runs
from recpoint.catalog.store.store import open_store
from recpoint.testing.seaweed import SeaweedServer
from tests.fault.kill_points import Death, act_of, at_steps
from tests.fault.lives import serving
from tests.fault.rank_jobs import WAITING, Life, RankJob, require_same_end
from tests.fault.rank_lives import BATCH, SAMPLES
from tests.forked_shell import forked_programs
from tests.polling import until
from tests.training_builder import InlineAgent

#: A checkpoint is cut after every second batch and at the end.
_COMMITTED, _KILLED_FROM, _CUT, _END = 2, 3, 4, 5
_TORCHRUN_SECONDS = 600.0
_ONE_NODE = ("--rdzv-endpoint=127.0.0.1:0",)

#: No checkpoint is waited for, so that ranks may wait for each other a short time only.
_SOON = {"drain_seconds": 5.0, "close_seconds": 5.0, "ranks_seconds": 20.0}

#: Steps between which nothing changes that anybody else could see. What is on disk between them is
#: there without ranks too, where they are gone through (`test_kill_everywhere`).
_UNSEEN = frozenset({"fsync", "mkdir", "open", "reserve", "unlink", "write"})

pytestmark = pytest.mark.xdist_group("ranks killed")  # one process trains the reference


class Reference(NamedTuple):
    """What jobs that nobody kills come to.

    Attributes:
        run: one with a single checkpoint, after batch `_COMMITTED`, at which training ended.
        there: how all ranks ended there.
        ended: how all ranks of a job end that goes to the end without a stop.
    """

    run: Path
    there: list[Life]
    ended: list[Life]

    def job_on_copy(self, place: Path) -> RankJob:
        """A job on a run of its own, with that checkpoint, and a staging area of its own."""
        shutil.copytree(self.run, place / "run")
        return RankJob(place)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Reference]:
    """Number of ranks -> the right end."""
    references = {}
    for ranks in (2, 4):
        short, whole = (RankJob(tmp_path_factory.mktemp("reference")) for _ in range(2))
        with InlineAgent(short.staging), InlineAgent(whole.staging):
            there = short.train(ranks, _COMMITTED, settings=WAITING)
            ended = whole.train(ranks, _END, settings=WAITING)
        references[ranks] = Reference(Path(short.url), there, ended)
    return references


def killed_at(
    job: RankJob,
    kill: int | str | None,
    *,
    rank: int,
    expected: list[Life],
    kill_from: int = _KILLED_FROM,
    count_into: str | None = None,
) -> bool:
    """Whether `rank` was killed; what it left is right in any case."""
    ranks = len(expected)
    with InlineAgent(job.staging):
        first = job.train(
            ranks,
            _CUT,
            only=rank,
            kill=kill,
            kill_from=kill_from,
            count_into=count_into,
            settings=WAITING,
        )
        killed = first[rank].exit_code == -signal.SIGKILL
        assert killed or [life.exit_code for life in first] == [0] * ranks
        require_told(first, rank)
        second = job.train(ranks, _END, settings=WAITING)
    # All go on from one checkpoint that was committed.
    (begun,) = {life.told["begun"] for life in second}
    assert begun in {_COMMITTED, _CUT}
    assert killed or begun == _CUT
    require_same_end(second, expected)
    require_whole(job.url)
    return killed


def require_told(lives: Sequence[Life], lost: int) -> None:
    """That every rank but this one has ended well, or says who is gone."""
    for rank, life in enumerate(lives):
        if rank == lost or life.exit_code == 0:
            continue
        assert life.exit_code == 1
        # Else it was in a collective of training itself, whose error is not recpoint's to tell.
        if "training_failed" not in life.told:
            assert life.told["lost"].startswith(f"rank {lost} of {len(lives)}: ")


def require_whole(url: str) -> None:
    """That the last checkpoint is there, and after a sweep nothing that is not of some."""
    run = Run.open(open_store(url))
    assert run.live_line()[0].step == _END
    execute(run, plan_sweep(run, grace_seconds=0))  # of a checkpoint that never was
    report = check(run, level="full")
    assert report.ok and not report.findings


def point_of(step: str) -> str:
    """The kind of a point: an agent dies at each kind of disk step in `test_kill_everywhere`."""
    if step.startswith("exchange"):
        return step
    return "unseen" if act_of(step) in _UNSEEN else act_of(step)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly("kills")), 1])
def test_a_rank_of_two_is_killed_at_any_point(
    tmp_path: Path, reference: dict[int, Reference], rank: int
) -> None:
    def killed(death: Death) -> bool:
        return killed_at(
            RankJob(tmp_path / str(death.die)),
            death.die,
            rank=rank,
            expected=reference[2].ended,
            count_into=death.count_into,
        )

    assert at_steps(killed, tmp_path / "steps", kind=point_of) > 10


#: For most of its life such a start waits for a rank that will not say that it is alive.
_STARTS_AT_ONCE = 8


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly("kills")), 1])
def test_a_rank_of_two_is_killed_at_any_point_of_a_start(
    tmp_path: Path, reference: dict[int, Reference], rank: int
) -> None:
    """Each start that is killed comes after another one that was, on one run."""
    runs: queue.SimpleQueue[RankJob] = queue.SimpleQueue()
    jobs = [reference[2].job_on_copy(tmp_path / str(number)) for number in range(_STARTS_AT_ONCE)]
    for job in jobs:
        runs.put(job)

    def killed(death: Death) -> bool:
        job = runs.get()
        # It has nothing to store, and ends.
        lives = job.train(
            2,
            _COMMITTED,
            only=rank,
            kill=death.die,
            count_into=death.count_into,
            besides=_UNSEEN,
            settings=_SOON,
        )
        found = lives[rank].exit_code == -signal.SIGKILL
        assert found or [life.exit_code for life in lives] == [0, 0]
        require_told(lives, rank)
        for life in lives:
            state = reference[2].there[0].told["state"]
            assert life.told.get("restored_state", state) == state
        if not found:
            require_same_end(lives, reference[2].there)
        assert Run.open(open_store(job.url)).live_line() == [(_COMMITTED, 1)]
        runs.put(job)
        return found

    steps = at_steps(killed, tmp_path / "steps", at_once=_STARTS_AT_ONCE, kind=point_of)
    assert steps > 20
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(lambda job: goes_on(job, reference[2].ended), jobs))


def goes_on(job: RankJob, expected: list[Life]) -> None:
    """That a job that nobody kills goes on from the only checkpoint, to the right end."""
    with InlineAgent(job.staging):
        lives = job.train(len(expected), _END, settings=WAITING)
    assert {life.told["begun"] for life in lives} == {_COMMITTED}
    require_same_end(lives, expected)
    require_whole(job.url)


@pytest.mark.parametrize(
    "cases",
    [
        [
            (0, "created generations", 0),  # and nobody was told
            (2, "exchange a checkpoint", _KILLED_FROM),
        ],
        pytest.param(
            [
                (3, "exchange what each rank has", 0),
                (1, "restored-rows", 0),
                (3, "exchange a cut", _KILLED_FROM),
                (1, "rename", _KILLED_FROM),  # of its job file
                (0, "exchange the end", _KILLED_FROM),
            ],
            marks=pytest.mark.nightly("kills"),
        ),
    ],
    ids=["by day", "by night"],
)
def test_ranks_of_four_are_killed(
    tmp_path: Path, reference: dict[int, Reference], cases: list[tuple[int, str, int]]
) -> None:
    def killed(place: Path, rank: int, kill: str, kill_from: int) -> None:
        job = reference[4].job_on_copy(place) if kill_from == 0 else RankJob(place)
        assert killed_at(job, kill, rank=rank, expected=reference[4].ended, kill_from=kill_from)

    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(lambda n: killed(tmp_path / str(n), *cases[n]), range(len(cases))))


def test_a_rank_that_hangs_is_named(tmp_path: Path, reference: dict[int, Reference]) -> None:
    """All connections stay open: it is told by its silence."""

    def hangs(place: Path, ranks: int, rank: int, step: str, hosted: bool) -> None:
        lives = (
            reference[ranks]
            .job_on_copy(place)
            .train(
                ranks,
                _CUT,
                only=rank,
                kill=step,
                by=signal.SIGSTOP,
                hosted=hosted,
                settings=_SOON | {"jobs": 2},
            )
        )
        assert lives[rank].exit_code == -signal.SIGKILL  # when all others had ended
        for life in lives[:rank] + lives[rank + 1 :]:
            assert life.told["lost"].startswith(f"rank {rank} of {ranks}: "), life

    cases = [
        (2, 1, "meet", False),
        (2, 0, "restored-rows", False),
        (4, 2, "exchange a checkpoint", False),
        (2, 0, "exchange a cut", True),  # it keeps what ranks meet with, too
        (2, 1, "exchange the end", True),
    ]
    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(lambda n: hangs(tmp_path / str(n), *cases[n]), range(len(cases))))


def test_two_hosts_with_an_agent_each_over_one_s3_server(
    tmp_path: Path,
    reference: dict[int, Reference],
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
    require_same_end(second, reference[2].ended)
    assert {life.told["begun"] for life in second} == {_COMMITTED}
    require_whole(s3_run_url)
    for rank, host in enumerate(hosts):  # neither has seen anything of the other
        (run,) = [run.path for run in staged_runs(host)]
        # Slots are given back with the training's end; locks and outcomes name ranks as well.
        assert {path.stem[-6:] for path in run.rglob("*-r*")} <= {f"r{rank:05d}"}


@contextmanager
def torchrun(
    ranks: int, told: Path, *, node: Sequence[str] = _ONE_NODE, **given: object
) -> Iterator[Callable[[], dict[str, Life]]]:
    """Start the ranks of a node; what is given ends well, and says what they told, by their lives.

    Args:
        ranks: on this node.
        told: how the files begin in which they tell.
        node: arguments that say where torchrun meets other nodes.
        given: see `tests.fault.torchrun_life`.
    """
    programs = forked_programs() or Path(sys.executable).parent
    command = [str(programs / "torchrun"), f"--nproc-per-node={ranks}", *node]
    command += ["--max-restarts=2", "--monitor-interval=0.1", "--rdzv-backend=c10d"]
    command += ["--local-addr=127.0.0.1", "-m", "tests.fault.torchrun_life"]
    command.append(json.dumps({"told": str(told), "settings": WAITING, **given}))
    log = told.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            # Else ranks that torchrun restarts meet in the store of those before, and may find the
            # address of one that is dead (torch 2.13).
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            start_new_session=True,
        )

    def lives() -> dict[str, Life]:
        assert process.wait(_TORCHRUN_SECONDS) == 0, log.read_text()[-4000:]
        files = sorted(told.parent.glob(f"{told.name}-*"))
        return {
            file.name.removeprefix(f"{told.name}-"): Life(json.loads(file.read_text()), 0)
            for file in files
        }

    try:
        yield lives
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_torchrun_restarts_all_and_another_one_goes_on_with_more(
    tmp_path: Path, reference: dict[int, Reference]
) -> None:
    common = {"url": str(tmp_path / "run"), "staging": str(tmp_path / "staging")}
    with InlineAgent(tmp_path / "staging"):
        lives: dict[str, Any] = {
            "until_batch": _END,
            "killed": 1,
            "killed_after": _CUT,
            "killed_restoring": 0,
        }
        with torchrun(2, tmp_path / "two", **common, **lives) as ended:
            two = ended()
        with torchrun(3, tmp_path / "three", **common, until_batch=_END + 2) as ended:
            three = ended()
    restarted = [two["2-0"], two["2-1"]]
    assert not {"0-1", "1-0"} & two.keys()  # the first life of one, the second of the other
    assert {life.told["begun"] for life in restarted} == {_COMMITTED}
    require_same_end(restarted, reference[2].ended)
    assert three.keys() == {"0-0", "0-1", "0-2"}
    samples = [life.told["samples"] for life in (*restarted, *three.values())]
    for life in three.values():
        assert life.told["begun"] == _END
        assert life.told["restored_state"] == restarted[0].told["state"]
    # Each sample behind the checkpoint that they went on from, once.
    require_each_once(samples, 2 * _COMMITTED, 2 * _END + 3 * 2)


def require_each_once(samples: Sequence[list[int]], first: int, last: int) -> None:
    """That these are the samples of all batches of ranks from `first` to before `last`."""
    order = np.random.default_rng(5).permutation(SAMPLES)
    assert sorted(sum(samples, [])) == sorted(order[first * BATCH : last * BATCH].tolist())


@pytest.mark.nightly("kills")
def test_torchrun_goes_on_with_more_ranks_when_a_node_joins(tmp_path: Path) -> None:
    # Kept here, so that no node has to be the one that never goes.
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True
    )
    node = ["--nnodes=1:2", "--rdzv-id=job", f"--rdzv-endpoint=127.0.0.1:{store.port}"]
    # A busy machine may hold a node up for 15 s. It must not count as gone, nor the other begin
    # alone.
    patience = "keep_alive_max_attempt=60,join_timeout=240"
    node += [f"--rdzv-conf=is_host=false,last_call_timeout=15,{patience}"]
    given: dict[str, Any] = {
        "url": str(tmp_path / "run"),
        "staging": str(tmp_path / "staging"),
        "until_batch": _END,
        "alone_until": 2,
        "settings": WAITING | {"interval_batches": 1000},
    }
    with (
        InlineAgent(tmp_path / "staging"),
        torchrun(1, tmp_path / "first", node=node, **given) as first,
    ):
        until(lambda: (tmp_path / "run" / "generations" / "00000001.json").exists())
        with torchrun(1, tmp_path / "second", node=node, **given) as second:
            told = [*first().values(), *second().values()]
    logs = "\n".join((tmp_path / f"{name}.log").read_text() for name in ("first", "second"))
    assert [life.told["world"] for life in told] == [2, 2], logs
    # The one that was alone took a final checkpoint after the batch that followed the signal.
    assert [life.told["begun"] for life in told] == [3, 3]
    require_each_once([life.told["samples"] for life in told], 3, 3 + 2 * (_END - 3))
