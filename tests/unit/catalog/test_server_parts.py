"""Checkpoints of one rank and embedding servers, which store the rows that they hold themselves."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from recpoint.catalog.check.check import check
from recpoint.catalog.check.validate import validate
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.persist import persist
from recpoint.catalog.retention.finish_staged import foresee_staged
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.job import open_slot
from recpoint.errors import FormatError, MalformedObject, RanksMissing
from recpoint.format.manifest import CacheUse, Manifest
from recpoint.format.naming import PART_KEY, ManifestName
from tests.catalog_builder import Table, tables
from tests.consolidation import chain_of, merge, require_same, restored
from tests.job_builder import rewrite
from tests.rank_jobs import RankJobs, ServerJobs

SERVERS = 3
CACHE = CacheUse(
    hits=90,
    misses=10,
    fetched_rows=10,
    fetched_bytes=400,
    written_rows=4,
    written_bytes=160,
    wait_us=70,
    window=3,
)


@pytest.fixture
def trained() -> list[Table]:
    """A table on the servers, stored with 4 bits, and one that the rank holds."""
    return tables(bits=4)


@pytest.fixture
def jobs(run: Run, tmp_path: Path, trained: list[Table]) -> ServerJobs:
    stagings = [tmp_path / "trainer", *(tmp_path / f"server-{n}" for n in range(SERVERS))]
    return ServerJobs(run, stagings, trained)


def persist_all(run: Run, paths: list[Path], step: int) -> Manifest:
    """The last one commits; then the others are told."""
    for path in paths[:-1]:
        with pytest.raises(RanksMissing):
            persist.persist_job(path)
        assert step not in [name.step for name in run.manifest_names()]
    for path in reversed(paths):
        assert persist.persist_job(path).result == "committed"
    assert not list(run.store.list("parts/"))
    return run.manifest(step, 1)


def train(trained: list[Table], ids: list[int]) -> list[torch.Tensor]:
    """Change rows of the first table, and one of the second; return their ids."""
    dirty = [torch.tensor(ids), torch.tensor([3])]
    for table, rows in zip(trained, dirty, strict=True):
        table.train(rows, torch.Generator().manual_seed(len(ids)))
    return dirty


def test_a_full_and_increments_of_a_rank_and_its_servers(
    run: Run, jobs: ServerJobs, trained: list[Table]
) -> None:
    trained[0].bits = None
    full = persist_all(run, jobs.stage(10, samples=5, cache=CACHE), 10)
    assert (full.ranks, full.servers, full.parts, full.cache) == (1, SERVERS, 4, CACHE)
    assert {chunk.rank for chunk in full.chunks if chunk.table == 0} == {1, 2, 3}
    assert {chunk.rank for chunk in full.chunks if chunk.content == "state"} == {0}
    assert full.dirty_rows == sum(table.rows for table in trained)

    dirty = train(trained, [0, 3, 9, 31])  # of servers 0 and 1: server 2 stores nothing
    newest = persist_all(run, jobs.stage(20, dirty=dirty, samples=5, slot=1), 20)
    assert newest.cache is None and newest.dirty_rows == 5
    assert {chunk.rank for chunk in newest.chunks if chunk.table == 0} == {1, 2}

    target, _ = restored(run, newest)
    for table in trained:
        found = target.tables[table.name]
        assert torch.equal(found.values, table.values)
        for state, expected in zip(found.row_states, table.states, strict=True):
            assert state is not None and torch.equal(state, expected)
    assert target.state == {0: {"step": 20}}
    report = check(run, level="full")
    assert report.ok and not report.findings
    for step in (10, 20):
        proven = validate(run, ManifestName(step, 1), level="full")
        assert (proven.level, proven.result) == ("full", "passed")
        assert (proven.findings, proven.notes) == ((), ())
        # Both the rank and the servers have sampled rows of the servers' table.
        assert proven.rows_compared > 15


def test_a_consolidation_keeps_the_parts_of_its_sources(
    run: Run, jobs: ServerJobs, trained: list[Table]
) -> None:
    persist_all(run, jobs.stage(10, samples=5), 10)
    for step, ids in ((20, [0, 1, 2, 35]), (30, [1, 4])):
        newest = persist_all(run, jobs.stage(step, dirty=train(trained, ids), samples=5), step)
    before, _ = restored(run, newest)
    assert merge(run, newest).outcome == "created"
    (merged,) = [one for ones in run.consolidated().values() for one in ones]
    manifest = run.read_manifest(merged)
    assert (manifest.ranks, manifest.servers) == (1, SERVERS)
    assert {chunk.rank for chunk in manifest.chunks if chunk.table == 0} == {1, 2, 3}
    assert len(chain_of(run, newest)) == 1
    require_same(before, restored(run, newest)[0])
    assert check(run, level="full").ok
    found = validate(run, ManifestName(30, 1), level="full")
    assert (found.level, found.result, found.findings) == ("full", "passed", ())


def test_servers_may_change_from_link_to_link(
    run: Run, tmp_path: Path, jobs: ServerJobs, trained: list[Table]
) -> None:
    persist_all(run, jobs.stage(10), 10)
    fewer = ServerJobs(run, jobs.stagings[:3], trained)
    fewer.links = jobs.links[:3]
    dirty = train(trained, [0, 1, 2, 3])
    newest = persist_all(run, fewer.stage(20, dirty=dirty, slot=1), 20)
    assert newest.servers == 2
    before, _ = restored(run, newest)
    merge(run, newest)
    (merged,) = [one for ones in run.consolidated().values() for one in ones]
    assert run.read_manifest(merged).servers == SERVERS  # those whose chunks it has
    require_same(before, restored(run, newest)[0])
    assert check(run, level="full").ok

    # No servers at all are a chain too.
    alone = RankJobs(run, [tmp_path / "trainer"], trained)
    alone._links[0] = jobs.links[0]
    (path,) = alone.stage(30, dirty=train(trained, [5, 6]))
    assert persist.persist_job(path).result == "committed"
    assert check(run, level="full").ok


def test_the_missing_part_of_a_server_is_named(run: Run, tmp_path: Path, jobs: ServerJobs) -> None:
    rank, first, second, third = jobs.stage(10)
    for path in (rank, third, first):
        with pytest.raises(RanksMissing) as caught:
            persist.persist_job(path)
    assert caught.value.ranks == (2,) and not run.manifest_names()
    assert caught.value.found == "no part of embedding server 2 of 1 rank and 3 embedding servers"
    assert persist.PersistJob.open(first).ranks_awaited() == (2,)
    (fate,) = foresee_staged(run, StagedRun.of_job(rank)).jobs
    assert fate.why == "its part would be stored; embedding server 2 would still be missing"

    texts = [finding.text for finding in check(run).findings]
    assert any("the part of rank 0 and embedding servers 1, 3" in text for text in texts)
    for number in (0, 1, 3):
        part = tmp_path / "run" / PART_KEY.of(10, 1, f"{10:032x}", rank=number)
        os.utime(part, (time.time() - 61, time.time() - 61))
    (failure,) = RunWatch(run).refresh().failures
    expected = "step 10 waits for embedding server 2 of 1 rank and 3 embedding servers"
    assert failure.subject == expected
    assert failure.cause.startswith("rank 0 and embedding servers 1, 3 stored their parts")

    assert persist.persist_job(second).result == "committed"
    assert not RunWatch(run).refresh().failures


@pytest.mark.parametrize("kind", ["full", "increment"])
def test_a_row_that_two_servers_have_is_found(
    run: Run, jobs: ServerJobs, trained: list[Table], kind: str
) -> None:
    """The sum is right: server 0 has row 1, which is server 1's, and lacks its own row 3."""
    step, dirty, swapped = 10, None, jobs.rows_of(0).clone()
    swapped[1] = 1
    if kind == "increment":
        persist_all(run, jobs.stage(10), 10)
        step, dirty = 20, train(trained, [0, 1, 2])
    persist_all(run, jobs.stage(step, dirty=dirty, held={0: swapped.sort().values}), step)
    found = validate(run, ManifestName(step, 1), level="full")
    assert found.result == "failed"
    assert "a row of table 'items' in two chunks" in [one.found for one in found.findings]
    assert not check(run, level="full").ok
    with pytest.raises(FormatError, match="in two chunks"):
        restored(run, run.manifest(step, 1))


def test_a_row_that_a_server_has_not_as_the_rank_has_read_it(
    run: Run, tmp_path: Path, jobs: ServerJobs, trained: list[Table]
) -> None:
    """Both have sampled the row: only the server's sample agrees with what it has stored."""
    others = [table.clone() for table in trained]
    others[0].states[1][7] += 1
    stagings = [tmp_path / f"other-{n}" for n in range(SERVERS + 1)]
    paths = jobs.stage(10, samples=40)[:1]
    paths += ServerJobs(run, stagings, others).stage(10, samples=40)[1:]
    persist_all(run, paths, 10)
    (found,) = validate(run, ManifestName(10, 1), level="sample").findings
    assert (found.subject, found.row, found.what) == ("items", 7, "row state state1")


def test_servers_that_lack_a_row_are_not_joined(run: Run, jobs: ServerJobs) -> None:
    *others, last = jobs.stage(10, held={2: jobs.rows_of(2)[1:]})
    for path in others:
        with pytest.raises(RanksMissing):
            persist.persist_job(path)
    outcome = persist.persist_job(last)
    assert (outcome.result, outcome.error_type) == ("rejected", "MalformedObject")
    assert "embedding server 3: 39 rows of table 'items' in all parts; expected 40" in outcome.error
    assert not run.manifest_names()


def test_ids_of_scattered_rows_are_of_the_whole_table(run: Run, jobs: ServerJobs) -> None:
    """Server 2 holds 13 rows, and row 38 is one of them; no row 40 is there."""
    path = jobs.stage(10)[-1]
    job = job_files.read_job(path)
    assert job.tables[0].shard_rows == 13 and job.tables[0].id_bound == 40
    spec = job.tables[0].spec.model_copy(update={"rows": 38})
    table = job.tables[0].model_copy(update={"spec": spec})
    rewrite(path, tables=(table, *job.tables[1:]))
    outcome = persist.persist_job(path)
    assert outcome.error_type == "MalformedObject" and "ascending ids below 38" in outcome.error


@pytest.mark.parametrize(("number", "name"), [(0, "tree"), (1, "t0.ids"), (1, "t0.values")])
def test_what_a_slot_has_to_have(jobs: ServerJobs, number: int, name: str) -> None:
    path = jobs.stage(10)[number]
    job = job_files.read_job(path)
    open_slot(path, job)
    rewrite(path, segments=tuple(one for one in job.segments if one.name != name))
    with pytest.raises(MalformedObject) as caught:
        open_slot(path, job_files.read_job(path))
    assert caught.value.found == f"no segment {name}"


def test_a_server_has_no_state(jobs: ServerJobs) -> None:
    """The rank's job, as if it were the first server's."""
    path = jobs.stage(10)[0]
    job = job_files.read_job(path)
    slot = StagedRun(path.parent.parent).slot_path(1, 0)
    (slot.parent / job.slot).rename(slot)
    served = job.model_copy(update={"rank": 1, "slot": slot.name})
    with pytest.raises(MalformedObject) as caught:
        open_slot(path, served)
    assert caught.value.found == "segment tree"
