"""The lock of a staging area says who holds it; that anybody does, only the kernel says."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
from pathlib import Path

import pytest

from recpoint.catalog.staging.agent_lock import (
    AGENT,
    DRAIN,
    AgentLock,
    AtWork,
    agent_lock_path,
    at_work,
    sweep_of,
)
from recpoint.catalog.staging.area import StagedRun
from recpoint.errors import StagingError


@pytest.mark.parametrize("kind", ["agent", "drain", "sweep"])
def test_who_finishes_jobs_is_known_as_long_as_it_does(tmp_path: Path, kind: str) -> None:
    own, other = (StagedRun.of(tmp_path, url).path for url in ("/runs/own", "/runs/other"))
    who = {"agent": AGENT, "drain": DRAIN, "sweep": sweep_of(StagedRun(own))}[kind]
    with AgentLock(tmp_path, who):
        found = at_work(tmp_path)
        assert found is not None and found == who._replace(process=str(os.getpid()))
        assert found.serves(StagedRun(own)) and found.serves(StagedRun(other)) == (kind != "sweep")
        assert found.ends_by_itself == (kind != "agent")
        with pytest.raises(StagingError) as refused, AgentLock(tmp_path):
            pytest.fail("two of them")
    assert refused.value.found == f"a lock held by process {os.getpid()}, {found}"
    assert ("run this again after it" in refused.value.next_step) == found.ends_by_itself
    # Killed or not, the file still says so.
    assert agent_lock_path(tmp_path).read_text() and at_work(tmp_path) is None


def test_a_message_names_who_is_at_work() -> None:
    assert [str(AGENT), str(DRAIN)] == ["an agent", "a drain"]
    assert str(AtWork("sweep", "run-0123456789ab")) == "a sweep of run-0123456789ab"


def test_nothing_is_left_of_who_held_it_before(tmp_path: Path) -> None:
    with AgentLock(tmp_path, sweep_of(StagedRun(tmp_path / f"{'long' * 25}-0123456789ab"))):
        pass
    inode = agent_lock_path(tmp_path).stat().st_ino
    with AgentLock(tmp_path):
        assert agent_lock_path(tmp_path).read_text() == f"{os.getpid()} agent\n"
        assert agent_lock_path(tmp_path).stat().st_ino == inode  # what others wait for


@pytest.mark.parametrize(
    ("text", "process"),
    [
        ("1234\n", "1234"),  # of an older version
        ("1234 consolidator of all\n", "1234"),  # of a newer one
        ("1234 sweep\n", "1234"),
        ("1234 sweep ../run\n", "1234"),
        ("1234 agent\nrun-0123456789ab\n", "1234"),  # over a longer one
        ("1234 sweep run-01234", "unknown"),  # half written
        ("sweep run-0123456789ab\n", "unknown"),
        ("", "unknown"),
        ("\xff\x00" * 200, "unknown"),
    ],
)
def test_who_does_not_say_what_it_is_counts_as_an_agent(
    tmp_path: Path, text: str, process: str
) -> None:
    path = agent_lock_path(tmp_path)
    path.write_text(text, encoding="latin-1")
    assert at_work(tmp_path) is None
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert at_work(tmp_path) == AtWork("agent", process=process)
        assert AgentLock(tmp_path).take() == AtWork("agent", process=process)
    with AgentLock(tmp_path, DRAIN):
        assert path.read_text() == f"{os.getpid()} drain\n"


def test_that_no_more_files_may_be_opened_is_no_lock_nobody_holds(tmp_path: Path) -> None:
    """A living trainer's staged checkpoints would be thrown away otherwise."""
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    with AgentLock(tmp_path):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, kept[1]))
        try:
            with pytest.raises(OSError, match="Too many open files") as found:
                at_work(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, kept)
        assert found.value.filename == str(agent_lock_path(tmp_path))


def test_no_directory_has_no_lock(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert at_work(tmp_path / "nothing") is None and at_work(tmp_path / "file") is None


def test_a_full_staging_area_is_no_reason_to_leave_it(tmp_path: Path) -> None:
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, kept[1]))  # a full disk, of another number
    try:
        with pytest.raises(StagingError) as refused:
            AgentLock(tmp_path).take()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert refused.value.next_step.startswith("free space there")
    with AgentLock(tmp_path):
        pass  # nothing is left of it


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path: Path) -> None:
    """Else trainers would throw away what is staged, since nobody seems to be at work."""
    staging = tmp_path / "staging"
    with AgentLock(staging) as lock:
        assert lock.keep() is None
        agent_lock_path(staging).unlink()
        assert at_work(staging) is None
        assert lock.keep() is None and at_work(staging) is not None
        shutil.rmtree(staging)
        assert lock.keep() is None and at_work(staging) is not None
    assert at_work(staging) is None


def test_a_lock_whose_file_was_removed_may_be_anothers_by_now(tmp_path: Path) -> None:
    lock, other = AgentLock(tmp_path), AgentLock(tmp_path, DRAIN)
    assert lock.take() is None
    agent_lock_path(tmp_path).unlink()
    assert other.take() is None
    found = lock.keep()
    assert found is not None and str(found) == "a drain"
    other.release()
    assert lock.keep() is None and at_work(tmp_path) == AtWork("agent", process=str(os.getpid()))
    lock.release()
    assert at_work(tmp_path) is None


def test_a_lock_that_nobody_can_look_at_is_held_still(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    with AgentLock(staging) as lock:
        (tmp_path / "loop").symlink_to("loop")
        staging.rename(tmp_path / "elsewhere")
        staging.symlink_to(tmp_path / "loop")
        assert lock.keep() is None  # too many links
        staging.unlink()
        (tmp_path / "elsewhere").rename(staging)
        assert lock.keep() is None and at_work(staging) is not None
