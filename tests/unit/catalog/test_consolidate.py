"""A consolidation restores, bit for bit, what its chain restores (format §6.8, I6)."""

from __future__ import annotations

import mmap
import pickle
import threading
from pathlib import Path

import pytest
import torch

from recpoint.catalog.chunks import seen_rows
from recpoint.catalog.consolidation import consolidate_plan, row_moves
from recpoint.catalog.consolidation.consolidate import commit_consolidation, consolidate
from recpoint.catalog.consolidation.consolidate_plan import (
    ConsolidationPlan,
    ConsolidationTriggers,
    plan_consolidation,
    read_sources,
)
from recpoint.catalog.consolidation.consolidate_rows import merge_part
from recpoint.catalog.persisting.persist import persist_job
from recpoint.catalog.runs.lineage import ManifestName, Representation
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.store_contract import ObjectInfo
from recpoint.catalog.sweeping.sweep import execute, plan_sweep
from recpoint.catalog.validation.check import check
from recpoint.errors import (
    ChainError,
    CommitConflict,
    DigestMismatch,
    FormatError,
    MalformedObject,
    MissingLink,
    ObjectNotFound,
    SettingsError,
)
from recpoint.format.manifest import Manifest
from recpoint.format.naming import (
    CHUNKS_PREFIX,
    CONSOLIDATED_PREFIX,
    ValidationName,
    attempt_prefix,
    consolidated_key,
    manifest_key,
    parse_chunk_key,
    validation_key,
)
from recpoint.format.records import pack_record
from tests.catalog_builder import Table, build, publish, single_rows, tables
from tests.consolidation import chain_of, merge, name_of, require_same, restored, trained
from tests.interposed_store import InterposedStore
from tests.job_builder import Links, stage


@pytest.fixture
def links(run: Run) -> list[Manifest]:
    """A full at step 10 and increments up to step 14."""
    return trained(run, tables(rows=200), [10, 11, 12, 13, 14])


def chunks_of(run: Run, attempt: str) -> set[str]:
    keys = {info.key for info in run.store.list(CHUNKS_PREFIX)}
    return {key for key in keys if (found := parse_chunk_key(key)) and found.attempt == attempt}


def test_rows_that_a_validation_found_wrong_are_not_mixed_with_others(
    run: Run, links: list[Manifest]
) -> None:
    run.store.put(validation_key(ValidationName(12, 1, 1, "sample", "failed")), b"")
    for name in (ManifestName(12, 1), ManifestName(14, 1)):
        with pytest.raises(ChainError, match="validation 1"):
            plan_consolidation(run, name)
    assert plan_consolidation(run, ManifestName(11, 1)).needed
    run.store.put(validation_key(ValidationName(14, 1, 1, "full", "passed")), b"")
    assert plan_consolidation(run, ManifestName(14, 1)).needed  # it does not have them


@pytest.mark.parametrize("links_merged", [None, 2, 3, 5, 99])
def test_a_merged_chain_restores_the_same_bits(
    run: Run, links: list[Manifest], links_merged: int | None
) -> None:
    before, _ = restored(run, links[-1])
    done = merge(run, links[-1], links_merged)
    after, report = restored(run, links[-1])
    require_same(before, after)
    k = links_merged if links_merged in (2, 3) else 5
    assert done.outcome == "created" and report.chain_length == 5 - k + 1
    merged = chain_of(run, links[-1])[-1]
    assert merged.links == links[-1].links and merged.ref == links[-1].ref
    assert done.key == consolidated_key(14, 1, None if k == 5 else 14 - k)
    assert done.written_bytes == merged.stored_bytes and done.chunks == len(merged.chunks)
    assert check(run, level="full").ok and not check(run, level="full").findings
    # The checkpoint's own chain is as it was.
    assert chain_of(run, links[-1], original=True) == tuple(links)


def test_rows_in_every_form_that_a_chunk_can_have(run: Run) -> None:
    """Widths, schemes and dtypes are mixed in one chain; NaN and infinities are among the rows."""
    all_tables = tables(rows=300, dim=6)
    all_tables[0].values[::7, 2] = torch.nan
    all_tables[0].values[5::11] = torch.inf
    links = trained(run, all_tables, list(range(10, 18)), bits=[8, 2, 4, None, 3])
    before, _ = restored(run, links[-1])
    kinds = {(c.bits, c.scheme) for link in links for c in link.chunks if c.table == 0}
    merge(run, links[-1])
    (merged,) = chain_of(run, links[-1])
    assert {(c.bits, c.scheme) for c in merged.chunks if c.table == 0} == kinds
    assert len(kinds) == 5
    after, _ = restored(run, links[-1])
    require_same(before, after)


@pytest.mark.parametrize("links_merged", [None, 3])
@pytest.mark.parametrize("section_rows", [64, 1 << 29])
def test_many_small_chunks_and_sections(
    run: Run, monkeypatch: pytest.MonkeyPatch, section_rows: int, links_merged: int | None
) -> None:
    """Chunks fill and are split, buffers run over, rows of one kind are out of order."""
    monkeypatch.setattr(row_moves, "CHUNK_BYTES", 700)
    # Of the ten kinds of rows three or four wait: a page at least for each array.
    monkeypatch.setattr(row_moves, "BUFFERED_BYTES", 16 * mmap.PAGESIZE)
    monkeypatch.setattr(seen_rows, "SECTION_ROWS", section_rows)
    links = trained(run, tables(rows=333), list(range(10, 16)), bits=[8, 2, None, 4], ranks=2)
    before, _ = restored(run, links[-1])
    done = merge(run, links[-1], links_merged)
    merged = chain_of(run, links[-1])[-1]
    assert done.chunks > 12 and max(c.bytes for c in merged.chunks if c.table == 0) < 2000
    after, _ = restored(run, links[-1])
    require_same(before, after)
    assert check(run, level="full").findings == ()


@pytest.mark.parametrize("links_merged", [None, 3])
def test_a_chunk_is_read_in_the_sections_it_may_touch_and_as_planned(
    run: Run, monkeypatch: pytest.MonkeyPatch, links_merged: int | None
) -> None:
    monkeypatch.setattr(seen_rows, "SECTION_ROWS", 64)
    links = trained(run, tables(rows=300), list(range(1, 6)))
    plan = plan_consolidation(run, name_of(links[-1]), links=links_merged)
    store = InterposedStore(run.store)
    read: list[int] = []
    done = consolidate(Run.open(store), plan, on_progress=lambda so_far, _: read.append(so_far))
    touched = {
        entry.key: (entry.last_row or 0) // 64 - (entry.first_row or 0) // 64 + 1
        for link in links[-len(plan.sources) :]
        for entry in link.chunks
        if entry.content == "rows"
    }
    assert 1 in touched.values() and 2 in touched.values()
    assert {key: store.calls.count(("get", key)) for key in touched} == touched
    sizes = {entry.key: entry.bytes for link in links for entry in link.chunks}
    assert read[-1] == sum(sizes[key] * times for key, times in touched.items())
    assert done.read_bytes == plan.read_bytes == read[-1] + plan.state_bytes


@pytest.mark.parametrize("links_merged", [None, 3])
def test_few_rows_of_a_large_table(run: Run, links_merged: int | None) -> None:
    """An increment's rows are kept in mind by their ids where bits would take more memory."""
    links = trained(run, tables(rows=20_000, dim=1), list(range(1, 6)), share=0.002)
    before, _ = restored(run, links[-1])
    merge(run, links[-1], links_merged)
    require_same(before, restored(run, links[-1])[0])


def test_children_of_a_consolidated_checkpoint_check_and_can_be_consolidated_again(
    run: Run,
) -> None:
    trainer = tables(rows=120)
    links = trained(run, trainer, [1, 2, 3])
    merge(run, links[-1])
    links += trained(run, trainer, [4, 5, 6], parent=links[-1], seed=1)
    before, _ = restored(run, links[-1])
    assert [m.step for m in chain_of(run, links[-1])] == [3, 4, 5, 6]
    assert merge(run, links[-1], 2).key == consolidated_key(6, 1, 4)
    assert [m.step for m in chain_of(run, links[-1])] == [3, 4, 6]
    links += trained(run, trainer, [7], parent=links[-1], seed=2)
    assert links[-1].chain_length == 7
    assert [m.step for m in chain_of(run, links[-1])] == [3, 4, 6, 7]
    truth, _ = restored(run, links[-1])
    merge(run, links[-1])
    assert len(chain_of(run, links[-1])) == 1
    require_same(truth, restored(run, links[-1])[0])
    require_same(before, restored(run, links[-2])[0])
    assert check(run, level="full").findings == ()


def test_what_retention_lets_go_of_is_not_missed(run: Run) -> None:
    trainer = tables(rows=120)
    links = trained(run, trainer, [1, 2, 3])
    merge(run, links[-1])
    truth, _ = restored(run, links[-1])
    later = trained(run, trainer, [4], parent=links[-1], seed=3)
    for link in reversed(links):
        run.store.delete(manifest_key(link.step, 1))
    execute(run, plan_sweep(run, grace_seconds=0))
    assert run.live_line() == [(4, 1), (3, 1)]
    assert not [key for link in links for key in chunks_of(run, link.attempt)]
    require_same(truth, restored(run, links[-1])[0])
    later = trained(run, trainer, [5], parent=later[-1], seed=4)
    assert check(run, level="full").findings == ()
    merge(run, later[-1])
    assert len(chain_of(run, later[-1])) == 1 and check(run, level="full").ok


def test_a_second_run_says_already_and_writes_nothing(run: Run, links: list[Manifest]) -> None:
    plan = plan_consolidation(run, name_of(links[-1]))
    assert consolidate(run, plan).outcome == "created"
    store = InterposedStore(run.store)
    again = consolidate(Run.open(store), plan)
    assert (again.outcome, again.key) == ("already", plan.target.key)
    assert not [call for call in store.calls if call[0] in ("put", "create")]
    anew = plan_consolidation(run, name_of(links[-1]))
    assert not anew.needed and consolidate(run, anew).outcome == "not_needed"
    full = plan_consolidation(run, name_of(links[0]))
    assert not full.needed and not full.pays and full.parts == ()


def test_steps_are_plain_values_and_may_be_done_twice(run: Run, links: list[Manifest]) -> None:
    plan = plan_consolidation(run, name_of(links[-1]))
    assert pickle.loads(pickle.dumps(plan)) == plan
    done = [merge_part(run, plan, part) for part in plan.parts]
    assert [merge_part(run, plan, part) for part in plan.parts] == done
    entries = [entry for part in done for entry in part]
    assert commit_consolidation(run, plan, entries)[0] == "created"
    assert commit_consolidation(run, plan, entries)[0] == "already"
    assert {entry.key for entry in entries} < chunks_of(run, plan.attempt)


def test_chunks_that_are_there_are_not_written_again(run: Run, links: list[Manifest]) -> None:
    plan = plan_consolidation(run, name_of(links[-1]))
    (part,) = plan.parts
    entries = merge_part(run, plan, part)
    store = InterposedStore(run.store)
    assert merge_part(Run.open(store), plan, part) == entries
    # The first is: its age is what keeps a sweep from the others.
    assert [at for call, at in store.calls if call == "put"] == [entries[0].key]
    damaged = entries[1].key
    run.store.put(damaged, b"x" * entries[1].bytes)
    store.calls.clear()
    merge_part(Run.open(store), plan, part)
    assert [at for call, at in store.calls if call == "put"] == [entries[0].key, damaged]
    commit_consolidation(run, plan, entries)
    assert check(run, level="full").ok


def test_a_chunk_that_is_gone_before_the_commit_is_an_error(
    run: Run, links: list[Manifest]
) -> None:
    plan = plan_consolidation(run, name_of(links[-1]))
    entries = merge_part(run, plan, plan.parts[0])
    run.store.delete(entries[1].key)
    with pytest.raises(ObjectNotFound):
        commit_consolidation(run, plan, entries)
    assert not list(run.store.list(CONSOLIDATED_PREFIX))
    assert consolidate(run, plan).outcome == "created"


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
    parent = manifest_key(12, 1)
    data = run.store.get(parent, max_bytes=1 << 20)
    run.store.delete(parent)
    with pytest.raises(MissingLink):
        commit_consolidation(run, plan, entries)
    run.store.put(parent, data)
    run.store.delete(manifest_key(14, 1))
    with pytest.raises(ObjectNotFound):
        commit_consolidation(run, plan, entries)
    assert not list(run.store.list(CONSOLIDATED_PREFIX))


def test_a_parent_of_which_a_consolidated_manifest_is_good_is_there(
    run: Run, links: list[Manifest]
) -> None:
    merge(run, links[2])
    run.store.put(manifest_key(12, 1), b"damaged")
    assert merge(run, links[-1], links=2).outcome == "created"
    assert [one.step for one in chain_of(run, links[-1])] == [12, 14]


def test_a_manifest_larger_than_any_reader_takes_is_not_made(run: Run) -> None:
    weights = [Table("items", torch.zeros(275_000, 1))]
    made = [publish(run, build(run, weights, step=5, generation=1, rows_per_chunk=1 << 20))]
    for step in (6, 7):
        dirty = [torch.tensor([step])]
        increment = build(run, weights, step=step, generation=1, parent=made[-1], dirty=dirty)
        made.append(publish(run, increment))
    plan = plan_consolidation(run, name_of(made[-1]), links=2)
    rows = next(entry for entry in made[-1].chunks if entry.content == "rows")
    many = single_rows(rows, 275_000, attempt=plan.attempt)
    with pytest.raises(MalformedObject, match=r"275,001 chunks.*the chain that it has"):
        commit_consolidation(run, plan, many)
    assert not list(run.store.list(CONSOLIDATED_PREFIX))


def test_a_plan_of_other_manifests_is_refused(run: Run, links: list[Manifest]) -> None:
    plan = plan_consolidation(run, name_of(links[-1]))
    changed = links[2].model_copy(update={"writer": "another"})
    run.store.put(manifest_key(12, 1), pack_record(changed))
    with pytest.raises(ChainError, match="new plan"):
        merge_part(run, plan, plan.parts[0])


def test_a_damaged_source_is_named_and_nothing_is_committed(
    run: Run, links: list[Manifest]
) -> None:
    key = next(entry.key for entry in links[1].chunks if entry.content == "rows")
    data = bytearray(run.store.get(key, max_bytes=1 << 20))
    data[-1] ^= 1
    run.store.put(key, bytes(data))
    with pytest.raises(DigestMismatch) as caught:
        merge(run, links[-1])
    assert caught.value.subject == key
    assert not list(run.store.list(CONSOLIDATED_PREFIX))


def test_rows_that_two_chunks_of_one_source_hold_are_refused(run: Run) -> None:
    trainer = tables(rows=60)
    full = publish(run, build(run, trainer, step=1, generation=1))
    ids = [torch.tensor([3, 4, 9]), torch.tensor([0])]
    child = build(run, trainer, step=2, generation=1, parent=full, dirty=ids, rows_per_chunk=3)
    again = build(
        run,
        trainer,
        step=2,
        generation=1,
        parent=full,
        dirty=[torch.tensor([1, 4, 9]), torch.tensor([0])],
        attempt=child.ref.attempt,
    )
    rows = [entry for entry in again.manifest.chunks if entry.table == 0]
    key = rows[0].key.replace("000000.safetensors", "000009.safetensors")
    for name, data in {**child.chunks, key: again.chunks[rows[0].key]}.items():
        run.store.put(name, data)
    twice = rows[0].model_copy(update={"key": key})
    chunks = (*child.manifest.chunks, twice)
    hostile = child.manifest.model_copy(update={"chunks": chunks})
    run.store.put(manifest_key(2, 1), pack_record(hostile))
    with pytest.raises(MalformedObject, match="in two chunks"):
        merge(run, hostile)
    assert not list(run.store.list(CONSOLIDATED_PREFIX))


class TestDamagedConsolidation:
    """The old chain is there, and a reader says why it takes it."""

    def damage(self, run: Run, key: str) -> None:
        data = bytearray(run.store.get(key, max_bytes=1 << 20))
        data[len(data) // 2] ^= 1
        run.store.put(key, bytes(data))

    @pytest.mark.parametrize("content", ["rows", "state", "manifest"])
    @pytest.mark.parametrize("links_merged", [None, 3])
    def test_falls_back(
        self, run: Run, links: list[Manifest], content: str, links_merged: int | None
    ) -> None:
        before, _ = restored(run, links[-1])
        done = merge(run, links[-1], links_merged)
        merged = chain_of(run, links[-1])[-1]
        key = done.key
        if content != "manifest":
            key = next(entry.key for entry in merged.chunks if entry.content == content)
        self.damage(run, key)
        after, report = restored(run, links[-1])
        require_same(before, after)
        assert [passed.key for passed in report.passed_over] == [done.key]
        assert key in report.passed_over[0].error and report.chain_length == 5
        found = check(run, level="full")
        assert found.ok and [f.key for f in found.findings if f.severity == "warning"] == [key]
        assert all(health.restorable for health in found.checkpoints)

    def test_without_the_old_chain_it_is_an_error(self, run: Run, links: list[Manifest]) -> None:
        done = merge(run, links[-1])
        for link in reversed(links):
            run.store.delete(manifest_key(link.step, 1))
        self.damage(run, done.key)
        with pytest.raises(FormatError) as caught:
            restored(run, links[-1])
        assert caught.value.subject == done.key
        assert not check(run).ok

    def test_a_damaged_manifest_is_in_the_way(self, run: Run, links: list[Manifest]) -> None:
        done = merge(run, links[-1])
        self.damage(run, done.key)
        with pytest.raises(CommitConflict) as caught:
            plan_consolidation(run, name_of(links[-1]))
        assert caught.value.subject == done.key
        run.store.delete(done.key)
        assert merge(run, links[-1]).outcome == "created"


class TestLies:
    """Consolidated manifests that say what is not so (format §9)."""

    def store(self, run: Run, key: str, manifest: Manifest, **changes: object) -> None:
        hostile = manifest.model_copy(update=changes)
        run.store.put(key, pack_record(hostile))

    def test_links_that_its_children_do_not_have(self, run: Run) -> None:
        trainer = tables(rows=80)
        links = trained(run, trainer, [1, 2, 3, 4])
        done = merge(run, links[2])
        (merged,) = chain_of(run, links[2])
        assert merged.stands_for is not None
        lie = merged.stands_for.model_copy(update={"chain_length": 7})
        self.store(run, done.key, merged, stands_for=lie)
        truth = chain_of(run, links[3], original=True)
        assert chain_of(run, links[3]) == truth
        _, report = restored(run, links[3])
        assert [passed.key for passed in report.passed_over] == [done.key]
        assert "chain_length" in report.passed_over[0].error
        found = check(run)
        assert [f.key for f in found.findings if f.severity == "warning"] == [done.key]

    def test_another_attempt(self, run: Run, links: list[Manifest]) -> None:
        done = merge(run, links[2])
        (merged,) = chain_of(run, links[2])
        self.store(run, done.key, merged, attempt="f" * 32)
        assert chain_of(run, links[3]) == tuple(links[:4])
        with pytest.raises(CommitConflict):
            consolidate(run, plan_of_the_chain(run, links[2]))

    def test_another_key_than_it_says(self, run: Run, links: list[Manifest]) -> None:
        merge(run, links[-1])
        (merged,) = chain_of(run, links[-1])
        run.store.delete(consolidated_key(14, 1, None))
        for key in (consolidated_key(14, 1, 11), consolidated_key(13, 1, None)):
            run.store.put(key, pack_record(merged))
        run.store.put(manifest_key(20, 1), pack_record(merged))
        assert chain_of(run, links[-1]) == tuple(links)
        assert len(check(run).findings) == 3

    def test_a_plan_never_goes_round_in_circles(self, run: Run, links: list[Manifest]) -> None:
        merge(run, links[-1], 2)
        merged = chain_of(run, links[-1])[-1]
        key = consolidated_key(14, 1, 12)
        assert merged.parent is not None
        # Steps descend, whoever the parent is said to be: it ends at a manifest that is not there.
        for parent in (links[1].ref, links[0].ref):
            self.store(run, key, merged, parent=parent)
            assert chain_of(run, links[-1]) == tuple(links)


def plan_of_the_chain(run: Run, manifest: Manifest) -> ConsolidationPlan:
    """A plan as if nothing had been consolidated yet."""
    there = {info.key: run.store.get(info.key, max_bytes=1 << 20) for info in listed(run)}
    for key in there:
        run.store.delete(key)
    plan = plan_consolidation(run, name_of(manifest))
    for key, data in there.items():
        run.store.put(key, data)
    return plan


def listed(run: Run) -> list[ObjectInfo]:
    return list(run.store.list(CONSOLIDATED_PREFIX))


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


def test_a_commit_says_how_many_manifests_its_restore_reads(run: Run, tmp_path: Path) -> None:
    """What lets a trainer see that consolidation does not keep up."""
    found, links = [], Links()
    for step in range(1, 6):
        dirty = None if step == 1 else [torch.arange(0, 40, 3), torch.arange(2)]
        job = stage(
            run, tmp_path / "s", tables(), step=step, generation=1, links=links, dirty=dirty
        )
        found.append(persist_job(job).links_to_read)
        if step == 3:
            merge(run, run.manifest(3, 1))
    assert found == [1, 2, 3, 2, 3]
    assert run.manifest(5, 1).chain_length == 5
