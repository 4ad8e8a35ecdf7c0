"""Plans of consolidations, and committing by one that the store has left behind."""

from __future__ import annotations

import pickle
import threading

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.consolidate import plan as consolidate_plan
from recpoint.catalog.consolidate.commit import commit_consolidation
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.merge import merge_part
from recpoint.catalog.consolidate.plan import (
    ConsolidationTriggers,
    plan_consolidation,
    read_sources,
)
from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.errors import ChainError, MissingLink, ObjectNotFound, SettingsError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import CONSOLIDATED_KEY, MANIFEST_KEY, ManifestName, attempt_prefix
from recpoint.format.records import pack_record
from tests.catalog_builder import tables
from tests.consolidation import chain_of, chunks_of, merge, name_of, require_same, restored, trained


@pytest.fixture
def links(run: Run) -> list[Manifest]:
    """A full at step 10 and increments up to step 14."""
    return trained(run, tables(rows=200), [10, 11, 12, 13, 14])


def test_steps_are_plain_values_and_may_be_done_twice(run: Run, links: list[Manifest]) -> None:
    plan = plan_consolidation(run, name_of(links[-1]))
    assert pickle.loads(pickle.dumps(plan)) == plan
    done = [merge_part(run, plan, part) for part in plan.parts]
    assert [merge_part(run, plan, part) for part in plan.parts] == done
    entries = [entry for part in done for entry in part]
    assert commit_consolidation(run, plan, entries)[0] == "created"
    assert commit_consolidation(run, plan, entries)[0] == "already"
    assert {entry.key for entry in entries} < chunks_of(run, plan.attempt)


def test_two_at_once_both_end_well(run: Run, links: list[Manifest]) -> None:
    before, _ = restored(run, links[-1])
    plan = plan_consolidation(run, name_of(links[-1]))
    together = threading.Barrier(2)
    outcomes: list[str] = []

    def work() -> None:
        ours = Run.open(run.store)
        entries = [entry for part in plan.parts for entry in merge_part(ours, plan, part)]
        together.wait(240)
        outcomes.append(commit_consolidation(ours, plan, entries)[0])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["already", "created"]
    require_same(before, restored(run, links[-1])[0])
    assert check(run, level="full").findings == ()


def test_two_of_other_sources_at_once_leave_orphans_only(run: Run, links: list[Manifest]) -> None:
    long = plan_consolidation(run, name_of(links[-1]))
    merge(run, links[2])
    short = plan_consolidation(run, name_of(links[-1]))
    assert long.target == short.target and long.attempt != short.attempt
    assert (len(long.sources), len(short.sources)) == (5, 3)
    entries = [entry for part in long.parts for entry in merge_part(run, long, part)]
    assert consolidate(run, short).outcome == "created"
    assert commit_consolidation(run, long, entries)[0] == "already"
    assert plan_sweep(run, grace_seconds=3600).objects == ()  # young: it may be running
    plan = plan_sweep(run, grace_seconds=0)
    assert {swept.key for swept in plan.objects} == chunks_of(run, long.attempt)
    execute(run, plan)
    assert check(run, level="full").findings == ()


def test_a_checkpoint_or_parent_that_was_let_go_of_is_not_brought_back(
    run: Run, links: list[Manifest]
) -> None:
    plan = plan_consolidation(run, name_of(links[-1]), links=2)
    entries = merge_part(run, plan, plan.parts[0])
    parent = MANIFEST_KEY.of(12, 1)
    data = run.store.get(parent, max_bytes=1 << 20)
    run.store.delete(parent)
    with pytest.raises(MissingLink):
        commit_consolidation(run, plan, entries)
    run.store.put(parent, data)
    run.store.delete(MANIFEST_KEY.of(14, 1))
    with pytest.raises(ObjectNotFound):
        commit_consolidation(run, plan, entries)
    assert not list(run.store.list(CONSOLIDATED_KEY.prefix))


def test_a_parent_of_which_a_consolidated_manifest_is_good_is_there(
    run: Run, links: list[Manifest]
) -> None:
    merge(run, links[2])
    run.store.put(MANIFEST_KEY.of(12, 1), b"damaged")
    assert merge(run, links[-1], links=2).outcome == "created"
    assert [one.step for one in chain_of(run, links[-1])] == [12, 14]


def test_a_plan_of_other_manifests_is_refused(run: Run, links: list[Manifest]) -> None:
    plan = plan_consolidation(run, name_of(links[-1]))
    changed = links[2].model_copy(update={"writer": "another"})
    run.store.put(MANIFEST_KEY.of(12, 1), pack_record(changed))
    with pytest.raises(ChainError, match="new plan"):
        merge_part(run, plan, plan.parts[0])


class TestPlan:
    """What it says beforehand is what comes."""

    def test_into_a_full(self, run: Run, links: list[Manifest]) -> None:
        plan = plan_consolidation(run, name_of(links[-1]))
        state = sum(c.bytes for c in links[-1].chunks if c.content == "state")
        rows = sum(c.bytes for link in links for c in link.chunks if c.content == "rows")
        stored = sum(c.row_count or 0 for link in links for c in link.chunks)
        assert plan.target == Representation(ManifestName(14, 1), "full")
        assert plan.read_bytes == plan.restore_bytes_before == rows + state
        assert plan.frees_bytes == sum(link.stored_bytes for link in links)
        assert (plan.stored_rows, plan.dead_rows) == (stored, stored - 300)
        assert (plan.links_before, plan.links_after) == (5, 1)
        done = consolidate(run, plan)
        assert done.read_bytes == plan.read_bytes
        merged = chain_of(run, links[-1])[0]
        assert sum(c.row_count or 0 for c in merged.chunks) == 300

    def test_into_an_increment(self, run: Run, links: list[Manifest]) -> None:
        plan = plan_consolidation(run, name_of(links[-1]), links=3)
        assert plan.target == Representation(ManifestName(14, 1), "after", 11)
        assert (plan.links_before, plan.links_after, plan.dead_rows) == (5, 3, None)
        assert [source.name.step for source in plan.sources] == [12, 13, 14]
        done = consolidate(run, plan)
        assert done.written_bytes < plan.write_bytes

    @pytest.mark.parametrize(
        ("triggers", "reason"),
        [
            (ConsolidationTriggers(links=5, restore_ratio=99, dead_share=1), "reads 5 manifests"),
            (ConsolidationTriggers(links=6, restore_ratio=1.2, dead_share=1), "times what it has"),
            (ConsolidationTriggers(links=6, restore_ratio=99, dead_share=0.4), "are dead"),
        ],
    )
    def test_each_trigger_is_reason_enough(
        self, run: Run, links: list[Manifest], triggers: ConsolidationTriggers, reason: str
    ) -> None:
        plan = plan_consolidation(run, name_of(links[-1]), triggers=triggers)
        assert plan.pays and reason in plan.reason and ";" not in plan.reason

    def test_none_is_reached(self, run: Run, links: list[Manifest]) -> None:
        never = ConsolidationTriggers(links=6, restore_ratio=99, dead_share=1)
        plan = plan_consolidation(run, name_of(links[-1]), triggers=never)
        assert plan.needed and not plan.pays

    def test_settings(self, run: Run, links: list[Manifest]) -> None:
        with pytest.raises(SettingsError):
            plan_consolidation(run, name_of(links[-1]), links=1)
        with pytest.raises(SettingsError):
            ConsolidationTriggers(links=1)
        with pytest.raises(SettingsError):
            ConsolidationTriggers(restore_ratio=float("nan"))

    def test_small_tables_share_a_part(
        self, run: Run, links: list[Manifest], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert [p.tables for p in plan_consolidation(run, name_of(links[-1])).parts] == [(0, 1)]
        monkeypatch.setattr(consolidate_plan, "_PART_BYTES", 1)
        plan = plan_consolidation(run, name_of(links[-1]))
        assert [part.tables for part in plan.parts] == [(0,), (1,)]
        assert consolidate(run, plan).outcome == "created"

    def test_a_step_keeps_of_manifests_what_it_needs(self, run: Run, links: list[Manifest]) -> None:
        plan = plan_consolidation(run, name_of(links[-1]))
        for tables_wanted in ((), (1,), (0, 1)):
            found = read_sources(run, plan, tables=tables_wanted)
            kept = {entry.table for manifest in found for entry in manifest.chunks}
            assert kept == {None, *tables_wanted}
            assert [manifest.ref for manifest in found] == [link.ref for link in links]

    def test_the_attempt_follows_from_everything_that_the_bytes_follow_from(
        self, run: Run, links: list[Manifest], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        attempt = plan_consolidation(run, name_of(links[-1])).attempt
        assert plan_consolidation(Run.open(run.store), name_of(links[-1])).attempt == attempt
        others = {
            plan_consolidation(run, name_of(links[-2])).attempt,
            plan_consolidation(run, name_of(links[-1]), links=3).attempt,
        }
        monkeypatch.setattr(consolidate_plan, "CHUNK_BYTES", 1 << 20)
        others.add(plan_consolidation(run, name_of(links[-1])).attempt)
        assert len(others | {attempt}) == 4
        assert attempt_prefix(14, 1, attempt)
