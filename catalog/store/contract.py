"""States what a store promises: its calls, its errors, and how it tells the age of an object."""

from __future__ import annotations

import errno
import re
import secrets
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

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
from recpoint.format.retention_records import Stamp

__all__ = [
    "Clocks",
    "ObjectInfo",
    "PROBE_PREFIX",
    "Store",
    "check_key",
    "check_prefix",
    "check_range",
    "exists",
    "for_answer",
    "for_no_answer",
    "for_os_error",
    "host_seconds",
    "linked",
    "missing",
    "no_create_only",
    "now_ms",
    "probe_create_only",
    "stamp_now",
    "store_ms",
    "too_large",
    "too_short",
]


# What a store is: the interface and contract that every implementation keeps.


#: Keys of `Store.probe`; what a killed probe leaves under it is not a run's and may be removed.
PROBE_PREFIX = "probe/"

# Printable ASCII without blank and backslash: the characters that mean themselves to every
# file system and every object store. [!-~] and \Z, so that no final newline gets through.
_PART = re.compile(r"(?!\.tmp-)[!-\[\]-~]{1,200}\Z")
_MAX_KEY = 700  # S3 allows 1,024 bytes, the URL's own prefix included


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """One listed object. `modified_ms` is the store's clock: for people and grace periods only."""

    key: str
    size_bytes: int
    modified_ms: int


class Store(ABC):
    """Objects under one URL, addressed by keys relative to it (format §2).

    Contract, for every implementation (the suite in `recpoint.testing.store_suite` checks it):

    - After `put` or `create` returns, the object is durable and visible to `get` and `list`.
    - An object is visible whole or not at all, also when the writer dies in the middle.
    - `create` never replaces an object; of many concurrent creates of one key one wins.
    - Errors are those of `recpoint.errors.StoreError`; `retryable` says what a later call may
      heal. Every call ends: none takes longer than the store's time-outs allow.
    - A store makes a request again only as a client of its protocol does, a few times. An S3 store
      does so after a time-out, a reset, a 429, a 5xx and a body that breaks off. A local store does
      not.
    - Whoever wants more puts a `RetryingStore` around the store, and writes no loop. The creates of
      records have one, and so has the store of a trainer that starts. Agents, flows, followers and
      dashboards have none: they come again at their next turn.
    - Only failures are tried again. ObjectNotFound and ObjectExists are answers, and stay what they
      are; ObjectExists may be about an object that an earlier try has made.
    - Keys are relative, `/`-separated, of printable ASCII without blanks and backslashes, without
      empty, `.`, `..` or `.tmp-…` parts; others are a ValueError. No key may be the directory of
      another (`a` and `a/b`): a local store cannot hold both.
    - An instance may be used from several threads; it may be pickled, never with a secret inside.
    """

    #: The run URL, without credentials; safe to print and to store.
    url: str

    #: Mode of a file that is made in `scratch_directory`, before the umask: a model is restored
    #: there, which is nobody else's business in a directory that everybody can list.
    scratch_mode: int = 0o600

    @abstractmethod
    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object.

        Raises:
            ObjectNotFound: there is none.
            MalformedObject: it is larger than `max_bytes`; nothing was allocated for it.
        """

    def get_lent(
        self, key: str, *, max_bytes: int, lend: Callable[[int], memoryview]
    ) -> bytes | memoryview:
        """As `get`; where a store can choose, in memory that `lend` gives for so many bytes."""
        return self.get(key, max_bytes=max_bytes)

    @abstractmethod
    def get_range(self, key: str, *, start: int, end: int) -> bytes:
        """Bytes `start` (included) to `end` (excluded) of the object, exactly that many.

        Raises:
            ObjectNotFound: there is none.
            StoreUnavailable: fewer bytes came.
            ValueError: not 0 <= start <= end.
        """

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write the object, replacing what is there."""

    @abstractmethod
    def create(self, key: str, data: bytes | memoryview) -> None:
        """Write the object if there is none.

        Raises:
            ObjectExists: there is one (possibly ours, from a try whose answer was lost: read back).
            StoreUnavailable: it is not known whether it was written: read back.
        """

    def create_from_file(self, key: str, path: Path) -> None:
        """As `create`, with the bytes of a file in `scratch_directory`; of any size but none.

        The file is the caller's to remove, and not to be written any more.
        """
        mapped: Any = np.memmap(path, mode="r")
        self.create(key, memoryview(mapped))

    def scratch_directory(self) -> Path:
        """A local directory, which is there, for what `create_from_file` is to store."""
        return Path(tempfile.gettempdir())

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose keys start with `prefix`, ascending by key; nothing is cached.

        Raises:
            ObjectNotFound: of a local store: the directory of `prefix` lies behind a symbolic link.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """Length of the object in bytes; ObjectNotFound if there is none."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the object; it is no error when there is none."""

    @abstractmethod
    def list_unfinished(self) -> Iterator[ObjectInfo]:
        """What killed writers left that is not an object: temporary files, multipart uploads.

        Writers that still live are in it too: remove only what is older than a grace period.
        """

    @abstractmethod
    def delete_unfinished(self, key: str) -> None:
        """Remove one thing that `list_unfinished` named; it is no error when it is gone."""

    @abstractmethod
    def probe(self) -> None:
        """Find out, by trying, that create-only writes are honoured.

        Raises:
            StoreUnsupported: they are not.
        """


def check_key(key: str) -> str:
    """The key itself if it is one.

    Raises:
        ValueError: it is absolute, leads elsewhere, or is nothing that every store takes.
    """
    if len(key) > _MAX_KEY or not all(
        _PART.match(part) and part not in (".", "..") for part in key.split("/")
    ):
        raise ValueError(f"{key[:200]!r} is not a key")
    return key


def check_prefix(prefix: str) -> str:
    """The prefix itself if keys can start with it: as `check_key`, but the last part may be empty.

    Raises:
        ValueError: no key can start with it.
    """
    directory, _, last = prefix.rpartition("/")
    if directory:
        check_key(directory)
    elif prefix.startswith("/"):
        raise ValueError(f"{prefix[:200]!r} is absolute")
    if last and not re.fullmatch(r"[!-\[\]-~]{1,200}", last):
        raise ValueError(f"no key starts with {prefix[:200]!r}")
    if last == "..":
        raise ValueError(f"{prefix[:200]!r} leads out of the store")
    return prefix


def check_range(start: int, end: int) -> int:
    """Length in bytes of the range; ValueError if it is none."""
    if not 0 <= start <= end:
        raise ValueError(f"{start} … {end} is not a range")
    return end - start


def probe_create_only(store: Store) -> None:
    """Create one object twice; the second try must fail and leave the first's bytes.

    Raises:
        StoreUnsupported: it did not.
    """
    key = f"{PROBE_PREFIX}{secrets.token_hex(16)}"
    for body in (b"first", b"again"):
        try:
            store.create(key, body)
        except ObjectExists:
            # Of the first too, when its answer got lost and the client asked again by itself.
            pass
    found = store.get(key, max_bytes=16)
    store.delete(key)
    if found != b"first":
        raise no_create_only(store, "a second create-only write that replaced the first")


def no_create_only(store: Store, found: str) -> StoreUnsupported:
    """The error of a probe."""
    return StoreUnsupported(
        store.url,
        found=found,
        expected="create-only writes that never replace an object; a commit relies on them",
        next_step="choose a local directory, or an S3 that honours If-None-Match, for the run",
    )


# From what an operating system or an object store says to the exception tree of recpoint.


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


# How long ago something was written, by clocks of which none is trusted alone (format §6.7).


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """What the clocks say at one moment.

    Attributes:
        wall_ms: this host's time.
        boot: the id of this host's boot; None where the system has none.
        boot_ms: time since that boot, sleep included; nobody can set it.
        store_ms: the store's own time; None if it was not asked.
    """

    wall_ms: int
    boot: str | None
    boot_ms: int
    store_ms: int | None = None

    @classmethod
    def read(cls, store: Store | None = None) -> Self:
        """The clocks now.

        Args:
            store: asked for its time too: by writing a small object, listing it and removing it.

        Raises:
            StoreError: the store cannot be written or read.
        """
        asked_ms = None if store is None else store_ms(store)
        boot, boot_ms = _boot()
        return cls(wall_ms=now_ms(), boot=boot, boot_ms=boot_ms, store_ms=asked_ms)

    def age_seconds(self, stamp: Stamp, *, modified_ms: int | None = None) -> float:
        """Seconds since `stamp` was made, at least: the least that any of the clocks says.

        Args:
            stamp: of a record.
            modified_ms: the store's own time of that record's object.

        Returns:
            A negative number if some clock says that it is from the future.
        """
        ages = [self.wall_ms - stamp.written_ms]
        if stamp.boot is not None and stamp.boot == self.boot:
            ages.append(self.boot_ms - stamp.boot_ms)
        if self.store_ms is not None and modified_ms is not None:
            ages.append(self.store_ms - modified_ms)
        return min(ages) / 1000


def now_ms() -> int:
    """This host's time in whole milliseconds since the epoch; somebody may set it back."""
    return time.time_ns() // 1_000_000


def stamp_now() -> Stamp:
    """A stamp of this moment."""
    boot, boot_ms = _boot()
    return Stamp(written_ms=now_ms(), boot=boot, boot_ms=boot_ms)


def host_seconds() -> float:
    """A clock that nobody sets, and that goes on while the host sleeps where there is such one."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


def _boot() -> tuple[str | None, int]:
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip().replace("-", "").lower()
        boot_ms = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
    except (OSError, ValueError, AttributeError):  # not Linux
        return None, 0
    if len(boot) != 32 or not all(digit in "0123456789abcdef" for digit in boot):
        return None, 0
    return boot, boot_ms


def store_ms(store: Store) -> int:
    """The store's own time: a small object is written, listed and removed.

    Raises:
        StoreError: the store cannot be written or read.
    """
    key = f"{PROBE_PREFIX}{secrets.token_hex(16)}"
    store.put(key, b"what time is it?")
    try:
        times = [info.modified_ms for info in store.list(key) if info.key == key]
    finally:
        store.delete(key)
    if not times:
        raise StoreUnavailable(
            f"{store.url}/{key}",
            found="no such object in a listing, right after it was written",
            expected="what was written, with the time that it was written at",
            next_step="try again; a store that does not list what it holds cannot be used",
        )
    return times[0]
