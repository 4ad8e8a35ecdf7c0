"""Parts of a consolidation and a restore on a Dask cluster: the same bytes as without Prefect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

from recpoint.catalog.check.check import check
from recpoint.catalog.consolidate import plan as consolidate_plan
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.catalog.restore.files import restore_shards
from recpoint.catalog.run.run import Run
from recpoint.catalog.store import durable
from recpoint.catalog.store.store import open_store
from recpoint.errors import DigestMismatch, SettingsError
from recpoint.flows.consolidate import consolidate as flow
from recpoint.flows.consolidate import run_consolidate
from recpoint.flows.restore import restore as restore_flow
from recpoint.flows.restore import run_restore
from recpoint.flows.task_runner import VARIABLE, task_runner_named
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from tests.catalog_builder import copy_run
from tests.flows.test_consolidate_flow import chain
from tests.flows.test_persist_flow import flow_runs, task_runs

__all__ = ["chain"]

pytestmark = [
    pytest.mark.nightly("dask"),
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
    """The flows' parts go to the cluster, a part for each table."""
    monkeypatch.setattr(consolidate_plan, "_PART_BYTES", 1)
    runner = task_runner_named(f"dask:{cluster.scheduler_address}")
    monkeypatch.setattr(flow, "task_runner", runner)
    monkeypatch.setattr(restore_flow, "task_runner", runner)


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
    flow_run = flow_runs(tmp_path, f"run:{run.url}")[0]
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


@pytest.mark.usefixtures("on_dask")
def test_the_same_files_as_bare(run: Run, chain: list[Manifest], tmp_path: Path) -> None:
    bare, target = tmp_path / "bare", tmp_path / "target"
    restore_shards(run, open_store(str(bare)), shard_bytes=1)
    state = run_restore(run.url, str(target), shard_bytes=1, parts_at_once=2)
    assert state.is_completed() and "restored" in str(state.message)
    files = {path.name: path.read_bytes() for path in bare.iterdir()}
    assert len(files) == 3 and files == {path.name: path.read_bytes() for path in target.iterdir()}
    names = {
        one.name
        for one in task_runs(
            flow_runs(tmp_path, f"run:{run.url}")[0], count=5, last="report_restore"
        )
    }
    parts = {f"restore_shard {name} of run step 4" for name in files if name.startswith("model-")}
    assert len(parts) == 2 and names >= parts


@pytest.mark.usefixtures("on_dask")
def test_a_part_whose_process_is_killed_is_done_by_another(
    run: Run, chain: list[Manifest], tmp_path: Path, cluster: LocalCluster
) -> None:
    """Right before the file is put in its place."""
    target, killed = tmp_path / "target", tmp_path / "killed"

    def die_once(step: str) -> None:
        if step.startswith("create model-") and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    with Client(cluster) as client:
        client.run(durable.set_observer, die_once)
        try:
            state = run_restore(run.url, str(target), shard_bytes=1)
        finally:
            client.run(durable.set_observer, None)
    assert killed.exists() and state.is_completed(), state.message
    restore_shards(run, open_store(str(tmp_path / "bare")), shard_bytes=1)
    # What it was writing stays for a day: nobody can tell that it is dead.
    assert len(list(target.glob(".tmp-*"))) == 1
    found = {path.name: path.read_bytes() for path in target.glob("model*")}
    assert found == {path.name: path.read_bytes() for path in (tmp_path / "bare").iterdir()}
    assert not list(run.store.list("leases/"))


@pytest.mark.parametrize("flow_name", ["consolidate", "restore"])
def test_the_setting_chooses_the_runner(monkeypatch: pytest.MonkeyPatch, flow_name: str) -> None:
    monkeypatch.setenv(VARIABLE, "dask:tcp://127.0.0.1:1")
    question = (
        f"from recpoint.flows.{flow_name} import {flow_name} as c;"
        "print(type(c.task_runner).__name__, c.task_runner.address)"
    )
    asked = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True)
    assert asked.stdout.split() == ["DaskTaskRunner", "tcp://127.0.0.1:1"], asked.stderr
    for good in ("threads", "dask", "prefect.task_runners:ThreadPoolTaskRunner"):
        assert task_runner_named(good).name
    for wrong in ("", "process", "os:getcwd", "nothing.there:x", "prefect_dask:Nobody"):
        with pytest.raises(SettingsError, match=VARIABLE):
            task_runner_named(wrong)
