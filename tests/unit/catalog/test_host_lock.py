from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recpoint.catalog.staging import locks
from recpoint.errors import StagingError

IN_A_CHILD = """
import os, sys
from pathlib import Path
from recpoint.catalog.staging import locks

path = Path(sys.argv[1])
lock = locks.acquire(path, expected="a free lock", next_step="wait")
child = os.fork()
if child == 0:
    # Under the number of the lock's file, which is free in the child.
    own = os.dup2(os.open(path.with_name("own"), os.O_CREAT | os.O_RDWR), lock)
    locks.release(lock)  # as a child does that leaves the trainer's `with Checkpointer`
    os.write(own, b"mine")
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert locks.is_held(path)
locks.release(lock)
assert not locks.is_held(path)
"""


def test_a_forked_child_that_releases_closes_no_file_of_its_own(tmp_path: Path) -> None:
    program = [sys.executable, "-c", IN_A_CHILD, str(tmp_path / "lock")]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "own").read_bytes() == b"mine"


def test_a_lock_that_another_thread_gives_back_meanwhile_hides_none(tmp_path: Path) -> None:
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
    lock = locks.acquire(tmp_path / "lock", expected="a free lock", next_step="wait")
    os.close(other)
    locks._held.add(other)  # as a thread sees it that has listed the locks before
    try:
        with pytest.raises(StagingError, match="this one"):
            locks.acquire(tmp_path / "lock", expected="none", next_step="wait", here="close it")
    finally:
        locks._held.discard(other)
        locks.release(lock)


def test_a_lock_of_which_the_system_knows_nothing_any_more_is_lost(tmp_path: Path) -> None:
    """NFS says so of a file that was removed on another host; an agent would end with its error."""
    path = tmp_path / "lock"
    lock = locks.acquire(path, expected="a free lock", next_step="wait")
    assert not locks.is_lost(lock, path)
    unknown = os.dup(lock)
    os.close(unknown)
    assert locks.is_lost(unknown, path)
    locks.release(lock)
