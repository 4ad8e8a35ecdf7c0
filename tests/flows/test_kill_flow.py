"""SIGKILL of the flow `persist` at its steps, one after another, beside a real Prefect server.

`make test` kills at a fixed sample of the steps; `make nightly` at all of them
(`tests/fault/RUNS.md`).
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from prefect.settings import get_current_settings

from recpoint.catalog.check.check import check
from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format import naming
from recpoint.testing.seaweed import SeaweedServer
from tests.catalog_builder import tables
from tests.fault.kill_points import UNSEEN_ACTS, Death, act_of, at_steps, ended
from tests.fault.lives import begin, flow_life
from tests.job_builder import stage


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_api")
# An object in a bucket is one step: three chunks and a manifest. A file is written, synced, linked.
@pytest.mark.parametrize(
    ("where", "steps"),
    [("local", 15), pytest.param("s3", 4, marks=pytest.mark.nightly("kills"))],
)
def test_a_flow_killed_at_any_step(
    request: pytest.FixtureRequest, tmp_path: Path, where: str, steps: int
) -> None:
    environment = get_current_settings().to_environment_variables(exclude_unset=True)
    contents = tables()
    base = str(tmp_path)
    if where == "s3":
        server: SeaweedServer = request.getfixturevalue("s3_environment")
        environment |= server.environment()
        base = server.run_url()

    def attempt(death: Death) -> bool:
        run = Run.create(open_store(f"{base}/run-{death.die}"))
        run.claim(None)
        staging = tmp_path / f"staging-{death.die}"
        job_file = stage(run, staging, contents, step=7, generation=1, state={"n": 7})
        arguments = {"url": run.url, "job_file": str(job_file), **death._asdict()}
        code = ended(begin(flow_life, environment, **arguments))
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

    # An agent without Prefect dies at each kind of these steps in `test_kill_everywhere`.
    def kind(step: str) -> str:
        return "unseen" if act_of(step) in UNSEEN_ACTS else act_of(step)

    assert at_steps(attempt, tmp_path / "steps", kind=kind) >= steps
