"""Checkpoints of several ranks: committed once, by whoever is last, and by nobody before."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from recpoint.catalog.check.check import check
from recpoint.catalog.check.validate import validate
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.persist import persist
from recpoint.catalog.persist.ranks import parts_there
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run import stored_chunks
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.stored_chunks import not_there_of_parts
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.cancels import write_mark
from recpoint.catalog.store.store import open_store
from recpoint.errors import ObjectNotFound, RanksMissing
from recpoint.format.manifest import ChunkEntry
from recpoint.format.naming import (
    PART_KEY,
    AttemptName,
    ManifestName,
    ValidationLevel,
    attempt_prefix,
    row_chunk_key,
)
from tests.catalog_builder import Table, tables
from tests.interposed_store import InterposedStore
from tests.persisted import store_groups
from tests.rank_jobs import RankJobs


def two_hosts(run: Run, tmp_path: Path, trained: list[Table]) -> RankJobs:
    stagings = [tmp_path / f"host-{rank}" for rank in range(2)]
    return RankJobs(run, stagings, trained)


def require_restores(run: Run, trained: list[Table], *, ranks: int, step: int) -> None:
    target = MemoryTarget()
    restore(run, target)
    for table in trained:
        found = target.tables[table.name]
        assert torch.equal(found.values, table.values)
        for state, expected in zip(found.row_states, table.states, strict=True):
            assert state is not None and torch.equal(state, expected)
    assert target.state == {rank: {"rank": rank, "step": step} for rank in range(ranks)}
    report = check(run, level="full")
    assert report.ok and not report.findings


def test_whoever_is_last_commits_and_the_other_learns_of_it(run: Run, tmp_path: Path) -> None:
    trained = tables()
    jobs = two_hosts(run, tmp_path, trained)
    first, last = jobs.stage(10)
    with pytest.raises(RanksMissing, match="no part of rank 1 of 2") as caught:
        persist.persist_job(first)
    assert caught.value.ranks == (1,) and first.exists() and not run.manifest_names()
    assert persist.PersistJob.open(first).ranks_awaited() == (1,)
    done = persist.persist_job(last)
    assert done.result == "committed" and run.manifest(10, 1).ranks == 2
    assert persist.PersistJob.open(first).ranks_awaited() == ()
    told = persist.persist_job(first)
    assert told.result == "committed" and told.stored_bytes == done.stored_bytes
    assert told.rank_bytes + done.rank_bytes == done.stored_bytes
    assert not list(run.store.list("parts/"))
    require_restores(run, trained, ranks=2, step=10)


def test_a_chain_of_increments_over_rank_shards(run: Run, tmp_path: Path) -> None:
    trained = tables()
    jobs = RankJobs(
        run, [tmp_path / "a", tmp_path / "a", tmp_path / "b"], trained, [[25, 0, 15], [0, 20, 0]]
    )
    generator = torch.Generator().manual_seed(5)
    for step in (10, 20, 30):
        dirty = None
        if step > 10:
            dirty = [torch.randperm(t.rows, generator=generator)[:9].sort().values for t in trained]
            for table, ids in zip(trained, dirty, strict=True):
                table.train(ids, generator)
        paths = jobs.stage(step, dirty=dirty, slot=step // 10 % 2)
        for path in (paths[2], paths[0]):
            with pytest.raises(RanksMissing):
                persist.persist_job(path)
        for path in (paths[1], paths[0], paths[2]):
            assert persist.persist_job(path).result == "committed"
    assert run.manifest(30, 1).chain_length == 3
    require_restores(run, trained, ranks=3, step=30)


def test_both_are_last_at_once(run: Run, tmp_path: Path) -> None:
    for step in range(10, 60, 10):
        trained = tables(seed=step)
        jobs = two_hosts(run, tmp_path, trained)
        paths = jobs.stage(step)
        for path in paths:
            store_groups(persist.PersistJob.open(path))
        # The last writes its part only, as an agent does that is killed before it looks.
        with pytest.raises(RanksMissing):
            persist.PersistJob.open(paths[0]).commit()
        barrier = threading.Barrier(2)
        told: list[str] = []

        def finish(path: Path, barrier: threading.Barrier, told: list[str]) -> None:
            barrier.wait()
            while True:
                try:
                    told.append(persist.persist_job(path).result)
                except RanksMissing:
                    continue
                return

        threads = [threading.Thread(target=finish, args=(p, barrier, told)) for p in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert told == ["committed", "committed"]
        assert not parts_there(run, run.manifest(step, 1).ref)
        require_restores(run, trained, ranks=2, step=step)


def test_a_part_that_is_written_again_after_the_commit_does_not_stay(
    run: Run, tmp_path: Path
) -> None:
    """Whoever commits removes it, maybe before its own agent is told that it was written."""
    first, last = two_hosts(run, tmp_path, tables()).stage(10)
    with pytest.raises(RanksMissing):
        persist.persist_job(last)
    job = job_files.read_job(last)
    key = PART_KEY.of(10, 1, job.attempt, rank=1)
    part = run.store.get(key, max_bytes=1 << 20)
    assert persist.persist_job(first).result == "committed"
    assert not parts_there(run, job.ref)
    run.store.put(key, part)
    assert persist.persist_job(last).result == "committed"
    assert not parts_there(run, job.ref)


def test_what_is_waited_for_is_dropped_when_its_trainer_asks(run: Run, tmp_path: Path) -> None:
    jobs = two_hosts(run, tmp_path, tables())
    first, last = jobs.stage(10)
    with pytest.raises(RanksMissing):
        persist.persist_job(first)
    ref = job_files.read_job(first).ref
    write_mark(StagedRun.of_job(first), ref, 0)
    assert persist.persist_job(first).error_type == "CheckpointCancelled"
    assert not parts_there(run, ref)  # it is withdrawn: the other cannot commit it any more
    with pytest.raises(RanksMissing):
        persist.persist_job(last)
    write_mark(StagedRun.of_job(last), ref, 1)
    assert persist.persist_job(last).error_type == "CheckpointCancelled"
    assert not run.manifest_names()


def test_who_waits_learns_that_a_newer_trainer_has_taken_over(run: Run, tmp_path: Path) -> None:
    first, last = two_hosts(run, tmp_path, tables()).stage(10)
    with pytest.raises(RanksMissing):
        persist.persist_job(first)
    run.claim(None)
    assert persist.PersistJob.open(first).ranks_awaited() == ()
    assert persist.persist_job(first).error_type == "StaleWriter"
    assert persist.persist_job(last).error_type == "StaleWriter"


def test_a_restarted_agent_writes_no_chunk_again(run: Run, tmp_path: Path) -> None:
    first, _ = two_hosts(run, tmp_path, tables()).stage(10)
    with pytest.raises(RanksMissing):
        persist.persist_job(first)
    before = {info.key: info.modified_ms for info in run.store.list()}
    StagedRun(first.parent.parent).clean()  # as an agent does when it starts
    with pytest.raises(RanksMissing):
        persist.persist_job(first)
    assert {info.key: info.modified_ms for info in run.store.list()} == before


def test_a_part_whose_chunks_are_gone_is_withdrawn_and_both_are_written_again(
    run: Run, tmp_path: Path
) -> None:
    trained = tables()
    jobs = two_hosts(run, tmp_path, trained)
    first, last = jobs.stage(10)
    with pytest.raises(RanksMissing):
        persist.persist_job(first)
    run.store.delete(min(info.key for info in run.store.list("chunks/")))
    with pytest.raises(RanksMissing, match="no part of rank 0 of 2"):
        persist.persist_job(last)
    assert not run.manifest_names() and list(parts_there(run, jobs.ref(10))) == [1]
    assert persist.PersistJob.open(first).ranks_awaited() == ()  # its agent goes on with it at once
    with pytest.raises(ObjectNotFound):
        persist.persist_job(first)  # its spool says that they are uploaded
    assert list(parts_there(run, jobs.ref(10))) == [1]
    assert persist.persist_job(first).result == "committed"
    require_restores(run, trained, ranks=2, step=10)


def test_a_step_that_is_staged_again_is_not_mixed_with_the_first_snapshot_of_it(
    run: Run, tmp_path: Path
) -> None:
    jobs = two_hosts(run, tmp_path, tables())
    (first,) = jobs.stage(10, only=[0])
    with pytest.raises(RanksMissing):
        persist.persist_job(first)
    first.unlink()
    (again,) = two_hosts(run, tmp_path, tables(seed=1)).stage(10, only=[0])
    outcome = persist.persist_job(again)
    assert outcome.error_type == "CommitConflict"
    assert PART_KEY.of(10, 1, jobs.attempt(10), rank=0) in outcome.error


def test_a_sweep_takes_what_a_dead_rank_left_once_nobody_can_commit_it(
    run: Run, tmp_path: Path
) -> None:
    jobs = two_hosts(run, tmp_path, tables())
    (first,) = jobs.stage(10, only=[0])
    with pytest.raises(RanksMissing):
        persist.persist_job(first)
    report = check(run)
    assert report.ok
    ((severity, key, text),) = report.findings
    assert (severity, key) == ("info", f"parts/{10:012d}-{1:08d}-{jobs.attempt(10)}/")
    assert "the part of rank 0 and" in text and "not committed" in text

    # It can still be committed, by an agent that nobody here knows of.
    plan = plan_sweep(run, grace_seconds=0)
    assert not plan.objects and "may still commit it" in plan.kept[0].reason
    run.claim(None)
    plan = plan_sweep(run, grace_seconds=0)
    assert plan.objects[0].key == PART_KEY.of(10, 1, jobs.attempt(10), rank=0)  # before its chunks
    execute(run, plan)
    assert not list(run.store.list("parts/")) and not list(run.store.list("chunks/"))


def test_a_sweep_takes_the_parts_that_a_killed_committer_left(run: Run, tmp_path: Path) -> None:
    trained = tables()
    jobs = two_hosts(run, tmp_path, trained)
    first, last = jobs.stage(10)
    with pytest.raises(RanksMissing):
        persist.persist_job(first)
    key = PART_KEY.of(10, 1, jobs.attempt(10), rank=0)
    part = run.store.get(key, max_bytes=1 << 20)
    assert persist.persist_job(last).result == persist.persist_job(first).result == "committed"
    run.store.put(key, part)
    assert "of a committed step" in check(run).findings[0].text
    plan = plan_sweep(run, grace_seconds=0)
    assert [swept.key for swept in plan.objects] == [key]
    assert len(execute(run, plan).removed) == 1
    require_restores(run, trained, ranks=2, step=10)


@pytest.mark.parametrize("level", ["sample", "full"])
def test_what_ranks_sampled_adds_up(run: Run, tmp_path: Path, level: ValidationLevel) -> None:
    trained = tables()
    jobs = two_hosts(run, tmp_path, trained)
    persist_all(jobs.stage(10, samples=5))
    dirty = [torch.tensor([1, 2, 25, 31]), torch.tensor([3])]  # of `users` one rank stores none
    for table, ids in zip(trained, dirty, strict=True):
        table.train(ids, torch.Generator().manual_seed(1))
    persist_all(jobs.stage(20, dirty=dirty, samples=5))
    found = validate(run, ManifestName(20, 1), level=level)
    assert (found.level, found.result, found.findings, found.notes) == (level, "passed", (), ())
    assert found.rows_compared > 0


def persist_all(paths: list[Path]) -> None:
    for path in paths[:-1]:
        with pytest.raises(RanksMissing):
            persist.persist_job(path)
    for path in reversed(paths):
        assert persist.persist_job(path).result == "committed"


def test_a_chain_of_several_ranks_is_consolidated_rank_by_rank(run: Run, tmp_path: Path) -> None:
    trained = tables(bits=4)
    jobs = two_hosts(run, tmp_path, trained)
    persist_all(jobs.stage(10))
    dirty = [torch.tensor([1, 2, 25, 31]), torch.tensor([3, 15])]
    for table, ids in zip(trained, dirty, strict=True):
        table.train(ids, torch.Generator().manual_seed(1))
    persist_all(jobs.stage(20, dirty=dirty))
    before = MemoryTarget()
    restore(run, before)
    plan = plan_consolidation(run, ManifestName(20, 1))
    assert consolidate(run, plan).outcome == "created"
    (merged,) = [one for ones in run.consolidated().values() for one in ones]
    manifest = run.read_manifest(merged)
    assert manifest.ranks == 2 and {entry.rank for entry in manifest.chunks} == {0, 1}
    assert [(one.table, one.rank) for one in manifest.quantizers] == [(0, 0), (0, 1)]
    after = MemoryTarget()
    restore(run, after)
    for name, found in before.tables.items():
        assert torch.equal(after.tables[name].values, found.values)
    assert after.state == before.state
    assert check(run, level="full").ok


def test_an_overview_names_the_ranks_that_are_waited_for(run: Run, tmp_path: Path) -> None:
    trained = tables()
    jobs = RankJobs(run, [tmp_path / f"host-{rank}" for rank in range(3)], trained)
    first, *others = jobs.stage(10)
    with pytest.raises(RanksMissing):
        persist.persist_job(first)
    watch = RunWatch(run)
    assert not watch.refresh().failures  # others may take a minute longer
    part = tmp_path / "run" / PART_KEY.of(10, 1, jobs.attempt(10), rank=0)
    os.utime(part, (time.time() - 61, time.time() - 61))
    (failure,) = watch.refresh().failures
    assert (failure.kind, failure.subject) == ("ranks", "step 10 waits for ranks 1, 2 of 3")
    assert failure.cause.startswith("rank 0 stored")
    persist_all(others)
    assert not watch.refresh().failures


def test_a_rank_looks_for_its_own_chunks_and_the_last_one_for_all(run: Run, tmp_path: Path) -> None:
    first, last = two_hosts(run, tmp_path, tables()).stage(10)
    prefixes = []
    for job in (first, last):
        store = InterposedStore(run.store)
        if job is first:
            with pytest.raises(RanksMissing):
                persist.persist_job(job, store=store)
        else:
            assert persist.persist_job(job, store=store).result == "committed"
        chunks = [key for call, key in store.calls if call == "list" and key.startswith("chunks/")]
        prefixes.append([key.rpartition("/")[2] for key in chunks])
    assert prefixes == [["r00000-"], ["r00001-", ""]]


def test_a_chunk_that_goes_before_the_part_is_written_is_missed(run: Run, tmp_path: Path) -> None:
    first, last = two_hosts(run, tmp_path, tables()).stage(10)
    with pytest.raises(RanksMissing):
        persist.persist_job(first)
    lost: list[str] = []

    def lose_one(call: str, key: str) -> None:
        if call == "list" and key.endswith("/r00001-") and not lost:
            lost.append(next(info.key for info in run.store.list(key)))
            run.store.delete(lost[0])

    with pytest.raises(ObjectNotFound, match=r"1 uploaded chunks of .* missing"):
        persist.persist_job(last, store=InterposedStore(run.store, before=lose_one))
    assert lost and [*parts_there(run, persist.PersistJob.open(last).job.ref)] == [0]
    assert persist.persist_job(last).result == "committed"


def test_parts_are_read_at_once_and_chunks_are_listed_by_ranges_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An attempt of very many chunks, some of them lost."""
    monkeypatch.setattr(stored_chunks, "_LISTED_IN_TURN", 10)
    parts, attempt = 161, AttemptName(10, 1, 32 * "a")
    keys = [row_chunk_key(*attempt, rank=rank, table=0, number=0) for rank in range(parts)]
    entries = [entry_of(key, rank) for rank, key in enumerate(keys)]
    inner = open_store(f"memory://run-{os.urandom(8).hex()}")
    lost = {keys[0], keys[57], keys[160]}
    for key in {*keys} - lost:
        inner.put(key, bytes(100))
    inner.put(keys[57], bytes(99))
    inner.put(row_chunk_key(*attempt, rank=parts, table=0, number=0), bytes(100))
    store = InterposedStore(inner)
    absent = not_there_of_parts(store, attempt, entries, parts=parts)
    assert {entry.key for entry in absent} == lost
    listed = [key.rpartition("/")[2] for _, key in store.calls]
    assert sorted(listed) == [f"r{ten:04d}" for ten in range(17)]
    store.calls.clear()
    assert not_there_of_parts(store, attempt, entries[1:11], parts=parts) == []
    assert [key for _, key in store.calls] == [attempt_prefix(*attempt)]


def entry_of(key: str, rank: int) -> ChunkEntry:
    return ChunkEntry(
        key=key,
        bytes=100,
        crc32c=0,
        content="rows",
        rank=rank,
        table=0,
        row_count=1,
        first_row=0,
        last_row=0,
        bits=32,
        scheme="exact",
    )


def test_the_last_rank_reads_parts_at_once(run: Run, tmp_path: Path) -> None:
    hosts = [tmp_path / f"host-{rank}" for rank in range(4)]
    *others, last = RankJobs(run, hosts, tables()).stage(10)
    for job in others:
        with pytest.raises(RanksMissing):
            persist.persist_job(job)
    at_once = threading.Barrier(3)

    def meet(call: str, key: str) -> None:
        if call == "get" and key.startswith("parts/") and not key.endswith("r00003.json"):
            at_once.wait(60)  # breaks if the parts of the others are read one after another

    store = InterposedStore(run.store, before=meet)
    assert persist.persist_job(last, store=store).result == "committed"
    assert run.manifest(10, 1).ranks == 4
