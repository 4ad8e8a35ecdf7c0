"""Locks between processes of one host: held by one of them, and released however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from recpoint.errors import StagingError

__all__ = ["acquire", "is_held", "release"]

_TRIES = 10
_PAUSE_SECONDS = 0.02

#: Descriptors of the locks that this process holds.
_held: set[int] = set()


def acquire(path: Path, *, expected: str, next_step: str) -> int:
    """Take the lock, or say who has it.

    Args:
        path: the lock file, made if it is not there; a link in its place is refused.
        expected: for the error: what should have been.
        next_step: for the error: what to do.

    Returns:
        A descriptor for `release`.

    Raises:
        StagingError: another process has it.
        OSError: the file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        _lock(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip()
        os.close(descriptor)
        raise StagingError(
            str(path),
            found=f"a lock held by process {holder or 'unknown'}",
            expected=expected,
            next_step=next_step,
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    _held.add(descriptor)
    return descriptor


def release(descriptor: int) -> None:
    """Give back what `acquire` returned."""
    _held.discard(descriptor)
    os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether any process has the lock now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        # Shared, and for microseconds: two processes that ask do not see each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock(descriptor: int) -> None:
    # Whoever asks with `is_held` has the lock for microseconds.
    for _ in range(_TRIES):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE_SECONDS)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _after_fork() -> None:
    # A lock lives as long as any copy of its descriptor: a reader's worker that outlives a killed
    # trainer would keep the next one from the run.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_after_fork)
