"""A validation finds what differs from what the trainer recorded, names it, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recpoint.catalog.check.check import check
from recpoint.catalog.check.rows import read_samples
from recpoint.catalog.check.validate import record, validate
from recpoint.catalog.persist import persist
from recpoint.catalog.restore.chunks import StoreChunks, read_chunk, read_rows
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run.metrics import read_metrics, record_metric
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import records_of, verdicts
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import ObjectNotFound, SettingsError, StoreUnavailable
from recpoint.format.chunk import Section
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY, METRIC_KEY, VALIDATION_KEY, ManifestName
from recpoint.format.record_kinds import VALIDATION
from recpoint.testing.faults import Fault, FaultStore
from tests.catalog_builder import copy_run, new_run
from tests.interposed_store import InterposedStore
from tests.job_builder import Links, stage
from tests.validated_run import (
    LEVELS,
    STEPS,
    Level,
    at,
    chunk_of,
    rewrite,
    subjects,
    tables_of,
    validated_run,
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Manifest]]:
    return validated_run(tmp_path_factory.mktemp("built"))


@pytest.fixture
def manifests(built: tuple[Run, list[Manifest]]) -> list[Manifest]:
    return built[1]


@pytest.fixture
def run(built: tuple[Run, list[Manifest]], tmp_path: Path) -> Run:
    return copy_run(built[0], tmp_path / "run")


SAID = ("validations/", "metrics/")


def change_unsampled_code(run: Run, manifest: Manifest) -> None:
    """Change a row so that neither a sample nor a digest of the trainer shows it."""
    entry = chunk_of(manifest, "rows", 0)
    with ReadScheduler(1) as reads:
        sampled = read_samples(StoreChunks(run.store), manifest, reads)[0].ids
    rows = read_rows(StoreChunks(run.store), manifest, entry).rows
    assert isinstance(rows, torch.Tensor)
    row = int((~torch.isin(rows, sampled)).nonzero()[0])

    def change(sections: dict[str, Section]) -> None:
        data = sections["codes"].data
        assert isinstance(data, bytearray)
        data[row * sections["codes"].shape[1]] ^= 1

    rewrite(run, entry, change)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("step", STEPS)
def test_good_checkpoints_pass(run: Run, step: int, level: Level) -> None:
    found = at(run, step, level)
    assert found.result == "passed" and found.findings == () and found.notes == ()
    assert found.checkpoint == run.manifest(step, 1).ref
    if level == "metadata":
        assert (found.chunks_read, found.rows_compared) == (0, 0)
    else:
        assert found.rows_compared > 0 and 0.2 < found.worst <= 1
    assert bool(found.digests) == (level == "full")


def test_a_full_validation_compares_every_sampled_row(run: Run) -> None:
    # Those of older ones too, but for the rows that newer ones have replaced.
    assert 3 * 40 < at(run, 30, "full").rows_compared < 3 * 3 * 40
    assert at(run, 10, "full").rows_compared == 3 * 40
    assert 0 < at(run, 30, "sample").rows_compared < 3 * 40
    assert at(run, 30, "sample").links_read == 1 and at(run, 30, "full").links_read == 3


def test_progress_ends_at_all_bytes(run: Run) -> None:
    seen: list[tuple[int, int]] = []
    found = validate(
        run,
        ManifestName(30, 1),
        level="full",
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (found.bytes_read, found.bytes_read)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("content", "results"),
    [
        ("rows", ("failed", "failed")),
        ("state", ("stateless", "passed")),
        ("sample", ("passed", "passed")),
    ],
)
def test_a_lost_chunk_is_found_without_reading_one(
    run: Run, manifests: list[Manifest], content: str, results: tuple[str, str]
) -> None:
    run.store.delete(chunk_of(manifests[1], content).key)
    found = [at(run, step, "metadata") for step in (20, 30)]
    assert tuple(validation.result for validation in found) == results
    assert (len(found[0].findings), len(found[0].notes)) == (
        (0, 1) if content == "sample" else (1, 0)
    )
    assert at(run, 10, "full").result == "passed"


@pytest.mark.parametrize("content", ["rows", "state", "sample"])
def test_a_flipped_bit_is_found_by_reading(
    run: Run, manifests: list[Manifest], content: str
) -> None:
    entry = chunk_of(manifests[1], content)
    data = bytearray(run.store.get(entry.key, max_bytes=1 << 20))
    data[-1] ^= 4
    run.store.put(entry.key, bytes(data))
    assert at(run, 20, "metadata").result == "passed"
    expected = {"rows": "failed", "state": "stateless", "sample": "passed"}[content]
    for level in ("sample", "full"):
        found = at(run, 20, level)
        assert found.result == expected
        (finding,) = found.findings + found.notes
        assert finding.subject.endswith(entry.key) and "crc32c" in finding.found
    assert at(run, 30, "sample").result == "passed", "it is not among its own chunks"
    assert at(run, 30, "full").result == ("failed" if content == "rows" else "passed")


@pytest.mark.parametrize("level", ["sample", "full"])
def test_rows_are_looked_at_though_the_state_is_missing(
    run: Run, manifests: list[Manifest], level: Level
) -> None:
    rows_compared = at(run, 20, level).rows_compared
    run.store.delete(chunk_of(manifests[1], "state").key)
    found = at(run, 20, level)
    assert (found.result, found.level, len(found.findings)) == ("stateless", level, 1)
    assert found.rows_compared == rows_compared > 0

    def change(sections: dict[str, Section]) -> None:
        data = sections["values"].data
        assert isinstance(data, bytearray)
        data[:] = bytes(len(data))

    rewrite(run, chunk_of(manifests[1], "rows", 1), change)
    found = at(run, 20, level)
    assert (found.result, found.level) == ("failed", level)
    assert "plain" in subjects(found)


@pytest.mark.parametrize("what", ["chunk", "manifest"])
@pytest.mark.parametrize("level", LEVELS)
def test_no_level_is_recorded_of_which_no_row_was_read(
    run: Run, manifests: list[Manifest], level: Level, what: str
) -> None:
    record(run, at(run, 20, "full"))
    base = chunk_of(manifests[0], "rows").key if what == "chunk" else MANIFEST_KEY.of(10, 1)
    data = run.store.get(base, max_bytes=1 << 20)
    run.store.delete(base)
    found = at(run, 20, level)
    assert (found.result, found.level, found.chunks_read) == ("failed", "metadata", 0)
    record(run, found)
    assert str(verdicts(run)[ManifestName(20, 1)]) == "failed (metadata)"
    run.store.put(base, data)
    record(run, at(run, 20, "metadata"))
    assert str(verdicts(run)[ManifestName(20, 1)]) == "metadata"


def test_wrong_rows_stay_found_when_the_state_goes_missing(
    run: Run, manifests: list[Manifest]
) -> None:
    """Rows with sound digests that are wrong; then another validation, of what lacks its state."""

    def change(sections: dict[str, Section]) -> None:
        data = sections["values"].data
        assert isinstance(data, bytearray)
        data[0] ^= 64

    rewrite(run, chunk_of(manifests[1], "rows", 1), change)
    record(run, at(run, 20, "full"))
    assert restore(run, MemoryTarget()).restored.step == 10
    run.store.delete(chunk_of(run.manifest(20, 1), "state").key)
    record(run, at(run, 20, "full"))
    assert restore(run, MemoryTarget()).restored.step == 10


def test_other_rows_than_earlier_are_found_though_the_state_is_missing(
    run: Run, manifests: list[Manifest]
) -> None:
    record(run, at(run, 30, "full"))
    change_unsampled_code(run, manifests[2])
    run.store.delete(chunk_of(run.manifest(30, 1), "state").key)
    assert at(run, 30, "sample").result == "stateless"
    assert at(run, 30, "full").result == "failed"


def test_a_truncated_chunk(run: Run, manifests: list[Manifest]) -> None:
    entry = chunk_of(manifests[0], "rows")
    run.store.put(entry.key, run.store.get(entry.key, max_bytes=1 << 20)[:-1])
    for step in STEPS:
        assert at(run, step, "metadata").result == "failed"


def test_a_missing_or_damaged_link(run: Run) -> None:
    run.store.delete(MANIFEST_KEY.of(10, 1))
    found = at(run, 30, "metadata")
    assert found.result == "failed" and found.checkpoint == run.manifest(30, 1).ref
    with pytest.raises(ObjectNotFound):
        at(run, 10, "metadata")
    data = run.store.get(MANIFEST_KEY.of(30, 1), max_bytes=1 << 20)
    run.store.put(MANIFEST_KEY.of(30, 1), data.replace(b'"stall_us"', b'"stall_uz"'))
    assert at(run, 30, "full").result == "failed"


# --- wrong contents with right digests -----------------------------------------------------------


def test_one_wrong_code_in_a_sampled_row(run: Run, manifests: list[Manifest]) -> None:
    entry = chunk_of(manifests[0], "rows", 0)
    missed = []

    def raise_all(sections: dict[str, Section]) -> None:
        codes = sections["codes"].data
        assert isinstance(codes, bytearray)
        width = sections["codes"].shape[1]
        for row in range(sections["codes"].shape[0]):
            low = codes[row * width] & 15
            codes[row * width] = codes[row * width] & 240 | (low + 1 if low < 15 else 14)
            missed.append(row)

    rewrite(run, entry, raise_all)
    for level in ("sample", "full"):
        found = at(run, 10, level)
        assert found.result == "failed"
        rows = [finding.row for finding in found.findings if finding.subject == "items"]
        # Every sampled row of the chunk, but for those whose two codes are equally good.
        assert len(rows) >= 36 and all(row is not None for row in rows)
        first = found.findings[0]
        assert first.what == "values[0]" and float(first.bound) > 0
        assert abs(float(first.found) - float(first.expected)) > float(first.bound)


def test_rows_that_changed_places(run: Run, manifests: list[Manifest]) -> None:
    entry = chunk_of(manifests[1], "rows", 1)

    def exchange(sections: dict[str, Section]) -> None:
        for name in ("values", "state.0"):
            data = sections[name].data
            assert isinstance(data, bytearray)
            each = len(data) // sections[name].shape[0]
            data[:each], data[each : 2 * each] = data[each : 2 * each], data[:each]

    rewrite(run, entry, exchange)
    found = at(run, 20, "sample")
    assert found.result == "failed" and subjects(found) == {"plain"}
    texts = {finding.what for finding in found.findings}
    assert {"digest of the values of step 20", "digest of the row state state0 of step 20"} <= texts
    # The digests of step 20 show it, also where no sampled row does.
    assert at(run, 30, "full").result == "failed"


def test_a_rounded_row_state_that_is_off_by_one(run: Run, manifests: list[Manifest]) -> None:
    entry = chunk_of(manifests[0], "rows", 0)

    def change(sections: dict[str, Section]) -> None:
        assert sections["state.0"].dtype == "BF16"
        data = sections["state.0"].data
        assert isinstance(data, bytearray)
        for at_byte in range(0, len(data), 2):
            data[at_byte] ^= 1

    rewrite(run, entry, change)
    found = at(run, 10, "sample")
    assert found.result == "failed"
    assert {finding.what.partition("[")[0] for finding in found.findings} == {"row state state0"}


def test_an_increment_with_the_rows_of_another_step(run: Run, manifests: list[Manifest]) -> None:
    """Right bytes in the wrong place: the rows of a link, stored with the codes of the full."""
    older, newer = (chunk_of(manifest, "rows", 2) for manifest in manifests[:2])
    _, sections = read_chunk(StoreChunks(run.store), manifests[0], older)
    stale = {name: bytes(section.data_view) for name, section in sections.items()}

    def change(into: dict[str, Section]) -> None:
        for name in ("codes", "scale", "offset"):
            data = into[name].data
            assert isinstance(data, bytearray)
            data[:] = stale[name][: len(data)]

    rewrite(run, newer, change)
    assert at(run, 20, "metadata").result == "passed"
    found = at(run, 20, "sample")
    assert found.result == "failed" and subjects(found) == {"half"}
    assert at(run, 30, "full").result == "failed"


def test_a_row_that_nobody_marked(tmp_path: Path) -> None:
    """The sample is of the whole table: it shows a change that is in no checkpoint."""
    run = new_run(tmp_path / "run")
    run.claim(None)
    tables, links = tables_of(1), Links()
    job = stage(run, tmp_path / "s", tables, step=1, generation=1, links=links, samples=300)
    persist.persist_job(job)
    tables[0].values[17, 2] += 1e-3  # below a step of its codes: still within the bound
    tables[1].values[33, 1] += 1e-3
    dirty = [torch.tensor([4, 5])] * 3
    job = stage(
        run, tmp_path / "s", tables, step=2, generation=1, links=links, dirty=dirty, samples=300
    )
    persist.persist_job(job)
    assert at(run, 2, "sample").result == "passed"
    found = at(run, 2, "full")
    assert [(finding.subject, finding.row) for finding in found.findings] == [("plain", 33)]


# --- what is kept of it --------------------------------------------------------------------------


def test_a_record_says_what_was_found(run: Run, manifests: list[Manifest]) -> None:
    assert verdicts(run) == {}
    first = record(run, at(run, 30, "full"))
    assert (first.number, first.level, first.result) == (1, "full", "passed")
    kept = run.records(VALIDATION).read(*first)
    assert kept.checkpoint == manifests[2].ref and kept.findings == ()
    assert kept.rows_compared == at(run, 30, "full").rows_compared
    assert 200_000 < kept.worst_ppm <= 1_000_000
    assert [len(digests.row_states) for digests in kept.digests] == [2, 1, 0]
    run.store.delete(chunk_of(manifests[2], "rows").key)
    second = record(run, at(run, 30, "metadata"))
    assert (second.number, second.result) == (2, "failed")
    assert run.records(VALIDATION).read(*second).findings[0].subject.endswith(".safetensors")
    assert str(verdicts(run)[ManifestName(30, 1)]) == "failed (metadata)"
    assert records_of(run, ManifestName(30, 1)) == [first, second]
    assert records_of(run, ManifestName(20, 1)) == []


def test_what_was_restored_once_must_be_restored_again(run: Run, manifests: list[Manifest]) -> None:
    """Neither the sample nor a digest of the trainer may cover a code that changed since."""
    record(run, at(run, 30, "full"))
    change_unsampled_code(run, manifests[2])
    assert at(run, 30, "sample").result == "passed"
    found = at(run, 30, "full")
    assert found.result == "failed" and subjects(found) == {"items"}


def test_a_store_that_fails_says_nothing_about_a_checkpoint(run: Run) -> None:
    def refuse(call: str, key: str) -> None:
        if call == "get" and key.startswith("chunks/"):
            raise StoreUnavailable(key, found="no answer", expected="one", next_step="")

    with pytest.raises(StoreUnavailable):
        validate(Run.open(InterposedStore(run.store, before=refuse)), ManifestName(30, 1))
    assert verdicts(run) == {}


def test_a_bit_that_flips_on_the_way_is_no_damage(run: Run) -> None:
    for number in range(4):
        fault = Fault.flip(key_contains="chunks/", after=number)
        store = FaultStore(run.store, [fault])
        found = validate(Run.open(store), ManifestName(30, 1), level="full")
        assert found.result == "passed" and found.notes == ()


def test_wrong_settings(run: Run) -> None:
    with pytest.raises(SettingsError, match="threads"):
        validate(run, ManifestName(30, 1), threads=0)
    with pytest.raises(ObjectNotFound):
        validate(run, ManifestName(31, 1), level="metadata")


def test_a_sweep_removes_what_was_said_of_checkpoints_that_are_gone(run: Run) -> None:
    kept, gone = (record(run, at(run, step, "metadata")) for step in (10, 30))
    for step in (10, 30):
        record_metric(run, ManifestName(step, 1), "auc", 0.5)
    run.store.delete(MANIFEST_KEY.of(30, 1))
    assert not any(f.key.startswith(SAID) for f in check(run).findings)
    young = plan_sweep(run, grace_seconds=3600)
    assert young.unrecognised == () and not any(o.key.startswith(SAID) for o in young.objects)
    assert young.young == 2
    plan = plan_sweep(run, grace_seconds=0)
    said = [(o.key, o.reason) for o in plan.objects if o.key.startswith(SAID)]
    why = "is of step 30 (generation 1), which has no manifest"
    assert said == [(METRIC_KEY.of(30, 1, "auc"), why), (VALIDATION_KEY.of(*gone), why)]
    execute(run, plan)
    assert verdicts(run).keys() == {ManifestName(10, 1)}
    assert run.records(VALIDATION).read(*kept).level == "metadata"
    there = run.manifest_names()
    assert read_metrics(run, ["auc"], of=there) == {"auc": {ManifestName(10, 1): 0.5}}
    assert not list(run.store.list(METRIC_KEY.of(30, 1, "auc")))


def test_while_a_manifest_cannot_be_read_nothing_that_was_said_goes(run: Run) -> None:
    record_metric(run, ManifestName(30, 1), "auc", 0.5)
    record(run, at(run, 30, "metadata"))
    run.store.delete(MANIFEST_KEY.of(30, 1))
    run.store.put(MANIFEST_KEY.of(20, 1), b"damaged")
    assert not any(o.key.startswith(SAID) for o in plan_sweep(run, grace_seconds=0).objects)


def test_a_lost_sample_is_a_warning_of_a_check(run: Run, manifests: list[Manifest]) -> None:
    entry = chunk_of(manifests[2], "sample")
    run.store.delete(entry.key)
    report = check(run, level="full")
    assert report.ok and all(health.restorable for health in report.checkpoints)
    assert [(f.severity, f.key) for f in report.findings] == [("warning", entry.key)]
    assert restore(run, MemoryTarget()).restored == manifests[2].ref
