"""From what an operating system or an object store says to the exception tree of recpoint."""

from __future__ import annotations

import errno

from recpoint.errors import (
    MalformedObject,
    ObjectExists,
    ObjectNotFound,
    StoreAccessDenied,
    StoreError,
    StoreFull,
    StoreThrottled,
    StoreUnavailable,
    StoreUnsupported,
)

__all__ = [
    "exists",
    "for_answer",
    "for_no_answer",
    "for_os_error",
    "linked",
    "missing",
    "too_large",
    "too_short",
]

_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}
_IMPOSSIBLE = {errno.EINVAL, errno.ENAMETOOLONG, errno.EFBIG, errno.EBADF}

# Error codes of S3 whose status says less, or something else, than they do.
_DENIED_CODES = {"ExpiredToken", "InvalidToken", "RequestTimeTooSkewed", "InvalidAccessKeyId"}
_FULL_CODES = {"QuotaExceeded", "XMinioStorageFull", "InsufficientCapacity"}
_THROTTLED_CODES = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
_REFUSED = (403, 409)
# The bytes or the request did not arrive as they were sent: another try may.
_DAMAGED_CODES = {
    "BadDigest",
    "IncompleteBody",
    "InvalidDigest",
    "RequestTimeout",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}


def missing(where: str) -> ObjectNotFound:
    """The error for an object that is not there; `where` is its URL with its key."""
    return ObjectNotFound(
        where,
        found="no such object",
        expected="an object",
        next_step="look at what is there with `recpoint check`",
    )


def linked(where: str, link: str, *, reading: bool) -> StoreError:
    """The error for a directory of a run that is a symbolic link.

    Args:
        where: the object or the listing that was asked for.
        link: path of the link.
        reading: something was to be read or listed. It counts as missing then, so that a restore
            passes over the checkpoint; a change is refused.
    """
    kind = ObjectNotFound if reading else StoreError
    return kind(
        where,
        found=f"a symbolic link at {link}",
        expected="a directory: below the directory of a run no link is followed",
        next_step=f"move the directory that {link} leads to into the place of the link; the "
        "directory of the run as a whole may be a link",
    )


def exists(where: str) -> ObjectExists:
    """The error for a create-only write of an object that is there."""
    return ObjectExists(
        where,
        found="an object",
        expected="none",
        next_step="read it back: it may be the one that was to be written",
    )


def too_large(where: str, *, found_bytes: int, max_bytes: int) -> MalformedObject:
    """The error for an object that is larger than one of its kind can be."""
    return MalformedObject(
        where,
        found=f"{found_bytes} bytes",
        expected=f"at most {max_bytes} bytes",
        next_step="run `recpoint check`: the object is not what its key says",
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
    number = error.errno or _number_of(error)
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
        return exists(where)
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


def _number_of(error: OSError) -> int:
    """The number of an error that was raised without one, as Python programs do."""
    kinds = {
        FileNotFoundError: errno.ENOENT,
        IsADirectoryError: errno.EISDIR,
        NotADirectoryError: errno.ENOTDIR,
        FileExistsError: errno.EEXIST,
        PermissionError: errno.EACCES,
    }
    return next((number for kind, number in kinds.items() if isinstance(error, kind)), errno.EIO)


def for_answer(
    where: str, *, status: int, code: str, message: str, doing: str, bucket: str
) -> StoreError:
    """The store error for an HTTP answer that is not a success.

    Args:
        where: URL with key.
        status: HTTP status; 0 if it is not known.
        code: the service's error code, `NoSuchKey` for instance.
        message: the service's own words.
        doing: what was tried.
        bucket: the bucket's name.
    """
    error = _for_status(where, status, code, message, doing, bucket)
    error.refused = status in _REFUSED
    return error


def _for_status(
    where: str, status: int, code: str, message: str, doing: str, bucket: str
) -> StoreError:
    found = f"{status or 'an error'} {code}: {message} (while {doing})"
    if code == "NoSuchBucket":
        return StoreError(
            where,
            found=f"no bucket {bucket!r}",
            expected="a bucket that is there",
            next_step=f"create the bucket {bucket!r}, or correct the run URL or the endpoint",
        )
    if status in (401, 403) or code in _DENIED_CODES:
        return StoreAccessDenied(
            where,
            found=found,
            expected="permission to do it",
            next_step="check AWS_ACCESS_KEY_ID and its secret, the bucket's policy, the clock",
        )
    if status == 404:
        return missing(where)
    if status == 412:
        return exists(where)
    if status == 507 or code in _FULL_CODES:
        return StoreFull(
            where,
            found=found,
            expected="room for the object",
            next_step="raise the quota, or remove old checkpoints",
        )
    if status in (429, 503) or code in _THROTTLED_CODES:
        return StoreThrottled(
            where,
            found=found,
            expected="an answer",
            next_step="try again later; if it stays so, send fewer requests at once",
        )
    if status in (405, 501):
        return StoreUnsupported(
            where,
            found=found,
            expected="a store that can do it",
            next_step="choose another store for the run",
        )
    # 409 is Amazon's answer to two conditional writes at once: nobody knows who won.
    if status >= 500 or status in (408, 409) or code in _DAMAGED_CODES:
        return StoreUnavailable(
            where,
            found=found,
            expected="an answer that says what happened",
            next_step="try again; if it stays so, look at the store's own log",
        )
    return StoreError(
        where,
        found=found,
        expected="a request the store accepts",
        next_step="check run URL, endpoint and region",
    )


def for_no_answer(where: str, *, words: str, doing: str, endpoint: str) -> StoreUnavailable:
    """The store error for a time-out, a reset, a refused connection or half an answer."""
    return StoreUnavailable(
        where,
        found=f"{words} (while {doing})",
        expected=f"an answer from {endpoint}",
        next_step="check that the store is up and reachable from this host, then try again",
    )
