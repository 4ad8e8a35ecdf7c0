"""The consolidation's parts on a Dask cluster: the same bytes as without Prefect."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import LocalCluster

from recpoint.catalog import consolidate_plan
from recpoint.catalog.check import check
from recpoint.catalog.consolidate import consolidate
from recpoint.catalog.consolidate_plan import plan_consolidation
from recpoint.catalog.lineage import ManifestName
from recpoint.catalog.run import Run
from recpoint.errors import DigestMismatch, SettingsError
from recpoint.flows.consolidate import consolidate as flow
from recpoint.flows.consolidate import run_consolidate
from recpoint.flows.task_runner import VARIABLE, task_runner_named
from recpoint.format.manifest import Manifest
from tests.catalog_builder import copy_run
from tests.flows.test_consolidate_flow import chain
from tests.flows.test_persist_flow import flow_runs, task_runs

__all__ = ["chain"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_api"),
    pytest.mark.xdist_group("dask"),  # one cluster for all of them
]

NEWEST = ManifestName(4, 1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two processes that each take one task at a time."""
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        yield cluster


@pytest.fixture
def on_dask(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow's parts go to the cluster, a part for each table."""
    monkeypatch.setattr(consolidate_plan, "_PART_BYTES", 1)
    monkeypatch.setattr(flow, "task_runner", task_runner_named(f"dask:{cluster.scheduler_address}"))


def objects(run: Run) -> dict[str, bytes]:
    return {info.key: run.store.get(info.key, max_bytes=1 << 20) for info in run.store.list()}


@pytest.mark.usefixtures("on_dask")
@pytest.mark.parametrize("at_once", [1, 2])
def test_the_same_bytes_as_bare(
    run: Run, chain: list[Manifest], tmp_path: Path, at_once: int
) -> None:
    bare = copy_run(run, tmp_path / "bare")
    plan = plan_consolidation(bare, NEWEST)
    assert len(plan.parts) == 2
    consolidate(bare, plan)
    state = run_consolidate(run.url, parts_at_once=at_once)
    assert state.is_completed() and "created" in str(state.message)

    expected, found = objects(bare), objects(run)
    assert found.keys() == expected.keys()
    written = plan.target.key
    for key, data in expected.items():
        assert key == written or found[key] == data, key
    ours, theirs = run.read_manifest(plan.target), bare.read_manifest(plan.target)
    assert ours == theirs.model_copy(update={"committed_ms": ours.committed_ms})
    assert check(run, level="full").ok
    flow_run = flow_runs("run:run")[0]
    names = {one.name for one in task_runs(flow_run, count=5, last="report_merge")}
    assert names >= {f"merge_tables part {part} of run step 4" for part in (0, 1)}


@pytest.mark.usefixtures("on_dask")
def test_damage_that_a_part_finds_is_told_as_it_is(run: Run, chain: list[Manifest]) -> None:
    entry = next(entry for entry in chain[1].chunks if entry.content == "rows")
    run.store.put(entry.key, bytes(entry.bytes))
    state = run_consolidate(run.url, parts_at_once=2)
    assert state.is_failed()
    assert isinstance(state.result(raise_on_failure=False), DigestMismatch)
    assert not list(run.store.list("consolidated/")) and not list(run.store.list("leases/"))


def test_the_setting_chooses_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "dask:tcp://127.0.0.1:1")
    question = (
        "from recpoint.flows.consolidate import consolidate as c;"
        "print(type(c.task_runner).__name__, c.task_runner.address)"
    )
    asked = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True)
    assert asked.stdout.split() == ["DaskTaskRunner", "tcp://127.0.0.1:1"], asked.stderr
    for good in ("threads", "dask", "prefect.task_runners:ThreadPoolTaskRunner"):
        assert task_runner_named(good).name
    for wrong in ("", "process", "os:getcwd", "nothing.there:x", "prefect_dask:Nobody"):
        with pytest.raises(SettingsError, match=VARIABLE):
            task_runner_named(wrong)
