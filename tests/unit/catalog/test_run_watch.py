"""The overview of a run is what its catalog says, and a refresh reads only what is new."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recpoint.catalog.overview.alarms import alarms
from recpoint.catalog.overview.figures import measured_interval_seconds
from recpoint.catalog.overview.overview import Age, StagedRisk
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.retention.plan import plan_prune
from recpoint.catalog.retention.prune import execute
from recpoint.catalog.retention.rules import BestBy, RetentionPolicy
from recpoint.catalog.retention.stored_plan import leave_plan
from recpoint.catalog.run.ends import tell_ended
from recpoint.catalog.run.pins import pin
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import add_record
from recpoint.catalog.staging.agent_trouble import AgentTrouble
from recpoint.catalog.store.contract import ObjectInfo
from recpoint.catalog.store.local import LocalStore
from recpoint.errors import FormatError, NothingToRestore, StoreFull
from recpoint.format.history import History
from recpoint.format.manifest import Manifest
from recpoint.format.naming import (
    END_KEY,
    EXPIRED_KEY,
    GENERATION_KEY,
    MANIFEST_KEY,
    PLAN_KEY,
    ManifestName,
)
from recpoint.format.records import CheckpointRef, pack_record
from recpoint.format.retention_records import MAX_PLAN_BYTES, Mark, Stamp
from recpoint.format.validation import ValidationFinding, ValidationRecord
from recpoint.testing.faults import Fault, FaultStore
from tests import catalog_builder
from tests.catalog_builder import build, new_run

NOW_MS = 1_760_000_000_000


class CountingStore(LocalStore):
    """A local store that counts the objects that are read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.reads: list[str] = []

    def get(self, key: str, *, max_bytes: int) -> bytes:
        self.reads.append(key)
        return super().get(key, max_bytes=max_bytes)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return new_run(tmp_path / "run")


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("recpoint.catalog.overview.watch.time.time", lambda: NOW_MS / 1000)
    yield


def commit(
    run: Run,
    step: int,
    *,
    at: float,
    took: float = 1.0,
    parent: Manifest | None = None,
    generation: int = 1,
    **due: int | None,
) -> Manifest:
    """A checkpoint cut `at` seconds before now, committed `took` seconds later by every clock."""
    tables = catalog_builder.tables()
    due = due or {"due_batches": 10}
    dirty = None if parent is None else [torch.arange(2), torch.arange(1)]
    history = History(trained_ms=0, lossy_restores=0, precision=None, **due)
    built = build(
        run,
        tables,
        step=step,
        generation=generation,
        parent=parent,
        dirty=dirty,
        history=history,
    )
    cut = NOW_MS - int(at * 1000)
    times = {"snapshot_ms": cut, "staged_ms": cut + 1, "committed_ms": cut + int(took * 1000)}
    checkpoint = replace(built, manifest=built.manifest.model_copy(update=times))
    manifest = catalog_builder.publish(run, checkpoint)
    _dated(run, MANIFEST_KEY.of(step, generation), manifest.committed_ms)
    return manifest


def _dated(run: Run, key: str, when_ms: int) -> None:
    os.utime(Path(run.url) / key, ns=(when_ms * 10**6,) * 2)


def begin(run: Run, *, at: float, restored: CheckpointRef | None = None) -> int:
    record = run.claim(restored)
    created = NOW_MS - int(at * 1000)
    key = f"generations/{record.generation:08d}.json"
    run.store.put(key, pack_record(record.model_copy(update={"created_ms": created})))
    _dated(run, key, created)
    return record.generation


def three(run: Run) -> list[Manifest]:
    """Cut every 100 s and 10 batches, the newest 50 s ago, committed after 2 s."""
    begin(run, at=360)
    full = commit(run, 10, at=250, took=2.0)
    second = commit(run, 20, at=150, took=2.0, parent=full)
    return [full, second, commit(run, 30, at=50, took=2.0, parent=second)]


def watch(run: Run) -> RunWatch:
    return RunWatch(Run.open(run.store))


def test_the_figures_are_those_of_the_manifests(run: Run) -> None:
    made = three(run)
    seen = watch(run).refresh()
    assert [one.step for one in seen.checkpoints] == [30, 20, 10]
    assert [one.stored_bytes for one in seen.checkpoints] == [m.stored_bytes for m in made[::-1]]
    assert [one.stall_seconds for one in seen.checkpoints] == [0.0001] * 3
    assert [one.lag_seconds for one in seen.checkpoints] == [2.0] * 3
    assert [one.at_risk_seconds for one in seen.checkpoints] == [102.0, 102.0, None]
    assert [one.interval_batches for one in seen.checkpoints] == [10, 10, None]
    assert [one.at_risk_batches for one in seen.checkpoints] == [10, 10, None]
    assert seen.lag.seconds == seen.lag.at_risk_seconds == 50.0
    assert seen.lag.at_risk_batches == 5 and seen.lag.interval_seconds == 100.0
    assert (seen.live_checkpoints, seen.superseded_checkpoints) == (3, 0)
    assert seen.totals.full_bytes == 3 * made[0].full_bytes
    assert seen.totals.stored_bytes == sum(m.stored_bytes for m in made)
    assert seen.restore is not None
    assert (seen.restore.manifests_to_read, seen.restore.chain_length) == (3, 3)
    rows = sum(c.bytes for m in made for c in m.chunks if c.content == "rows")
    state = sum(c.bytes for c in made[-1].chunks if c.content == "state")
    assert seen.restore.bytes_to_read == rows + state
    assert seen.restore.seconds is None
    assert alarms(seen) == () and seen.failures == ()


def test_a_refresh_reads_only_what_is_new(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    made = three(run)
    store = CountingStore(tmp_path / "run")
    seen = RunWatch(Run.open(store))
    seen.refresh()
    assert sum(key.startswith("manifests/") for key in store.reads) == 3
    store.reads.clear()
    seen.refresh()
    assert store.reads == ["ends/00000001.json", "deletion.json"]
    commit(run, 40, at=10, parent=made[-1])
    store.reads.clear()
    assert seen.refresh().checkpoints[0].step == 40
    assert [key for key in store.reads if key.startswith("manifests/")] == [MANIFEST_KEY.of(40, 1)]


def test_a_run_without_a_checkpoint(run: Run) -> None:
    empty = watch(run).refresh()
    assert (empty.generation, empty.newest, empty.restore) == (None, None, None)
    assert empty.lag.seconds is None and empty.lag.at_risk_seconds == 0.0
    assert alarms(empty) == ()
    begin(run, at=3600)
    started = watch(run).refresh()
    assert started.lag.seconds is None and started.lag.at_risk_seconds == 3600.0
    assert [alarm.trouble for alarm in alarms(started)] == ["no_commit"]
    assert alarms(started, unknown_interval_seconds=4000.0) == ()


def test_a_single_checkpoint_is_measured_from_the_start_of_its_trainer(run: Run) -> None:
    begin(run, at=360)
    commit(run, 10, at=260, took=2.0)
    seen = watch(run).refresh()
    assert seen.checkpoints[0].at_risk_seconds == 102.0 and seen.lag.interval_seconds == 100.0


def test_a_run_that_is_gone_is_not_an_empty_one(run: Run, tmp_path: Path) -> None:
    three(run)
    seen = watch(run)
    seen.refresh()
    Path(run.url).rename(tmp_path / "elsewhere")
    with pytest.raises(NothingToRestore):
        seen.refresh()


def test_a_generation_record_that_is_damaged_while_watched_is_noticed(run: Run) -> None:
    run.claim(None)
    commit(run, 10, at=20)
    watch = RunWatch(run)
    watch.refresh()
    good = run.store.get(GENERATION_KEY.of(1), max_bytes=10_000)
    run.store.put(GENERATION_KEY.of(1), good[:-9])  # nothing restores now
    with pytest.raises(FormatError, match=GENERATION_KEY.of(1)):
        watch.refresh()
    run.store.put(GENERATION_KEY.of(1), good)
    assert watch.refresh().lag.seconds is not None


def test_silence_alarms_after_so_many_intervals(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    three(run)
    now = "recpoint.catalog.overview.watch.time.time"
    monkeypatch.setattr(now, lambda: NOW_MS / 1000 + 249.0)
    assert alarms(watch(run).refresh()) == ()
    monkeypatch.setattr(now, lambda: NOW_MS / 1000 + 251.0)
    (alarm,) = alarms(watch(run).refresh())
    assert alarm.trouble == "no_commit"
    assert alarm.text == (
        "no new checkpoint that restores for 5 min 1 s; one is expected every 1 min 40 s"
    )
    assert len(alarms(watch(run).refresh(), intervals=4.0)) == 0


def test_the_alarm_of_a_new_trainer_names_both_times(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It started 301 s ago on a store that is full; the checkpoint that restores is older."""
    made = three(run)
    begin(run, at=20, restored=made[-1].ref)
    monkeypatch.setattr("recpoint.catalog.overview.watch.time.time", lambda: NOW_MS / 1000 + 281.0)
    seen = watch(run).refresh()
    (alarm,) = alarms(seen)
    assert (seen.lag.silent_seconds, seen.lag.seconds) == (301.0, 331.0)
    assert alarm.text == (
        "no new checkpoint that restores for 5 min 1 s, since the newest trainer started; the "
        "newest is 5 min 31 s old; one is expected every 1 min 40 s"
    )


def test_an_alarm_names_why_the_agent_cannot_store_what_is_staged(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    three(run)
    monkeypatch.setattr("recpoint.catalog.overview.watch.time.time", lambda: NOW_MS / 1000 + 281.0)
    seen = watch(run).refresh()
    full = AgentTrouble("StoreFull: no space left", "free space or raise the quota", 6)
    staged = StagedRisk(step=40, at_risk_seconds=1.0, at_risk_batches=2, trouble=full)
    (alarm,) = alarms(replace(seen, staged=staged))
    assert alarm.text.endswith(
        "; recpoint agent cannot store step 40 (6 tries): StoreFull: no space left"
    )
    assert alarm.next_step.endswith(": free space or raise the quota")
    (unsaid,) = alarms(replace(seen, staged=replace(staged, trouble=full._replace(next_step=""))))
    assert unsaid.next_step.endswith(": read the log of recpoint agent")


def test_the_interval_is_what_the_trainer_meant_or_longer(run: Run) -> None:
    made = three(run)
    commit(run, 40, at=10, parent=made[-1], due_ms=600_000)
    assert watch(run).refresh().lag.interval_seconds == 600.0
    commit(run, 50, at=5, parent=made[-1], due_ms=1_000)  # but every second one is skipped
    assert watch(run).refresh().lag.interval_seconds == 70.0
    commit(run, 60, at=4, parent=made[-1], due_ms=None)
    assert watch(run).refresh().lag.interval_seconds is None


def test_a_run_that_has_ended_alarms_only_for_what_is_not_stored(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = three(run)
    monkeypatch.setattr("recpoint.catalog.overview.watch.time.time", lambda: NOW_MS / 1000 + 86_400)
    seen = watch(run)
    assert [alarm.trouble for alarm in alarms(seen.refresh())] == ["no_commit"]
    tell_ended(run, 1, step=35, reason="terminated")
    lacking = seen.refresh()
    assert lacking.ended is not None and lacking.ended.reason == "terminated"
    # What it costs stands still: that of 5 batches, and not a day.
    assert (lacking.lag.at_risk_batches, lacking.lag.at_risk_seconds) == (5, 50.0)
    (alarm,) = alarms(lacking)
    assert "its last 5 batches are not stored" in alarm.text
    assert "if a checkpoint is staged there" in alarm.next_step
    assert "alive" not in alarm.next_step and "recpoint agent" in alarm.next_step
    commit(run, 35, at=0, parent=made[-1])
    ended = seen.refresh()
    assert alarms(ended) == () and ended.lag.at_risk_batches == 0
    assert ended.lag.at_risk_seconds == 0.0
    # Its successor starts from there: that is no failure, and its silence counts again.
    begin(run, at=-80_000, restored=ended_ref(run))
    again = seen.refresh()
    assert again.ended is None and again.failures == () and alarms(again) == ()
    assert again.lag.clock == "watched"  # it has just appeared, whatever the store's clock says
    again = watch(run).refresh()
    assert [alarm.trouble for alarm in alarms(again)] == ["no_commit"]


def test_a_last_checkpoint_has_no_more_at_risk_than_was_trained(run: Run) -> None:
    """It is cut soon after the one before it, and its commit takes long."""
    begin(run, at=100)
    commit(run, 140, at=60)
    commit(run, 150, at=59, took=30.0)
    assert watch(run).refresh().checkpoints[0].at_risk_batches == 10 + 300  # if it went on
    tell_ended(run, 1, step=150, reason="finished")
    last = watch(run).refresh().checkpoints[0]
    assert (last.at_risk_batches, last.at_risk_seconds) == (10, 1.0)


def test_what_is_overdue_is_not_counted_in_batches(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that is dead looks like one whose agent is."""
    three(run)
    now = "recpoint.catalog.overview.watch.time.time"
    monkeypatch.setattr(now, lambda: NOW_MS / 1000 + 51.0)
    lag = watch(run).refresh().lag
    assert (lag.overdue, lag.at_risk_batches) == (False, 10)
    monkeypatch.setattr(now, lambda: NOW_MS / 1000 + 53.0)
    lag = watch(run).refresh().lag
    assert (lag.overdue, lag.at_risk_batches, lag.at_risk_seconds) == (True, None, 103.0)


def ended_ref(run: Run) -> CheckpointRef:
    return run.manifest(35, 1).ref


def test_a_damaged_end_record_is_told_and_trusted_by_nobody(run: Run) -> None:
    three(run)
    tell_ended(run, 1, step=30, reason="finished")
    path = Path(run.url) / END_KEY.of(1)
    path.write_bytes(path.read_bytes().replace(b'"step":30', b'"step":31'))
    seen = watch(run).refresh()
    assert seen.ended is None and seen.lag.at_risk_seconds == 50.0
    assert [failure.kind for failure in seen.failures] == ["record"]


def test_after_a_restart_only_its_own_work_is_at_risk(run: Run) -> None:
    made = three(run)
    begin(run, at=20, restored=made[1].ref)
    seen = watch(run).refresh()
    assert [one.step for one in seen.checkpoints] == [20, 10]
    assert seen.superseded_checkpoints == 1 and seen.restarts == 1
    assert seen.lag.seconds == 150.0 and seen.lag.at_risk_seconds == 20.0
    commit(run, 25, at=10, took=1.0, parent=made[1], generation=2)
    first = watch(run).refresh().checkpoints[0]
    assert (first.at_risk_seconds, first.interval_batches) == (11.0, 5)


def test_a_damaged_newest_manifest_is_no_recovery_point(run: Run) -> None:
    three(run)
    path = Path(run.url) / MANIFEST_KEY.of(30, 1)
    path.write_bytes(path.read_bytes()[:-20])
    seen = watch(run).refresh()
    assert [one.state for one in seen.checkpoints] == ["damaged", "committed", "committed"]
    assert seen.lag.seconds == 150.0 and seen.restore is not None and seen.restore.step == 20
    assert {alarm.trouble for alarm in alarms(seen)} == {"manifest_damaged", "chain_broken"}


def test_a_broken_chain_is_noticed_while_watching(run: Run) -> None:
    made = three(run)
    seen = watch(run)
    assert alarms(seen.refresh()) == ()
    run.store.delete(MANIFEST_KEY.of(20, 1))
    after = seen.refresh()
    assert after.restore is not None and after.restore.step == 10
    assert [failure.subject for failure in after.failures] == [f"chain of {ManifestName(30, 1)}"]
    assert MANIFEST_KEY.of(20, 1) in after.failures[0].cause
    assert "chain_broken" in [alarm.trouble for alarm in alarms(after)]
    run.store.create(MANIFEST_KEY.of(20, 1), pack_record(made[1]))
    assert seen.refresh().failures == ()


def validated(run: Run, of: Manifest, result: str, *, level: str = "full") -> None:
    finding = ValidationFinding(
        subject="items", row=7, what="values", found="1", expected="2", bound="0"
    )
    record = ValidationRecord.model_validate(
        {
            "run": run.id,
            "checkpoint": of.ref,
            "level": level,
            "result": result,
            "links_read": 1,
            "chunks_read": 1,
            "bytes_read": 5000,
            "rows_compared": 1,
            "worst_ppm": 0,
            "digests": (),
            "findings": () if result == "passed" else (finding,),
            "more_findings": 0,
            "evaluated_by": "",
            "started_ms": NOW_MS - 3000,
            "finished_ms": NOW_MS - 1000,
            "writer": "tests",
        }
    )
    add_record(run, record)


def test_the_last_validation_is_seen_however_long_ago(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    validated(run, three(run)[0], "passed")
    monkeypatch.setattr("recpoint.catalog.overview.watch.NEWEST", 1)
    seen = watch(run).refresh()
    assert [one.step for one in seen.checkpoints] == [30]
    assert seen.last_validated is not None and seen.last_validated.step == 10


def test_validations_give_states_alarms_and_a_speed(run: Run) -> None:
    made = three(run)
    validated(run, made[1], "passed")
    seen = watch(run)
    first = seen.refresh()
    assert [one.state for one in first.checkpoints] == ["committed", "validated", "committed"]
    assert first.last_validated is not None and first.last_validated.step == 20
    assert first.restore is not None and first.restore.bytes_per_second == 2500.0
    assert first.restore.seconds == first.restore.bytes_to_read / 2500.0
    validated(run, made[2], "failed")
    failed = seen.refresh()
    assert failed.checkpoints[0].state == "failed" and failed.lag.seconds == 150.0
    (failure,) = failed.failures
    assert failure.when_ms == NOW_MS - 1000 and "items, row 7" in failure.cause
    assert [alarm.trouble for alarm in alarms(failed)] == ["validation_failed"]


def test_pins_and_marks(run: Run) -> None:
    made = three(run)
    pin(run, ManifestName(20, 1), label="release")
    mark = Mark(
        run=run.id,
        manifest=MANIFEST_KEY.of(10, 1),
        attempt=made[0].attempt,
        reason="no rule keeps it",
        stamp=Stamp(written_ms=NOW_MS, boot=None, boot_ms=0),
    )
    key = EXPIRED_KEY.of(mark.manifest)
    run.store.put(key, pack_record(mark))
    _dated(run, key, NOW_MS - 5000)
    seen = watch(run).refresh()
    assert [one.pins for one in seen.checkpoints] == [(), ("release",), ()]
    assert [one.expires for one in seen.checkpoints] == [False, False, True]
    (expiring,) = seen.expiring
    assert (expiring.key, expiring.reason) == (mark.manifest, "no rule keeps it")
    assert expiring.age.seconds == 5.0


def test_the_plan_of_the_newest_retention(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    begin(run, at=20)
    commit(run, 10, at=10)
    store = CountingStore(tmp_path / "run")
    looking = RunWatch(Run.open(store))
    assert looking.refresh().plan is None
    policy = RetentionPolicy(
        keep_last=2,
        keep_within_seconds=0.5,
        best_by=(BestBy("auc", "max"),),
        require_validated=False,
    )
    made = plan_prune(run, policy, grace_seconds=3600, ask_store=False)
    leave_plan(run, made)
    store.reads.clear()
    plan = looking.refresh().plan
    assert plan is not None and looking.refresh().plan is plan
    assert store.reads.count(PLAN_KEY) == 1
    assert (plan.rules.last, plan.rules.within_ms, plan.rules.best[0].metric) == (2, 500, "auc")
    assert (plan.grace_ms, plan.keep, plan.mark + plan.wait + plan.delete) == (3_600_000, 1, 0)
    (row,) = plan.manifests
    assert (row.manifest, row.action) == (MANIFEST_KEY.of(10, 1), "keep")
    assert "one of the last 2" in row.reason

    for broken in (b"{}", bytes(MAX_PLAN_BYTES + 1)):  # the latter is not read
        store.put(PLAN_KEY, broken)
        seen = looking.refresh()
        assert seen.plan is None and [one.kind for one in seen.failures] == ["record"]
        assert PLAN_KEY in seen.failures[0].subject
    assert f"{MAX_PLAN_BYTES}" in seen.failures[0].cause
    leave_plan(run, made)
    seen = looking.refresh()
    assert seen.plan is not None and seen.failures == ()


def test_of_many_manifests_a_plan_names_the_newest_that_go_and_that_stay(run: Run) -> None:
    begin(run, at=20)
    commit(run, 10, at=10)
    made = plan_prune(
        run,
        RetentionPolicy(keep_last=1, require_validated=False),
        grace_seconds=3600,
        ask_store=False,
    )
    (kept,) = made.retention.decisions
    decisions = tuple(kept._replace(action="drop" if n % 3 else "keep") for n in range(1800))
    many = replace(made, retention=replace(made.retention, decisions=decisions))
    leave_plan(run, many)
    plan = watch(run).refresh().plan
    assert plan is not None and (plan.keep, plan.mark) == (600, 1200)
    actions = [one.action for one in plan.manifests]
    assert (actions.count("keep"), actions.count("mark")) == (500, 500)
    leave_plan(run, replace(many, retention=replace(made.retention, decisions=decisions[:1200])))
    plan = watch(run).refresh().plan
    assert plan is not None
    actions = [one.action for one in plan.manifests]
    assert (actions.count("keep"), actions.count("mark")) == (400, 600)


def test_a_store_that_takes_no_plan_is_retained_all_the_same(run: Run) -> None:
    old = begin(run, at=30)
    commit(run, 10, at=25, generation=old)
    commit(run, 20, at=10, generation=begin(run, at=20))
    policy = RetentionPolicy(keep_last=1, require_validated=False)
    fault = Fault(kind="fail", on=frozenset({"put"}), key_contains=PLAN_KEY, error=StoreFull)
    full = Run.open(FaultStore(run.store, [fault]))
    result = execute(full, plan_prune(full, policy, grace_seconds=3600, ask_store=False))
    assert result.marked == (MANIFEST_KEY.of(10, old),)
    seen = watch(run).refresh()
    assert seen.plan is None and len(seen.expiring) == 1


def test_a_clock_that_is_off_is_named_and_does_not_hide_the_lag(run: Run) -> None:
    """The trainer's clock is an hour ahead; the store's is right."""
    three(run)
    for step in (10, 20, 30):
        path = Path(run.url) / MANIFEST_KEY.of(step, 1)
        manifest = run.manifest(step, 1)
        ahead = {
            name: getattr(manifest, name) + 3_600_000
            for name in ("snapshot_ms", "staged_ms", "committed_ms")
        }
        path.write_bytes(pack_record(manifest.model_copy(update=ahead)))
        _dated(run, MANIFEST_KEY.of(step, 1), manifest.committed_ms)
    lag = watch(run).refresh().lag
    assert lag.seconds == 50.0 and lag.interval_seconds == 100.0
    assert "3600 s before" in lag.clock_note


def test_what_a_watch_has_seen_bounds_what_the_store_says() -> None:
    assert Age.of(store_seconds=50.0, least=0.0, most=None) == (50.0, "store")
    assert Age.of(store_seconds=-3600.0, least=4.0, most=None) == (4.0, "watched")
    assert Age.of(store_seconds=3600.0, least=4.0, most=9.0) == (9.0, "watched")


def test_a_store_whose_clock_is_wrong_does_not_matter_to_a_watch(run: Run) -> None:
    made = three(run)
    seen = watch(run)
    seen.refresh()
    commit(run, 40, at=10, took=2.0, parent=made[-1])
    _dated(run, MANIFEST_KEY.of(40, 1), NOW_MS + 7_200_000)
    lag = seen.refresh().lag
    assert lag.clock == "watched" and lag.seconds is not None
    assert 2.0 <= lag.seconds < 60.0 and "7200 s ahead" in lag.clock_note
    assert isinstance(next(iter(run.store.list(MANIFEST_KEY.of(40, 1)))), ObjectInfo)


def test_only_the_newest_are_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    three(run)
    monkeypatch.setattr("recpoint.catalog.overview.watch.NEWEST", 2)
    seen = watch(run).refresh()
    assert [one.step for one in seen.checkpoints] == [30, 20] and seen.live_checkpoints == 3
    assert seen.checkpoints[1].at_risk_seconds is None


def test_a_measured_interval_is_the_median(run: Run) -> None:
    three(run)
    checkpoints = watch(run).refresh().checkpoints
    assert measured_interval_seconds(checkpoints) == 100.0
    assert measured_interval_seconds(()) is None
