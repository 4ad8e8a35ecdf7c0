"""A damaged consolidation keeps nobody from consolidating: the links it was made of are there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.consolidate.consolidate import (
    Consolidated,
    consolidate_around_damage,
    passed_over_words,
)
from recpoint.catalog.consolidate.plan import (
    ConsolidationPlan,
    ConsolidationTriggers,
    plan_consolidation,
)
from recpoint.catalog.run.chain import PassedOver
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.errors import CommitConflict, DigestMismatch, ObjectNotFound, RecpointError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import CONSOLIDATED_KEY
from tests.catalog_builder import tables
from tests.consolidation import chain_of, merge, name_of, require_same, restored, trained


@pytest.fixture
def links(run: Run) -> list[Manifest]:
    """A full at step 1 and increments up to step 5."""
    return trained(run, tables(rows=200), [1, 2, 3, 4, 5])


def damage(run: Run, key: str) -> None:
    data = bytearray(run.store.get(key, max_bytes=1 << 20))
    data[-1] ^= 1
    run.store.put(key, bytes(data))


def chunk_of(manifest: Manifest, content: str) -> str:
    return next(entry.key for entry in manifest.chunks if entry.content == content)


def around(
    run: Run, manifest: Manifest, *, links: int | None = None
) -> tuple[ConsolidationPlan, Consolidated | None]:
    def make_plan(avoid: Sequence[PassedOver]) -> ConsolidationPlan:
        return plan_consolidation(run, name_of(manifest), links=links, avoid=avoid)

    return consolidate_around_damage(run, make_plan)


def consolidated(run: Run) -> set[str]:
    return {info.key for info in run.store.list(CONSOLIDATED_KEY.prefix)}


@pytest.mark.parametrize("what", ["a flipped bit", "a chunk that is gone"])
def test_a_merged_full_with_a_damaged_chunk_is_gone_around(
    run: Run, links: list[Manifest], what: str
) -> None:
    before = merge(run, links[2])
    key = chunk_of(chain_of(run, links[2])[0], "rows")
    if what == "a flipped bit":
        damage(run, key)
        kind: type[RecpointError] = DigestMismatch
    else:
        run.store.delete(key)
        kind = ObjectNotFound
    truth, report = restored(run, links[-1])
    assert report.chain_length == 5
    with pytest.raises(kind):
        merge(run, links[-1])
    plan, done = around(run, links[-1])
    assert done is not None and done.outcome == "created"
    assert plan.sources == tuple(Representation.of(link) for link in links)
    assert [passed.key for passed in plan.passed_over] == [before.key]
    assert key in plan.passed_over[0].error and before.key in passed_over_words(plan)
    assert consolidated(run) == {before.key, done.key}
    assert len(chain_of(run, links[-1])) == 1
    require_same(truth, restored(run, links[-1])[0])
    found = check(run, level="full")
    assert found.ok and {finding.key for finding in found.findings} == {key}


def test_state_that_is_damaged_in_a_merged_increment_is_taken_from_the_checkpoint(
    run: Run, links: list[Manifest]
) -> None:
    truth, _ = restored(run, links[-1])
    before = merge(run, links[-1], 3)
    damage(run, chunk_of(chain_of(run, links[-1])[-1], "state"))
    plan, done = around(run, links[-1])
    assert done is not None and done.outcome == "created"
    assert [passed.key for passed in plan.passed_over] == [before.key]
    require_same(truth, restored(run, links[-1])[0])
    assert len(chain_of(run, links[-1])) == 1


def test_several_that_are_damaged_are_gone_around_one_after_another(
    run: Run, links: list[Manifest]
) -> None:
    keys = [merge(run, links[2]).key, merge(run, links[-1], 2).key]
    for manifest in chain_of(run, links[-1]):
        damage(run, chunk_of(manifest, "rows"))
    plan, done = around(run, links[-1])
    assert done is not None and done.outcome == "created" and len(plan.sources) == 5
    assert {passed.key for passed in plan.passed_over} == set(keys)


def test_where_no_other_chain_is_good_the_first_error_is_raised(
    run: Run, links: list[Manifest]
) -> None:
    before = merge(run, links[2])
    damaged = chunk_of(chain_of(run, links[2])[0], "rows")
    for key in (damaged, chunk_of(links[1], "rows")):
        damage(run, key)
    with pytest.raises(DigestMismatch) as caught:
        around(run, links[-1])
    assert caught.value.subject == damaged
    assert consolidated(run) == {before.key}


def test_the_damaged_one_itself_is_in_the_way_of_another_under_its_key(
    run: Run, links: list[Manifest]
) -> None:
    before = merge(run, links[-1], 3)
    damage(run, chunk_of(chain_of(run, links[-1])[-1], "rows"))
    with pytest.raises(CommitConflict) as caught:
        plan_consolidation(
            run, name_of(links[-1]), links=3, avoid=[PassedOver(before.key, "damaged")]
        )
    assert caught.value.subject == before.key


def test_nothing_is_begun_before_it_pays(run: Run, links: list[Manifest]) -> None:
    never = ConsolidationTriggers(links=99, restore_ratio=99, dead_share=1)
    plan, done = consolidate_around_damage(
        run,
        lambda avoid: plan_consolidation(run, name_of(links[-1]), triggers=never, avoid=avoid),
        only_if_it_pays=True,
    )
    assert done is None and not plan.pays and not consolidated(run)
