"""Steps that a local file takes until it survives the death of process and machine.

Every function that changes the disk announces each of its steps to one observer first, so that a
test can stop a process at any of them and look at what is left (`recpoint.testing.die_at`).
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


#: Names of files that are being written start so; what a killed writer left keeps such a name.
TEMPORARY_PREFIX = ".tmp-"

#: The numbers of errors where a file system, a quota or a limit has no room for what is written.
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

#: Is told the name of each step right before it is taken; what it raises stops the step.
Observer = Callable[[str], None]

_observer: Observer | None = None


def set_observer(observer: Observer | None) -> None:
    """Have `observer` called before every step of this process, from the thread that takes it."""
    global _observer
    _observer = observer


def step(name: str) -> None:
    """Announce the step `name`; costs one comparison when nobody observes."""
    if _observer is not None:
        _observer(name)


def write_atomically(
    path: str | os.PathLike[str],
    data: bytes | bytearray | memoryview,
    *,
    directory: int | None = None,
) -> None:
    """Make `data` the content of `path`, replacing what is there; durable when it returns.

    Whoever opens `path` sees the old content or the new, never a mixture.

    Args:
        path: the file.
        data: its content.
        directory: a descriptor of the directory that it lies in: that one is written to, whatever
            the path leads to.

    Raises:
        OSError: of the step that failed; `path` is as it was, unless it was the last fsync.
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

    `link` is the step that decides: it is atomic and fails when the name is taken, on NFS too,
    where an exclusive open is not enough (and would show an empty file first).

    Raises:
        FileExistsError: there is such a file; it is durable.
        OSError: of the step that failed.
    """
    target = Path(path)
    temporary = _write_temporary(target, data)
    try:
        step(f"link {target.name}")
        os.link(temporary, target)
    except FileExistsError:
        _discard(temporary)
        # Whoever made it may have died before this fsync, and the caller may now rely on it.
        fsync_directory(target.parent)
        raise
    except OSError:
        _discard(temporary)
        raise
    step(f"unlink temporary of {target.name}")
    os.unlink(temporary)
    fsync_directory(target.parent)


def remove(path: str | os.PathLike[str], *, directory: int | None = None) -> None:
    """Remove the file; gone for good when it returns. It is no error when there is none.

    The directory is synced in that case too: an earlier try may have died before it.

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
        return  # another remover has found it empty and removed the directory itself


def make_directory(path: str | os.PathLike[str], *, mode: int = 0o777) -> None:
    """Make the directory and its missing parents, each durable in the one above it.

    Args:
        path: the directory.
        mode: of those that are made, before the process's umask.

    Raises:
        FileNotFoundError: somebody else has removed one of them meanwhile, as empty ones are.
        OSError: it cannot be made.
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
                    raise  # made by somebody else, and removed again
                is_directory = False
            if not is_directory:
                raise NotADirectoryError(
                    errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory)
                ) from None
        fsync_directory(directory.parent)


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Make names made, replaced and removed in the directory durable."""
    _fsync(path, f"fsync directory {Path(path).name}", os.O_RDONLY | os.O_DIRECTORY)


def fsync_open_directory(descriptor: int, name: str) -> None:
    """As `fsync_directory`, of one that is open; `name` is for who observes the steps."""
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
    """What a call names `target` by: relative to its directory, where that is open."""
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
            left = memoryview(data).cast("B")
            while left:
                left = left[os.write(descriptor, left) :]
            step(f"fsync {target.name}")
            # Once only: after a failed fsync the kernel may call lost pages clean (a second says
            # success), so the whole write has failed.
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        _discard(temporary, directory)
        raise
    return temporary


def _discard(temporary: Path | str, directory: int | None = None) -> None:
    """Remove a temporary file after an error, which matters more than one met here."""
    try:
        os.unlink(temporary, dir_fd=directory)
    except OSError:
        pass  # what is left is found by `list_unfinished` and swept
