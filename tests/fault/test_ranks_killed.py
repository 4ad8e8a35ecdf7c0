"""Checkpoints of two hosts: killed anywhere, committed once, by whoever is left or comes back."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from recpoint.catalog.check.check import check
from recpoint.catalog.persist import persist
from recpoint.catalog.persist.ranks import parts_there
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.errors import RanksMissing
from recpoint.testing import die_at
from recpoint.testing.seaweed import SeaweedServer
from tests.catalog_builder import Table, tables
from tests.fault.kill_points import at_every_step, ended
from tests.fault.lives import agent_life, begin
from tests.forked import ForkedProcess
from tests.persisted import store_groups
from tests.polling import until
from tests.rank_jobs import RankJobs


def persisting_life(*, job_file: str, die: int | None) -> None:
    """One persist of a job, whose checkpoint it may leave waiting for the other rank."""
    die_at.install(die_at=die)
    try:
        persist.persist_job(job_file)
    except RanksMissing:
        pass


def life(job_file: Path, environment: dict[str, str], *, die: int | None = None) -> ForkedProcess:
    return begin(persisting_life, environment, job_file=str(job_file), die=die)


def require_committed_once(run: Run, trained: list[Table], step: int) -> None:
    found = MemoryTarget()
    restore(run, found)
    for table in trained:
        assert torch.equal(found.tables[table.name].values, table.values)
    assert found.state == {rank: {"rank": rank, "step": step} for rank in range(2)}
    execute(run, plan_sweep(run, grace_seconds=0))  # the parts, if it was killed before that
    assert not parts_there(run, run.manifest(step, 1).ref)
    report = check(run, level="full")
    assert report.ok and not report.findings


def all_gone(paths: Sequence[Path]) -> bool:
    return not any(path.exists() for path in paths)


class TestKilledAtEveryStep:
    """The second of two ranks commits; it dies at each step of that, on a local disk."""

    def killed_at(self, folder: Path, die: int) -> bool:
        trained = tables(seed=die)
        run = Run.create(open_store(str(folder / "run")))
        run.claim(None)
        jobs = RankJobs(run, [folder / "host-a", folder / "host-b"], trained)
        first, last = jobs.stage(10)
        with pytest.raises(RanksMissing):
            persist.persist_job(first)
        # As with one rank, whose every step is died at too.
        store_groups(persist.PersistJob.open(last))
        killed = ended(life(last, {}, die=die)) == -signal.SIGKILL
        # The other rank's agent finds it committed, or waits, or commits it itself.
        try:
            assert persist.persist_job(first).result == "committed"
        except RanksMissing as missing:
            assert missing.ranks == (1,) and killed and last.exists()
        if last.exists():
            StagedRun(last.parent.parent).clean()
            if not job_files.finish_answered(last):
                assert persist.persist_job(last).result == "committed"
        if first.exists():
            assert persist.persist_job(first).result == "committed"
        require_committed_once(run, trained, 10)
        return killed

    def test_it_is_committed_once(self, tmp_path: Path) -> None:
        steps = at_every_step(lambda die: self.killed_at(tmp_path / str(die), die))
        assert steps > 10


@pytest.fixture
def s3_run(s3_run_url: str) -> Run:
    run = Run.create(open_store(s3_run_url))
    run.claim(None)
    return run


def test_two_agents_with_staging_areas_of_their_own_over_one_s3_server(
    s3_environment: SeaweedServer, s3_run: Run, tmp_path: Path
) -> None:
    trained = tables()
    hosts = [tmp_path / "host-a", tmp_path / "host-b"]
    jobs = RankJobs(s3_run, hosts, trained)
    environment = s3_environment.environment()

    def agent(host: Path) -> ForkedProcess:
        return begin(agent_life, environment, staging=str(host))

    def part_is_there(step: int) -> bool:
        return 1 in parts_there(s3_run, jobs.ref(step))

    generator = torch.Generator().manual_seed(3)
    both = [agent(host) for host in hosts]
    try:
        for step, slot in zip((10, 20, 30), itertools.cycle((0, 1)), strict=False):
            dirty = None
            if step > 10:
                dirty = [torch.randperm(t.rows, generator=generator)[:7].sort()[0] for t in trained]
                for table, ids in zip(trained, dirty, strict=True):
                    table.train(ids, generator)
            (waits,) = jobs.stage(step, dirty=dirty, only=[1], slot=slot)
            until(partial(part_is_there, step))
            if step == 20:
                both[1].kill()  # while it waits; another takes its place
                both[1].join()
                both[1] = agent(hosts[1])
            (last,) = jobs.stage(step, dirty=dirty, only=[0], slot=slot)
            until(partial(all_gone, (waits, last)))
            for job in (waits, last):
                answer = job.parent.parent / "outcomes" / job.name
                assert job_files.read_outcome(answer).result == "committed"
        assert s3_run.live_line() == [(30, 1), (20, 1), (10, 1)]
        require_committed_once(s3_run, trained, 30)
    finally:
        for process in both:
            process.terminate()
            process.join()


@pytest.mark.parametrize("die", [2, 6, 10])
def test_a_killed_rank_on_s3(
    s3_environment: SeaweedServer, s3_run: Run, tmp_path: Path, die: int
) -> None:
    trained = tables()
    first, last = RankJobs(s3_run, [tmp_path / "a", tmp_path / "b"], trained).stage(10)
    with pytest.raises(RanksMissing):
        persist.persist_job(first)
    ended(life(last, s3_environment.environment(), die=die))
    if last.exists():
        StagedRun(last.parent.parent).clean()
        if not job_files.finish_answered(last):
            assert persist.persist_job(last).result == "committed"
    assert persist.persist_job(first).result == "committed"
    require_committed_once(s3_run, trained, 10)
