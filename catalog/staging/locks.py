"""Locks between processes of one host: held by one of them, and released however it ends."""

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
    """Who has a lock, as its file says: only the kernel's lock says that anybody has it.

    Attributes:
        process: its number; `unknown` where the file does not have it.
        words: what it says of itself; empty: nothing.
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
) -> int:
    """Take the lock, or say who has it.

    Args:
        path: the lock file, made if it is not there; another user's, or a link, is refused.
        expected: for the error: what should have been.
        next_step: for the error: what to do.
        here: what to do instead where this process itself has it.
        root: the staging area that it lies in; None: the directory that it lies in.

    Returns:
        A descriptor for `release`.

    Raises:
        StagingError: another process has it, or this one.
        StagingRefused: the file, or a directory above it, is not this user's own.
        OSError: the file cannot be opened.
    """
    taken = take(path, root=root)
    if isinstance(taken, Holder):
        held_here = here is not None and _is_held_here(path)
        raise StagingError(
            str(path),
            found=f"a lock held by process {taken.process}{', this one' if held_here else ''}",
            expected=expected,
            next_step=here if here is not None and held_here else next_step,
        )
    return taken


def take(path: Path, words: str = "", *, root: Path | None = None) -> int | Holder:
    """Take the lock: a descriptor for `release`, or who has it.

    Args:
        path, root: as for `acquire`.
        words: that say who this is, on one line.

    Raises:
        StagingRefused: the file, or a directory above it, is not this user's own.
        OSError: the file cannot be opened.
    """
    descriptor = owned.open_file(root or path.parent, path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            _lock(descriptor)
        except BlockingIOError:
            found = _read(descriptor)
            os.close(descriptor)
            return found
        # Over what the one before has left, and cut to length after: an empty file would need a
        # page again, which a full file system in memory may not have any more.
        text = f"{os.getpid()} {words}".rstrip().encode("ascii") + b"\n"
        os.pwrite(descriptor, text, 0)
        os.ftruncate(descriptor, len(text))
    except BaseException:
        os.close(descriptor)
        raise
    _held.add(descriptor)
    return descriptor


def release(descriptor: int) -> None:
    """Give back what `acquire` or `take` returned; nothing in a forked child, which has no lock."""
    if descriptor in _held:  # else the number may be that of another file of the child by now
        _held.discard(descriptor)
        os.close(descriptor)


def _is_held_here(path: Path) -> bool:
    # By the file: of several containers that share a directory each may have a process 1.
    return any(_is_file(descriptor, path) for descriptor in list(_held))


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False  # another thread has given it back meanwhile, or the file is gone


def is_lost(descriptor: int, path: Path) -> bool:
    """Whether the file of a lock that is held was removed: who asks finds it free, and may take it.

    As what clears directories of temporary files does with a file that nobody has written to for
    days, and some systems with all that a user has in memory, when that user logs out.

    Args:
        descriptor: that `acquire` or `take` returned.
        path: as it was given to them.
    """
    try:
        there = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False  # who cannot look has nothing to go by
    try:
        return not os.path.samestat(os.fstat(descriptor), there)
    except OSError:
        return True  # NFS does not know it any more: removed on another host


def is_held(path: Path, *, root: Path | None = None) -> bool:
    """Whether any process has the lock now; raises as `holder` does."""
    return holder(path, root=root) is not None


def holder(path: Path, *, root: Path | None = None) -> Holder | None:
    """Who has the lock now; None: nobody, whatever its file says.

    In the moment after a lock was taken its file may still speak of the one before.

    Raises:
        StagingRefused: the file, or a directory above it, is not this user's own: another user's
            lock says nothing.
        OSError: the system does not say: NFS without its lock daemon, or no more files may be
            opened; with the file's name.
    """
    try:
        descriptor = owned.open_file(root or path.parent, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        error.filename = str(path)  # which may name the directory above it
        raise
    try:
        # Shared, and for microseconds: two processes that ask do not see each other.
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
    # One line; after it may be the rest of a longer one that is being replaced.
    text = os.pread(descriptor, _MAX_TEXT_BYTES, 0).decode("ascii", errors="replace")
    line, whole, _ = text.partition("\n")
    process, _, words = line.partition(" ")
    if not (whole and process.isdecimal()):
        return Holder("unknown", "")
    return Holder(process, words)


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
