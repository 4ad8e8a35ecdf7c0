"""From what an operating system or an S3 server says to the exception tree of recpoint."""

from __future__ import annotations

import errno

from recpoint.errors import (
    ObjectExists,
    ObjectNotFound,
    StoreAccessDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUnsupported,
)

__all__ = ["for_os_error", "missing", "too_short"]

_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}
_IMPOSSIBLE = {errno.EINVAL, errno.ENAMETOOLONG, errno.EFBIG, errno.EBADF}


def missing(where: str) -> ObjectNotFound:
    """The error for an object that is not there; `where` is its URL with its key."""
    return ObjectNotFound(
        where,
        found="no such object",
        expected="an object",
        next_step="look at what is there with `recpoint check`",
    )


def too_short(where: str, *, found_bytes: int, expected_bytes: int) -> StoreUnavailable:
    """The error for a body that ended early."""
    return StoreUnavailable(
        where,
        found=f"{found_bytes} bytes",
        expected=f"{expected_bytes} bytes",
        next_step="try again; if it stays so, the object is truncated: run `recpoint check`",
    )


def for_os_error(error: OSError, where: str, *, doing: str, writing: bool) -> StoreError:
    """The store error that says what `error`, met while `doing` something to `where`, means."""
    number = error.errno
    found = f"{type(error).__name__}: {error.strerror or error} (while {doing})"
    if number in _FULL:
        return StoreFull(
            where,
            found=found,
            expected="room for the object",
            next_step="free space or raise the quota, or remove old checkpoints",
        )
    if number in _DENIED:
        return StoreAccessDenied(
            where,
            found=found,
            expected="permission to do it",
            next_step="check owner and mode of the directory and that it is not mounted read-only",
        )
    if number in _ABSENT and not writing:
        return missing(where)
    if number == errno.EEXIST:
        return ObjectExists(
            where,
            found="an object",
            expected="none",
            next_step="read it back: it may be the one that was to be written",
        )
    if number in _UNSUPPORTED:
        return StoreUnsupported(
            where,
            found=found,
            expected="a file system with hard links, rename and fsync",
            next_step="choose another directory, or an object store, for the run",
        )
    if number in _IMPOSSIBLE or number in _ABSENT:
        return StoreError(
            where,
            found=found,
            expected="a path that can be written",
            next_step="check the run URL, and that no file stands where a directory has to be",
        )
    return StoreUnavailable(
        where,
        found=found,
        expected="an answer from the file system",
        next_step="check that the disk or mount is there, then try again",
    )
