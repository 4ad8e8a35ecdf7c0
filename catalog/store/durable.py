"""Writes local files so that they survive the death of the process and of the machine.

Every function that changes the disk announces each step to one observer before it takes the step.
So a test can stop a process at any step and look at what is left (`recpoint.testing.die_at`).
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = [
    "NO_ROOM",
    "Observer",
    "TEMPORARY_PREFIX",
    "create_exclusively",
    "fsync_directory",
    "fsync_file",
    "fsync_open_directory",
    "make_directory",
    "remove",
    "set_observer",
    "step",
    "write_atomically",
]


#: Start of the names of files that are being written; a killed writer leaves such a file.
TEMPORARY_PREFIX = ".tmp-"

#: Error numbers of a file system, a quota or a limit without room for a write.
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

#: Called with the name of each step right before the step; an exception stops the step.
Observer = Callable[[str], None]

_observer: Observer | None = None


def set_observer(observer: Observer | None) -> None:
    """Call `observer` before every step of this process, in the thread that takes the step."""
    global _observer
    _observer = observer


def step(name: str) -> None:
    """Announce the step `name`; costs one comparison if there is no observer."""
    if _observer is not None:
        _observer(name)


def write_atomically(
    path: str | os.PathLike[str],
    data: bytes | bytearray | memoryview,
    *,
    directory: int | None = None,
) -> None:
    """Make `data` the content of `path`, replacing any old content; durable when it returns.

    A reader that opens `path` sees the old content or the new, never a mixture.

    Args:
        path: the file.
        data: its content.
        directory: a descriptor of the file's directory. The file is then written there, even if
            `path` leads elsewhere by now.

    Raises:
        OSError: a step failed. `path` is unchanged, unless the last fsync failed.
    """
    target = Path(path)
    temporary = _write_temporary(target, data, directory)
    try:
        step(f"rename {target.name}")
        os.replace(temporary, _named(target, directory), src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        _discard(temporary, directory)
        raise
    _fsync_above(target, directory)


def create_exclusively(path: str | os.PathLike[str], data: bytes | bytearray | memoryview) -> None:
    """Create `path` with content `data`; durable when it returns.

    The step `link` decides: it is atomic and fails if the name is taken, on NFS too. An exclusive
    open is not enough on NFS, and it would show an empty file first.

    Raises:
        FileExistsError: the file exists and is durable.
        OSError: a step failed.
    """
    target = Path(path)
    temporary = _write_temporary(target, data)
    try:
        step(f"link {target.name}")
        os.link(temporary, target)
    except FileExistsError:
        _discard(temporary)
        # The file's writer may have died before its fsync, and the caller may rely on the file.
        fsync_directory(target.parent)
        raise
    except OSError:
        _discard(temporary)
        raise
    step(f"unlink temporary of {target.name}")
    os.unlink(temporary)
    fsync_directory(target.parent)


def remove(path: str | os.PathLike[str], *, directory: int | None = None) -> None:
    """Remove the file durably; it is no error if there is none.

    The directory is synced even if there is no file, because an earlier try may have removed the
    file and died before its sync.

    Args:
        path: the file.
        directory: see `write_atomically`.
    """
    target = Path(path)
    step(f"unlink {target.name}")
    try:
        os.unlink(_named(target, directory), dir_fd=directory)
    except FileNotFoundError:
        if directory is None and not target.parent.is_dir():
            return
    try:
        _fsync_above(target, directory)
    except FileNotFoundError:
        return  # another process found the directory empty and removed it


def make_directory(path: str | os.PathLike[str], *, mode: int = 0o777) -> None:
    """Make the directory and its missing parents, each durable in its parent.

    Args:
        path: the directory.
        mode: mode of new directories, before the process's umask.

    Raises:
        FileNotFoundError: meanwhile another process removed one of them because it was empty.
        OSError: a directory cannot be made.
    """
    target = Path(path)
    missing = []
    while not target.is_dir():
        missing.append(target)
        if target == target.parent:
            break
        target = target.parent
    for directory in reversed(missing):
        step(f"mkdir {directory.name}")
        try:
            os.mkdir(directory, mode)
        except FileExistsError:
            try:
                is_directory = stat.S_ISDIR(os.stat(directory).st_mode)
            except FileNotFoundError:
                if not os.path.islink(directory):
                    raise  # another process made and removed it
                is_directory = False
            if not is_directory:
                raise NotADirectoryError(
                    errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory)
                ) from None
        fsync_directory(directory.parent)


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Make created, replaced and removed names in the directory durable."""
    _fsync(path, f"fsync directory {Path(path).name}", os.O_RDONLY | os.O_DIRECTORY)


def fsync_open_directory(descriptor: int, name: str) -> None:
    """As `fsync_directory`, for an open directory; `name` is for the observer of steps."""
    step(f"fsync directory {name}")
    os.fsync(descriptor)


def fsync_file(file: int | str | os.PathLike[str]) -> None:
    """Make a file's bytes durable; `file` is a path or an open file descriptor."""
    if isinstance(file, int):
        step("fsync open file")
        os.fsync(file)
    else:
        _fsync(file, f"fsync {Path(file).name}", os.O_RDONLY)


def _fsync(path: str | os.PathLike[str], name: str, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        step(name)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _named(target: Path, directory: int | None) -> Path | str:
    """Return the name of `target` for a system call, relative to its directory if that is open."""
    return target if directory is None else target.name


def _fsync_above(target: Path, directory: int | None) -> None:
    if directory is None:
        fsync_directory(target.parent)
    else:
        fsync_open_directory(directory, target.parent.name)


def _write_temporary(
    target: Path, data: bytes | bytearray | memoryview, directory: int | None = None
) -> Path | str:
    """Write `data` durably under a new temporary name beside `target`."""
    temporary = _named(target.with_name(TEMPORARY_PREFIX + secrets.token_hex(16)), directory)
    step(f"write {target.name}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666, dir_fd=directory)
    try:
        try:
            remaining = memoryview(data).cast("B")
            while remaining:
                remaining = remaining[os.write(descriptor, remaining) :]
            step(f"fsync {target.name}")
            # A failed fsync is not repeated: the kernel may have marked lost pages as clean, so a
            # second fsync would report success. The whole write has failed.
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        _discard(temporary, directory)
        raise
    return temporary


def _discard(temporary: Path | str, directory: int | None = None) -> None:
    """Remove a temporary file after an error, which matters more than an error here."""
    try:
        os.unlink(temporary, dir_fd=directory)
    except OSError:
        pass  # `list_unfinished` finds the file, and a sweep removes it
