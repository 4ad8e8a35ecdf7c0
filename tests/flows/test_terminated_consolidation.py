"""SIGTERM in the middle of the flow `consolidate`, as a Prefect worker that ends sends it.

Prefect (22528) reports flows that go on, or whose runs stay open, after such a signal.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.settings import get_current_settings

from recpoint.catalog.check.check import check
from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run.run import Run
from recpoint.catalog.store import durable
from recpoint.flows.consolidate import run_consolidate
from recpoint.format.naming import CHUNKS_PREFIX
from tests.catalog_builder import tables
from tests.consolidation import chain_of, require_same, restored, trained
from tests.fault.kill_points import ended
from tests.fault.lives import begin


def _terminated_life(*, url: str, step_start: str, steps_into: str) -> None:
    """Consolidate the run as a flow, and get a SIGTERM at the first step of such a name."""
    from prefect.context import refresh_global_settings_context

    # Prefect read its settings when the server of these processes imported it.
    refresh_global_settings_context()
    terminated = False

    def observe(name: str) -> None:
        nonlocal terminated
        with open(steps_into, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")
        if not terminated and name.startswith(step_start):
            terminated = True
            os.kill(os.getpid(), signal.SIGTERM)

    durable.set_observer(observe)
    if not run_consolidate(url).is_completed():
        raise AssertionError("the flow has not completed")


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_api")
def test_a_consolidation_that_is_terminated_is_finished_by_the_next(
    tmp_path: Path, run: Run
) -> None:
    newest = trained(run, tables(rows=60), [1, 2, 3, 4], bits=[4, None])[-1]
    truth, _ = restored(run, newest)
    environment = get_current_settings().to_environment_variables(exclude_unset=True)
    steps_file = tmp_path / "steps"
    for step_start in ("write", "link"):
        steps_file.unlink(missing_ok=True)
        life = begin(
            _terminated_life,
            environment,
            url=run.url,
            step_start=step_start,
            steps_into=str(steps_file),
        )
        code = ended(life)
        steps = steps_file.read_text().splitlines()
        assert any(name.startswith(step_start) for name in steps), steps
        assert code != 0, steps
        require_same(truth, restored(run, newest)[0])
        assert check(run, level="full").ok
    with get_client(sync_client=True) as client:
        chosen = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"run:{run.url}"]))
        states = [one.state for one in client.read_flow_runs(flow_run_filter=chosen)]
    assert len(states) == 2
    assert all(state is not None and state.is_final() for state in states), states
    assert run_consolidate(run.url).is_completed()
    assert len(chain_of(run, newest)) == 1
    require_same(truth, restored(run, newest)[0])
    execute(run, plan_sweep(run, grace_seconds=0, keep=()))
    named = {
        entry.key
        for several in run.representations().values()
        for one in several
        for entry in run.read_manifest(one).chunks
    }
    assert {info.key for info in run.store.list(CHUNKS_PREFIX)} == named
    assert check(run, level="full").ok
