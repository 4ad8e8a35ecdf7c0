"""A large manifest is a root and pages: written before it, read with it, swept after it (§4.1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run import manifest_pages
from recpoint.catalog.run.commit import commit
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.errors import (
    DigestMismatch,
    ForeignObject,
    MalformedObject,
    ObjectNotFound,
    StoreUnavailable,
    UnsupportedVersion,
)
from recpoint.format import paging
from recpoint.format.manifest import Manifest
from recpoint.format.manifest_root import ManifestRoot, Page
from recpoint.format.naming import CONSOLIDATED_KEY, MANIFEST_KEY, PAGE_KEY
from recpoint.format.record_kinds import MANIFEST
from recpoint.format.records import pack_record, unpack_record
from tests.catalog_builder import build, publish, tables, upload
from tests.consolidation import merge, name_of, require_same, restored, trained
from tests.interposed_store import InterposedStore, unavailable
from tests.small_pages import small_pages

STEPS = [10, 11, 12, 13]


@pytest.fixture
def links(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[Manifest]:
    """A full at step 10 and increments up to step 13, each in pages of two levels."""
    small_pages(monkeypatch)
    return trained(run, tables(rows=200), STEPS, ranks=2)


def root_of(run: Run, manifest: Manifest) -> ManifestRoot:
    record = run.records(MANIFEST).read(manifest.step, manifest.generation)
    assert isinstance(record, ManifestRoot)
    return record


def pages_in(run: Run) -> set[str]:
    return {info.key for info in run.store.list("chunks/") if PAGE_KEY.parse(info.key)}


def test_a_small_manifest_is_one_record_as_ever(run: Run) -> None:
    manifest = publish(run, build(run, tables(rows=200), step=10, generation=1))
    key = MANIFEST_KEY.of(10, 1)
    assert run.store.get(key, max_bytes=1 << 20) == pack_record(manifest)
    assert not pages_in(run) and run.manifest(10, 1).pages == ()


def test_a_manifest_in_pages_is_read_whole(run: Run, links: list[Manifest]) -> None:
    for manifest in links:
        stored = run.manifest(manifest.step, 1)
        by_key = tuple(sorted(manifest.chunks, key=lambda chunk: chunk.key))
        assert stored.model_dump() == manifest.model_dump() | {
            "chunks": tuple(chunk.model_dump() for chunk in by_key)
        }
        root = root_of(run, manifest)
        assert len(root.pages) > 1 and all(entry.pages > 0 for entry in root.pages)
        assert root.chunks == len(manifest.chunks)
        assert len(stored.pages) == len(root.pages) + sum(entry.pages for entry in root.pages)
    assert {page.key for one in links for page in run.manifest(one.step, 1).pages} == pages_in(run)
    assert check(run, level="full").findings == ()


def test_an_older_reader_refuses_it_by_its_version(run: Run, links: list[Manifest]) -> None:
    key = MANIFEST_KEY.of(10, 1)
    with pytest.raises(UnsupportedVersion, match=f"{key}.*found version 2"):
        unpack_record(Manifest, run.store.get(key, max_bytes=1 << 20), name=key, next_step="")


def test_pages_are_stored_before_the_root(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pages(monkeypatch)
    checkpoint = build(run, tables(rows=200), step=10, generation=1)
    upload(run.store, checkpoint)
    there: list[set[str]] = []

    def before(call: str, key: str) -> None:
        if call == "create" and key == MANIFEST_KEY.of(10, 1):
            there.append(pages_in(run))
            raise unavailable(key)

    with pytest.raises(StoreUnavailable):
        commit(Run.open(InterposedStore(run.store, before=before)), checkpoint.manifest)
    packed = paging.pack_manifest(checkpoint.manifest)
    assert there[0] == {page.key for page, _ in packed.pages} and len(there[0]) > 2
    assert run.manifest_names() == []  # without a root there is no checkpoint
    assert commit(run, checkpoint.manifest) == "created"
    assert pages_in(run) == there[0]  # the next try wrote the same
    assert set(run.manifest(10, 1).chunks) == set(checkpoint.manifest.chunks)


def test_a_sweep_leaves_pages_that_a_root_names_and_takes_others(
    run: Run, links: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pages_in(run)
    assert execute(run, plan_sweep(run, grace_seconds=0)).removed == ()
    # A writer that divides the same chunks otherwise, and is killed before its root.
    small_pages(monkeypatch, chunks=5)
    orphans = paging.pack_manifest(links[0])
    manifest_pages.write_pages(run.store, orphans)
    more = pages_in(run) - before
    assert more == {page.key for page, _ in orphans.pages} - before and more
    removed = execute(run, plan_sweep(run, grace_seconds=0)).removed
    assert {swept.key for swept in removed} == more and pages_in(run) == before
    run.store.delete(MANIFEST_KEY.of(13, 1))
    execute(run, plan_sweep(run, grace_seconds=0))
    last = {page.key for page in links[-1].pages} or {
        key for key in before if key.startswith(f"chunks/{13:012d}-")
    }
    assert pages_in(run) == before - last


def test_a_consolidation_writes_swept_pages_again(run: Run, links: list[Manifest]) -> None:
    before, _ = restored(run, links[-1])

    def meanwhile(call: str, key: str) -> None:
        if call == "create" and key.startswith(CONSOLIDATED_KEY.prefix):
            removed = execute(run, plan_sweep(run, grace_seconds=0)).removed
            assert any(PAGE_KEY.parse(swept.key) for swept in removed)

    stood_still = Run.open(InterposedStore(run.store, before=meanwhile))
    assert merge(stood_still, links[-1]).outcome == "created"
    after, report = restored(run, links[-1])
    require_same(before, after)
    assert report.passed_over == () and report.chain_length == 1
    whole = run.read_manifest(Representation(name_of(links[-1]), "full"))
    assert whole.pages and whole.attempt == links[-1].attempt
    assert check(run, level="full").findings == ()


@pytest.mark.parametrize("of", ["pages", "chunks"])
@pytest.mark.parametrize("damage", ["missing", "flipped", "truncated", "longer"])
def test_a_damaged_page_is_named_and_an_older_checkpoint_restored(
    run: Run, links: list[Manifest], of: str, damage: str
) -> None:
    entry = root_of(run, links[-1]).pages[0]
    key = root_of(run, links[-1]).page_key(entry)
    page = Page.model_validate_json(_body(run, key), strict=False)
    if of == "chunks":
        entry = page.pages[-1]
        key = root_of(run, links[-1]).page_key(entry)
    data = run.store.get(key, max_bytes=1 << 20)
    if damage == "missing":
        run.store.delete(key)
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        run.store.put(
            key, {"flipped": flipped, "truncated": data[:-9], "longer": data + b" "}[damage]
        )
    expected = DigestMismatch if damage in ("flipped", "truncated") else MalformedObject
    with pytest.raises(expected, match=key):
        run.manifest(13, 1)
    assert any(key in finding.key + finding.text for finding in check(run).findings)
    assert plan_sweep(run, grace_seconds=0).blocked  # it is unknown what it names
    older, _ = restored(run, links[-2])
    assert older.manifest is not None and older.manifest.step == 12


def _body(run: Run, key: str) -> bytes:
    data = run.store.get(key, max_bytes=1 << 20)
    return data[len(b'{"body":') : data.rindex(b',"crc32c"')]


def test_a_deleted_manifest_is_not_found_though_its_pages_are_gone_too(
    run: Run, links: list[Manifest]
) -> None:
    def meanwhile(call: str, key: str) -> None:
        if call == "get" and PAGE_KEY.parse(key):  # retention and a sweep, after the root was read
            run.store.delete(MANIFEST_KEY.of(13, 1))
            for page in pages_in(run):
                run.store.delete(page)

    reader = Run.open(InterposedStore(run.store, before=meanwhile))
    with pytest.raises(ObjectNotFound, match=MANIFEST_KEY.of(13, 1)):
        reader.read_manifest(Representation(name_of(links[-1])))


def test_a_page_of_another_checkpoint_or_run_is_refused(
    run: Run, links: list[Manifest], tmp_path: Path
) -> None:
    root = root_of(run, links[0])
    other = root_of(run, links[1])
    moved = other.model_copy(update={"pages": root.pages})
    with pytest.raises(ObjectNotFound, match=moved.page_key(root.pages[0])):
        manifest_pages.read_pages(run.store, moved)
    # Put where the other root looks for it.
    data = run.store.get(root.page_key(root.pages[0]), max_bytes=1 << 20)
    run.store.put(moved.page_key(root.pages[0]), data)
    with pytest.raises(ForeignObject, match=root.page_key(root.pages[0])):
        manifest_pages.read_pages(run.store, moved)
    foreign = root.model_copy(update={"run": "0d" * 16})
    with pytest.raises(ForeignObject):
        manifest_pages.read_pages(run.store, foreign)


@pytest.mark.parametrize(
    "lie",
    [
        {"chunks": 1},
        {"chunk_bytes": 1},
        {"others": 0},
        {"residuals": True},
        {"first_part": 1, "last_part": 1},
        {"rows": ()},
        {"pages": 0},
    ],
    ids=lambda lie: next(iter(lie)),
)
def test_an_entry_that_says_something_else_than_its_page(
    run: Run, links: list[Manifest], lie: dict[str, object]
) -> None:
    root = root_of(run, links[0])
    forged = root.pages[0].model_copy(update=lie)
    with pytest.raises(MalformedObject, match="than its entry says"):
        manifest_pages.read_pages(run.store, root.model_copy(update={"pages": (forged,)}))


def test_pages_that_make_up_no_full(run: Run, links: list[Manifest]) -> None:
    root = root_of(run, links[0])
    key = MANIFEST_KEY.of(10, 1)
    lacking = root.model_copy(update={"pages": root.pages[:1]})
    run.store.put(key, pack_record(lacking))
    with pytest.raises(MalformedObject, match=f"{key}.*are stored"):
        run.manifest(10, 1)
    twice = root.model_copy(update={"pages": (*root.pages, root.pages[0])})
    run.store.put(key, pack_record(twice))
    with pytest.raises(MalformedObject, match=f"{key}.*named twice"):
        run.manifest(10, 1)


def test_more_chunks_than_memory_has_room_for_are_refused_before_pages_are_read(
    run: Run, links: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_pages, "MAX_CHUNKS", len(links[0].chunks) - 1)
    store = InterposedStore(run.store)
    with pytest.raises(UnsupportedVersion, match="in memory"):
        Run.open(store).manifest(10, 1)
    assert not any(PAGE_KEY.parse(key) for _, key in store.calls)
