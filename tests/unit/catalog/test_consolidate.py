"""A consolidation restores, bit for bit, what its chain restores (format §6.8, invariant 6)."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from recpoint.catalog.check.check import check
from recpoint.catalog.consolidate import moves
from recpoint.catalog.consolidate.commit import commit_consolidation
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.merge import merge_part
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.restore import rows
from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run.run import Run
from recpoint.errors import ObjectNotFound
from recpoint.format.manifest import Manifest
from recpoint.format.naming import CONSOLIDATED_KEY, MANIFEST_KEY
from tests.catalog_builder import tables
from tests.consolidation import chain_of, chunks_of, merge, name_of, require_same, restored, trained
from tests.interposed_store import InterposedStore
from tests.job_builder import Links, stage


@pytest.fixture
def links(run: Run) -> list[Manifest]:
    """A full at step 10 and increments up to step 14."""
    return trained(run, tables(rows=200), [10, 11, 12, 13, 14])


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
    assert done.key == CONSOLIDATED_KEY.of(14, 1, None if k == 5 else 14 - k)
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
    monkeypatch.setattr(moves, "CHUNK_BYTES", 700)
    # Of the ten kinds of rows three or four wait: a page at least for each array.
    monkeypatch.setattr(moves, "BUFFERED_BYTES", 16 * mmap.PAGESIZE)
    monkeypatch.setattr(rows, "SECTION_ROWS", section_rows)
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
    monkeypatch.setattr(rows, "SECTION_ROWS", 64)
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
    assert merge(run, links[-1], 2).key == CONSOLIDATED_KEY.of(6, 1, 4)
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
        run.store.delete(MANIFEST_KEY.of(link.step, 1))
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
    assert not list(run.store.list(CONSOLIDATED_KEY.prefix))
    assert consolidate(run, plan).outcome == "created"


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
