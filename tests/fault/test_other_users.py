"""In a directory where everybody may write, another user gets neither the model nor a job stored.

The other user is a real one: what is theirs is made by processes that run as that user.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import cancels, job_files
from recpoint.catalog.staging.agent_lock import AgentLock, agent_lock_path, at_work
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.catalog.staging.job import open_slot
from recpoint.catalog.store.store import open_store
from recpoint.cli import app
from recpoint.errors import StagingError
from recpoint.flows.agent.agent import run_agent
from recpoint.trainer_plugin.snapshot.staging import StagingArea
from tests.catalog_builder import new_run, tables
from tests.job_builder import stage
from tests.other_user import area_of
from tests.polling import until
from tests.training_builder import Place, checkpointer, simple_training, train

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")

ANOTHER = 54_321
THEIRS = f"of user {ANOTHER}"


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory where everybody may write, as /dev/shm is, and which everybody can reach."""
    directory = Path(tempfile.mkdtemp(prefix="recpoint-public-"))
    directory.chmod(0o1777)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = new_run(tmp_path / "run")
    run.claim(None)
    return run


def as_another(command: str, *paths: Path) -> str:
    """What a shell of the other user prints, and what it fails with."""
    done = subprocess.run(
        ["/bin/sh", "-c", command, "sh", *map(str, paths)],
        user=ANOTHER,
        group=ANOTHER,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout + done.stderr


def another_makes(*paths: Path) -> None:
    assert as_another('mkdir -p "$@" && chmod -R 777 "$1"', *paths) == ""


def bytes_below(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


# --- the trainer ----------------------------------------------------------------------------------


def test_nothing_is_staged_into_what_another_user_has_made_first(
    public: Path, tmp_path: Path
) -> None:
    place = Place(str(tmp_path / "run"), public)
    another_makes(place.run_directory, place.run_directory / "slots")
    training = simple_training()
    ckpt = checkpointer(training, place, drain_seconds=0)
    with pytest.raises(StagingError, match=THEIRS) as caught:
        ckpt.restore()
    assert caught.value.subject == str(place.run_directory)
    assert "RECPOINT_STAGING" in caught.value.next_step
    assert bytes_below(place.run_directory) == 0


@pytest.mark.parametrize("target", ["theirs", "ours"])
def test_a_run_directory_that_is_a_link_is_not_followed(
    public: Path, tmp_path: Path, target: str
) -> None:
    place = Place(str(tmp_path / "run"), public)
    if target == "theirs":
        elsewhere = public / "elsewhere"
        another_makes(elsewhere)
    else:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
    assert as_another('ln -s "$1" "$2"', elsewhere, place.run_directory) == ""
    with pytest.raises(StagingError, match="a symbolic link") as caught:
        StagingArea(public, place.run).create()
    assert caught.value.subject == str(place.run_directory)
    assert list(elsewhere.iterdir()) == []
    assert [run.path for run in staged_runs(public)] == []


def given_away(path: Path) -> None:
    os.chown(path, ANOTHER, -1)


def replaced_by_a_link(path: Path) -> None:
    path.rmdir()
    path.symlink_to(path.parent)


def opened_to_all(path: Path) -> None:
    path.chmod(0o777)
    path.parent.chmod(0o755)


@pytest.mark.parametrize("name", ["", "slots", "jobs", "outcomes"])
@pytest.mark.parametrize("change", [given_away, replaced_by_a_link, opened_to_all])
def test_each_directory_of_a_run_is_this_users_own(
    public: Path, name: str, change: Callable[[Path], None]
) -> None:
    area = StagingArea(public / "area", "/runs/own")
    area.create()
    area.create()
    path = area.staged_run.path / name
    if not name and change is replaced_by_a_link:
        shutil.rmtree(path)
        path.mkdir()
    change(path)
    with pytest.raises(StagingError) as caught:
        area.create()
    assert caught.value.subject == str(path)
    kind: dict[Callable[[Path], None], str] = {
        given_away: THEIRS,
        replaced_by_a_link: "a symbolic link",
        opened_to_all: "rwxrwxrwx",
    }
    assert kind[change] in caught.value.found


def test_modes_below_a_directory_that_nobody_else_may_enter_do_not_matter(tmp_path: Path) -> None:
    """As with a umask of 002, which earlier releases went by."""
    area = StagingArea(tmp_path / "area", "/runs/own")
    area.create()
    for name in ("slots", "jobs", "outcomes"):
        (area.staged_run.path / name).chmod(0o775)
    area.create()
    area.staged_run.path.chmod(0o755)
    with pytest.raises(StagingError, match="nobody else can write"):
        area.create()


def test_what_another_user_puts_in_the_place_of_slots_while_training_goes_on_is_not_written(
    public: Path, tmp_path: Path
) -> None:
    place = Place(str(tmp_path / "run"), public)
    training = simple_training()
    with checkpointer(training, place, close_seconds=0.2, interval_batches=100) as ckpt:
        ckpt.restore()
        train(training, ckpt, 1)
        assert ckpt.checkpoint()
        until(lambda: ckpt.stats.staged == 1)
        assert place.persist_all() == 1
        until(lambda: ckpt.stats.committed == 1)
        shutil.rmtree(place.run_directory)  # as what clears directories of temporary files does
        another_makes(place.run_directory, place.run_directory / "slots")
        train(training, ckpt, 2)
        assert not ckpt.checkpoint()
        assert ckpt.stats.failed == 1 and THEIRS in str(ckpt.stats.last_error)
        assert bytes_below(place.run_directory) == 0
        shutil.rmtree(place.run_directory)
        train(training, ckpt, 1)
        assert ckpt.checkpoint()
        until(lambda: ckpt.stats.staged == 2)
        assert place.persist_all() == 1
        target = MemoryTarget()
        assert restore(Run.open(open_store(place.run)), target).restored.step == 4
        assert torch.equal(target.tables["users"].values, training.model.users.weight)


# --- the staging area -----------------------------------------------------------------------------


def test_a_directory_of_root_where_everybody_may_write_is_a_staging_area(
    public: Path, tmp_path: Path
) -> None:
    place = Place(str(tmp_path / "run"), public)
    training = simple_training()
    with checkpointer(training, place, close_seconds=0.2, interval_batches=100) as ckpt:
        ckpt.restore()
        train(training, ckpt, 2)
        assert ckpt.checkpoint()
        until(lambda: ckpt.stats.staged == 1)
        assert bytes_below(place.run_directory) > 0
        for path in (place.run_directory, place.run_directory / "slots"):
            assert path.stat().st_mode & 0o777 == 0o700
            assert "ermission denied" in as_another('ls "$1"', path)
        assert run_agent(public, once=True, prefect="off") == 0
        assert [name.step for name in Run.open(open_store(place.run)).live_line()] == [2]


def test_each_user_has_directories_of_their_own_in_a_directory_of_root(public: Path) -> None:
    root = public / "volume"
    root.mkdir()
    root.chmod(0o1777)
    assert area_of(ANOTHER, root, "/runs/theirs") == "taken"
    run_dir = StagedRun.of(root, "/runs/theirs").path
    assert run_dir.stat().st_uid == ANOTHER and run_dir.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in (run_dir / "slots").iterdir()] == ["r00000-0.bin"]
    # Root may own the volume, and nothing in it: who has made a run's directory reads the model.
    StagedRun.of(root, "/runs/own").path.mkdir()
    assert "of user 0" in area_of(ANOTHER, root, "/runs/own")
    third = StagedRun.of(root, "/runs/third").path
    third.mkdir()
    os.chown(third, ANOTHER + 1, -1)
    third.chmod(0o777)
    assert f"of user {ANOTHER + 1}" in area_of(ANOTHER, root, "/runs/third")
    assert list(third.iterdir()) == []


def test_a_staging_area_of_another_user_is_refused_by_who_stages_stores_and_sweeps(
    public: Path, run: Run
) -> None:
    root = public / "area"
    another_makes(root)
    assert as_another('chmod 755 "$1"', root) == ""
    calls: list[Callable[[], object]] = [
        StagingArea(root, run.url).create,
        lambda: run_agent(root, once=True, prefect="off"),
        lambda: at_work(root),
        lambda: [run.path for run in staged_runs(root)],
        lambda: StagedRun.of(root, run.url).staged_jobs(),
    ]
    for call in calls:
        with pytest.raises(StagingError, match=THEIRS) as caught:
            call()
        assert caught.value.subject == str(root)
    assert list(root.iterdir()) == []


def test_the_lock_of_another_user_says_nothing(public: Path, run: Run) -> None:
    lock = agent_lock_path(public)
    assert as_another('echo "1 agent" > "$1" && chmod 666 "$1"', lock) == ""
    calls: list[Callable[[], object]] = [
        StagingArea(public, run.url).create,
        AgentLock(public).take,
        lambda: at_work(public),
        lambda: run_agent(public, once=True, prefect="off"),
    ]
    for call in calls:
        with pytest.raises(StagingError, match=THEIRS) as caught:
            call()
        assert caught.value.subject == str(lock)
    assert lock.read_text() == "1 agent\n"


def test_a_pipe_in_the_place_of_a_lock_keeps_nobody_waiting(public: Path) -> None:
    assert as_another('mkfifo "$1" && chmod 666 "$1"', agent_lock_path(public)) == ""
    with pytest.raises(StagingError, match=THEIRS):
        at_work(public)
    agent_lock_path(public).unlink()
    os.mkfifo(agent_lock_path(public))
    with pytest.raises(StagingError, match="expected a plain file"):
        at_work(public)


# --- the agent ------------------------------------------------------------------------------------


def test_a_job_of_another_user_is_never_taken(
    public: Path, run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    staging = public / "area"
    job = stage(run, staging, tables(), step=1, generation=1)
    other = new_run(tmp_path / "other")
    other.claim(None)
    good = stage(other, staging, tables(), step=1, generation=1)
    os.chown(job, ANOTHER, -1)
    before = job.read_bytes()
    assert run_agent(staging, once=True, prefect="off") == 1
    assert not good.exists() and len(other.live_line()) == 1
    assert job.read_bytes() == before and run.manifest_names() == []
    assert not StagedRun(job.parent.parent).outcome_path(1, 1, 0).exists()
    status = StagedRun(job.parent.parent).status_path.read_text()
    assert "StagingRefused" in status and str(job) in status and THEIRS in status
    with pytest.raises(StagingError, match=THEIRS):
        open_slot(job, job_files.read_job(job))
    os.chown(job, os.geteuid(), -1)
    assert run_agent(staging, once=True, prefect="off") == 0
    assert len(run.live_line()) == 1


def test_a_slot_of_another_user_is_not_read(run: Run, tmp_path: Path) -> None:
    job = stage(run, tmp_path / "staging", tables(), step=1, generation=1)
    opened = open_slot(job, job_files.read_job(job))
    os.chown(opened.slot, ANOTHER, -1)
    for read in (opened.verify, lambda: open_slot(job, job_files.read_job(job))):
        with pytest.raises(StagingError, match=THEIRS) as caught:
            read()
        assert caught.value.subject == str(opened.slot)
    assert run_agent(tmp_path / "staging", once=True, prefect="off") == 1
    assert job.exists() and run.manifest_names() == []


def test_a_directory_that_another_user_has_filled_is_named_and_left_alone(
    public: Path, run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A forged job: the run is there, and would take the checkpoint."""
    victim = new_run(tmp_path / "victim")
    victim.claim(None)
    forged = stage(victim, public, tables(), step=1, generation=1)
    run_dir = forged.parent.parent
    for path in (run_dir, *run_dir.rglob("*")):
        os.chown(path, ANOTHER, ANOTHER)
    run_dir.chmod(0o755)
    good = stage(run, public, tables(), step=1, generation=1)
    with caplog.at_level(logging.WARNING), pytest.raises(StagingError, match=THEIRS) as caught:
        run_agent(public, once=True, prefect="off")
    assert caught.value.subject == str(run_dir)
    assert sum(run_dir.name in record.getMessage() for record in caplog.records) == 1
    assert not good.exists() and len(run.live_line()) == 1
    assert forged.exists() and victim.manifest_names() == []
    assert not (run_dir / "status.json").exists()


@pytest.mark.parametrize("options", [["--dry-run"], []])
def test_a_sweep_refuses_what_is_staged_by_another_user(
    public: Path, run: Run, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setenv("RECPOINT_STAGING", str(public))
    job = stage(run, public, tables(), step=1, generation=1)
    run_dir = job.parent.parent
    os.chown(run_dir / "jobs", ANOTHER, -1)
    done = CliRunner().invoke(app, ["sweep", run.url, *options])
    assert done.exit_code == 2, done.output
    told = "".join(done.output.split())
    assert f"{run_dir}/jobs" in told and THEIRS.replace(" ", "") in told
    assert job.exists()


def test_a_cancel_mark_of_another_user_drops_nothing(run: Run, tmp_path: Path) -> None:
    job = stage(run, tmp_path / "staging", tables(), step=1, generation=1)
    ref = job_files.read_job(job).ref
    cancels.write_mark(StagedRun.of_job(job), ref, 0)
    assert cancels.is_cancelled(job)
    os.chown(StagedRun.of_job(job).cancel_path(ref, 0), ANOTHER, -1)
    assert not cancels.is_cancelled(job)
    assert run_agent(tmp_path / "staging", once=True, prefect="off") == 0
    assert len(run.live_line()) == 1


@pytest.mark.parametrize("name", ["outcomes", "spool"])
def test_where_the_agent_writes_is_this_users_own(run: Run, tmp_path: Path, name: str) -> None:
    job = stage(run, tmp_path / "staging", tables(), step=1, generation=1)
    directory = job.parent.parent / name
    directory.mkdir(exist_ok=True)
    os.chown(directory, ANOTHER, -1)
    assert run_agent(tmp_path / "staging", once=True, prefect="off") == 1
    assert job.exists() and list(directory.iterdir()) == []
    os.chown(directory, os.geteuid(), -1)
    assert run_agent(tmp_path / "staging", once=True, prefect="off") == 0
