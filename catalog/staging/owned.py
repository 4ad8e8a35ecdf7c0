"""Opening what lies in a staging area so that only what is this user's own is used (format §7).

What is staged is the model, and a staged job decides what is stored of it. In a directory where
everybody may write, as `/dev/shm`, another user can make any name first, or put a link there. So
each directory below the staging area is opened relative to the one above it, without following a
link, and what was opened is looked at, not what the path leads to a moment later:

- the staging area itself belongs to this user or to root, as a mounted volume does;
- each directory and file below it belongs to this user, is no link, and can be written by nobody
  else. Below a directory that nobody else may enter, the modes of what is in it do not matter.

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
#: O_NONBLOCK: to open a pipe that somebody put there must not hang.
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER: Final = stat.S_IXGRP | stat.S_IXOTH
_NEXT_STEP: Final = (
    "find out who made it; remove it (a link in any case), or take it back (chown -R, chmod -R "
    "go-w), or give trainer "
    "and agent another staging area: RECPOINT_STAGING, staging= or --staging"
)


def make_root(root: Path) -> None:
    """Make the staging area if it is not there, for this user alone.

    In a directory where everybody may write, anybody may have made it first, or have put a link in
    its place: there it is no link, and one of this user's own is closed to others, unless it was
    opened to them on purpose, as `/tmp` is (mode 1777).

    Raises:
        StagingRefused: it is another user's, or such a link, or open to others there.
        OSError: it cannot be made.
    """
    durable.make_directory(root.parent)
    durable.make_directory(root, mode=0o700)
    os.close(_open_root(root))
    if not root.parent.stat().st_mode & stat.S_IWOTH:
        return
    there = root.lstat()
    if stat.S_ISLNK(there.st_mode):
        raise _refused(root, there, "a directory, in a place where everybody may write")
    opened = there.st_mode & _OTHERS_WRITE and not there.st_mode & stat.S_ISVTX
    if there.st_uid == os.geteuid() and opened:
        raise _refused(root, there, f"a directory that only user {os.geteuid()} can write to")


@contextmanager
def directory(root: Path, path: Path) -> Iterator[int]:
    """A descriptor of a directory, for calls relative to it.

    Args:
        root: the staging area.
        path: the directory, `root` or below it.

    Raises:
        StagingRefused: it, or one above it up to `root`, is not this user's own.
        OSError: it cannot be opened; FileNotFoundError: it is not there.
    """
    descriptor, _ = _walk(root, path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def names(root: Path, path: Path) -> list[str]:
    """Names of what lies in a directory, in no order; none where it is not there."""
    try:
        with directory(root, path) as descriptor:
            return os.listdir(descriptor)
    except FileNotFoundError:
        return []


def require_own(root: Path, path: Path) -> os.stat_result | None:
    """Make sure that a file or directory below the staging area is this user's, if it is there.

    Returns:
        Its status; None: there is none.

    Raises:
        StagingRefused: it is not, or one above it.
    """
    try:
        descriptor, entered = _walk(root, path.parent)
    except FileNotFoundError:
        return None
    try:
        there = os.stat(path.name, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return None
    finally:
        os.close(descriptor)
    _require(path, there, entered)
    return there


def file_status(root: Path, path: Path) -> os.stat_result:
    """Status of a plain file of this user's.

    Raises:
        FileNotFoundError: it is not there.
        StagingRefused: it is another's, or no plain file; or one of the directories above it is.
    """
    there = require_own(root, path)
    if there is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if not stat.S_ISREG(there.st_mode):
        raise _refused(path, there, "a plain file")
    return there


def open_file(root: Path, path: Path, flags: int = os.O_RDONLY, *, mode: int = 0o600) -> int:
    """Open a plain file of this user's.

    Args:
        root: the staging area.
        path: the file.
        flags: of `os.open`; with O_CREAT it is made where it is not there.
        mode: of one that is made.

    Raises:
        StagingRefused: it is another's, or no plain file; or one of the directories above it is.
        OSError: it cannot be opened; FileNotFoundError: it is not there.
    """
    above, entered = _walk(root, path.parent)
    try:
        descriptor = _open_in(above, entered, path, flags, mode)
    finally:
        os.close(above)
    try:
        there = os.fstat(descriptor)
        _require(path, there, entered)
        if not stat.S_ISREG(there.st_mode):
            raise _refused(path, there, "a plain file")
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read(root: Path, path: Path, most_bytes: int) -> bytes:
    """The first bytes of a file, at most so many; raises as `open_file`."""
    with open(open_file(root, path), "rb") as file:
        return file.read(most_bytes)


def make_directory(root: Path, path: Path) -> None:
    """Make a directory and those above it, up to `root`, for this user alone; durable.

    Raises:
        StagingRefused: one of them is there, and is not this user's own.
        OSError: one cannot be made.
    """
    at = root
    for name in path.relative_to(root).parts:
        with directory(root, at) as above:
            at = at / name
            try:
                os.close(_open_below(above, at, entered=False))
            except FileNotFoundError:
                durable.step(f"mkdir {name}")
                with _naming(at), suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=above)
                durable.fsync_open_directory(above, at.parent.name)
    with directory(root, path):  # all of it, whoever has made it
        return


def write_atomically(root: Path, path: Path, data: bytes) -> None:
    """`durable.write_atomically` into a directory that is this user's own; raises as `directory`
    and as that does."""
    with directory(root, path.parent) as above, _naming(path):
        durable.write_atomically(path, data, directory=above)


def replace(root: Path, path: Path, data: bytes, *, temporary: str) -> None:
    """Replace a file, whole at every moment, but not durably.

    Args:
        root: the staging area.
        path: the file.
        data: its new content.
        temporary: name of the file that is written first, beside it.

    Raises:
        StagingRefused: as `directory`.
        OSError: it cannot be written; `path` is as it was.
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
    """`durable.remove` from a directory that is this user's own; no error where that is gone."""
    try:
        with directory(root, path.parent) as above, _naming(path):
            durable.remove(path, directory=above)
    except FileNotFoundError:
        return


def remove_tree(root: Path, path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a directory with all that is in it, following no link; no error where it is gone.

    Args:
        root: the staging area.
        path: the directory.
        ignore_errors: remove what can be removed.

    Raises:
        StagingRefused: it, or one above it, is not this user's own.
        OSError: something in it cannot be removed; not with `ignore_errors`.
    """
    if require_own(root, path) is None:
        return
    with directory(root, path.parent) as above, suppress(FileNotFoundError):
        shutil.rmtree(path.name, ignore_errors, dir_fd=above)


def _walk(root: Path, path: Path) -> tuple[int, bool]:
    """Open a directory from `root` down; its descriptor, and whether others get as far."""
    descriptor = _open_root(root)
    entered = True
    at = root
    try:
        for name in path.relative_to(root).parts:
            at = at / name
            above, descriptor = descriptor, _open_below(descriptor, at, entered)
            os.close(above)  # once, also where an interrupt comes right after it
            entered = entered and bool(os.fstat(descriptor).st_mode & _OTHERS_ENTER)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, entered


def _open_below(above: int, path: Path, entered: bool) -> int:
    """Open a directory in one that is open, if it is this user's own."""
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
    """Have an error of a call that is relative to an open directory name the whole path."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _open_root(root: Path) -> int:
    descriptor = os.open(root, _DIRECTORY)
    there = os.fstat(descriptor)
    if there.st_uid in (0, os.geteuid()):
        return descriptor
    os.close(descriptor)
    raise _refused(root, there, f"the directory of user {os.geteuid()} or of root")


def _open_in(above: int, entered: bool, path: Path, flags: int, mode: int) -> int:
    """Open a file in a directory that is open; one that is there is never made anew.

    Where everybody may write, the kernel refuses O_CREAT for the file of another user without
    saying whose it is.
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
            return os.open(path.name, plain | os.O_CREAT | os.O_EXCL, mode, dir_fd=above)
        except FileExistsError:
            continue  # somebody has just made it: look whose it is
        except OSError as error:
            error.filename = str(path)
            raise


def _explain(error: OSError, above: int, path: Path, entered: bool) -> None:
    """Refuse what could not be opened, where it is not this user's; else name it in `error`."""
    error.filename = str(path)
    try:
        there = os.stat(path.name, dir_fd=above, follow_symlinks=False)
    except OSError:
        return
    _require(path, there, entered)


def _require(path: Path, there: os.stat_result, entered: bool) -> None:
    what = "directory" if stat.S_ISDIR(there.st_mode) else "plain file"
    if stat.S_ISLNK(there.st_mode):
        raise _refused(path, there, "no symbolic links in the staging area")
    if there.st_uid != os.geteuid():
        raise _refused(path, there, f"a {what} of user {os.geteuid()}")
    if entered and there.st_mode & _OTHERS_WRITE:
        raise _refused(path, there, f"a {what} that nobody else can write to")


def _refused(path: Path, there: os.stat_result, expected: str) -> StagingRefused:
    link = "a symbolic link, " if stat.S_ISLNK(there.st_mode) else ""
    return StagingRefused(
        str(path),
        found=f"{link}{stat.filemode(there.st_mode)}, of user {there.st_uid}",
        expected=expected,
        next_step=_NEXT_STEP,
    )
