"""Which consolidation is chosen: into a full, of all increments, or of the newest ones alone."""

from __future__ import annotations

import pytest
import torch

from recpoint.catalog.check.check import check
from recpoint.catalog.consolidate import moves
from recpoint.catalog.consolidate.choice import choose_consolidation
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.plan import (
    ConsolidationPlan,
    ConsolidationTriggers,
    newest_checkpoint,
    plan_consolidation,
)
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.format import records
from recpoint.format.naming import MANIFEST_KEY
from tests.catalog_builder import build, publish, tables
from tests.consolidation import chain_of, name_of, require_same, restored, trained


def chain_plan(
    run: Run,
    *,
    increments: int,
    dirty_rows: int,
    triggers: ConsolidationTriggers,
    spread: bool = False,
) -> ConsolidationPlan:
    """The choice for a chain whose increments all have the same rows, or spread ones."""
    trained = tables(rows=4000, dim=16)
    parent = publish(run, build(run, trained, step=1, generation=1, rows_per_chunk=4000))
    for step in range(2, 2 + increments):
        dirty = [torch.arange(dirty_rows), torch.arange(dirty_rows)]
        if spread:
            dirty = [torch.arange(step, 2000, 2000 // dirty_rows) for _ in dirty]
        trained[0].train(dirty[0], torch.Generator())
        parent = publish(
            run, build(run, trained, step=step, generation=1, parent=parent, dirty=dirty)
        )
    name = newest_checkpoint(run)
    assert name is not None and name.step == 1 + increments
    return choose_consolidation(run, name, triggers=triggers)


def test_nothing_is_chosen_before_a_trigger(run: Run) -> None:
    plan = chain_plan(run, increments=2, dirty_rows=10, triggers=ConsolidationTriggers())
    assert not plan.pays


def test_many_links_with_few_rows_become_one_increment(run: Run) -> None:
    triggers = ConsolidationTriggers(links=5)
    plan = chain_plan(run, increments=4, dirty_rows=10, triggers=triggers)
    assert plan.pays and plan.target.form == "after" and plan.links_after == 2
    consolidate(run, plan)
    after = choose_consolidation(run, plan.target.name, triggers=triggers)
    assert not after.pays and after.links_before == 2


def test_much_that_is_dead_becomes_a_full(run: Run) -> None:
    triggers = ConsolidationTriggers(links=100)
    plan = chain_plan(run, increments=3, dirty_rows=1900, triggers=triggers)
    assert plan.pays and plan.target.form == "full" and plan.links_after == 1


def test_hot_rows_become_one_increment_that_takes_what_was_planned(run: Run) -> None:
    plan = chain_plan(run, increments=14, dirty_rows=150, triggers=ConsolidationTriggers(links=99))
    whole = plan_consolidation(run, plan.target.name)
    assert whole.restore_bytes_before / whole.restore_bytes_after > 1.5
    assert plan.pays and plan.target.form == "after" and plan.links_after == 2
    assert plan.write_rows == 2 * 150 and plan.write_bytes < whole.write_bytes / 5
    by_dead_rows = ConsolidationTriggers(links=99, restore_ratio=9, dead_share=0.3)
    also = choose_consolidation(run, plan.target.name, triggers=by_dead_rows)
    assert also.pays and also.target == plan.target and "are dead" in also.reason
    done = consolidate(run, plan)
    assert done.written_bytes <= plan.write_bytes
    after = choose_consolidation(run, plan.target.name)
    assert not after.pays
    full_bytes = whole.restore_bytes_after
    assert after.restore_bytes_before / full_bytes < 1.25


def test_a_merge_that_may_have_too_large_a_manifest_is_not_chosen(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So small a buffer may have each chunk of a source become chunks of the merge.
    monkeypatch.setattr(moves, "BUFFERED_BYTES", 1)
    triggers = ConsolidationTriggers(links=5)
    best = chain_plan(run, increments=4, dirty_rows=10, triggers=triggers)
    sizes = [one.most_manifest_bytes for one in best.merges]
    for limit, merged in ((sizes[3], 4), (sizes[2], 4), (sizes[2] - 1, 3), (sizes[0] - 1, None)):
        monkeypatch.setattr(records, "MAX_RECORD_BYTES", limit)
        plan = choose_consolidation(run, best.target.name, triggers=triggers)
        if merged is None:
            assert not plan.pays and "no merge is sure to have a manifest that" in plan.reason
        else:
            assert plan.pays and len(plan.sources) == merged


def test_spread_rows_of_which_nothing_is_known_become_a_full(run: Run) -> None:
    triggers = ConsolidationTriggers(links=99)
    plan = chain_plan(run, increments=14, dirty_rows=150, triggers=triggers, spread=True)
    assert plan.pays and plan.target.form == "full"


def test_two_links_can_only_become_a_full(run: Run) -> None:
    triggers = ConsolidationTriggers(links=2)
    plan = chain_plan(run, increments=1, dirty_rows=10, triggers=triggers)
    assert plan.pays and plan.target.form == "full"


def test_links_merged_before_are_left_alone_and_the_same_bits_come_back(run: Run) -> None:
    """A chain that is shortened twice, by what is chosen: the second time around the first."""
    triggers = ConsolidationTriggers(links=6, restore_ratio=9, dead_share=1)
    rows = tables(rows=400, dim=8)
    links = trained(run, rows, list(range(10, 16)), share=0.05, bits=[4, None, 8])
    first = choose_consolidation(run, name_of(links[-1]), triggers=triggers)
    assert (first.links_before, first.links_after) == (6, 2)
    consolidate(run, first)
    links += trained(
        run, rows, list(range(16, 20)), parent=links[-1], share=0.05, seed=1, bits=[2, None, 3, 4]
    )
    before, report = restored(run, links[-1])
    assert report.chain_length == 6
    plan = choose_consolidation(run, name_of(links[-1]), triggers=triggers)
    assert plan.pays and "reads 6 manifests" in plan.reason
    assert [source.name.step for source in plan.sources] == [16, 17, 18, 19]
    assert plan.target == Representation(name_of(links[-1]), "after", 15)
    of_all = plan_consolidation(run, name_of(links[-1]), links=5)
    moved = plan.read_bytes + plan.write_bytes
    assert moved / 3 < (of_all.read_bytes + of_all.write_bytes) / 4  # for each manifest less
    assert consolidate(run, plan).outcome == "created"
    assert [link.step for link in chain_of(run, links[-1])] == [10, 15, 19]
    after, report = restored(run, links[-1])
    assert report.chain_length == 3 and report.passed_over == ()
    require_same(before, after)
    assert torch.equal(after.tables["users"].values, rows[1].values)  # stored as they are
    assert check(run, level="full").ok
    # Retention may let go of what was merged.
    for link in links[1:-1]:
        run.store.delete(MANIFEST_KEY.of(*name_of(link)))
    require_same(before, restored(run, links[-1])[0])


def test_a_run_without_checkpoints_has_no_newest(run: Run) -> None:
    assert newest_checkpoint(run) is None
