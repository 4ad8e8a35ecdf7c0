"""A generation record that is lost: damage that nothing may take for health (format §5)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from recpoint import Follower
from recpoint.catalog.check.check import check
from recpoint.catalog.consolidate.plan import newest_checkpoint
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.persist.persist import classify, persist_job
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.retention.plan import PrunePlan, plan_prune
from recpoint.catalog.retention.rules import RetentionPolicy
from recpoint.catalog.retention.sweep import plan_sweep
from recpoint.catalog.retention.sweep_here import knows_what_is_staged
from recpoint.catalog.run import publications
from recpoint.catalog.run.commit import commit
from recpoint.catalog.run.relink import relink
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.agent_lock import AgentLock
from recpoint.catalog.staging.area import StagedRun
from recpoint.errors import (
    ForeignObject,
    GenerationRecordLost,
    NothingToRestore,
    RecpointError,
    SettingsError,
)
from recpoint.format.manifest import Manifest
from recpoint.format.naming import GENERATION_KEY, MANIFEST_KEY, MAX_GENERATION, ManifestName
from recpoint.trainer_plugin.policy import breaks_chain, superseded
from tests.catalog_builder import build, new_run, publish, tables, upload
from tests.interposed_store import InterposedStore
from tests.job_builder import stage

LOST = re.escape(GENERATION_KEY.of(2))
ATTEMPT = "ab" * 16


def full(run: Run, step: int, generation: int) -> Manifest:
    return publish(run, build(run, tables(seed=step), step=step, generation=generation))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """1, 2, 5 of generation 1, rolled back to 2; 3 and 4 of generation 2, whose record is lost."""
    run = new_run(tmp_path / "run")
    run.claim(None)
    _, second, _ = (full(run, step, 1) for step in (1, 2, 5))
    run.claim(second.ref)
    full(run, 3, 2)
    full(run, 4, 2)
    run.store.delete(GENERATION_KEY.of(2))
    return Run.open(run.store)


def planned(run: Run, *, keep_last: int = 1) -> PrunePlan:
    policy = RetentionPolicy(keep_last=keep_last, require_validated=False)
    return plan_prune(run, policy, grace_seconds=3600.0)


# --- nobody guesses which checkpoints count ------------------------------------------------------


def test_the_branch_that_was_left_does_not_come_back(run: Run) -> None:
    with pytest.raises(GenerationRecordLost, match=LOST) as caught:
        run.live_line()
    assert "2 checkpoints of generation 2, the newest of step 4" in caught.value.found
    assert "recpoint relink URL 2" in caught.value.next_step
    with pytest.raises(GenerationRecordLost, match=LOST):
        restore(run, MemoryTarget())
    assert restore(run, MemoryTarget(), Selection(step=4, generation=2)).restored.step == 4
    # What was there before that generation is known as ever.
    assert run.live_line(before=2) == [(5, 1), (2, 1), (1, 1)]


@pytest.mark.parametrize(
    "asked",
    [
        lambda run: planned(run),
        lambda run: publications.choose(run, validated_only=False),
        newest_checkpoint,
        lambda run: RunWatch(run).refresh(),
        lambda run: run.claim_from_newest(lambda before: None),
        lambda run: Follower(run.url).poll(),
        lambda run: Follower(run.url, channel="published").poll(),
    ],
)
def test_nobody_goes_on_as_if_it_were_well(run: Run, asked: Callable[[Run], object]) -> None:
    with pytest.raises(GenerationRecordLost, match=LOST):
        asked(run)
    assert run.generation_numbers() == [1], "nothing was claimed"


def test_a_check_fails_and_says_what_to_do(run: Run) -> None:
    report = check(run)
    (error,) = (found for found in report.findings if found.severity == "error")
    assert not report.ok and error.key == GENERATION_KEY.of(2)
    assert "recpoint relink URL 2" in error.text
    assert "superseded" not in {found.text for found in report.findings}


def test_a_run_without_any_record_is_not_one_that_begins(run: Run) -> None:
    run.store.delete(GENERATION_KEY.of(1))
    run = Run.open(run.store)
    with pytest.raises(GenerationRecordLost, match=LOST):
        run.live_line()
    errors = [found.key for found in check(run).findings if found.severity == "error"]
    assert errors == [GENERATION_KEY.of(1), GENERATION_KEY.of(2)]
    assert run.claim(None).generation == 3


def test_a_loss_that_only_an_upload_tells_of_is_found_by_a_check(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    manifest = full(run, 1, run.claim(None).generation)
    run.claim(manifest.ref)
    upload(run.store, build(run, tables(), step=2, generation=2))
    run.store.delete(GENERATION_KEY.of(2))
    report = check(Run.open(run.store))
    assert [found.key for found in report.findings if found.severity == "error"] == [
        GENERATION_KEY.of(2)
    ]


def test_a_page_that_watches_notices_the_loss(run: Run) -> None:
    relink(run, 2, ManifestName(2, 1))
    watch = RunWatch(run)
    assert [one.step for one in watch.refresh().checkpoints] == [4, 3, 2, 1]
    run.store.delete(GENERATION_KEY.of(2))
    with pytest.raises(GenerationRecordLost, match=LOST):
        watch.refresh()


def test_a_follower_stays_where_it_is(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    first = full(run, 1, run.claim(None).generation)
    follower = Follower(run.url)
    assert follower.poll() and follower.version == 1
    run.claim(first.ref)
    full(run, 2, 2)
    run.store.delete(GENERATION_KEY.of(2))
    with pytest.raises(GenerationRecordLost, match=LOST):
        follower.poll()
    assert follower.version == 1 and GENERATION_KEY.of(2) in (follower.status.error or "")
    relink(run, 2, ManifestName(1, 1))
    assert follower.poll() and follower.version == 2 and follower.status.error is None


@pytest.mark.parametrize("commits", [False, True])
def test_a_trainer_that_starts_meanwhile_is_not_taken_for_lost(
    tmp_path: Path, commits: bool
) -> None:
    run = new_run(tmp_path / "run")
    manifest = full(run, 1, run.claim(None).generation)

    def start(call: str, key: str) -> None:
        if call == "list" and key == "generations/" and run.generation_numbers() == [1]:
            run.claim(manifest.ref)
            if commits:
                full(run, 2, 2)

    seen = Run.open(InterposedStore(run.store, after=start))
    assert seen.live_line() == ([(2, 2), (1, 1)] if commits else [(1, 1)])
    assert run.generation_numbers() == [1, 2]


# --- a number is never used twice ----------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "ends/00000007.json",
        "manifests/000000000010-00000007.json",
        "consolidated/000000000010-00000007-full.json",
        "consolidated/000000000010-00000007-after-000000000009.json",
        f"parts/000000000010-00000007-{ATTEMPT}/r00001.json",
        "pins/000000000010-00000007-best.json",
        "metrics/000000000010-00000007-auc.json",
        "expired/000000000010-00000007-full.json",
        "validations/000000000010-00000007-000001-full-passed.json",
        "generations/00000007.json",
    ],
)
def test_a_trainer_takes_a_number_above_all_that_are_named(tmp_path: Path, key: str) -> None:
    run = new_run(tmp_path)
    run.store.put(key, b"{}")
    assert run.claim(None).generation == 8
    assert run.claim(None).generation == 9


@pytest.mark.parametrize("number", [7, MAX_GENERATION])
@pytest.mark.parametrize(
    "key",
    [
        "ends/{:08d}.json.bak",
        "manifests/000000000010-{:08d}.json.bak",
        "manifests/000000000010-{:08d}-copy.json",
        "consolidated/000000000010-{:08d}-full.json~",
        "consolidated/000000000010-{:08d}-after-000000000010.json",
        "parts/000000000010-{:08d}-" + ATTEMPT + "/r00001.json.bak",
        "chunks/000000000010-{:08d}-" + ATTEMPT + "/README",
        "pins/000000000010-{:08d}-Best.json",
        "expired/000000000010-{:08d}.json.bak",
        "validations/000000000010-{:08d}-000001-full.json",
        "generations/{:08d}.json.bak",
    ],
)
def test_a_key_that_is_not_ours_names_no_generation(tmp_path: Path, key: str, number: int) -> None:
    run = new_run(tmp_path / "run")
    full(run, 1, run.claim(None).generation)
    stranger = key.format(number)
    run.store.put(stranger, b"{}")
    report = check(run)
    assert report.ok and [(one.severity, one.key) for one in report.findings] == [
        ("info", stranger)
    ]
    with pytest.raises(SettingsError, match="no trace of that generation"):
        relink(run, number, ManifestName(1, 1))
    full(run, 2, 1)
    assert run.claim(None).generation == 2


def test_a_claim_lists_no_chunks(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    store = InterposedStore(run.store)
    Run.open(store).claim(None)
    listed = [key for call, key in store.calls if call == "list"]
    assert "manifests/" in listed and not {"", "chunks/"} & set(listed)


def test_the_highest_number_there_can_be_is_refused_by_name(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    key = MANIFEST_KEY.of(3, MAX_GENERATION)
    run.store.put(key, b"{}")
    with pytest.raises(ForeignObject, match=re.escape(key)):
        run.claim(None)


def test_nobody_goes_on_from_where_no_line_leads(run: Run) -> None:
    named = run.manifest(4, 2).ref
    with pytest.raises(GenerationRecordLost, match=LOST):
        run.claim(named)
    assert run.generation_numbers() == [1]
    relink(run, 2, ManifestName(2, 1))
    assert run.claim(named).generation == 3


def test_nor_from_where_a_line_leads_to_a_lost_record(run: Run) -> None:
    """Each start would be refused from then on, and what had been trained be of no use."""
    relink(run, 2, ManifestName(2, 1))
    run.claim(run.manifest(4, 2).ref)
    named = full(run, 6, 3).ref
    run.store.delete(GENERATION_KEY.of(2))
    again = Run.open(run.store)
    with pytest.raises(GenerationRecordLost, match=LOST) as caught:
        again.claim(named)
    assert "recpoint relink URL 2" in caught.value.next_step
    assert again.generation_numbers() == [1, 3]
    relink(again, 2, ManifestName(2, 1))
    assert again.claim(named).generation == 4


# --- what a lost record must not cost ------------------------------------------------------------


@pytest.fixture
def left(run: Run) -> Run:
    """Somebody has started afresh since: what is lost does not count any more."""
    run.claim(None)
    full(run, 1, 3)
    full(run, 2, 3)
    return Run.open(run.store)


def test_beside_the_live_line_it_is_a_warning(left: Run) -> None:
    assert left.live_line() == [(2, 3), (1, 3)]
    report = check(left)
    assert report.ok
    assert [found.key for found in report.findings if found.severity == "warning"] == [
        GENERATION_KEY.of(2)
    ]
    (failure,) = (one for one in RunWatch(left).refresh().failures if one.kind == "record")
    assert failure.subject == GENERATION_KEY.of(2) and "recpoint relink" in failure.next_step


def test_retention_keeps_what_only_the_loss_may_have_superseded(left: Run) -> None:
    rows = {(row.step, row.generation): row for row in planned(left).rows()}
    assert {name for name, row in rows.items() if row.action == "keep"} == {(2, 3), (3, 2), (4, 2)}
    assert rows[4, 2].reason == f"{GENERATION_KEY.of(2)} is lost"
    relink(left, 2, ManifestName(2, 1))
    rows = {(row.step, row.generation): row for row in planned(Run.open(left.store)).rows()}
    assert {name for name, row in rows.items() if row.action == "keep"} == {(2, 3)}


def test_a_sweep_leaves_what_its_trainer_may_still_commit(run: Run) -> None:
    upload(run.store, build(run, tables(), step=9, generation=2))
    upload(run.store, build(run, tables(), step=2, generation=2))
    plan = plan_sweep(run, grace_seconds=0.0, spare_newest=True)
    assert [attempt.step for attempt in plan.prefixes] == [2]
    (kept,) = plan.kept
    assert kept.prefix.startswith("chunks/000000000009-00000002-")


def test_nobody_can_tell_what_its_trainer_has_staged(run: Run, tmp_path: Path) -> None:
    run_dir = StagedRun.of(tmp_path / "staging", run.url).path
    run_dir.mkdir(parents=True)
    with AgentLock(run_dir.parent):
        assert not knows_what_is_staged(run, StagedRun(run_dir))
        relink(run, 2, None)
        assert not knows_what_is_staged(run, StagedRun(run_dir))
        run.claim(None)
        assert knows_what_is_staged(run, StagedRun(run_dir))


def test_its_trainer_goes_on_once_the_record_is_back(run: Run) -> None:
    late = build(run, tables(), step=6, generation=2)
    upload(run.store, late)
    with pytest.raises(GenerationRecordLost, match=LOST):
        commit(run, late.manifest)
    relink(run, 2, ManifestName(2, 1))
    assert commit(run, late.manifest) == "created"
    assert run.live_line()[0] == (6, 2)


def test_what_is_staged_waits_for_the_record(run: Run, tmp_path: Path) -> None:
    before = [info.key for info in run.store.list()]
    job_file = stage(run, tmp_path / "staging", tables(), step=6, generation=2)
    with pytest.raises(GenerationRecordLost, match=LOST) as caught:
        persist_job(job_file)
    assert classify(caught.value) == "deferred" and job_file.exists()
    assert [info.key for info in run.store.list()] == before, "something was uploaded"
    relink(run, 2, ManifestName(2, 1))
    assert persist_job(job_file).result == "committed"


def test_an_end_record_tells_of_a_generation_too(run: Run, tmp_path: Path) -> None:
    relink(run, 2, ManifestName(2, 1))
    run.store.put("ends/00000003.json", b"{}")
    job_file = stage(run, tmp_path / "staging", tables(), step=6, generation=3)
    with pytest.raises(GenerationRecordLost, match=re.escape(GENERATION_KEY.of(3))):
        persist_job(job_file)
    assert job_file.exists()


def test_the_first_snapshot_waits_for_a_record_that_is_lost_before_it(
    run: Run, tmp_path: Path
) -> None:
    relink(run, 2, ManifestName(2, 1))
    run.claim(run.manifest(4, 2).ref)
    job_file = stage(run, tmp_path / "staging", tables(), step=6, generation=3)
    run.store.delete(GENERATION_KEY.of(3))
    with pytest.raises(GenerationRecordLost, match="relink URL 3 --never-committed") as caught:
        persist_job(job_file)
    assert classify(caught.value) == "deferred" and job_file.exists()
    relink(run, 3, ManifestName(4, 2), never_committed=True)
    assert persist_job(job_file).result == "committed"
    assert Run.open(run.store).live_line()[0] == (6, 3)


def test_of_a_run_without_any_record_too(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    job_file = stage(run, tmp_path / "staging", tables(), step=6, generation=1)
    with pytest.raises(GenerationRecordLost, match="recpoint relink URL 1"):
        persist_job(job_file)
    relink(run, 1, None, never_committed=True)
    assert persist_job(job_file).result == "committed"


def test_what_the_store_knows_nothing_of_is_rejected(run: Run, tmp_path: Path) -> None:
    relink(run, 2, ManifestName(2, 1))
    outcome = persist_job(stage(run, tmp_path / "staging", tables(), step=6, generation=4))
    assert outcome.result == "rejected" and outcome.error_type == "MissingLink"
    assert "start the trainer again" in (outcome.error or "")
    # The trainer is not replaced: it takes a full next, with the rows of this one.
    assert breaks_chain("MissingLink") and not superseded("MissingLink")


# --- saying it anew ------------------------------------------------------------------------------


def test_what_a_person_says_is_the_line_again(run: Run) -> None:
    record = relink(run, 2, ManifestName(2, 1))
    assert record.restored == run.manifest(2, 1).ref and record.host == ""
    fresh = Run.open(run.store)
    assert fresh.live_line() == [(4, 2), (3, 2), (2, 1), (1, 1)] and check(fresh).ok
    assert fresh.claim(None).generation == 3


def test_from_nothing_the_line_ends_there(run: Run) -> None:
    assert relink(run, 2, None).restored is None
    assert Run.open(run.store).live_line() == [(4, 2), (3, 2)]


@pytest.mark.parametrize(
    ("generation", "restored", "kind", "said"),
    [
        (1, None, SettingsError, "a generation record"),
        (3, None, SettingsError, "no trace"),
        (2, ManifestName(5, 1), SettingsError, "its own first checkpoint at step 3"),
        (2, ManifestName(3, 2), SettingsError, "a checkpoint of an earlier generation"),
        (2, ManifestName(0, 1), NothingToRestore, "no manifest"),
    ],
)
def test_what_cannot_be_is_refused(
    run: Run,
    generation: int,
    restored: ManifestName | None,
    kind: type[RecpointError],
    said: str,
) -> None:
    with pytest.raises(kind, match=said):
        relink(run, generation, restored)
    assert run.generation_numbers() == [1]


def test_one_that_never_was_does_not_replace_the_trainer(run: Run) -> None:
    relink(run, 2, ManifestName(2, 1))
    fifth = build(run, tables(), step=5, generation=2)
    with pytest.raises(SettingsError, match="generation 2 is the newest") as refused:
        relink(run, 3, None)
    assert "recpoint relink URL 3 --never-committed (no earlier" in refused.value.next_step
    with pytest.raises(SettingsError, match="no trace") as refused:
        relink(run, 4, None, never_committed=True)
    assert "relink" not in refused.value.next_step
    publish(run, fifth)
    assert Run.open(run.store).live_line()[0] == (5, 2)


def test_a_damaged_record_is_moved_away_and_said_anew(run: Run) -> None:
    run.store.put(GENERATION_KEY.of(2), b"{")
    newest = run.manifest(4, 2).ref
    there = Run.open(run.store)
    asked: list[Callable[[], object]] = [there.live_line, lambda: there.claim(newest)]
    asked.append(lambda: relink(there, 2, ManifestName(2, 1)))
    for ask in asked:
        with pytest.raises(RecpointError) as refused:
            ask()
        assert refused.value.subject == GENERATION_KEY.of(2)
        assert "move it out of the run" in refused.value.next_step
    run.store.delete(GENERATION_KEY.of(2))
    relink(there, 2, ManifestName(2, 1))
    assert there.claim(newest).generation == 3


def test_of_two_who_say_it_at_once_one_is_heard(run: Run) -> None:
    def other(call: str, key: str) -> None:
        if call == "create" and Run.open(run.store).generation_numbers() == [1]:
            relink(run, 2, None)

    seen = Run.open(InterposedStore(run.store, before=other))
    with pytest.raises(SettingsError, match="a generation record"):
        relink(seen, 2, ManifestName(2, 1))
    assert Run.open(run.store).generation(2).restored is None
