"""Slots are removed while sweeps are killed and trainers start: none that anybody still needs.

Real processes, real SIGKILL. `make test` kills at a fixed sample of the steps; `make nightly` at
all of them (`RUNS.md`).
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.persist import persist
from recpoint.catalog.retention.finish_staged import finish_staged
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.free import free_slots, free_slots_of_ended
from recpoint.catalog.staging.trainer_note import write_trainer_note
from recpoint.flows.agent.agent import run_agent
from recpoint.testing import die_at
from recpoint.trainer_plugin.snapshot.staging import StagingArea
from tests.catalog_builder import new_run, tables
from tests.fault.kill_points import Death, at_steps, ended
from tests.fault.lives import begin
from tests.job_builder import stage
from tests.polling import until

_STARTS = 150


def sweep_here_life(*, run_dir: str, die: int | None = None, count_into: str | None = None) -> None:
    """Finish what is staged and free the slots, as `recpoint sweep` does."""
    die_at.install(die_at=die, count_into=count_into)
    finish_staged(StagedRun(Path(run_dir)))
    free_slots(StagedRun(Path(run_dir)), ended=True, grace_seconds=0.0)


def agent_once_life(*, run_dir: str, die: int | None = None, count_into: str | None = None) -> None:
    """An agent that ends when nothing is left to do."""
    die_at.install(die_at=die, count_into=count_into)
    run_agent(Path(run_dir).parent, once=True, prefect="off")


def freeing_life(*, run_dir: str) -> None:
    """Free slots all the time."""
    freed = 0
    while os.getppid() != 1:
        freed += len(free_slots(StagedRun(Path(run_dir)), ended=True, grace_seconds=0.0))
        (Path(run_dir) / "freed").write_text(str(freed))


@pytest.mark.slow
@pytest.mark.parametrize("life", [sweep_here_life, agent_once_life])
def test_killed_at_any_step_no_job_loses_its_slot(
    tmp_path: Path, life: Callable[..., None]
) -> None:
    def attempt(death: Death) -> bool:
        here = tmp_path / str(death.die)
        run = new_run(here / "run")
        run.claim(None)
        job = stage(run, here / "staging", tables(), step=1, generation=1, slot=1)
        run_dir = job.parent.parent
        StagedRun(run_dir).slot_path(0, 0).write_bytes(bytes(1000))
        write_trainer_note(StagedRun(run_dir), run.url, "ended")
        code = ended(begin(life, {}, run_dir=str(run_dir), **death._asdict()))
        assert code in (0, -signal.SIGKILL)
        assert job.exists() <= StagedRun(run_dir).slot_path(0, 1).exists()
        finish_staged(StagedRun(run_dir))
        free_slots_of_ended(StagedRun(run_dir))
        assert not list(StagedRun(run_dir).slots_directory.iterdir())
        assert [name.step for name in run.live_line()] == [1]
        assert check(run, level="full").ok
        return code != 0

    assert at_steps(attempt, tmp_path / "steps") > 10


def test_a_trainer_that_starts_is_neither_refused_nor_robbed(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    run_dir = StagedRun.of(tmp_path / "staging", run.url).path
    StagingArea(tmp_path / "staging", run.url).create()
    sweeper = begin(freeing_life, {}, run_dir=str(run_dir))
    try:
        for start in itertools.count():
            area = StagingArea(tmp_path / "staging", run.url)
            area.create()
            area.lock()  # a StagingError: a sweep took its place
            slot = area.free_slot(set())
            slot.reserve(1 << 16)
            slot.data[:] = start % 251
            assert slot.path.exists() and slot.path.stat().st_size == 1 << 16
            assert slot.path.read_bytes() == bytes([start % 251]) * (1 << 16)
            if start % 10 == 0:
                job = stage(run, tmp_path / "staging", tables(), step=start, generation=1)
            area.close()
            if start % 10 == 0:
                assert persist.persist_job(job).result == "committed"
            if start >= _STARTS and int((run_dir / "freed").read_text() or 0) > 20:
                break
        until(lambda: not list(StagedRun(run_dir).slots_directory.iterdir()))
    finally:
        sweeper.kill()
        sweeper.join()
    assert check(Run.open(run.store), level="full").ok
