"""What a lost manifest has named is kept until it is put back; what retention let go of is not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recpoint.catalog.check.check import CheckReport, check
from recpoint.catalog.check.validate import record, validate
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.persist import persist
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.retention.sweep import SweepPlan, SweepResult, execute, plan_sweep
from recpoint.catalog.run import metrics, pins, publications
from recpoint.catalog.run.line_to_go_on import line_to_go_on
from recpoint.catalog.run.rejections import leave_rejection
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import verdicts
from recpoint.catalog.staging import cancels
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.job_files import read_job
from recpoint.errors import NothingToRestore
from recpoint.format.manifest import Manifest
from recpoint.format.naming import (
    CHUNKS_PREFIX,
    CONSOLIDATED_KEY,
    GENERATION_KEY,
    MANIFEST_KEY,
    PART_KEY,
    ManifestName,
    attempt_prefix,
)
from recpoint.format.records import pack_record
from recpoint.format.rejections import MAX_REJECTIONS, Rejection
from tests.catalog_builder import Checkpoint, build, copy_run, new_run, publish, tables, upload
from tests.interposed_store import InterposedStore
from tests.job_builder import stage
from tests.persisted import store_groups
from tests.retained_run import LAST, add, consolidated, keys, retain

STEPS = (10, 11, 12, 13)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Full 10, increments 11, 12 and 13, one after another."""
    run = new_run(tmp_path_factory.mktemp("built") / "run")
    run.claim(None)
    parent: Manifest | None = None
    for step in STEPS:
        parent = add(run, step, parent)
    return run


@pytest.fixture
def run(built: Run, tmp_path: Path) -> Run:
    return copy_run(built, tmp_path / "run")


def lose(run: Run, *lost: str) -> dict[str, bytes]:
    """Remove manifests, as no part of recpoint does; what they were."""
    found = {key: run.store.get(key, max_bytes=1 << 20) for key in lost}
    for key in lost:
        run.store.delete(key)
    return found


def put_back(run: Run, lost: dict[str, bytes]) -> None:
    for key, data in lost.items():
        run.store.put(key, data)


def chunks(run: Run, step: int) -> set[str]:
    """Chunks of the checkpoint's own manifest."""
    return {entry.key for entry in run.manifest(step, 1).chunks}


def swept(run: Run) -> tuple[SweepPlan, SweepResult]:
    plan = plan_sweep(run, grace_seconds=0)
    return plan, execute(run, plan)


def texts(report: CheckReport, severity: str) -> list[str]:
    found = (one for one in report.findings if one.severity == severity)
    return [one.text for one in found if one.key.startswith(("chunks/", "parts/"))]


def test_what_a_lost_manifest_has_named_stays_until_it_is_back(run: Run) -> None:
    record(run, validate(run, ManifestName(10, 1), level="full"))
    metrics.record_metric(run, ManifestName(10, 1), "auc", 0.5)
    before = keys(run)
    attempt = run.manifest(10, 1).attempt
    lost = lose(run, MANIFEST_KEY.of(10, 1))
    plan, result = swept(run)
    why = "step 10 (generation 1) is needed by step 11 (generation 1), and its manifest is gone"
    (kept,) = plan.kept
    assert kept == (attempt_prefix(10, 1, attempt), why)
    assert plan.lost == (why,) and result.removed == ()
    assert keys(run) == before - lost.keys()
    put_back(run, lost)
    assert check(run, level="full").ok
    assert str(verdicts(run)[ManifestName(10, 1)]) == "full"
    plan, result = swept(run)
    assert (plan.kept, plan.lost, result.removed) == ((), (), ())


def test_a_check_says_what_such_chunks_are_for(run: Run) -> None:
    orphan = build(run, tables(), step=20, generation=1)
    upload(run.store, orphan)
    lose(run, MANIFEST_KEY.of(11, 1))
    report = check(run)
    assert not report.ok
    (text,) = texts(report, "warning")
    assert "step 11 (generation 1) is needed by step 12 (generation 1)" in text
    assert "put the manifest back" in text and "recpoint sweep removes" not in text
    (text,) = texts(report, "info")
    assert f"{len(orphan.chunks)} chunks that no manifest names; recpoint sweep removes" in text


def test_a_check_says_so_of_parts_too(run: Run) -> None:
    attempt = run.manifest(11, 1).attempt
    run.store.put(PART_KEY.of(11, 1, attempt, rank=0), b"a part")
    assert "recpoint sweep removes it" in texts(check(run), "info")[0]
    lose(run, MANIFEST_KEY.of(11, 1))
    plan, result = swept(run)
    assert len(plan.kept) == 1 and result.removed == ()
    (text,) = texts(check(run), "warning")
    assert text.startswith("the part of rank 0 and ") and "put the manifest back" in text


def test_several_in_a_row(run: Run) -> None:
    """The manifest of the last of them alone had said what it stands on."""
    lost = lose(run, *(MANIFEST_KEY.of(step, 1) for step in (10, 11, 12)))
    plan, result = swept(run)
    assert result.removed == () and len(plan.kept) == len(plan.lost) == 3
    assert plan.lost[1] == (
        "step 11 (generation 1) may be of the chain of step 13 (generation 1), of which manifests "
        "are gone"
    )
    put_back(run, lost)
    assert check(run, level="full").ok


def test_beside_the_gap_orphans_go(run: Run) -> None:
    orphans = [build(run, tables(), step=step, generation=1) for step in (5, 12, 20)]
    for orphan in orphans:
        upload(run.store, orphan)
    lose(run, MANIFEST_KEY.of(11, 1))
    _, result = swept(run)
    gone = {key for orphan in orphans for key in orphan.chunks}
    assert {one.key for one in result.removed} == gone


def test_of_a_parent_that_was_replaced_by_another_attempt(run: Run) -> None:
    wanted = chunks(run, 11)
    (lost,) = lose(run, MANIFEST_KEY.of(11, 1)).values()
    parent = run.manifest(10, 1)
    dirty = [torch.tensor([1]), torch.tensor([0])]
    other = build(run, tables(), step=11, generation=1, parent=parent, dirty=dirty)
    upload(run.store, other)
    run.store.put(MANIFEST_KEY.of(11, 1), pack_record(other.manifest))
    assert swept(run)[1].removed == () and wanted <= keys(run)
    run.store.put(MANIFEST_KEY.of(11, 1), lost)
    assert check(run, level="full").ok
    assert {one.key for one in swept(run)[1].removed} == set(other.chunks)


def test_what_retention_let_go_of_is_swept(run: Run) -> None:
    """Killed after it had deleted the links that a consolidation stands for, and some of them."""
    consolidated(run, 13)
    merged = run.read_manifest(run.representations()[ManifestName(13, 1)][0])
    wanted = {entry.key for entry in merged.chunks}
    old = set.union(*(chunks(run, step) for step in (10, 11, 12)))
    lose(run, *(MANIFEST_KEY.of(step, 1) for step in (12, 11, 10)))
    assert swept(run)[0].kept == () and not old & keys(run)
    assert check(run, level="full").ok and wanted <= keys(run)


@pytest.mark.parametrize("deleted", [(13,), (13, 12), (13, 12, 11), (13, 12, 11, 10)])
def test_a_chain_of_which_retention_has_deleted_the_newest(
    run: Run, deleted: tuple[int, ...]
) -> None:
    add(run, 20, None)  # the newest of the run, which retention leaves
    gone = set.union(*(chunks(run, step) for step in deleted))
    lose(run, *(MANIFEST_KEY.of(step, 1) for step in deleted))
    plan, result = swept(run)
    assert plan.kept == () and {one.key for one in result.removed} == gone


def test_once_nothing_needs_it_any_more_it_goes(run: Run) -> None:
    old = chunks(run, 10)
    lose(run, MANIFEST_KEY.of(10, 1))
    assert swept(run)[1].removed == ()
    for step in (14, 15):  # a new chain, for which retention lets the damaged one go
        add(run, step, None)
    retain(run)
    retain(run)
    assert check(run).findings == () and not old & keys(run)


def test_a_consolidated_one_that_all_others_were_dropped_for(run: Run) -> None:
    consolidated(run, 12)
    retain(run, LAST)
    retain(run, LAST)
    assert set(run.representations()) == {ManifestName(12, 1), ManifestName(13, 1)}
    before = keys(run)
    lost = lose(run, CONSOLIDATED_KEY.of(12, 1, None))
    plan, result = swept(run)
    assert result.removed == ()
    assert plan.lost == (
        "step 12 (generation 1) is needed by step 13 (generation 1), and its manifest is gone",
    )
    put_back(run, lost)
    assert keys(run) == before and check(run, level="full").ok


def test_one_that_is_pinned(run: Run) -> None:
    pins.pin(run, ManifestName(13, 1), label="best")
    lost = lose(run, MANIFEST_KEY.of(13, 1))
    plan, result = swept(run)
    why = "step 13 (generation 1) is pinned (best), and its manifest is gone"
    assert plan.lost == (why,) and result.removed == ()
    (text,) = texts(check(run), "warning")
    assert why in text
    put_back(run, lost)
    assert check(run, level="full").ok
    lose(run, MANIFEST_KEY.of(13, 1))
    pins.unpin(run, ManifestName(13, 1), label="best")
    assert len(swept(run)[1].removed) > 0


SIGNS: dict[str, Callable[[Run], object]] = {
    "validated": lambda run: record(run, validate(run, ManifestName(13, 1), level="metadata")),
    "measured": lambda run: metrics.record_metric(run, ManifestName(13, 1), "auc", 0.5),
    "published": lambda run: publications.publish(run, ManifestName(13, 1)),
    "consolidated": lambda run: consolidated(run, 12),
    "marked": lambda run: (add(run, 14, None), add(run, 15, None), retain(run)),
    "restored": lambda run: run.claim(run.manifest(13, 1).ref),
    "damaged": lambda run: (run.claim(None), run.store.put(GENERATION_KEY.of(2), b"damaged")),
}


@pytest.mark.parametrize("sign", SIGNS)
def test_all_manifests_gone_of_a_run_that_had_some(run: Run, sign: str) -> None:
    """A mount of its own that is missing, or a copy that has not come to them yet."""
    SIGNS[sign](run)
    run = Run.open(run.store)  # which knows no record yet
    before = keys(run)
    lost = lose(run, *(key for key in before if key.startswith("manifests/")))
    plan, result = swept(run)
    assert result.removed == () and len(plan.kept) >= 4
    (why,) = plan.lost
    assert why.endswith(", and nothing is under manifests/ any more")
    assert all(kept.reason == why for kept in plan.kept)
    assert keys(run) == before - lost.keys()
    found = texts(check(run), "warning")
    assert len(found) == len(plan.kept) and all(why in text for text in found)
    if sign == "damaged":
        run.store.delete(GENERATION_KEY.of(2))
    put_back(run, lost)
    assert check(run, level="full").ok


def test_all_manifests_gone_of_a_run_of_which_nothing_else_tells(run: Run) -> None:
    """One trainer that was killed: its chunks alone say that an agent went on from them."""
    before = keys(run)
    lost = lose(run, *(MANIFEST_KEY.of(step, 1) for step in STEPS))
    plan, result = swept(run)
    assert result.removed == () and len(plan.kept) == len(STEPS)
    (why,) = plan.lost
    assert why == (
        "chunks of 4 checkpoints of the newest generation are there, of steps 10 … 13, and nothing "
        "is under manifests/ any more"
    )
    assert before - keys(run) == lost.keys()
    with pytest.raises(NothingToRestore, match="no checkpoint, but chunks of 4 checkpoints"):
        line_to_go_on(run)
    with pytest.raises(NothingToRestore, match="no checkpoint, but chunks of 4 checkpoints"):
        restore(run, MemoryTarget())
    put_back(run, lost)
    assert check(run, level="full").ok


def rejected(run: Run, checkpoint: Checkpoint) -> None:
    why = Rejection(checkpoint=checkpoint.ref, error_type="E", error="", rejected_ms=1)
    leave_rejection(run, 0, why)


def part_there(run: Run, checkpoint: Checkpoint) -> None:
    ref = checkpoint.ref
    run.store.put(PART_KEY.of(ref.step, ref.generation, ref.attempt, rank=0), b"a part")


def replaced(run: Run, checkpoint: Checkpoint) -> None:
    run.claim(None)


def many_rejected(run: Run, checkpoint: Checkpoint) -> None:
    """More than their record has room for."""
    rejected(run, checkpoint)
    for step in range(11, 11 + MAX_REJECTIONS):
        rejected(run, build(run, tables(), step=step, generation=1))


@pytest.mark.parametrize("answer", [rejected, part_there, replaced, many_rejected])
def test_what_was_stored_and_not_committed_is_no_sign_of_a_manifest(
    answer: Callable[[Run, Checkpoint], None], tmp_path: Path
) -> None:
    run = new_run(tmp_path / "new")
    run.claim(None)
    for step in (10, 20):
        checkpoint = build(run, tables(), step=step, generation=1)
        upload(run.store, checkpoint)
        if step == 10:
            answer(run, checkpoint)
    assert line_to_go_on(run) == []
    plan, result = swept(run)
    assert plan.lost == () and len(result.removed) > 0


def test_what_a_trainer_wished_dropped_is_no_sign_of_a_manifest(tmp_path: Path) -> None:
    """All its chunks were there: a newer one was to take its place, and was cut short."""
    run = new_run(tmp_path / "new")
    run.claim(None)
    job_file = stage(run, tmp_path / "s", tables(), step=10, generation=1)
    store_groups(persist.PersistJob.open(job_file))
    cancels.write_mark(StagedRun.of_job(job_file), read_job(job_file).ref, 0)
    assert persist.persist_job(job_file).error_type == "CheckpointCancelled"
    upload(run.store, build(run, tables(), step=20, generation=1))
    assert len(list(run.store.list(CHUNKS_PREFIX))) > 2
    assert line_to_go_on(run) == []
    assert RunWatch(run).refresh().failures == ()


def test_a_first_checkpoint_that_is_committed_meanwhile(tmp_path: Path) -> None:
    """And chunks of a second one, between two looks of a start."""
    run = new_run(tmp_path / "new")
    run.claim(None)
    struck: list[str] = []

    def commit(call: str, key: str) -> None:
        if call == "list" and key == CHUNKS_PREFIX and not struck:
            struck.append(key)
            publish(run, build(run, tables(), step=10, generation=1))
            upload(run.store, build(run, tables(), step=20, generation=1))

    assert line_to_go_on(Run.open(InterposedStore(run.store, before=commit))) == []
    assert struck


def test_all_manifests_gone_between_plan_and_deed(run: Run) -> None:
    run.claim(run.manifest(13, 1).ref)
    upload(run.store, build(run, tables(), step=20, generation=1))
    plan = plan_sweep(run, grace_seconds=0)
    assert plan.objects != ()
    before = keys(run)
    lost = lose(run, *(MANIFEST_KEY.of(step, 1) for step in STEPS))
    result = execute(run, plan)
    assert result.removed == () and keys(run) == before - lost.keys()
    assert result.spared[0].reason == (
        "generations/00000002.json goes on from step 13 (generation 1), and nothing is under "
        "manifests/ any more"
    )


def test_a_run_whose_first_checkpoint_was_never_committed_is_swept(tmp_path: Path) -> None:
    run = new_run(tmp_path / "new")
    for generation in (1, 2):
        run.claim(None)
        upload(run.store, build(run, tables(), step=10, generation=generation))
    run.store.put("validations/copied.json", b"not ours")
    plan, result = swept(run)
    assert plan.kept == () and len(result.removed) > 0
    assert not any(key.startswith("chunks/") for key in keys(run))


def test_validations_stay_while_it_is_not_known_what_is_needed(run: Run) -> None:
    record(run, validate(run, ManifestName(10, 1), level="metadata"))
    lost = lose(run, MANIFEST_KEY.of(10, 1), MANIFEST_KEY.of(11, 1))
    run.store.put(MANIFEST_KEY.of(11, 1), b"damaged")
    assert swept(run)[1].removed == ()
    put_back(run, lost)
    assert ManifestName(10, 1) in verdicts(run) and check(run, level="full").ok


def test_a_manifest_lost_between_plan_and_deed(run: Run) -> None:
    """What was no orphan is not in the plan; what was one becomes needed by who names it now."""
    late = build(run, tables(), step=20, generation=1)
    upload(run.store, late)
    plan = plan_sweep(run, grace_seconds=0)
    assert {one.key for one in plan.objects} == set(late.chunks)
    dirty = [torch.tensor([1]), torch.tensor([0])]
    child = build(run, tables(), step=21, generation=1, parent=late.manifest, dirty=dirty)
    publish_alone(run, child.manifest, child.chunks)
    result = execute(run, plan)
    assert result.removed == () and "is needed by step 21" in result.spared[0].reason


def publish_alone(run: Run, manifest: Manifest, data: dict[str, bytes]) -> None:
    """A checkpoint whose parent has no manifest, which no commit would let through."""
    for key, chunk in data.items():
        run.store.put(key, chunk)
    run.store.put(MANIFEST_KEY.of(manifest.step, manifest.generation), pack_record(manifest))


def test_of_a_superseded_checkpoint_it_stays_too(run: Run) -> None:
    run.claim(run.manifest(11, 1).ref)
    second = build(run, tables(), step=12, generation=2, parent=run.manifest(11, 1), dirty=None)
    publish(run, second)
    lost = lose(run, MANIFEST_KEY.of(12, 1))
    assert swept(run)[1].removed == ()
    put_back(run, lost)
    assert check(run, level="full").ok


def test_a_young_probe_is_left_for_a_later_sweep(run: Run) -> None:
    probe = Path(run.url) / "probe" / ("b" * 32)
    half = Path(run.url) / "chunks" / f".tmp-{'a' * 32}"
    for path in (probe, half):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    assert plan_sweep(run, grace_seconds=3600).young == 2
    for path in (probe, half):
        os.utime(path, (1, 1))
    assert plan_sweep(run, grace_seconds=3600).young == 0


def test_retention_keeps_what_is_before_a_lost_manifest_in_a_chain_that_is_kept(run: Run) -> None:
    pins.pin(run, ManifestName(13, 1))
    lost = lose(run, MANIFEST_KEY.of(12, 1))
    for step in (14, 15):
        add(run, step, None)
    retain(run)
    assert retain(run).deleted == (MANIFEST_KEY.of(14, 1),)
    put_back(run, lost)
    assert check(run, level="full").ok
    pins.unpin(run, ManifestName(13, 1))
    retain(run)
    retain(run)
    assert set(run.representations()) == {ManifestName(15, 1)}
