"""Defines what a store promises: its calls, its errors, and the clocks for an object's age.

The age of a record, by several clocks, because no single clock can be trusted (format §6.7).
"""

from __future__ import annotations

import errno
import re
import secrets
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
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


#: Prefix of the keys of `Store.probe`. Objects that a killed probe leaves there belong to no run
#: and may be removed.
PROBE_PREFIX = "probe/"

# Printable ASCII without blank and backslash: these characters have no special meaning in any file
# system or object store. \Z, because $ would accept a final newline.
_PART = re.compile(r"(?!\.tmp-)[!-\[\]-~]{1,200}\Z")
_MAX_KEY = 700  # S3 allows 1,024 bytes, including the prefix in the run URL


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """One listed object; `modified_ms`, of the store's clock, is for people and grace periods."""

    key: str
    size_bytes: int
    modified_ms: int


class Store(ABC):
    """Objects under one URL, addressed by keys relative to it (format §2).

    Contract, for every implementation (the suite in `recpoint.testing.store_suite` checks it):

    - After `put` or `create` returns, the object is durable and visible to `get` and `list`.
    - An object is visible whole or not at all, even if its writer dies in the middle.
    - `create` never replaces an object; if many create the same key at once, one wins.
    - Errors are subclasses of `recpoint.errors.StoreError`; `retryable` says whether a later call
      may succeed. Every call ends within the store's time-outs.
    - A store repeats a request only a few times, as clients of its protocol do. An S3 store does so
      after a time-out, a reset, a 429, a 5xx and a body that breaks off. A local store does not.
    - A caller that wants more retries puts a `RetryingStore` around the store and writes no loop.
      The creates of records and the store of a starting trainer have one. Agents, flows, followers
      and dashboards have none, because they try again at their next turn.
    - Only failures are retried. ObjectNotFound and ObjectExists are answers and are raised at once;
      ObjectExists may be about an object that an earlier try has made.
    - Keys are relative, `/`-separated, of printable ASCII without blanks and backslashes, without
      empty, `.`, `..` or `.tmp-…` parts; another key raises ValueError. No key may be the directory
      of another (`a` and `a/b`), because a local store cannot hold both.
    - Several threads may use one instance. It may be pickled; a pickle holds no secret.
    """

    #: The run URL, without credentials; safe to print and to store.
    url: str

    #: Mode, before the umask, of files that callers make in `scratch_directory`. The default keeps
    #: them private, because restored models lie there, in a directory that everybody can list.
    scratch_mode: int = 0o600

    @property
    def refusals(self) -> int:
        """How often so far the store has answered that it is asked for too much (429, 503).

        Also of requests that were repeated since. 0 for a store that cannot say.
        """
        return 0

    @abstractmethod
    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Return the whole object.

        Raises:
            ObjectNotFound: there is no such object.
            MalformedObject: the object is larger than `max_bytes`; nothing was allocated for it.
        """

    def get_lent(
        self, key: str, *, max_bytes: int, lend: Callable[[int], memoryview]
    ) -> bytes | memoryview:
        """As `get`; a store that can choose reads into memory from `lend(size_in_bytes)`."""
        return self.get(key, max_bytes=max_bytes)

    @abstractmethod
    def get_range(self, key: str, *, start: int, end: int) -> bytes:
        """Return bytes `start` (included) to `end` (excluded) of the object, exactly that many.

        Raises:
            ObjectNotFound: there is no such object.
            StoreUnavailable: fewer bytes came.
            ValueError: not 0 <= start <= end.
        """

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write the object, replacing any object under this key."""

    @abstractmethod
    def create(self, key: str, data: bytes | memoryview) -> None:
        """Write the object if there is none.

        Raises:
            ObjectExists: an object is there. It may be the caller's own, from a try whose answer
                was lost: read it back.
            StoreUnavailable: it is unknown whether the object was written: read it back.
        """

    def create_from_file(self, key: str, path: Path) -> None:
        """As `create`, with the bytes of a file in `scratch_directory`; the file must not be empty.

        The caller removes the file and must not write to it any more.
        """
        mapped: Any = np.memmap(path, mode="r")
        self.create(key, memoryview(mapped))

    def scratch_directory(self) -> Path:
        """Return an existing local directory for the files that `create_from_file` stores."""
        return Path(tempfile.gettempdir())

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Return all objects whose keys start with `prefix`, ascending by key; cache nothing.

        Raises:
            ObjectNotFound: in a local store, the directory of `prefix` lies behind a symbolic link.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """Return the length of the object in bytes; raise ObjectNotFound if there is none."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the object; it is no error if there is none."""

    def delete_many(self, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Remove objects in any order, a request at a time; yield the keys that each one removed.

        A request is made when the caller asks for the next keys, so a caller that stops leaves the
        other objects there. Here a request removes one object. A store that has requests about
        many overrides this; one of its requests may remove none of its objects, if others are to
        be tried again. An object that is not there counts as removed.

        Raises:
            ValueError: one of them is not a key; nothing was removed.
            StoreError: objects could not be removed; all that are gone were yielded before, except
                those of a request whose answer was lost.
        """
        return self._one_by_one([check_key(key) for key in keys])

    def _one_by_one(self, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
        for key in keys:
            self.delete(key)
            yield (key,)

    @abstractmethod
    def list_unfinished(self) -> Iterator[ObjectInfo]:
        """List writes that did not end: temporary files, multipart uploads.

        Writes of living processes are included, so remove only entries older than a grace period.
        """

    @abstractmethod
    def delete_unfinished(self, key: str) -> None:
        """Remove one entry that `list_unfinished` named; it is no error if it is gone."""

    @abstractmethod
    def probe(self) -> None:
        """Test, by writing, that the store honours create-only writes.

        Raises:
            StoreUnsupported: it does not.
        """


def check_key(key: str) -> str:
    """Return `key` if it is one.

    Raises:
        ValueError: it is absolute, leads elsewhere, or some store would refuse it.
    """
    if len(key) > _MAX_KEY or not all(
        _PART.match(part) and part not in (".", "..") for part in key.split("/")
    ):
        raise ValueError(f"{key[:200]!r} is not a key")
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if keys can start with it: as `check_key`, but the last part may be empty.

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
    """Return the length of the range in bytes; raise ValueError if it is no range."""
    if not 0 <= start <= end:
        raise ValueError(f"{start} … {end} is not a range")
    return end - start


def probe_create_only(store: Store) -> None:
    """Create one object twice; the second create must fail and keep the first one's bytes.

    Raises:
        StoreUnsupported: the second create replaced the bytes.
    """
    key = f"{PROBE_PREFIX}{secrets.token_hex(16)}"
    for body in (b"first", b"again"):
        try:
            store.create(key, body)
        except ObjectExists:
            # The first create can raise it too, if its answer was lost and the client tried again.
            pass
    stored = store.get(key, max_bytes=16)
    store.delete(key)
    if stored != b"first":
        raise no_create_only(store, "a second create-only write that replaced the first")


def no_create_only(store: Store, found: str) -> StoreUnsupported:
    """Return the error of a store that does not honour create-only writes."""
    return StoreUnsupported(
        store.url,
        found=found,
        expected="create-only writes that never replace an object; a commit relies on them",
        next_step="choose a local directory, or an S3 that honours If-None-Match, for the run",
    )


_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}
_IMPOSSIBLE = {errno.EINVAL, errno.ENAMETOOLONG, errno.EFBIG, errno.EBADF}

# Error codes of S3 that say more than their HTTP status, or something else.
_DENIED_CODES = {"ExpiredToken", "InvalidToken", "RequestTimeTooSkewed", "InvalidAccessKeyId"}
_FULL_CODES = {"QuotaExceeded", "XMinioStorageFull", "InsufficientCapacity"}
_THROTTLED_CODES = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
_REFUSED = (403, 409)
# The bytes or the request arrived damaged; another try may succeed.
_DAMAGED_CODES = {
    "BadDigest",
    "IncompleteBody",
    "InvalidDigest",
    "RequestTimeout",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}


def missing(address: str) -> ObjectNotFound:
    """Return the error for an object that is not there; `address` is its URL with its key."""
    return ObjectNotFound(
        address,
        found="no such object",
        expected="an object",
        next_step="see what the run holds: recpoint check URL",
    )


def linked(address: str, link: str, *, reading: bool) -> StoreError:
    """Return the error for a directory of a run that is a symbolic link.

    Args:
        address: the object or the listing that was asked for.
        link: path of the link.
        reading: true for a read or a listing: the object counts as missing, so that a restore
            passes over the checkpoint. False: a change is refused.
    """
    kind = ObjectNotFound if reading else StoreError
    return kind(
        address,
        found=f"a symbolic link at {link}",
        expected="a directory: recpoint follows no link below the directory of a run",
        next_step=f"replace the link {link} by the directory that it leads to; only the directory "
        "of the whole run may be a link",
    )


def exists(address: str) -> ObjectExists:
    """Return the error for a create-only write of an object that is there."""
    return ObjectExists(
        address,
        found="an object",
        expected="none",
        next_step="read it back: an earlier try of the same write may have made it",
    )


def too_large(address: str, *, found_bytes: int, max_bytes: int) -> MalformedObject:
    """Return the error for an object that is larger than an object of its kind can be."""
    return MalformedObject(
        address,
        found=f"{found_bytes} bytes",
        expected=f"at most {max_bytes} bytes",
        next_step="recpoint check URL: the object is not of the kind that its key says",
    )


def too_short(address: str, *, found_bytes: int, expected_bytes: int) -> StoreUnavailable:
    """Return the error for a body that ended early."""
    return StoreUnavailable(
        address,
        found=f"{found_bytes} bytes",
        expected=f"{expected_bytes} bytes",
        next_step="try again; if it stays so, the object is truncated: recpoint check URL",
    )


def for_os_error(error: OSError, address: str, *, doing: str, writing: bool) -> StoreError:
    """Translate `error` into a store error.

    Args:
        error: what the operating system raised.
        address: the URL with key.
        doing: what was tried.
        writing: whether this was a change; a missing path is then no ObjectNotFound.
    """
    number = error.errno or _number_of(error)
    failure = f"{type(error).__name__}: {error.strerror or error} (while {doing})"
    if number in _FULL:
        return StoreFull(
            address,
            found=failure,
            expected="room for the object",
            next_step="free space or raise the quota, or remove old checkpoints",
        )
    if number in _DENIED:
        return StoreAccessDenied(
            address,
            found=failure,
            expected="permission for this",
            next_step="check owner and mode of the directory and that it is not mounted read-only",
        )
    if number in _ABSENT and not writing:
        return missing(address)
    if number == errno.EEXIST:
        return exists(address)
    if number in _UNSUPPORTED:
        return StoreUnsupported(
            address,
            found=failure,
            expected="a file system with hard links, rename and fsync",
            next_step="choose another directory, or an object store, for the run",
        )
    if number in _IMPOSSIBLE or number in _ABSENT:
        return StoreError(
            address,
            found=failure,
            expected="a path that can be written",
            next_step="check the run URL, and that no file is in the place of a directory",
        )
    return StoreUnavailable(
        address,
        found=failure,
        expected="an answer from the file system",
        next_step="check that the disk or the mount works, then try again",
    )


def _number_of(error: OSError) -> int:
    """Return the errno of an error that Python code raised without one."""
    kinds = {
        FileNotFoundError: errno.ENOENT,
        IsADirectoryError: errno.EISDIR,
        NotADirectoryError: errno.ENOTDIR,
        FileExistsError: errno.EEXIST,
        PermissionError: errno.EACCES,
    }
    return next((number for kind, number in kinds.items() if isinstance(error, kind)), errno.EIO)


def for_answer(
    address: str, *, status: int, code: str, message: str, doing: str, bucket: str
) -> StoreError:
    """Return the store error for an HTTP answer that is not a success.

    Args:
        address: URL with key.
        status: HTTP status; 0 if it is not known.
        code: the service's error code, `NoSuchKey` for instance.
        message: the service's own words.
        doing: what was tried.
        bucket: the bucket's name.
    """
    error = _for_status(address, status, code, message, doing, bucket)
    error.refused = status in _REFUSED
    return error


def _for_status(
    address: str, status: int, code: str, message: str, doing: str, bucket: str
) -> StoreError:
    failure = f"{status or 'an error'} {code}: {message} (while {doing})"
    if code == "NoSuchBucket":
        return StoreError(
            address,
            found=f"no bucket {bucket!r}",
            expected="an existing bucket",
            next_step=f"create the bucket {bucket!r}, or correct the run URL or the endpoint",
        )
    if status in (401, 403) or code in _DENIED_CODES:
        return StoreAccessDenied(
            address,
            found=failure,
            expected="permission for this",
            next_step="check AWS_ACCESS_KEY_ID and its secret, the bucket's policy, the clock",
        )
    if status == 404:
        return missing(address)
    if status == 412:
        return exists(address)
    if status == 507 or code in _FULL_CODES:
        return StoreFull(
            address,
            found=failure,
            expected="room for the object",
            next_step="raise the quota, or remove old checkpoints",
        )
    if status in (429, 503) or code in _THROTTLED_CODES:
        return StoreThrottled(
            address,
            found=failure,
            expected="an answer",
            next_step="try again later; if it stays so, send fewer requests at once",
        )
    if status in (405, 501):
        return StoreUnsupported(
            address,
            found=failure,
            expected="a store that supports this",
            next_step="choose another store for the run",
        )
    # Amazon answers 409 to two conditional writes at once; it is unknown which one won.
    if status >= 500 or status in (408, 409) or code in _DAMAGED_CODES:
        return StoreUnavailable(
            address,
            found=failure,
            expected="an answer that says what happened",
            next_step="try again; if it stays so, read the store's own log",
        )
    return StoreError(
        address,
        found=failure,
        expected="a request that the store accepts",
        next_step="check the run URL, the endpoint and the region",
    )


def for_no_answer(address: str, *, words: str, doing: str, endpoint: str) -> StoreUnavailable:
    """Return the store error for a time-out, a reset, a refused connection or half an answer."""
    return StoreUnavailable(
        address,
        found=f"{words} (while {doing})",
        expected=f"an answer from {endpoint}",
        next_step="check that the store is up and reachable from this host, then try again",
    )


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """The readings of several clocks at one moment.

    Attributes:
        wall_ms: this host's time in milliseconds since the epoch.
        boot: the id of this host's boot; None if the system has none.
        boot_ms: milliseconds since that boot, sleep included; nobody can set this clock.
        store_ms: the store's time in milliseconds since the epoch; None if it was not asked.
    """

    wall_ms: int
    boot: str | None
    boot_ms: int
    store_ms: int | None = None

    @classmethod
    def read(cls, store: Store | None = None) -> Self:
        """Read the clocks.

        Args:
            store: a store whose time is read too, by writing, listing and removing a small object.

        Raises:
            StoreError: the store cannot be written or read.
        """
        asked_ms = None if store is None else store_ms(store)
        boot, boot_ms = _boot()
        return cls(wall_ms=now_ms(), boot=boot, boot_ms=boot_ms, store_ms=asked_ms)

    def age_seconds(self, stamp: Stamp, *, modified_ms: int | None = None) -> float:
        """Return the seconds that have passed at least since `stamp`: the smallest of all clocks.

        Args:
            stamp: the stamp in a record.
            modified_ms: when that record's object was written, by the store's clock.

        Returns:
            Seconds; negative if a clock says that the stamp lies in the future.
        """
        ages = [self.wall_ms - stamp.written_ms]
        if stamp.boot is not None and stamp.boot == self.boot:
            ages.append(self.boot_ms - stamp.boot_ms)
        if self.store_ms is not None and modified_ms is not None:
            ages.append(self.store_ms - modified_ms)
        return min(ages) / 1000


def now_ms() -> int:
    """Return this host's time in whole milliseconds since the epoch; it can be set back."""
    return time.time_ns() // 1_000_000


def stamp_now() -> Stamp:
    """Return a stamp of this moment."""
    boot, boot_ms = _boot()
    return Stamp(written_ms=now_ms(), boot=boot, boot_ms=boot_ms)


def host_seconds() -> float:
    """Return the seconds of a clock that nobody can set; on Linux it counts sleep too."""
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
    """Return the store's time in milliseconds, by writing, listing and removing a small object.

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
            found="no such object in a listing right after it was written",
            expected="the object, with its time of writing",
            next_step="try again; a store that does not list all its objects cannot hold a run",
        )
    return times[0]
