"""Opens files in a staging area, and refuses those that are not this user's own (format §7).

The staged data are the model, and a job decides what is stored. In a directory where everybody may
write, such as `/dev/shm`, another user can make any name first, or put a link there. So each
directory below the staging area is opened relative to its parent, without following a link. The
checks look at the opened file, not at the path, which may lead elsewhere a moment later:

- the staging area itself belongs to this user or, like a mounted volume, to root;
- each directory and file below it belongs to this user, is no link, and nobody else can write to
  it. Modes do not matter below a directory that nobody else may enter.

Functions take the staging area, `root`, and a path below it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from recpoint.catalog.store import durable
from recpoint.errors import StagingRefused

__all__ = [
    "directory",
    "file_status",
    "make_directory",
    "make_root",
    "names",
    "open_file",
    "read",
    "remove",
    "remove_tree",
    "replace",
    "require_own",
    "write_atomically",
]


_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: O_NONBLOCK, because opening a pipe in the file's place must not hang.
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER: Final = stat.S_IXGRP | stat.S_IXOTH
_NEXT_STEP: Final = (
    "find out who made it; then remove it (always if it is a link), or take it back (chown -R, "
    "chmod -R go-w), or give trainer and agent another staging area: RECPOINT_STAGING, staging= or "
    "--staging"
)


def make_root(root: Path) -> None:
    """Make the staging area for this user alone, if it is not there.

    If everybody may write to its parent directory, anybody may have made it first, or put a link in
    its place. There a link is refused, and so is a directory of this user to which others can
    write, unless it was opened on purpose with a sticky bit, like `/tmp` (mode 1777).

    Raises:
        StagingRefused: it is another user's, or there it is a link or open to others.
        OSError: it cannot be made.
    """
    durable.make_directory(root.parent)
    durable.make_directory(root, mode=0o700)
    os.close(_open_root(root))
    if not root.parent.stat().st_mode & stat.S_IWOTH:
        return
    status = root.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise _refused(root, status, "a directory, in a place where everybody may write")
    opened = status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX
    if status.st_uid == os.geteuid() and opened:
        raise _refused(root, status, f"a directory that only user {os.geteuid()} can write to")


@contextmanager
def directory(root: Path, path: Path) -> Iterator[int]:
    """Open a directory and yield its descriptor, for calls relative to it.

    Args:
        root: the staging area.
        path: the directory, `root` or below it.

    Raises:
        StagingRefused: it, or a directory above it up to `root`, is not this user's own.
        OSError: it cannot be opened; FileNotFoundError: it is not there.
    """
    descriptor, _ = _walk(root, path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def names(root: Path, path: Path) -> list[str]:
    """Return the names in a directory, in no order; none if it does not exist."""
    try:
        with directory(root, path) as descriptor:
            return os.listdir(descriptor)
    except FileNotFoundError:
        return []


def require_own(root: Path, path: Path) -> os.stat_result | None:
    """Check that a file or directory below the staging area is this user's, if it exists.

    Returns:
        Its status; None if it does not exist.

    Raises:
        StagingRefused: it, or a directory above it, is not this user's own.
    """
    try:
        descriptor, entered = _walk(root, path.parent)
    except FileNotFoundError:
        return None
    try:
        status = os.stat(path.name, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return None
    finally:
        os.close(descriptor)
    _require(path, status, entered)
    return status


def file_status(root: Path, path: Path) -> os.stat_result:
    """Return the status of a plain file of this user.

    Raises:
        FileNotFoundError: it does not exist.
        StagingRefused: it is no plain file, or it or a directory above it is not this user's own.
    """
    status = require_own(root, path)
    if status is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise _refused(path, status, "a plain file")
    return status


def open_file(root: Path, path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a plain file of this user and return its descriptor.

    Args:
        root: the staging area.
        path: the file.
        flags: flags of `os.open`; with O_CREAT a missing file is made, with mode 0600.

    Raises:
        StagingRefused: it is no plain file, or it or a directory above it is not this user's own.
        OSError: it cannot be opened; FileNotFoundError: it does not exist.
    """
    above, entered = _walk(root, path.parent)
    try:
        descriptor = _open_in(above, entered, path, flags)
    finally:
        os.close(above)
    try:
        status = os.fstat(descriptor)
        _require(path, status, entered)
        if not stat.S_ISREG(status.st_mode):
            raise _refused(path, status, "a plain file")
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read(root: Path, path: Path, most_bytes: int) -> bytes:
    """Return at most the first `most_bytes` bytes of a file; raise as `open_file`."""
    with open(open_file(root, path), "rb") as file:
        return file.read(most_bytes)


def make_directory(root: Path, path: Path) -> None:
    """Make a directory and its parents below `root`, for this user alone; durable.

    Raises:
        StagingRefused: one of them exists and is not this user's own.
        OSError: one cannot be made.
    """
    current = root
    for name in path.relative_to(root).parts:
        with directory(root, current) as above:
            current = current / name
            try:
                os.close(_open_below(above, current, entered=False))
            except FileNotFoundError:
                durable.step(f"mkdir {name}")
                with _naming(current), suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=above)
                durable.fsync_open_directory(above, current.parent.name)
    with directory(root, path):  # checks them all once more, whoever made them
        return


def write_atomically(root: Path, path: Path, data: bytes) -> None:
    """As `durable.write_atomically`, into a directory of this user; also raises as `directory`."""
    with directory(root, path.parent) as above, _naming(path):
        durable.write_atomically(path, data, directory=above)


def replace(root: Path, path: Path, data: bytes, *, temporary: str) -> None:
    """Replace a file so that it is whole at every moment, but not durably.

    Args:
        root: the staging area.
        path: the file.
        data: its new content.
        temporary: name of the file, in the same directory, that is written first.

    Raises:
        StagingRefused: as `directory`.
        OSError: it cannot be written; `path` is unchanged.
    """
    with directory(root, path.parent) as above, _naming(path):
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _FILE
            with open(os.open(temporary, flags, 0o600, dir_fd=above), "wb") as file:
                file.write(data)
            os.replace(temporary, path.name, src_dir_fd=above, dst_dir_fd=above)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=above)
            raise


def remove(root: Path, path: Path) -> None:
    """As `durable.remove`, from a directory of this user; no error if the directory is gone."""
    try:
        with directory(root, path.parent) as above, _naming(path):
            durable.remove(path, directory=above)
    except FileNotFoundError:
        return


def remove_tree(root: Path, path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a directory with its contents, following no link; no error if it is gone.

    Args:
        root: the staging area.
        path: the directory.
        ignore_errors: remove as much as possible, without an error for the rest.

    Raises:
        StagingRefused: it, or a directory above it, is not this user's own.
        OSError: something in it cannot be removed; not with `ignore_errors`.
    """
    if require_own(root, path) is None:
        return
    with directory(root, path.parent) as above, suppress(FileNotFoundError):
        shutil.rmtree(path.name, ignore_errors, dir_fd=above)


def _walk(root: Path, path: Path) -> tuple[int, bool]:
    """Open a directory from `root` down; return its descriptor and whether others can enter it."""
    descriptor = _open_root(root)
    entered = True
    current = root
    try:
        for name in path.relative_to(root).parts:
            current = current / name
            above, descriptor = descriptor, _open_below(descriptor, current, entered)
            os.close(above)  # after the swap, so that an interrupt here closes nothing twice
            entered = entered and bool(os.fstat(descriptor).st_mode & _OTHERS_ENTER)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, entered


def _open_below(above: int, path: Path, entered: bool) -> int:
    """Open a directory in an open directory, if it is this user's own."""
    try:
        descriptor = os.open(path.name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        _explain(error, above, path, entered)
        raise
    try:
        _require(path, os.fstat(descriptor), entered)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the whole path into errors of calls that are relative to an open directory."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _open_root(root: Path) -> int:
    descriptor = os.open(root, _DIRECTORY)
    status = os.fstat(descriptor)
    if status.st_uid in (0, os.geteuid()):
        return descriptor
    os.close(descriptor)
    raise _refused(root, status, f"the directory of user {os.geteuid()} or of root")


def _open_in(above: int, entered: bool, path: Path, flags: int) -> int:
    """Open a file in an open directory; O_CREAT is used only if the file does not exist.

    In a directory where everybody may write, the kernel refuses O_CREAT for an existing file of
    another user, and does not say whose it is.
    """
    plain = (flags & ~(os.O_CREAT | os.O_TRUNC)) | _FILE
    while True:
        try:
            return os.open(path.name, plain, dir_fd=above)
        except FileNotFoundError as error:
            if not flags & os.O_CREAT:
                error.filename = str(path)
                raise
        except OSError as error:
            _explain(error, above, path, entered)
            raise
        try:
            return os.open(path.name, plain | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=above)
        except FileExistsError:
            continue  # another process has just made it; open it and check whose it is
        except OSError as error:
            error.filename = str(path)
            raise


def _explain(error: OSError, above: int, path: Path, entered: bool) -> None:
    """Raise StagingRefused if the unopened file is not this user's; put its path into `error`."""
    error.filename = str(path)
    try:
        status = os.stat(path.name, dir_fd=above, follow_symlinks=False)
    except OSError:
        return
    _require(path, status, entered)


def _require(path: Path, there: os.stat_result, entered: bool) -> None:
    noun = "directory" if stat.S_ISDIR(there.st_mode) else "plain file"
    if stat.S_ISLNK(there.st_mode):
        raise _refused(path, there, "no symbolic links in the staging area")
    if there.st_uid != os.geteuid():
        raise _refused(path, there, f"a {noun} of user {os.geteuid()}")
    if entered and there.st_mode & _OTHERS_WRITE:
        raise _refused(path, there, f"a {noun} that nobody else can write to")


def _refused(path: Path, there: os.stat_result, expected: str) -> StagingRefused:
    link = "a symbolic link, " if stat.S_ISLNK(there.st_mode) else ""
    return StagingRefused(
        str(path),
        found=f"{link}{stat.filemode(there.st_mode)}, of user {there.st_uid}",
        expected=expected,
        next_step=_NEXT_STEP,
    )
