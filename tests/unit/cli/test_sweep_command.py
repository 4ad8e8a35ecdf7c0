"""sweep and what is staged here: finished, rejected, left to an agent, or discarded by name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.persist import persist
from recpoint.catalog.persist.persist import PersistJob, reject_job
from recpoint.catalog.retention.discard_staged import discard_staged
from recpoint.catalog.run.ends import tell_ended
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files, locks
from recpoint.catalog.staging.agent_lock import DRAIN, AgentLock, sweep_of
from recpoint.catalog.staging.area import StagedRun
from recpoint.errors import CheckpointCancelled, NothingToRestore, StagingError
from tests.agent_process import AgentProcess
from tests.catalog_builder import new_run, tables
from tests.job_builder import rewrite, stage, stage_chain
from tests.polling import until
from tests.unit.cli.conftest import Invoke


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = new_run(tmp_path / "run")
    run.claim(None)
    return run


@pytest.fixture
def staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RECPOINT_STAGING", str(tmp_path / "staging"))
    return tmp_path / "staging"


def fates(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(told["job"], told["fate"]) for told in document["staged"]]


def files(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if path.is_file()}


def test_sweep_finishes_what_is_staged_where_no_agent_is(
    recpoint: Invoke, run: Run, staging: Path
) -> None:
    first, second, third = stage_chain(run, staging, count=3)
    bad = stage(run, staging, tables(), step=9, generation=1, slot=9)
    bad.write_bytes(b"\xff" * 100)
    before = files(Path(run.url)) | files(staging)

    planned = recpoint("sweep", run.url, "--dry-run", "--json")
    assert planned.code == 0
    assert fates(planned.json) == [
        *((path.stem, "would finish") for path in (first, second, third)),
        (bad.stem, "would be rejected"),
    ]
    assert files(Path(run.url)) | files(staging) == before
    shown = recpoint("sweep", run.url, "--dry-run").stdout
    assert "staged here: 4 jobs" in shown and "would finish" in shown

    done = recpoint("sweep", run.url, "--json")
    assert done.code == 0
    assert [fate for _, fate in fates(done.json)] == ["committed"] * 3 + ["rejected"]
    assert "nothing: the job is rejected" in done.json["staged"][-1]["why"]
    assert [name.step for name in run.live_line()] == [3, 2, 1]
    assert check(run, level="full").ok
    assert not list((bad.parent).iterdir())
    assert recpoint("sweep", run.url, "--json").json["staged"] == []


def test_a_dry_run_tells_what_a_sweep_does(recpoint: Invoke, run: Run, staging: Path) -> None:
    """Of jobs that can never be committed, and of those behind what only has to wait."""
    superseded = stage(run, staging, tables(), step=1, generation=1)
    run.claim(None)
    (full, increment) = (
        stage(run, staging, tables(), step=step, generation=2, slot=step) for step in (2, 3)
    )
    orphan = job_files.read_job(full).ref.model_copy(update={"attempt": "0" * 32})
    rewrite(increment, kind="increment", parent=orphan, base=orphan, chain_length=2)
    lost = stage(run, staging, tables(), step=4, generation=2, slot=4)
    (lost.parent.parent / "slots" / "r00000-4.bin").unlink()
    half = stage(
        run, staging, tables(), step=5, generation=2, slot=5, ranks=2, shards=[(0, 3), (0, 3)]
    )

    def told(*options: str) -> list[tuple[str, str, str]]:
        document = recpoint("sweep", run.url, *options, "--json").json
        return [(one["job"], one["fate"], one["why"]) for one in document["staged"]]

    foreseen = told("--dry-run")
    assert [one[:2] for one in foreseen] == [
        (superseded.stem, "would be rejected"),
        (full.stem, "would finish"),
        (increment.stem, "would be rejected"),
        (lost.stem, "would be rejected"),
        (half.stem, "stays"),
    ]
    assert "would still be missing" in foreseen[-1][2] and "rank 1" in foreseen[-1][2]
    done = {"would finish": "committed", "would be rejected": "rejected", "stays": "stays"}
    assert [one[:2] for one in told()] == [(job, done[fate]) for job, fate, _ in foreseen]
    assert [one[:2] for one in told()] == [(half.stem, "stays")]


def test_a_job_that_has_to_wait_stays_and_keeps_no_sweep(
    recpoint: Invoke, run: Run, staging: Path
) -> None:
    first, second = stage_chain(run, staging, count=2)
    shutil.rmtree(Path(run.url) / "chunks", ignore_errors=True)
    (Path(run.url) / "chunks").write_text("in the way")  # what is written below it fails
    half = Path(run.url) / f".tmp-{'0' * 32}"
    half.write_bytes(b"half")
    os.utime(half, (1, 1))
    document = recpoint("sweep", run.url, "--json").json
    assert fates(document) == [(first.stem, "stays"), (second.stem, "stays")]
    assert f"{first.stem} is before it" == document["staged"][1]["why"]
    assert half.name in document["removed"] and first.exists() and second.exists()


def test_jobs_are_left_to_the_agent_that_is_at_work(
    recpoint: Invoke, run: Run, staging: Path
) -> None:
    paths = stage_chain(run, staging, count=2)
    with AgentLock(staging):
        for options in ([], ["--dry-run"]):
            ended = recpoint("sweep", run.url, *options, "--json")
            assert ended.code == 0
            assert fates(ended.json) == [(path.stem, "waits for its agent") for path in paths]
        assert "an agent serves this staging area" in recpoint("sweep", run.url).stdout
        # It rejects a job that nobody can read. Until then nobody knows what that needs.
        paths[0].write_bytes(b"\xff")
        ended = recpoint("sweep", run.url, "--json")
        assert ended.code == 4
        assert ended.json["next_step"].startswith("try again in a moment if an agent runs")
        assert f"recpoint sweep {run.url}" in ended.json["next_step"]
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize("who", ["drain", "sweep"])
def test_jobs_are_not_left_to_who_does_not_come_to_them(
    recpoint: Invoke, run: Run, staging: Path, who: str
) -> None:
    paths = stage_chain(run, staging, count=2)
    other = DRAIN if who == "drain" else sweep_of(StagedRun.of(staging, "/runs/other"))
    with AgentLock(staging, other):
        for options in ([], ["--dry-run"]):
            ended = recpoint("sweep", run.url, *options, "--json")
            assert ended.code == 0
            assert fates(ended.json) == [(path.stem, "stays") for path in paths]
            (why,) = {told["why"] for told in ended.json["staged"]}
            assert why == f"{other} is at work here: run this again after it"
    ended = recpoint("sweep", run.url, "--json")
    assert fates(ended.json) == [(path.stem, "committed") for path in paths]


def test_sweep_gives_back_the_slots_of_a_training_that_ended(
    recpoint: Invoke, run: Run, staging: Path
) -> None:
    (job,) = stage_chain(run, staging, count=1)
    slot = job.parent.parent / "slots" / "r00000-1.bin"
    size = slot.stat().st_size
    assert recpoint("sweep", run.url, "--dry-run", "--json").json["slots"] == []
    tell_ended(run, 1, step=1, reason="finished")
    (planned,) = recpoint("sweep", run.url, "--dry-run", "--json").json["slots"]
    assert planned == {"slot": slot.name, "size_bytes": size, "reason": "training has ended"}
    assert slot.exists()
    shown = recpoint("sweep", run.url).stdout
    assert "removed 1 slot" in shown and slot.name in shown
    assert not slot.exists() and not job.exists()
    assert recpoint("sweep", run.url, "--json").json["slots"] == []


# --- a run that is gone ------------------------------------------------------------------------


def test_what_is_staged_for_a_run_that_is_gone_is_discarded_by_name(
    recpoint: Invoke, run: Run, staging: Path
) -> None:
    first, second = stage_chain(run, staging, count=2)
    second.write_bytes(b"\xff")
    assert recpoint("sweep", run.url, "--discard-staged", "--json").code == 2  # it is there
    shutil.rmtree(run.url)

    ended = recpoint("sweep", run.url, "--json")
    assert ended.code == 1 and ended.json["error"] == "NothingToRestore"
    assert "2 jobs staged for it" in ended.json["found"]
    assert f"recpoint sweep {run.url} --discard-staged --dry-run" in ended.json["next_step"]

    planned = recpoint("sweep", run.url, "--discard-staged", "--dry-run", "--json").json
    assert planned["dry_run"] and first.exists() and second.exists()
    (lost, unknown) = planned["discarded"]
    assert (lost["job"], lost["kind"], lost["step"]) == (first.stem, "full", 1)
    assert lost["rows"] == sum(table.rows for table in tables())
    slots = first.parent.parent / "slots"
    assert lost["bytes"] == (slots / "r00000-1.bin").stat().st_size
    assert {slot["slot"] for slot in planned["slots"]} == {"r00000-1.bin", "r00000-2.bin"}
    assert (unknown["job"], unknown["kind"]) == (second.stem, "")
    shown = recpoint("sweep", run.url, "--discard-staged").stdout
    assert "discarded 2 jobs" in shown and "full of step 1" in shown
    assert not first.exists() and not second.exists() and not list(slots.iterdir())
    answer = job_files.read_outcome(first.parent.parent / "outcomes" / first.name)
    assert (answer.result, answer.error_type) == ("rejected", "CheckpointCancelled")
    again = recpoint("sweep", run.url, "--discard-staged", "--json")
    assert again.code == 0 and again.json["discarded"] == []


def test_an_agent_that_tries_for_ever_names_the_way_out_and_discards(
    recpoint: Invoke, run: Run, staging: Path, tmp_path: Path
) -> None:
    (job,) = stage_chain(run, staging, count=1)
    shutil.rmtree(run.url)
    with AgentProcess(staging, tmp_path / "log") as agent:
        until(lambda: agent.logged("stays staged") >= 1)
        assert agent.logged(f"recpoint sweep {run.url} --discard-staged")
        ended = recpoint("sweep", run.url, "--discard-staged", "--json")
        assert ended.code == 0 and [one["job"] for one in ended.json["discarded"]] == [job.stem]
        assert not job.exists()
    assert not list((job.parent.parent / "cancels").iterdir())


def test_a_discard_is_refused_at_once_beside_a_sweep_of_another_run(
    recpoint: Invoke, run: Run, staging: Path
) -> None:
    (job,) = stage_chain(run, staging, count=1)
    shutil.rmtree(run.url)
    with AgentLock(staging, sweep_of(StagedRun.of(staging, "/runs/other"))):
        ended = recpoint("sweep", run.url, "--discard-staged", "--json")
    assert ended.code == 2 and "a sweep of other-" in ended.json["found"]
    assert ended.json["next_step"] == "it ends by itself: run this again after it"
    assert job.exists() and not (job.parent.parent / "cancels").exists()
    assert recpoint("sweep", run.url, "--discard-staged", "--json").code == 0
    assert not job.exists()


@pytest.mark.parametrize("dropped", [4, 2])
def test_a_discard_waits_as_long_as_the_agent_drops_jobs(
    run: Run, staging: Path, monkeypatch: pytest.MonkeyPatch, dropped: int
) -> None:
    """Each takes it twenty seconds, which pass while they are waited for."""
    paths = stage_chain(run, staging, count=4)
    run_dir = paths[0].parent.parent
    passed, to_drop = [0.0], paths[:dropped]

    def wait(seconds: float) -> None:
        passed[0] += 20.0
        if to_drop:
            with pytest.raises(CheckpointCancelled) as cancelled:
                PersistJob.open(to_drop[0]).raise_if_cancelled()
            reject_job(to_drop.pop(0), cancelled.value)

    shutil.rmtree(run.url)
    clock = SimpleNamespace(monotonic=lambda: passed[0], sleep=wait)
    monkeypatch.setattr("recpoint.catalog.retention.discard_staged.time", clock)
    with AgentLock(staging):
        if dropped == len(paths):
            assert [loss.step for loss in discard_staged(StagedRun(run_dir))] == [1, 2, 3, 4]
            assert not list((run_dir / "cancels").iterdir())
        else:
            with pytest.raises(StagingError, match="2 jobs that were to be dropped"):
                discard_staged(StagedRun(run_dir))
    assert StagedRun(run_dir).staged_jobs() == paths[dropped:]


def test_nothing_is_discarded_of_a_run_that_has_only_lost_its_record(
    recpoint: Invoke, run: Run, staging: Path
) -> None:
    (job,) = stage_chain(run, staging, count=1)
    (Path(run.url) / "run.json").unlink()
    for options in ([], ["--dry-run"], ["--discard-staged"], ["--discard-staged", "--dry-run"]):
        ended = recpoint("sweep", run.url, *options, "--json")
        assert ended.code == 1 and "bring-back" in ended.json["next_step"]
    with pytest.raises(NothingToRestore, match=r"bring-back") as refused:
        persist.persist_job(job)
    assert "--discard-staged" not in str(refused.value)
    assert job.exists()


def test_nothing_is_discarded_beside_a_trainer(recpoint: Invoke, run: Run, staging: Path) -> None:
    (job,) = stage_chain(run, staging, count=1)
    shutil.rmtree(run.url)
    lock = locks.acquire(
        StagedRun(job.parent.parent).trainer_lock_path(), expected="", next_step=""
    )
    try:
        ended = recpoint("sweep", run.url, "--discard-staged", "--json")
    finally:
        locks.release(lock)
    assert ended.code == 2 and "a trainer of the run at work" in json.dumps(ended.json)
    assert job.exists()
