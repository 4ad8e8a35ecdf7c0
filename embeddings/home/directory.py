"""Holds the directory of a home in files: its lock, its files, and how they are opened.

The files are of use to one process only, while it runs. A home locks its directory. What a dead
process left there is deleted, never read: nobody knows which of its records are the newest. Only
files with names of homes are deleted. If anything else is in the directory, it is somebody's, and
the home refuses the directory.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch import Tensor

from recpoint.catalog.staging import locks
from recpoint.catalog.store import durable
from recpoint.errors import HomeError, StagingRefused

__all__ = ["HomeDirectory", "HomeFile", "page_memory"]

T = TypeVar("T")

_LOCK: Final = "home.lock"
_PROBE: Final = "home.probe"
_OURS: Final = re.compile(r"home\.lock|home\.probe|table-\d{4,}\.(base|\d{6,}-\d{4,}\.log)")
_PAGE_BYTES: Final = 4096
_NOBODY_ELSE: Final = "nobody else can write"


class HomeFile:
    """A file that is open for reads and writes of whole blocks.

    Attributes:
        path: for messages.
        descriptor: for the calls of `kernels.row_blocks`.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    def resize(self, size_bytes: int) -> None:
        """Give the file another length; new bytes are zeros that take no room.

        Raises:
            HomeError: the file system refuses it.
        """
        _explained(self.path, "resize", lambda: os.ftruncate(self.descriptor, size_bytes))

    def write(self, memory: Tensor, offset: int) -> None:
        """Write all of `memory`, uint8 [n] of `page_memory`, n a multiple of 4,096.

        Raises:
            HomeError: the disk is full, or another error of the system.
        """
        unwritten = memoryview(memory.numpy().data)
        try:
            while unwritten:
                written_bytes = os.pwrite(self.descriptor, unwritten, offset)
                unwritten, offset = unwritten[written_bytes:], offset + written_bytes
        except OSError as error:
            raise _told(self.path, "write", error) from error

    def disk_bytes(self) -> int:
        """Return the bytes that the file takes on the disk."""
        return 512 * os.fstat(self.descriptor).st_blocks

    def remove(self) -> None:
        """Close and delete the file. A second call does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            self.path.unlink(missing_ok=True)


class HomeDirectory:
    """The locked directory of one home.

    Args:
        path: made with mode 0700 if it does not exist.

    Raises:
        HomeError: another home uses the directory, it holds anything that is not a home's, it
            belongs to another user or others can write to it, or the system refuses a call.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        _explained(self.path, "make", lambda: durable.make_directory(self.path, mode=0o700))
        self._require_own()
        self._lock = self._locked()
        try:
            self._delete_left()
            self._is_direct = self._takes_direct()
        except BaseException:
            locks.release(self._lock)
            raise

    def make(self, name: str) -> HomeFile:
        """Make a file and open it.

        Raises:
            HomeError: the system refuses it.
        """
        path = self.path / name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        if self._is_direct:
            flags |= os.O_DIRECT
        return HomeFile(path, _explained(path, "make", lambda: os.open(path, flags, 0o600)))

    def close(self) -> None:
        """Give the lock back. The caller has removed its files."""
        locks.release(self._lock)

    def _require_own(self) -> None:
        status = _explained(self.path, "open", self.path.stat)
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise HomeError(
                str(self.path),
                found=f"{stat.filemode(status.st_mode)}, of user {status.st_uid}",
                expected=f"a directory of user {os.geteuid()}, to which {_NOBODY_ELSE}",
                next_step="give the home a directory of its own",
            )

    def _locked(self) -> int:
        lock = self.path / _LOCK
        try:
            lock_taken = _explained(lock, "lock", lambda: locks.take(lock, root=self.path))
        except StagingRefused as error:
            raise HomeError(
                error.subject,
                found=error.found,
                expected=error.expected,
                next_step=f"give the home a directory of this user, to which {_NOBODY_ELSE}",
            ) from error
        if isinstance(lock_taken, locks.Holder):
            whose = ", this one" if lock_taken.process == str(os.getpid()) else ""
            raise HomeError(
                str(self.path),
                found=f"a home of process {lock_taken.process}{whose}",
                expected="a directory that no other home uses",
                next_step="give each home its own directory, or end that process",
            )
        return lock_taken

    def _delete_left(self) -> None:
        names = sorted(_explained(self.path, "list", lambda: os.listdir(self.path)))
        foreign = [name for name in names if not _OURS.fullmatch(name)]
        if foreign:
            raise HomeError(
                str(self.path),
                found=f"{len(foreign)} entries that are not a home's, such as {foreign[0]!r}",
                expected="an empty directory, or files of an earlier home",
                next_step="give the home a directory of its own; nothing was deleted",
            )
        for name in names:
            if name != _LOCK:
                path = self.path / name
                _explained(path, "delete", path.unlink)

    def _takes_direct(self) -> bool:
        """Whether the file system takes reads and writes past the page cache."""
        path = self.path / _PROBE
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        memory = page_memory(_PAGE_BYTES)
        try:
            descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
            try:
                os.pwrite(descriptor, memory.numpy().data, 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise _told(path, "write", error) from error
            _LOG.warning(
                "%s: the file system refuses direct reads; rows of the home go through the page "
                "cache, which takes memory and time",
                self.path,
            )
            return False
        finally:
            path.unlink(missing_ok=True)
        return True


def page_memory(size_bytes: int) -> Tensor:
    """Return uint8 [size_bytes] that begins on a page, as direct writes need."""
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)


def _explained(path: Path, verb: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except OSError as error:
        raise _told(path, verb, error) from error


def _told(path: Path, verb: str, error: OSError) -> HomeError:
    if error.errno in durable.NO_ROOM:
        expected = "room for the rows of the home"
        next_step = "free room on this disk or raise the limit, or give the home another directory"
    else:
        expected = f"to {verb} it"
        next_step = "see what the system says about this disk, or give the home another directory"
    return HomeError(str(path), found=str(error), expected=expected, next_step=next_step)


_LOG = logging.getLogger("recpoint")
