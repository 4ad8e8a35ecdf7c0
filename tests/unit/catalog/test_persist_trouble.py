"""A persist that is killed, refused, too late or handed damage: no job is lost or done twice."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch

from recpoint.catalog.check.check import check
from recpoint.catalog.persist import persist, plan
from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.errors import (
    DigestMismatch,
    NothingToRestore,
    ObjectNotFound,
    StoreAccessDenied,
    StoreThrottled,
    StoreUnavailable,
)
from recpoint.testing.faults import Fault, FaultStore
from tests.catalog_builder import new_run, tables
from tests.job_builder import Links, stage
from tests.persist_process import persist_in_process
from tests.persisted import objects, restored


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and groups out of small jobs."""
    monkeypatch.setattr(plan, "CHUNK_BYTES", 400)
    monkeypatch.setattr(plan, "GROUP_BYTES", 900)


def test_killed_at_any_step_a_second_try_ends_with_the_same_bytes(
    run: Run, tmp_path: Path, small_chunks: None
) -> None:
    trained = tables(bits=4)
    trained[0].quantizer, trained[0].state_bits = "auto", 16
    trained[0].values[5, 0] = float("nan")
    trained[0].values[6] = 0.1
    path = stage(run, tmp_path / "staging", trained, step=1, generation=1, state=[1, 2.5])
    job = path.read_bytes()
    assert persist_in_process(path) == 0
    expected = objects(run)
    outcome = path.parent.parent / "outcomes" / path.name
    died = 0
    for number in itertools.count(1):
        for key in [info.key for info in run.store.list("chunks/")]:
            run.store.delete(key)
        run.store.delete("manifests/000000000001-00000001.json")
        outcome.unlink(missing_ok=True)
        path.write_bytes(job)
        exit_code = persist_in_process(path, die_at=number)
        if exit_code == 0:
            break
        assert exit_code == -9
        died += 1
        committed = list(run.store.list("manifests/"))
        if committed:
            assert check(run, level="full").ok
        StagedRun(path.parent.parent).clean()
        if path.exists() and not job_files.finish_answered(path):
            assert persist.persist_job(path).result == "committed"
        assert not path.exists()
        assert job_files.read_outcome(outcome).result == "committed"
        assert objects(run) == expected
        left = [name for name in os.listdir(outcome.parent) if name != outcome.name]
        assert not left
    assert died > 20


def test_an_attempt_that_is_committed_already_is_not_written_again(
    run: Run, tmp_path: Path
) -> None:
    path = stage(run, tmp_path / "staging", tables(), step=1, generation=1)
    job = path.read_bytes()
    first = persist.persist_job(path)
    path.write_bytes(job)
    store = FaultStore(run.store)
    again = persist.persist_job(path, store=store)
    assert (again.result, again.stored_bytes) == ("committed", first.stored_bytes)
    assert not [call for call in store.calls if call[0] in ("put", "create")]


def test_a_commit_that_a_later_trainer_overtook_still_counts(run: Run, tmp_path: Path) -> None:
    path = stage(run, tmp_path / "staging", tables(), step=1, generation=1)
    job = path.read_bytes()
    persist.persist_job(path)
    path.write_bytes(job)
    run.claim(None)
    assert persist.persist_job(path).result == "committed"


def test_a_stale_job_is_rejected_before_anything_is_uploaded(run: Run, tmp_path: Path) -> None:
    path = stage(run, tmp_path / "staging", tables(), step=1, generation=1)
    run.claim(None)
    outcome = persist.persist_job(path)
    assert (outcome.result, outcome.error_type) == ("rejected", "StaleWriter")
    assert not path.exists() and not objects(run)


def test_an_increment_without_its_parent_is_rejected(run: Run, tmp_path: Path) -> None:
    links = Links()
    stage(run, tmp_path / "staging", tables(), step=1, generation=1, links=links).unlink()
    dirty = [torch.tensor([1]), torch.tensor([2])]
    path = stage(
        run, tmp_path / "staging", tables(), step=2, generation=1, links=links, dirty=dirty
    )
    outcome = persist.persist_job(path)
    assert (outcome.result, outcome.error_type) == ("rejected", "MissingLink")
    assert not path.exists()


def test_a_second_attempt_of_a_step_is_rejected(run: Run, tmp_path: Path) -> None:
    persist.persist_job(stage(run, tmp_path / "a", tables(), step=1, generation=1))
    outcome = persist.persist_job(stage(run, tmp_path / "b", tables(), step=1, generation=1))
    assert (outcome.result, outcome.error_type) == ("rejected", "CommitConflict")


def test_a_full_that_lacks_rows_is_rejected(run: Run, tmp_path: Path) -> None:
    dirty = [torch.tensor([1]), torch.tensor([2])]
    path = stage(run, tmp_path / "s", tables(), step=1, generation=1, dirty=dirty)
    outcome = persist.persist_job(path)
    assert (outcome.result, outcome.error_type) == ("rejected", "MalformedObject")
    assert not list(run.store.list("manifests/"))


@pytest.mark.parametrize("name", ["t0.values", "t0.state.1", "t1.ids", "tree", "tensor.0"])
def test_a_flipped_bit_in_the_slot_is_never_committed(run: Run, tmp_path: Path, name: str) -> None:
    dirty = [None, torch.arange(20)]
    path = stage(
        run,
        tmp_path / "s",
        tables(),
        step=1,
        generation=1,
        dirty=dirty,
        state={"w": torch.ones(5)},
    )
    job = job_files.read_job(path)
    slot = path.parent.parent / "slots" / job.slot
    data = bytearray(slot.read_bytes())
    data[job.segment(name).offset + 1] ^= 4
    slot.write_bytes(data)
    outcome = persist.persist_job(path)
    assert outcome.result == "rejected"
    assert outcome.error_type in ("DigestMismatch", "MalformedObject")
    assert not list(run.store.list("manifests/"))


def test_a_spool_that_changed_is_noticed_before_it_is_uploaded(run: Run, tmp_path: Path) -> None:
    path = stage(run, tmp_path / "s", tables(bits=4), step=1, generation=1)
    job = persist.PersistJob.open(path)
    spool = Path(job.quantize(job.groups[0])).with_suffix(".bin")
    job.encode(job.groups[0])
    data = bytearray(spool.read_bytes())
    data[3] ^= 1
    spool.write_bytes(data)
    with pytest.raises(DigestMismatch, match="put|chunks|crc32c"):
        job.upload(job.groups[0])


@pytest.mark.parametrize("error", [StoreUnavailable, StoreThrottled, StoreAccessDenied])
@pytest.mark.parametrize("writes", [0, 2, 100])
def test_a_store_that_refuses_defers_the_job_and_the_next_try_goes_on(
    run: Run,
    tmp_path: Path,
    error: type[StoreUnavailable | StoreThrottled | StoreAccessDenied],
    writes: int,
    small_chunks: None,
) -> None:
    trained = tables(bits=3)
    path = stage(run, tmp_path / "s", trained, step=1, generation=1)
    chunks = sum(len(group.blocks) for group in persist.PersistJob.open(path).groups)
    faults = [Fault.stop_after(min(writes, chunks), error=error)]
    with pytest.raises(error):
        persist.persist_job(path, store=FaultStore(run.store, faults))
    assert path.exists() and not (path.parent.parent / "outcomes" / path.name).exists()
    store = FaultStore(run.store)
    assert persist.persist_job(path, store=store).result == "committed"
    # What was durable when the store went away is not sent again.
    again = len([call for call in store.calls if call[0] == "put"])
    assert again <= chunks - min(writes, chunks)
    assert restored(run).manifest is not None


@pytest.mark.parametrize("damage", ["all swept", "one truncated"])
def test_chunks_that_went_after_they_were_uploaded_are_written_again_before_the_commit(
    run: Run, tmp_path: Path, damage: str, small_chunks: None
) -> None:
    trained = tables(bits=3)
    path = stage(run, tmp_path / "s", trained, step=1, generation=1)
    with pytest.raises(StoreUnavailable):
        persist.persist_job(path, store=FaultStore(run.store, [Fault.stop_after(3)]))
    uploaded = objects(run)
    if damage == "all swept":
        # From a host that knows of no staged job, after a grace that the outage outlasted.
        assert len(execute(run, plan_sweep(run, grace_seconds=0)).removed) == len(uploaded) == 3
    else:
        first = min(uploaded)
        run.store.put(first, uploaded[first][:-1])
    with pytest.raises(ObjectNotFound, match="next try writes them again"):
        persist.persist_job(path)
    assert path.exists() and run.manifest_names() == []
    assert persist.persist_job(path).result == "committed"
    assert check(run, level="full").ok and uploaded.items() <= objects(run).items()


def test_a_lost_reply_of_the_commit_is_read_back(run: Run, tmp_path: Path) -> None:
    path = stage(run, tmp_path / "s", tables(), step=1, generation=1)
    store = FaultStore(run.store, [Fault.lost_reply(key_contains="manifests/")])
    assert persist.persist_job(path, store=store).result == "committed"


def test_a_run_that_is_not_there_defers_the_job(run: Run, tmp_path: Path) -> None:
    path = stage(run, tmp_path / "s", tables(), step=1, generation=1)
    (tmp_path / "run").rename(tmp_path / "unmounted")
    with pytest.raises(NothingToRestore):
        persist.persist_job(path)
    assert path.exists()
    (tmp_path / "unmounted").rename(tmp_path / "run")
    assert persist.persist_job(path).result == "committed"


def test_another_run_at_the_same_url_rejects_the_job(run: Run, tmp_path: Path) -> None:
    path = stage(run, tmp_path / "s", tables(), step=1, generation=1)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    new_run(tmp_path / "run").claim(None)
    outcome = persist.persist_job(path)
    assert (outcome.result, outcome.error_type) == ("rejected", "ForeignObject")
