"""Locks files between processes of one host; the kernel releases a lock however its holder ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import NamedTuple

from recpoint.catalog.staging import owned
from recpoint.errors import StagingError

__all__ = ["Holder", "acquire", "holder", "is_held", "is_lost", "release", "take"]


_TRIES = 10
_PAUSE_SECONDS = 0.02
_MAX_TEXT_BYTES = 256

#: Descriptors of the locks that this process holds.
_held: set[int] = set()


class Holder(NamedTuple):
    """The holder of a lock, as its file says. Whether the lock is held, only the kernel says.

    Attributes:
        process: the process number; `unknown` if the file does not have it.
        words: how the holder describes itself; empty: it does not.
    """

    process: str
    words: str


def acquire(
    path: Path,
    *,
    expected: str,
    next_step: str,
    here: str | None = None,
    root: Path | None = None,
    words: str = "",
) -> int:
    """Take the lock, or raise an error that names its holder.

    Args:
        path: the lock file, made if it does not exist; a link or another user's file is refused.
        expected: for the error: what was expected.
        next_step: for the error: what to do.
        here: replaces `next_step` if this process itself holds the lock.
        root: the staging area of the file; None: the file's directory.
        words: as for `take`.

    Returns:
        A descriptor for `release`.

    Raises:
        StagingError: another process, or this one, holds the lock.
        StagingRefused: the file, or a directory above it, is not this user's own.
        OSError: the file cannot be opened.
    """
    lock_taken = take(path, words, root=root)
    if isinstance(lock_taken, Holder):
        held_here = here is not None and _is_held_here(path)
        raise StagingError(
            str(path),
            found=f"a lock held by process {lock_taken.process}{', this one' if held_here else ''}",
            expected=expected,
            next_step=here if here is not None and held_here else next_step,
        )
    return lock_taken


def take(path: Path, words: str = "", *, root: Path | None = None) -> int | Holder:
    """Take the lock; return a descriptor for `release`, or the lock's holder.

    Args:
        path, root: as for `acquire`.
        words: how this process describes itself in the file, on one line.

    Raises:
        StagingRefused: the file, or a directory above it, is not this user's own.
        OSError: the file cannot be opened.
    """
    descriptor = owned.open_file(root or path.parent, path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            _lock(descriptor)
        except BlockingIOError:
            holder = _read(descriptor)
            os.close(descriptor)
            return holder
        # The text of the last holder is overwritten and then cut to length. Emptying the file first
        # would give up its page, and a full file system in memory may have no other.
        text = f"{os.getpid()} {words}".rstrip().encode("ascii") + b"\n"
        os.pwrite(descriptor, text, 0)
        os.ftruncate(descriptor, len(text))
    except BaseException:
        os.close(descriptor)
        raise
    _held.add(descriptor)
    return descriptor


def release(descriptor: int) -> None:
    """Release a lock by its descriptor; does nothing in a forked child, which holds no lock."""
    if descriptor in _held:  # in a child, this number may be another file by now
        _held.discard(descriptor)
        os.close(descriptor)


def _is_held_here(path: Path) -> bool:
    # Compares files, not process numbers: containers that share a directory may each have a
    # process 1.
    return any(_is_file(descriptor, path) for descriptor in list(_held))


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False  # another thread has released it meanwhile, or the file is gone


def is_lost(descriptor: int, path: Path) -> bool:
    """Say whether the file of a held lock was removed; then others find the lock free.

    Cleaners of temporary directories remove files that were not written for days, and some systems
    remove a user's files in memory when that user logs out.

    Args:
        descriptor: the result of `acquire` or `take`.
        path: the path that was given to them.
    """
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False  # unknown; the lock counts as held
    try:
        return not os.path.samestat(os.fstat(descriptor), status)
    except OSError:
        return True  # NFS does not know the file any more, so another host removed it


def is_held(path: Path, *, root: Path | None = None) -> bool:
    """Say whether any process holds the lock now; raise as `holder`."""
    return holder(path, root=root) is not None


def holder(path: Path, *, root: Path | None = None) -> Holder | None:
    """Return the holder of the lock now; None if it is free, whatever its file says.

    Right after a lock was taken, its file may still name the holder before.

    Raises:
        StagingRefused: the file, or a directory above it, is not this user's own. Another user's
            lock means nothing.
        OSError: the system does not say, for instance NFS without its lock daemon, or too many
            open files; the error has the file's name.
    """
    try:
        descriptor = owned.open_file(root or path.parent, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        error.filename = str(path)  # before, it may name the directory above
        raise
    try:
        # A shared lock, for microseconds, so that two processes that ask do not see each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)
    return None


def _read(descriptor: int) -> Holder:
    # Only the first line counts; the rest of a longer text that is being replaced may follow.
    text = os.pread(descriptor, _MAX_TEXT_BYTES, 0).decode("ascii", errors="replace")
    line, whole, _ = text.partition("\n")
    process, _, words = line.partition(" ")
    if not (whole and process.isdecimal()):
        return Holder("unknown", "")
    return Holder(process, words)


def _lock(descriptor: int) -> None:
    # Tried several times, because a process that asks with `is_held` locks for microseconds.
    for _ in range(_TRIES):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE_SECONDS)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _after_fork() -> None:
    # A lock lives as long as any copy of its descriptor. Without this, a data loader's worker that
    # outlives a killed trainer would keep the next trainer from the run.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_after_fork)
