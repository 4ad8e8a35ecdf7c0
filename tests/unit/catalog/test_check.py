"""A check finds what a restore would stumble over, and nothing else (format §4, §6.3)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from recpoint.catalog.check.check import CheckReport, Level, check
from recpoint.catalog.check.validate import validate
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.pins import DEFAULT_NAME, pin
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.local import LocalStore
from recpoint.errors import FormatError, NothingToRestore
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.naming import (
    FEW_OF_A_GENERATION,
    GENERATION_KEY,
    MANIFEST_KEY,
    PIN_KEY,
    ManifestName,
    attempt_prefix,
)
from tests.catalog_builder import build, copy_run, new_run, publish, tables, upload
from tests.every_record import every_record
from tests.interposed_store import InterposedStore
from tests.validated_run import validated_run

DIRTY = [torch.tensor([1, 4, 7, 9]), torch.tensor([0, 3])]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Manifest]]:
    """Full 10, increment 11, full 20, increment 21."""
    run = new_run(tmp_path_factory.mktemp("built") / "run")
    run.claim(None)
    made: list[Manifest] = []
    for step in (10, 11, 20, 21):
        parent = None if step in (10, 20) else made[-1]
        checkpoint = build(
            run,
            tables(seed=step),
            step=step,
            generation=1,
            parent=parent,
            dirty=DIRTY if parent else None,
            state={"step": step},
        )
        made.append(publish(run, checkpoint))
    return run, made


@pytest.fixture
def links(built: tuple[Run, list[Manifest]]) -> list[Manifest]:
    """The manifests of the run, which is built once and copied for each test."""
    return built[1]


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """With the fixture `links` a run with four checkpoints, else an empty one."""
    if "links" in request.fixturenames:
        built: tuple[Run, list[Manifest]] = request.getfixturevalue("built")
        return copy_run(built[0], tmp_path / "run")
    run = new_run(tmp_path / "run")
    run.claim(None)
    return run


def first(manifest: Manifest, content: str) -> ChunkEntry:
    return next(entry for entry in manifest.chunks if entry.content == content)


def flip(run: Run, key: str) -> None:
    data = bytearray(run.store.get(key, max_bytes=1 << 20))
    data[-1] ^= 4
    run.store.put(key, bytes(data))


def restorable(report: CheckReport) -> list[int]:
    return [health.name.step for health in report.checkpoints if health.restorable]


def found(report: CheckReport, severity: str) -> list[str]:
    return [finding.key for finding in report.findings if finding.severity == severity]


@pytest.mark.parametrize("level", ["metadata", "full"])
def test_a_good_run_has_no_findings(run: Run, links: list[Manifest], level: str) -> None:
    report = check(run, level="full" if level == "full" else "metadata")
    assert report.ok and report.findings == ()
    assert restorable(report) == [21, 20, 11, 10]
    assert all(health.live for health in report.checkpoints)
    chunks = sum(len(manifest.chunks) for manifest in links)
    assert report.chunks_read == (chunks if level == "full" else 0)
    assert report.bytes_read == (sum(m.stored_bytes for m in links) if level == "full" else 0)


def test_an_empty_run_is_good(tmp_path: Path) -> None:
    report = check(new_run(tmp_path), level="full")
    assert report.ok and report.checkpoints == ()


@pytest.mark.parametrize("content", ["rows", "state"])
def test_a_missing_chunk_is_found_without_reading_one(
    run: Run, links: list[Manifest], content: str
) -> None:
    key = first(links[2], content).key
    run.store.delete(key)
    store = InterposedStore(run.store)
    report = check(Run.open(store))
    assert not report.ok and found(report, "error") == [key]
    assert restorable(report) == ([11, 10] if content == "rows" else [21, 11, 10])
    assert not any(call == "get" and at.startswith("chunks/") for call, at in store.calls)


def test_a_truncated_chunk_is_found_without_reading_one(run: Run, links: list[Manifest]) -> None:
    key = first(links[3], "rows").key
    run.store.put(key, run.store.get(key, max_bytes=1 << 20)[:-1])
    report = check(run)
    assert found(report, "error") == [key] and restorable(report) == [20, 11, 10]


@pytest.mark.parametrize("content", ["rows", "state"])
def test_a_flipped_bit_is_found_by_reading(run: Run, links: list[Manifest], content: str) -> None:
    key = first(links[0], content).key
    flip(run, key)
    assert check(run).ok
    report = check(run, level="full")
    assert found(report, "error") == [key]
    assert restorable(report) == ([21, 20] if content == "rows" else [21, 20, 11])
    assert "crc32c" in report.findings[0].text


@pytest.mark.parametrize("content", ["rows", "state"])
def test_damage_is_reported_once_however_it_shows(
    run: Run, links: list[Manifest], content: str
) -> None:
    key = first(links[0], content).key
    run.store.delete(key)
    assert found(check(run, level="full"), "error") == [key]


def test_a_missing_link_and_a_damaged_manifest(run: Run, links: list[Manifest]) -> None:
    run.store.delete(MANIFEST_KEY.of(10, 1))
    flip_digit = run.store.get(MANIFEST_KEY.of(20, 1), max_bytes=1 << 20)
    run.store.put(MANIFEST_KEY.of(20, 1), flip_digit.replace(b'"stall_us":100', b'"stall_us":101'))
    report = check(run)
    assert found(report, "error") == [
        MANIFEST_KEY.of(11, 1),
        MANIFEST_KEY.of(20, 1),
        MANIFEST_KEY.of(21, 1),
    ]
    assert restorable(report) == []


def test_damage_to_superseded_checkpoints_is_a_warning(run: Run, links: list[Manifest]) -> None:
    run.claim(links[1].ref)
    key = first(links[3], "rows").key
    run.store.delete(key)
    report = check(run)
    assert report.ok
    assert found(report, "warning") == [key]
    assert [health.name.step for health in report.checkpoints if health.live] == [11, 10]
    assert MANIFEST_KEY.of(20, 1) in found(report, "info")


def test_superseded_links_that_a_live_checkpoint_needs_count(run: Run, tmp_path: Path) -> None:
    full = publish(run, build(run, tables(), step=10, generation=1))
    later = publish(run, build(run, tables(), step=11, generation=1, parent=full, dirty=DIRTY))
    run.claim(later.ref)
    key = first(full, "rows").key
    run.store.delete(key)
    assert found(check(run), "error") == [key]


def test_a_damaged_generation_record(run: Run, links: list[Manifest]) -> None:
    run.claim(links[3].ref)
    run.claim(links[3].ref)
    run.store.put(GENERATION_KEY.of(2), b"{}")
    report = check(Run.open(run.store))
    assert report.ok and found(report, "warning") == [GENERATION_KEY.of(2)]
    run.store.put(GENERATION_KEY.of(3), b"{}")
    report = check(Run.open(run.store))
    assert found(report, "error") == [GENERATION_KEY.of(3)]
    assert not any(health.live for health in report.checkpoints)
    assert restorable(report) == [21, 20, 11, 10]


def test_what_is_not_ours_and_what_nobody_names_is_told(run: Run, links: list[Manifest]) -> None:
    run.store.put("notes.txt", b"hello")
    orphan = build(run, tables(), step=30, generation=1)
    upload(run.store, orphan)
    report = check(run)
    assert report.ok
    prefix = attempt_prefix(30, 1, orphan.ref.attempt)
    assert found(report, "info") == [prefix, "notes.txt"]
    assert f"{len(orphan.chunks)} chunks" in report.findings[0].text


def test_only_one_step_and_what_it_needs(run: Run, links: list[Manifest]) -> None:
    run.store.delete(first(links[2], "rows").key)
    report = check(run, step=11, level="full")
    assert report.ok and restorable(report) == [11]
    assert report.chunks_read == len(links[0].chunks) + len(links[1].chunks)
    assert not check(run, step=21).ok
    with pytest.raises(NothingToRestore):
        check(run, step=12)


def test_a_checkpoint_committed_meanwhile_does_not_look_damaged(
    run: Run, links: list[Manifest]
) -> None:
    pending = [build(run, tables(), step=30, generation=1)]

    def commit_one(call: str, key: str) -> None:
        if call == "list" and key == "" and pending:
            publish(run, pending.pop())

    report = check(Run.open(InterposedStore(run.store, before=commit_one)))
    assert report.ok and not pending
    report = check(run)
    assert report.ok and restorable(report) == [30, 21, 20, 11, 10]


GOLDEN = Path(__file__).parents[2] / "golden" / "v1"


def one_record_of_each_kind() -> dict[str, str]:
    """A key of each kind of record, in the golden run (format §2)."""
    found: dict[str, str] = {}
    for path in sorted(GOLDEN.rglob("*.json")):
        key = path.relative_to(GOLDEN).as_posix()
        kind = key.partition("/")[0]
        if kind != "staging" and not kind.startswith("expected-"):
            found.setdefault(kind, key)
    return found


def undetected(store: LocalStore, key: str) -> list[int]:
    """Of eight bits all over an object the bytes where a flipped one is not found."""
    before = check(Run.open(store), level="full").findings
    sound = store.get(key, max_bytes=1 << 20)
    passed = []
    for bit in range(8):
        at = bit * (len(sound) - 1) // 7
        data = bytearray(sound)
        data[at] ^= 1 << bit
        store.put(key, bytes(data))
        try:
            findings = check(Run.open(store), level="full").findings
        except FormatError as error:
            assert error.subject == key  # it is run.json: nothing else can be looked at
            continue
        if key not in {finding.key for finding in set(findings) - set(before)}:
            passed.append(at)
    store.put(key, sound)
    assert check(Run.open(store), level="full").findings == before
    return passed


@pytest.mark.parametrize("kind", one_record_of_each_kind())
def test_one_bit_that_flips_in_a_record_is_found(kind: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "run")
    assert undetected(LocalStore(tmp_path / "run"), one_record_of_each_kind()[kind]) == []


def test_the_golden_run_has_a_record_of_each_kind() -> None:
    alone = {"deletion.json", "retention.json", "run.json"}
    of_prefixes = {prefix.rstrip("/") for prefix in FEW_OF_A_GENERATION}
    of_prefixes |= {"leases", "published", "rejections"}
    assert set(one_record_of_each_kind()) == alone | of_prefixes


def test_one_bit_that_flips_in_a_chunk_is_found(tmp_path: Path) -> None:
    run, manifests = validated_run(tmp_path)
    for content in ("rows", "state", "sample"):
        key = first(manifests[1], content).key
        assert undetected(LocalStore(run.url), key) == [], content
    assert check(run, level="full").chunks_read == sum(len(one.chunks) for one in manifests)


def test_a_record_that_lies_under_the_key_of_another_is_found(
    run: Run, links: list[Manifest]
) -> None:
    pin(run, ManifestName(10, 1), who="somebody", why="a test")
    assert not check(run, level="full").findings
    here, there = (PIN_KEY.of(step, 1, DEFAULT_NAME) for step in (10, 20))
    run.store.put(there, run.store.get(here, max_bytes=1 << 20))
    report = check(run, level="full")
    assert report.ok and found(report, "warning") == [there]
    assert not check(run, level="full", step=20).findings


@pytest.mark.parametrize("level", ["metadata", "full"])
def test_what_lies_behind_a_link_is_no_object_for_check_validation_and_restore(
    run: Run, links: list[Manifest], tmp_path: Path, level: Level
) -> None:
    inside = Path(run.url) / first(links[3], "rows").key
    outside = tmp_path / "elsewhere"
    shutil.move(inside.parent, outside)
    inside.parent.symlink_to(outside)
    report = check(run, level=level)
    assert not report.ok and restorable(report) == [20, 11, 10]
    wrong = [finding for finding in report.findings if finding.severity == "error"]
    assert {finding.key for finding in wrong} == {entry.key for entry in links[3].chunks}
    assert all(f"a symbolic link at {inside.parent}" in finding.text for finding in wrong)
    validation = validate(run, ManifestName(21, 1), level=level)
    assert validation.result == "failed"
    assert any("a symbolic link at" in str(finding) for finding in validation.findings)
    restored = restore(run, MemoryTarget())
    assert restored.restored.step == 20
    assert "a symbolic link at" in str(restored.skipped[0])


def test_a_flipped_bit_in_a_chunk_of_a_part_is_a_warning(tmp_path: Path) -> None:
    run = every_record(tmp_path)
    (key,) = [
        info.key
        for info in run.store.list("chunks/000000000050-")
        if "-t" in info.key.rpartition("/")[2]
    ]
    flip(run, key)
    assert found(check(run), "warning") == []
    report = check(run, level="full")
    assert report.ok and found(report, "warning") == [key]
    run.store.delete(key)  # a sweep may remove it: no damage
    assert found(check(run, level="full"), "warning") == []
