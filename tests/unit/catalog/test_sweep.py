"""A sweep removes what no checkpoint will ever need, and nothing else (format §6.4, §6.5)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from recpoint.catalog.check.check import check
from recpoint.catalog.consolidate import commit as consolidating
from recpoint.catalog.consolidate.merge import merge_part
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.catalog.retention import sweep
from recpoint.catalog.retention.sweep import SweepPlan, execute, plan_sweep, spared_words
from recpoint.catalog.retention.sweep_here import knows_what_is_staged
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.agent_lock import DRAIN, AgentLock, sweep_of
from recpoint.catalog.staging.area import StagedRun
from recpoint.errors import SettingsError, StoreFull, StoreUnavailable
from recpoint.format.manifest import Manifest
from recpoint.format.naming import GENERATION_KEY, MANIFEST_KEY, attempt_prefix
from recpoint.format.records import pack_record
from tests.catalog_builder import Checkpoint, build, new_run, publish, tables, upload
from tests.consolidation import chain_of, merge, name_of, trained
from tests.interposed_store import InterposedStore, unavailable
from tests.job_builder import stage

HOUR = 3600.0


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = new_run(tmp_path)
    run.claim(None)
    return run


@pytest.fixture
def full(run: Run) -> Manifest:
    return publish(run, build(run, tables(), step=10, generation=1))


@pytest.fixture
def orphan(run: Run, full: Manifest) -> Checkpoint:
    """Chunks of an attempt that was never committed, two hours old."""
    checkpoint = build(run, tables(), step=20, generation=1)
    upload(run.store, checkpoint)
    age(run, checkpoint, 2 * HOUR)
    return checkpoint


def age(run: Run, checkpoint: Checkpoint, seconds: float) -> None:
    when = time.time() - seconds
    for key in checkpoint.chunks:
        os.utime(Path(run.url) / key, (when, when))


def keys(run: Run) -> set[str]:
    return {info.key for info in run.store.list()}


def planned(plan: SweepPlan) -> set[str]:
    return {swept.key for swept in plan.objects}


def test_orphans_go_and_everything_else_stays(run: Run, full: Manifest, orphan: Checkpoint) -> None:
    run.store.put("notes.txt", b"hello")
    before = keys(run)
    plan = plan_sweep(run, grace_seconds=HOUR)
    assert planned(plan) == set(orphan.chunks)
    assert plan.size_bytes == sum(map(len, orphan.chunks.values()))
    assert all(orphan.ref.attempt in swept.reason for swept in plan.objects)
    assert plan.unrecognised == ("notes.txt",)
    assert keys(run) == before  # planning changes nothing
    result = execute(run, plan)
    assert {swept.key for swept in result.removed} == set(orphan.chunks)
    assert result.removed_bytes == plan.size_bytes and result.spared == ()
    assert keys(run) == before - set(orphan.chunks)
    assert not (Path(run.url) / attempt_prefix(20, 1, orphan.ref.attempt)).exists()
    assert check(run, level="full").ok
    assert planned(plan_sweep(run, grace_seconds=0)) == set()


def test_young_chunks_stay(run: Run, orphan: Checkpoint) -> None:
    plan = plan_sweep(run, grace_seconds=3 * HOUR)
    assert plan.objects == ()
    assert plan.kept[0].prefix == attempt_prefix(20, 1, orphan.ref.attempt)
    assert "younger" in plan.kept[0].reason


def test_one_young_chunk_keeps_its_whole_attempt(run: Run, orphan: Checkpoint) -> None:
    key = next(iter(orphan.chunks))
    run.store.put(key, orphan.chunks[key])
    assert plan_sweep(run, grace_seconds=HOUR).objects == ()


def test_chunks_from_the_future_are_young(run: Run, orphan: Checkpoint) -> None:
    age(run, orphan, -HOUR)
    assert plan_sweep(run, grace_seconds=0).objects == ()


def two_days_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong clock, of this host alone: what is written has the store's own time."""
    really = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: really() + 48 * 3600 * 10**9)


def test_what_is_young_by_the_clock_of_the_store_stays_whatever_this_hosts_says(
    run: Run, full: Manifest, orphan: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    young = build(run, tables(), step=30, generation=1)
    upload(run.store, young)
    half = Path(run.url) / "chunks" / f".tmp-{'a' * 32}"
    half.write_bytes(b"half")
    before = keys(run)
    two_days_ahead(monkeypatch)
    plan = plan_sweep(run, grace_seconds=HOUR)
    assert planned(plan) == set(orphan.chunks) and plan.unfinished == ()
    execute(run, plan)
    assert keys(run) == before - set(orphan.chunks) and half.exists()
    # A dry run writes nothing, not even to ask what time it is; what it says removes nothing.
    store = InterposedStore(run.store)
    assert planned(plan_sweep(Run.open(store), grace_seconds=HOUR, ask_store=False)) == set(
        young.chunks
    )
    assert not [call for call in store.calls if call[0] in ("put", "create", "delete")]


def test_a_full_store_is_swept_by_the_time_of_its_newest_object(
    run: Run, full: Manifest, orphan: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(call: str, key: str) -> None:
        if call == "put":
            raise StoreFull(key, found="no space", expected="some", next_step="sweep")

    upload(run.store, build(run, tables(), step=30, generation=1))
    two_days_ahead(monkeypatch)
    store = Run.open(InterposedStore(run.store, before=refuse))
    plan = plan_sweep(store, grace_seconds=HOUR)
    assert planned(plan) == set(orphan.chunks)
    assert len(execute(store, plan).removed) == len(orphan.chunks)


def test_attempts_of_staged_jobs_stay(run: Run, orphan: Checkpoint) -> None:
    plan = plan_sweep(run, grace_seconds=0, keep=[orphan.ref.attempt])
    assert plan.objects == ()
    assert plan.kept[0].reason == "a staged job names it"


def test_superseded_checkpoints_stay(run: Run, full: Manifest) -> None:
    run.claim(None)
    assert plan_sweep(run, grace_seconds=0).objects == ()


def test_chunks_that_only_a_consolidated_manifest_names_stay(run: Run, full: Manifest) -> None:
    newest = trained(run, tables(), [20], parent=full)[-1]
    own = keys(run)
    merge(run, newest)
    plan = plan_sweep(run, grace_seconds=0)
    assert any(key.startswith("chunks/") for key in keys(run) - own)
    assert plan.objects == () and plan.kept == ()


def test_keys_that_are_not_chunks_stay_in_an_orphaned_prefix(run: Run, orphan: Checkpoint) -> None:
    stranger = attempt_prefix(20, 1, orphan.ref.attempt) + "README"
    run.store.put(stranger, b"mine")
    plan = plan_sweep(run, grace_seconds=HOUR)
    assert plan.unrecognised == (stranger,)
    execute(run, plan)
    assert stranger in keys(run) and not keys(run) & set(orphan.chunks)


@pytest.mark.parametrize("kind", ["chunks", "parts"])
def test_keys_of_generation_zero_stay_and_stop_nothing(
    run: Run, orphan: Checkpoint, kind: str
) -> None:
    end = "r00000-state-000000.safetensors" if kind == "chunks" else "r00000.json"
    stranger = f"{kind}/000000000020-00000000-{orphan.ref.attempt}/{end}"
    run.store.put(stranger, b"mine")
    assert [found.key for found in check(run).findings if "not an object" in found.text] == [
        stranger
    ]
    plan = plan_sweep(run, grace_seconds=HOUR)
    assert plan.unrecognised == (stranger,)
    execute(run, plan)
    assert stranger in keys(run) and not keys(run) & set(orphan.chunks)


def test_while_a_manifest_cannot_be_read_no_chunk_goes(
    run: Run, full: Manifest, orphan: Checkpoint
) -> None:
    run.store.put(MANIFEST_KEY.of(10, 1), b"damaged")
    plan = plan_sweep(run, grace_seconds=0)
    assert plan.objects == () and plan.blocked == (MANIFEST_KEY.of(10, 1),)
    assert len(plan.kept) == 2


def test_what_killed_writers_and_probes_left_goes_when_it_is_old(run: Run) -> None:
    left = [Path(run.url) / "chunks" / f".tmp-{'a' * 32}", Path(run.url) / "probe" / ("b" * 32)]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    (Path(run.url) / "probe" / "mine").write_bytes(b"mine")
    assert execute(run, plan_sweep(run, grace_seconds=HOUR)).removed == ()
    for path in left:
        os.utime(path, (time.time() - 2 * HOUR,) * 2)
    plan = plan_sweep(run, grace_seconds=HOUR)
    assert len(plan.unfinished) == 1 and plan.unrecognised == ("probe/mine",)
    assert len(execute(run, plan).removed) == 2
    assert not any(path.exists() for path in left)


def test_a_negative_grace_is_refused(run: Run) -> None:
    with pytest.raises(SettingsError, match="grace_seconds"):
        plan_sweep(run, grace_seconds=-1)


class TestBetweenPlanAndDeed:
    """What happens after the plan was made is noticed."""

    def test_a_commit_spares_its_chunks(self, run: Run, orphan: Checkpoint) -> None:
        plan = plan_sweep(run, grace_seconds=HOUR)
        run.store.put(MANIFEST_KEY.of(20, 1), pack_record(orphan.manifest))
        result = execute(run, plan)
        assert result.removed == ()
        assert result.spared[0].reason == "a manifest names it now"
        prefix = result.spared[0].prefix
        words = f"not removed, because it is needed now: {prefix} (a manifest names it now)"
        assert spared_words(result.spared) == f"; {words}" and not spared_words(())
        assert check(run, level="full").ok

    def test_a_commit_while_planning_spares_its_chunks(self, run: Run, orphan: Checkpoint) -> None:
        def commit(call: str, key: str) -> None:
            if (call, key) == ("list", ""):
                run.store.put(MANIFEST_KEY.of(20, 1), pack_record(orphan.manifest))

        store = InterposedStore(run.store, after=commit)
        assert plan_sweep(Run.open(store), grace_seconds=0).objects == ()

    def test_a_job_staged_while_planning_or_since_keeps_its_attempt(
        self, run: Run, orphan: Checkpoint
    ) -> None:
        jobs: list[str] = []

        def stage_it(call: str, key: str) -> None:
            if (call, key) == ("list", ""):
                jobs.append(orphan.ref.attempt)

        slow = Run.open(InterposedStore(run.store, after=stage_it))
        plan = plan_sweep(slow, grace_seconds=HOUR, keep=lambda: list(jobs))
        assert plan.objects == () and plan.kept[0].reason == "a staged job names it"
        jobs.clear()
        plan = plan_sweep(run, grace_seconds=HOUR, keep=lambda: list(jobs))
        jobs.append(orphan.ref.attempt)
        result = execute(run, plan)
        assert result.removed == () and result.spared[0].reason == "a staged job names it"

    def test_chunks_written_again_are_young(self, run: Run, orphan: Checkpoint) -> None:
        plan = plan_sweep(run, grace_seconds=HOUR)
        upload(run.store, orphan)
        result = execute(run, plan)
        assert result.removed == () and "younger" in result.spared[0].reason

    def test_chunks_added_meanwhile_keep_the_attempt(self, run: Run, orphan: Checkpoint) -> None:
        plan = plan_sweep(run, grace_seconds=0)
        prefix = attempt_prefix(20, 1, orphan.ref.attempt)
        run.store.put(f"{prefix}r00007-state-000000.safetensors", b"more")
        os.utime(Path(run.url) / f"{prefix}r00007-state-000000.safetensors", (1, 1))
        assert execute(run, plan).spared[0].reason == "chunks were added to it"

    def test_a_manifest_damaged_meanwhile_keeps_the_attempt(
        self, run: Run, orphan: Checkpoint
    ) -> None:
        plan = plan_sweep(run, grace_seconds=0)
        run.store.put(MANIFEST_KEY.of(30, 1), b"damaged")
        assert "cannot be read" in execute(run, plan).spared[0].reason


def test_a_sweep_that_dies_anywhere_is_finished_by_the_next(
    run: Run, full: Manifest, orphan: Checkpoint
) -> None:
    kept = keys(run) - set(orphan.chunks)
    for _ in range(len(orphan.chunks)):
        # Dies after its first deletion, each time.
        def die(call: str, key: str) -> None:
            if call == "delete":
                raise unavailable(key)

        plan = plan_sweep(run, grace_seconds=HOUR)
        with pytest.raises(StoreUnavailable):
            execute(Run.open(InterposedStore(run.store, after=die)), plan)
        assert check(run, level="full").ok
    assert keys(run) == kept
    assert plan_sweep(run, grace_seconds=0).objects == ()


def test_many_attempts_go_one_by_one(run: Run, full: Manifest) -> None:
    for step in (20, 30, 40):
        dirty = [torch.tensor([1, 2]), torch.tensor([0])]
        checkpoint = build(run, tables(), step=step, generation=1, parent=full, dirty=dirty)
        upload(run.store, checkpoint)
        age(run, checkpoint, 2 * HOUR)
    plan = plan_sweep(run, grace_seconds=HOUR)
    assert [attempt.step for attempt in plan.prefixes] == [20, 30, 40]
    execute(run, plan)
    assert check(run).findings == ()


def test_a_consolidation_that_goes_on_with_what_is_being_swept(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed before its manifest long ago, and is run again while its chunks go."""
    newest = trained(run, tables(rows=200), [10, 20, 30])[-1]
    plan = plan_consolidation(run, name_of(newest))
    for part in plan.parts:
        merge_part(run, plan, part)
    for key in keys(run):
        os.utime(Path(run.url) / key, (time.time() - 2 * HOUR,) * 2)
    begun = plan_sweep(run, grace_seconds=HOUR)
    assert len(begun.objects) > 1

    def go_on(step: str, done: int, total: int) -> None:
        if done == 1 and step == "removing objects":
            assert merge(run, newest).outcome == "created"

    monkeypatch.setattr(sweep, "_LOOK_AGAIN_SECONDS", 0.0)
    # The sweep goes on only when the consolidation has ended, so it need not be waited for.
    monkeypatch.setattr(consolidating, "_SWEEPS_END_SECONDS", 0.0)
    result = execute(run, begun, on_step=go_on)
    assert len(result.removed) == 1 and result.spared[0].reason == "a manifest names it now"
    assert check(run, level="full").findings == ()
    assert len(chain_of(run, newest)) == 1


_BESIDE_AN_AGENT = """
import sys
from pathlib import Path

from recpoint.catalog.retention.sweep_here import sweep_here
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store

sweep_here(open_store(sys.argv[1]), StagedRun(Path(sys.argv[2])), grace_seconds=3600.0)
print("torch" in sys.modules)
"""


def test_a_sweep_beside_an_agent_imports_no_torch(run: Run, full: Manifest, tmp_path: Path) -> None:
    """The agent sweeps each run once a day, and does the staged jobs itself."""
    run_dir = StagedRun.of(tmp_path / "staging", run.url).path
    run_dir.mkdir(parents=True)
    with AgentLock(run_dir.parent):
        swept = subprocess.run(
            [sys.executable, "-c", _BESIDE_AN_AGENT, run.url, str(run_dir)],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert (swept.returncode, swept.stdout) == (0, "False\n"), swept.stderr


def test_only_the_directory_that_the_newest_trainer_uses_says_what_is_staged(
    run: Run, full: Manifest, tmp_path: Path
) -> None:
    run_dir = StagedRun.of(tmp_path / "staging", run.url).path
    assert not knows_what_is_staged(run, StagedRun(run_dir))  # as on a laptop
    run_dir.mkdir(parents=True)
    assert not knows_what_is_staged(run, StagedRun(run_dir))  # left by an earlier trainer
    for who in (
        DRAIN,
        sweep_of(StagedRun(run_dir)),
        sweep_of(StagedRun(run_dir.with_name("other"))),
    ):
        with AgentLock(run_dir.parent, who):
            assert not knows_what_is_staged(run, StagedRun(run_dir))  # whoever swept on the laptop
    with AgentLock(run_dir.parent):
        assert knows_what_is_staged(run, StagedRun(run_dir))
    job_file = stage(run, run_dir.parent, tables(), step=20, generation=1)
    assert knows_what_is_staged(run, StagedRun(run_dir))
    moved = run.claim(None).model_copy(update={"host": "another", "generation": 3})
    run.store.put(GENERATION_KEY.of(3), pack_record(moved))
    assert job_file.exists() and not knows_what_is_staged(run, StagedRun(run_dir))
    run.store.put(GENERATION_KEY.of(3), b"damaged")
    assert not knows_what_is_staged(run, StagedRun(run_dir))
