"""A validation of a consolidated chain: what it says, and what it cannot say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import crc32c
import pytest
import torch

from recpoint.catalog.check.rows import read_samples
from recpoint.catalog.check.validate import record
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.catalog.persist import persist
from recpoint.catalog.restore.chunks import StoreChunks, read_chunk, read_rows
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.format.chunk import Section, build_chunk
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY, ManifestName
from recpoint.format.records import pack_record
from tests.catalog_builder import Table, copy_run, new_run
from tests.job_builder import Links, stage
from tests.validated_run import Level, at, chunk_of, rewrite, subjects, validated_run


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Manifest]]:
    return validated_run(tmp_path_factory.mktemp("built"))


@pytest.fixture
def manifests(built: tuple[Run, list[Manifest]]) -> list[Manifest]:
    return built[1]


@pytest.fixture
def run(built: tuple[Run, list[Manifest]], tmp_path: Path) -> Run:
    return copy_run(built[0], tmp_path / "run")


def test_a_consolidated_chain_is_compared_with_the_same_sample(
    run: Run, manifests: list[Manifest]
) -> None:
    record(run, at(run, 30, "full"))
    plan = plan_consolidation(run, ManifestName(30, 1))
    assert consolidate(run, plan).outcome == "created"
    found = at(run, 30, "full")
    assert found.passed and found.notes == () and found.links_read == 1
    assert found.rows_compared == 3 * 40 and found.digests and found.level == "full"
    assert found.checkpoint == manifests[2].ref
    # Nothing of the old chain is needed for it, its sample included.
    for manifest in manifests:
        run.store.delete(MANIFEST_KEY.of(manifest.step, 1))
    assert at(run, 30, "full").rows_compared == 3 * 40


def wrong_row_of_a_link(run: Run, manifests: list[Manifest]) -> None:
    """A code of 20 that is wrong in a row of its own sample, and that only 20 can tell."""
    with ReadScheduler(1) as reads:
        own, newest = (
            read_samples(StoreChunks(run.store), manifests[at], reads)[0].ids for at in (1, 2)
        )
    entry = chunk_of(manifests[1], "rows", 0)
    replaced = read_rows(
        StoreChunks(run.store), manifests[2], chunk_of(manifests[2], "rows", 0)
    ).rows
    rows = read_rows(StoreChunks(run.store), manifests[1], entry).rows
    assert isinstance(rows, torch.Tensor) and isinstance(replaced, torch.Tensor)
    only = torch.isin(rows, own) & ~torch.isin(rows, newest) & ~torch.isin(rows, replaced)
    row = int(only.nonzero()[0])

    def change(sections: dict[str, Section]) -> None:
        data = sections["codes"].data
        assert isinstance(data, bytearray)
        data[row * sections["codes"].shape[1]] ^= 15

    rewrite(run, entry, change)


def test_a_full_validation_finds_what_the_validation_of_a_link_finds(
    run: Run, manifests: list[Manifest]
) -> None:
    wrong_row_of_a_link(run, manifests)
    assert at(run, 30, "sample").passed and at(run, 20, "sample").result == "failed"
    found = at(run, 30, "full")
    assert (found.result, found.level) == ("failed", "full")
    (finding,) = found.findings
    assert finding.subject == "items" and finding.what.endswith(" of the sample of step 20")


@pytest.mark.parametrize("first", ["link", "merged"])
def test_a_merged_chain_says_nothing_for_a_link_that_failed(
    run: Run, manifests: list[Manifest], first: str
) -> None:
    wrong_row_of_a_link(run, manifests)
    consolidate(run, plan_consolidation(run, ManifestName(30, 1)))
    gone = chunk_of(manifests[2], "rows").key  # of its own manifest, which no reader takes now
    run.store.delete(gone)
    found = at(run, 30, "full")
    assert (found.result, found.level) == ("passed", "sample")
    (note,) = found.notes
    assert note.what == "level" and gone in note.expected
    validations = [found, at(run, 20, "sample")]
    for validation in validations if first == "merged" else reversed(validations):
        record(run, validation)
    report = restore(run, MemoryTarget())
    assert report.restored.step == 10 and [one.name.step for one in report.skipped] == [30, 20]
    # Nor does it once more, although its rows are those that were digested then.
    record(run, at(run, 30, "full"))
    assert restore(run, MemoryTarget()).restored.step == 10


def test_rows_of_the_symmetric_method_pass_when_newer_ones_are_of_another(tmp_path: Path) -> None:
    run, links = new_run(tmp_path / "run"), Links()
    run.claim(None)
    items = Table("items", torch.rand(300, 8) + 1, bits=4)  # far from symmetric about zero
    for step in (10, 20):
        items.quantizer = "symmetric" if step == 10 else "asymmetric"
        dirty = None if step == 10 else [torch.arange(0, 300, 3)]
        job = stage(
            run,
            tmp_path / "staging",
            [items],
            step=step,
            generation=1,
            links=links,
            dirty=dirty,
            state={},
            samples=40,
        )
        assert persist.persist_job(job).result == "committed"
    assert at(run, 20, "full").passed
    assert consolidate(run, plan_consolidation(run, ManifestName(20, 1))).outcome == "created"
    found = at(run, 20, "full")
    assert found.passed and found.findings == () and found.links_read == 3


def test_links_that_are_there_are_read_beside_what_was_merged_from_them(
    run: Run, manifests: list[Manifest]
) -> None:
    before = at(run, 30, "full")
    consolidate(run, plan_consolidation(run, ManifestName(30, 1)))
    found = at(run, 30, "full")
    assert (found.result, found.level, found.notes) == ("passed", "full", ())
    assert found.links_read == 4 and found.digests == before.digests
    assert found.rows_compared > before.rows_compared
    record(run, found)
    # From then on its rows are known to be right, whatever becomes of the links.
    for manifest in manifests:
        run.store.delete(MANIFEST_KEY.of(manifest.step, 1))
    assert at(run, 30, "full").level == "full"


def test_a_row_that_was_wrong_before_it_was_merged_is_found_in_its_link(
    run: Run, manifests: list[Manifest]
) -> None:
    wrong_row_of_a_link(run, manifests)
    consolidate(run, plan_consolidation(run, ManifestName(30, 1)))
    found = at(run, 30, "full")
    assert (found.result, found.level) == ("failed", "full")
    (finding,) = found.findings
    assert finding.subject == "items" and finding.what.endswith(" of the sample of step 20")


def test_a_link_that_is_gone_is_named(run: Run, manifests: list[Manifest]) -> None:
    consolidate(run, plan_consolidation(run, ManifestName(30, 1)))
    run.store.delete(MANIFEST_KEY.of(10, 1))
    found = at(run, 30, "full")
    assert (found.result, found.level) == ("passed", "sample")
    (note,) = found.notes
    assert note.what == "level" and MANIFEST_KEY.of(10, 1) in note.expected


def test_damage_of_a_consolidated_chain_is_noted_while_the_old_one_is_there(
    run: Run, manifests: list[Manifest]
) -> None:
    consolidate(run, plan_consolidation(run, ManifestName(30, 1)))
    (merged,) = run.consolidated()[ManifestName(30, 1)]
    entry = chunk_of(run.read_manifest(merged), "rows")
    run.store.delete(entry.key)
    found = at(run, 30, "full")
    assert found.passed and found.links_read == 3
    assert [note.what for note in found.notes] == ["representation"]
    run.store.delete(chunk_of(manifests[0], "rows").key)
    assert at(run, 30, "full").result == "failed"


def rewrite_merged(run: Run, change: Callable[[bytearray, int], bytearray]) -> None:
    """Have a consolidation of step 30 with other values of the table `plain`, its digests sound.

    Args:
        run: the run.
        change: given the values, and the bytes of a row.
    """
    consolidate(run, plan_consolidation(run, ManifestName(30, 1)))
    (merged,) = run.consolidated()[ManifestName(30, 1)]
    manifest = run.read_manifest(merged)
    entry = chunk_of(manifest, "rows", 1)
    meta, sections = read_chunk(StoreChunks(run.store), manifest, entry)
    wrong = {name: bytearray(section.data_view) for name, section in sections.items()}
    each = len(wrong["values"]) // sections["values"].shape[0]
    wrong["values"] = change(wrong["values"], each)
    data = build_chunk(
        meta, [section._replace(data=wrong[name]) for name, section in sections.items()]
    )
    run.store.put(entry.key, data)
    digest = {"bytes": len(data), "crc32c": crc32c.crc32c(data)}
    chunks = tuple(
        other.model_copy(update=digest) if other.key == entry.key else other
        for other in manifest.chunks
    )
    run.store.put(merged.key, pack_record(manifest.model_copy(update={"chunks": chunks})))


def test_a_row_that_a_consolidation_got_wrong_and_no_sample_has(
    run: Run, manifests: list[Manifest]
) -> None:
    with ReadScheduler(1) as reads:
        sampled = set(read_samples(StoreChunks(run.store), manifests[2], reads)[1].ids.tolist())
    row = next(row for row in range(1000) if row not in sampled)

    def change(values: bytearray, each: int) -> bytearray:
        values[row * each] ^= 1
        return values

    rewrite_merged(run, change)
    assert at(run, 30, "sample").passed
    found = at(run, 30, "full")
    assert found.result == "failed"
    (finding,) = found.findings
    assert (finding.subject, finding.what) == ("plain", "digests")
    assert "the rows of its links" in finding.expected


def test_rows_that_a_consolidation_got_wrong(run: Run) -> None:
    rewrite_merged(run, lambda values, each: values[each:] + values[:each])  # moved by one row
    found = at(run, 30, "full")
    assert found.result == "failed" and subjects(found) == {"plain"}
    assert len([finding for finding in found.findings if finding.row is not None]) > 10


@pytest.mark.parametrize("level", ["sample", "full"])
def test_rows_that_a_consolidation_got_wrong_and_its_lost_state(run: Run, level: Level) -> None:
    """That another manifest stands in for the state is no word for the rows that are there."""
    rewrite_merged(run, lambda values, each: values[each:] + values[:each])
    (merged,) = run.consolidated()[ManifestName(30, 1)]
    run.store.delete(chunk_of(run.read_manifest(merged), "state").key)
    found = at(run, 30, level)
    assert found.result == "failed" and "plain" in subjects(found)


def test_wrong_rows_of_links_that_lack_their_state(run: Run, manifests: list[Manifest]) -> None:
    wrong_row_of_a_link(run, manifests)
    consolidate(run, plan_consolidation(run, ManifestName(30, 1)))
    run.store.delete(chunk_of(manifests[2], "state").key)
    assert at(run, 30, "full").result == "failed"
