"""The flow `restore` against a real Prefect server: what it writes, and what it says of it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from recpoint.catalog.restore.files import restore_shards
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.shard_plan import INDEX
from recpoint.catalog.run import going
from recpoint.catalog.run.deletions import announce
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import Store, open_store
from recpoint.errors import (
    DigestMismatch,
    RecpointError,
    RestoreError,
    RetentionRefused,
    SettingsError,
)
from recpoint.flows.restore import run_restore
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY
from recpoint.tasks import reports
from tests.flows.test_consolidate_flow import chain
from tests.flows.test_persist_flow import artifacts, flow_runs, task_runs
from tests.interposed_store import InterposedStore, unavailable

__all__ = ["chain"]

pytestmark = pytest.mark.usefixtures("prefect_api")


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def bare(run: Run, directory: Path, *, step: int | None = None) -> dict[str, bytes]:
    """What the same restore writes without Prefect."""
    restore_shards(run, open_store(str(directory)), Selection(step=step), shard_bytes=1)
    return files(directory)


@pytest.mark.parametrize("at_once", [1, 3])
def test_the_same_files_as_bare_and_what_is_shown(
    run: Run, chain: list[Manifest], tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_EVERY_SECONDS", 0.0)
    target = tmp_path / "target"
    state = run_restore(run.url, str(target), shard_bytes=1, parts_at_once=at_once)
    assert state.is_completed() and state.message is not None
    assert state.message.startswith("restored: ") and "skipped" not in state.message
    assert files(target) == bare(run, tmp_path / "bare")
    assert len(files(target)) == 3
    newest = flow_runs(tmp_path, f"run:{run.url}")[0]
    assert newest.name == "restore run"
    names = {task.name for task in task_runs(newest, count=5, last="report_restore")}
    assert names == {
        "plan_restore of run",
        "restore_shard model-00001-of-00002.safetensors of run step 4",
        "restore_shard model-00002-of-00002.safetensors of run step 4",
        "finish_restore of run step 4",
        "report_restore of run step 4",
    }
    (shown,) = artifacts(f"recpoint-run-{run.id[:12]}-restore-g1-step-4")
    assert "never validated" in str(shown.data) and "2, 560 B together" in str(shown.data)
    bars = artifacts(f"recpoint-run-{run.id[:12]}-g1-step-4-restore-part-")
    assert {(bar.type, float(str(bar.data))) for bar in bars} == {("progress", 100.0)}
    assert len(bars) == 2 and not list(run.store.list("leases/"))
    again = run_restore(run.url, str(target), shard_bytes=1)
    assert str(again.message).startswith("already: ")


def test_damage_falls_back_and_is_said(run: Run, chain: list[Manifest], tmp_path: Path) -> None:
    last = [entry for entry in chain[3].chunks if entry.content == "rows"][-1]
    run.store.put(last.key, bytes(last.bytes))
    target = tmp_path / "target"
    state = run_restore(run.url, str(target), shard_bytes=1)
    assert state.is_completed() and state.message is not None
    assert "step 3" in state.message and "skipped step 4" in state.message
    assert "DigestMismatch" in state.message and f"recpoint check {run.url}" in state.message
    assert files(target) == bare(run, tmp_path / "bare", step=3)
    (shown,) = artifacts(f"recpoint-run-{run.id[:12]}-restore-g1-step-3")
    assert "skipped step 4" in str(shown.data)
    named = run_restore(run.url, str(tmp_path / "named"), step=4, shard_bytes=1)
    assert isinstance(named.result(raise_on_failure=False), DigestMismatch)
    assert not (tmp_path / "named" / INDEX).exists()


@pytest.fixture
def through(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Store]]:
    """The stores that the flow's tasks read from: real ones, with what a test puts around them."""
    chosen = [run.store]
    monkeypatch.setattr("recpoint.tasks.consolidate.open_store", lambda url: chosen[0])
    yield chosen


def test_what_heals_is_tried_again_under_a_lease(
    run: Run, chain: list[Manifest], tmp_path: Path, through: list[Store]
) -> None:
    away = [2]
    leases = []

    def refuse(call: str, key: str) -> None:
        if call == "get" and key.startswith("chunks/"):
            leases.append(len(list(run.store.list("leases/"))))
            if away[0]:
                away[0] -= 1
                raise unavailable(key)

    through[0] = InterposedStore(run.store, before=refuse)
    target = tmp_path / "target"
    assert run_restore(run.url, str(target), shard_bytes=1).is_completed()
    assert away[0] == 0 and set(leases) == {1}
    assert files(target) == bare(run, tmp_path / "bare")


def test_another_checkpoint_is_not_replaced(
    run: Run, chain: list[Manifest], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    before = bare(run, target, step=2)
    state = run_restore(run.url, str(target), shard_bytes=1)
    assert isinstance(state.result(raise_on_failure=False), SettingsError)
    assert files(target) == before


def test_what_a_retention_is_deleting_is_refused_by_name(
    run: Run, chain: list[Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(going, "_WAIT_SECONDS", 0.0)
    announce(run, (MANIFEST_KEY.of(2, chain[0].generation),))
    target = tmp_path / "target"
    state = run_restore(run.url, str(target), shard_bytes=1, step=2)
    assert isinstance(state.result(raise_on_failure=False), RetentionRefused)
    assert not target.exists() or not files(target)


def test_a_run_that_vanishes_takes_no_finished_file_along(
    run: Run, chain: list[Manifest], tmp_path: Path, through: list[Store]
) -> None:
    """As a mount does, while the second of two files is written."""
    target, away = tmp_path / "target", tmp_path / "away"
    finished: list[dict[str, int]] = []
    one = threading.Lock()

    def inodes() -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in target.glob("model*")}

    def vanish(call: str, key: str) -> None:
        with one:
            if key.startswith("chunks/") and not finished and inodes():
                finished.append(inodes())
                os.rename(run.url, away)
                os.mkdir(run.url)

    through[0] = InterposedStore(run.store, before=vanish)
    state = run_restore(run.url, str(target), shard_bytes=1)
    assert isinstance(state.result(raise_on_failure=False), RecpointError)
    assert inodes() == finished[0] and len(finished[0]) == 1
    shutil.rmtree(run.url)
    os.rename(away, run.url)
    assert run_restore(run.url, str(target), shard_bytes=1).is_completed()
    assert inodes().items() >= finished[0].items()
    assert files(target) == bare(run, tmp_path / "bare")


def test_files_that_count_are_never_taken_back(
    run: Run, chain: list[Manifest], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    there = bare(run, target)
    lost = min(there.keys() - {INDEX})
    (target / lost).unlink()
    there.pop(lost)
    for entry in chain[3].chunks:
        if entry.content == "rows":
            run.store.put(entry.key, bytes(entry.bytes))
    refused = run_restore(run.url, str(target), shard_bytes=1).result(raise_on_failure=False)
    assert isinstance(refused, RestoreError), refused
    assert f"{INDEX} and 1 of the 2 files of step 4 (generation 1), without {lost}" in str(refused)
    assert files(target) == there
