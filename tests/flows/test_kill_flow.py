"""SIGKILL of the flow `persist` at every step, one after another, beside a real Prefect server."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from prefect.settings import get_current_settings

from recpoint.catalog.check import check
from recpoint.catalog.persist import persist_job
from recpoint.catalog.restore import MemoryTarget, restore
from recpoint.catalog.sweep import execute, plan_sweep
from recpoint.format import naming
from tests.catalog_builder import new_run, tables
from tests.fault.kill_points import at_every_step, ended
from tests.fault.lives import begin, flow_life
from tests.job_builder import stage


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_api")
def test_a_flow_killed_at_any_step(tmp_path: Path) -> None:
    environment = get_current_settings().to_environment_variables(exclude_unset=True)
    contents = tables()

    def attempt(die: int) -> bool:
        run = new_run(tmp_path / f"run-{die}")
        run.claim(None)
        staging = tmp_path / f"staging-{die}"
        job_file = stage(run, staging, contents, step=7, generation=1, state={"n": 7})
        code = ended(begin(flow_life, environment, job_file=str(job_file), die=die))
        assert code in (0, -signal.SIGKILL)
        if job_file.exists():
            # Without Prefect this time: whoever finds the job goes on with it.
            assert persist_job(job_file).result == "committed"
        target = MemoryTarget()
        assert restore(run, target).restored.step == 7
        for table in contents:
            restored = target.tables[table.name]
            assert torch.equal(restored.values, table.values)
        assert check(run, level="full").ok
        execute(run, plan_sweep(run, grace_seconds=0, keep=()))
        named = {chunk.key for chunk in run.manifest(7, 1).chunks}
        assert {info.key for info in run.store.list(naming.CHUNKS_PREFIX)} == named
        return code != 0

    assert at_every_step(attempt) >= 15
