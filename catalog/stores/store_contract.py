"""What a store is: the interface and contract that every implementation keeps."""

from __future__ import annotations

import re
import secrets
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recpoint.errors import ObjectExists, StoreUnsupported

__all__ = [
    "PROBE_PREFIX",
    "ObjectInfo",
    "Store",
    "check_key",
    "check_prefix",
    "check_range",
    "no_create_only",
    "probe_create_only",
]

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
