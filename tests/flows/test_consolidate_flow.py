"""The flow `consolidate` against a real Prefect server: what is done, and what is seen of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.sorting import FlowRunSort

from recpoint.catalog.check.check import check
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.chain import resolve_chain
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import Store
from recpoint.errors import DigestMismatch, SettingsError, StoreUnavailable
from recpoint.flows.consolidate import consolidate, run_consolidate
from recpoint.format.manifest import Manifest
from recpoint.tasks import reports
from tests.catalog_builder import build, publish, tables
from tests.consolidation import chain_of, merge
from tests.flows.test_persist_flow import artifacts, task_runs
from tests.interposed_store import InterposedStore

pytestmark = pytest.mark.usefixtures("prefect_api")


@pytest.fixture
def chain(run: Run) -> list[Manifest]:
    """A full and three increments."""
    generator = torch.Generator().manual_seed(1)
    trained = tables(bits=4)
    made: list[Manifest] = []
    for step in range(1, 5):
        dirty = [torch.arange(step, 40, 3), torch.arange(0, 20, step)]
        for table, ids in zip(trained, dirty, strict=True):
            table.train(ids, generator)
        parent = made[-1] if made else None
        checkpoint = build(
            run, trained, step=step, generation=1, parent=parent,
            dirty=dirty if parent else None, state={"step": step},
        )  # fmt: skip
        made.append(publish(run, checkpoint))
    return made


def restored(run: Run, *, step: int | None = None) -> tuple[MemoryTarget, int]:
    target = MemoryTarget()
    report = restore(run, target, Selection(step=step))
    return target, report.chain_length


def require_same(found: MemoryTarget, expected: MemoryTarget) -> None:
    assert found.state == expected.state
    for name, table in expected.tables.items():
        assert torch.equal(found.tables[name].values, table.values)
        for left, right in zip(found.tables[name].row_states, table.row_states, strict=True):
            assert left is not None and right is not None and torch.equal(left, right)


def test_a_chain_becomes_a_full_and_is_shown(run: Run, chain: list[Manifest]) -> None:
    before, links = restored(run)
    assert links == 4
    state = run_consolidate(run.url)
    assert state.is_completed() and state.message is not None and "created" in state.message
    after, links = restored(run)
    assert links == 1
    require_same(after, before)
    assert check(run, level="full").ok
    with get_client(sync_client=True) as client:
        chosen = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"run:{run.url}"]))
        newest = FlowRunSort.EXPECTED_START_TIME_DESC
        (flow_run,) = client.read_flow_runs(flow_run_filter=chosen, sort=newest, limit=1)
    assert flow_run.name == "consolidate run"
    names = {task.name for task in task_runs(flow_run, count=4, last="report_merge")}
    assert names == {
        "plan_merge of run",
        "merge_tables part 0 of run step 4",
        "commit_merge of run step 4",
        "report_merge of run step 4",
    }
    (shown,) = artifacts(f"recpoint-run-{run.id[:12]}-consolidation-g1-step-4")
    assert "4 before, 1 after" in str(shown.data) and "created" in str(shown.data)


def test_long_work_shows_how_far_it_is(
    run: Run, chain: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_EVERY_SECONDS", 0.0)
    assert run_consolidate(run.url).is_completed()
    (bar,) = artifacts(f"recpoint-run-{run.id[:12]}-consolidation-g1-step-4-part-0-progress")
    assert bar.type == "progress" and float(str(bar.data)) == 100.0
    assert bar.flow_run_id is not None and bar.task_run_id is not None


def test_work_that_is_soon_done_shows_no_bar(run: Run, chain: list[Manifest]) -> None:
    assert run_consolidate(run.url).is_completed()
    assert not [one for one in artifacts(f"recpoint-run-{run.id[:12]}-") if one.type == "progress"]


def test_once_is_enough_and_what_does_not_pay_is_left(run: Run, chain: list[Manifest]) -> None:
    for newer in reversed(chain[1:]):
        run.store.delete(f"manifests/{newer.step:012}-00000001.json")
    dirty = [torch.tensor([3]), torch.tensor([4])]
    publish(run, build(run, tables(), step=2, generation=1, parent=chain[0], dirty=dirty))
    state = run_consolidate(run.url, only_if_it_pays=True, after_links=9)
    assert "nothing done: no trigger" in str(state.message)
    assert "created" in str(run_consolidate(run.url).message)
    assert "a full restores it already" in str(run_consolidate(run.url).message)


def test_the_newest_links_of_a_named_checkpoint(run: Run, chain: list[Manifest]) -> None:
    before, _ = restored(run, step=3)
    run_consolidate(run.url, step=3, generation=1, links=2)
    after, links = restored(run, step=3)
    assert links == 2
    require_same(after, before)
    with pytest.raises(SettingsError, match="both or none"):
        asyncio.run(consolidate(run.url, step=3))


@pytest.fixture
def through(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Store]]:
    """The stores that the flow's tasks open: real ones, with what a test puts around them."""
    chosen = [run.store]
    monkeypatch.setattr("recpoint.tasks.consolidate.open_store", lambda url: chosen[0])
    yield chosen


def test_what_heals_is_tried_again(run: Run, chain: list[Manifest], through: list[Store]) -> None:
    before, _ = restored(run)
    away = [2]

    def refuse(call: str, key: str) -> None:
        if call == "put" and away[0]:
            away[0] -= 1
            raise StoreUnavailable(key, found="no answer", expected="one", next_step="wait")

    through[0] = InterposedStore(run.store, before=refuse)
    assert run_consolidate(run.url).is_completed()
    assert away[0] == 0
    require_same(restored(run)[0], before)


def test_damage_is_not_tried_again_and_nothing_is_committed(
    run: Run, chain: list[Manifest], through: list[Store]
) -> None:
    entry = next(entry for entry in chain[1].chunks if entry.content == "rows")
    run.store.put(entry.key, bytes(entry.bytes))
    store = through[0] = InterposedStore(run.store)
    state = run_consolidate(run.url)
    assert state.is_failed()
    assert isinstance(state.result(raise_on_failure=False), DigestMismatch)
    assert store.calls.count(("get", entry.key)) == 2  # once more for a flip on the way, no retry
    assert not list(run.store.list("consolidated/"))
    assert len(resolve_chain(run, run.live_line()[0]).manifests) == 4


def test_a_damaged_merge_is_gone_around_and_said(run: Run, chain: list[Manifest]) -> None:
    before, _ = restored(run)
    merged = merge(run, chain[2])
    (full,) = chain_of(run, chain[2])
    entry = next(entry for entry in full.chunks if entry.content == "rows")
    run.store.put(entry.key, bytes(entry.bytes))
    state = run_consolidate(run.url)
    assert state.is_completed() and state.message is not None
    assert "created" in state.message and f"passed over {merged.key}" in state.message
    after, links = restored(run)
    assert links == 1
    require_same(after, before)
    (shown,) = artifacts(f"recpoint-run-{run.id[:12]}-consolidation-g1-step-4")
    assert f"{merged.key}: DigestMismatch" in str(shown.data)
