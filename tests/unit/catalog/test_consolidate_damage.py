"""Consolidations of damaged chains, consolidated manifests that are damaged, and those that lie."""

from __future__ import annotations

import pytest
import torch

from recpoint.catalog.check.check import check
from recpoint.catalog.consolidate.commit import commit_consolidation
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.plan import ConsolidationPlan, plan_consolidation
from recpoint.catalog.run import manifest_pages
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import ObjectInfo
from recpoint.errors import ChainError, CommitConflict, DigestMismatch, FormatError, MalformedObject
from recpoint.format.manifest import Manifest
from recpoint.format.naming import CONSOLIDATED_KEY, MANIFEST_KEY, VALIDATION_KEY, ManifestName
from recpoint.format.records import pack_record
from tests.catalog_builder import Table, build, publish, single_rows, tables
from tests.consolidation import chain_of, merge, name_of, require_same, restored, trained


@pytest.fixture
def links(run: Run) -> list[Manifest]:
    """A full at step 10 and increments up to step 14."""
    return trained(run, tables(rows=200), [10, 11, 12, 13, 14])


def test_rows_that_a_validation_found_wrong_are_not_mixed_with_others(
    run: Run, links: list[Manifest]
) -> None:
    run.store.put(VALIDATION_KEY.of(12, 1, 1, "sample", "failed"), b"")
    for name in (ManifestName(12, 1), ManifestName(14, 1)):
        with pytest.raises(ChainError, match="validation 1"):
            plan_consolidation(run, name)
    assert plan_consolidation(run, ManifestName(11, 1)).needed
    run.store.put(VALIDATION_KEY.of(14, 1, 1, "full", "passed"), b"")
    assert plan_consolidation(run, ManifestName(14, 1)).needed  # it does not have them


def test_a_manifest_larger_than_any_reader_takes_is_not_made(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [Table("items", torch.zeros(5_000, 1))]
    made = [publish(run, build(run, weights, step=5, generation=1, rows_per_chunk=1 << 20))]
    for step in (6, 7):
        dirty = [torch.tensor([step])]
        increment = build(run, weights, step=step, generation=1, parent=made[-1], dirty=dirty)
        made.append(publish(run, increment))
    plan = plan_consolidation(run, name_of(made[-1]), links=2)
    rows = next(entry for entry in made[-1].chunks if entry.content == "rows")
    many = single_rows(rows, 5_000, attempt=plan.attempt)
    monkeypatch.setattr(manifest_pages, "MAX_CHUNKS", 5_000)
    with pytest.raises(MalformedObject, match=r"5,001 chunks.*the chain that the checkpoint has"):
        commit_consolidation(run, plan, many)
    assert not list(run.store.list(CONSOLIDATED_KEY.prefix))


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
    assert not list(run.store.list(CONSOLIDATED_KEY.prefix))


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
    run.store.put(MANIFEST_KEY.of(2, 1), pack_record(hostile))
    with pytest.raises(MalformedObject, match="in two chunks"):
        merge(run, hostile)
    assert not list(run.store.list(CONSOLIDATED_KEY.prefix))


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
            run.store.delete(MANIFEST_KEY.of(link.step, 1))
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
        run.store.delete(CONSOLIDATED_KEY.of(14, 1, None))
        for key in (CONSOLIDATED_KEY.of(14, 1, 11), CONSOLIDATED_KEY.of(13, 1, None)):
            run.store.put(key, pack_record(merged))
        run.store.put(MANIFEST_KEY.of(20, 1), pack_record(merged))
        assert chain_of(run, links[-1]) == tuple(links)
        assert len(check(run).findings) == 3

    def test_a_plan_never_goes_round_in_circles(self, run: Run, links: list[Manifest]) -> None:
        merge(run, links[-1], 2)
        merged = chain_of(run, links[-1])[-1]
        key = CONSOLIDATED_KEY.of(14, 1, 12)
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
    return list(run.store.list(CONSOLIDATED_KEY.prefix))
