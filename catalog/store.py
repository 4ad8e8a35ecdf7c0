"""Where a run's objects live: the interface every store keeps, and how one is opened from a URL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ObjectInfo", "Store", "open_store"]


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
      heal. Calls retry what can heal themselves, a few times, and always end: no call takes longer
      than its time-outs allow.
    - Keys are relative, `/`-separated, without empty, `.` or `..` parts; others are a ValueError.
    - An instance may be used from several threads; it may be pickled, never with a secret inside.
    """

    #: The run URL, without credentials; safe to print and to store.
    url: str

    @abstractmethod
    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object.

        Raises:
            ObjectNotFound: there is none.
            MalformedObject: it is larger than `max_bytes`; nothing was allocated for it.
        """

    @abstractmethod
    def get_range(self, key: str, *, start: int, end: int) -> bytes:
        """Bytes `start` (included) to `end` (excluded) of the object, exactly that many.

        Raises:
            ObjectNotFound: there is none.
            StoreUnavailable: fewer bytes came.
        """

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write the object, replacing what is there."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Write the object if there is none.

        Raises:
            ObjectExists: there is one (possibly ours, from a try whose answer was lost: read back).
            StoreUnavailable: it is not known whether it was written: read back.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose keys start with `prefix`, ascending by key; nothing is cached."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Length of the object in bytes; ObjectNotFound if there is none."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the object; it is no error when there is none."""

    @abstractmethod
    def list_unfinished(self) -> Iterator[ObjectInfo]:
        """What killed writers left that is not an object: temporary files, multipart uploads."""

    @abstractmethod
    def delete_unfinished(self, key: str) -> None:
        """Remove one thing that `list_unfinished` named."""

    @abstractmethod
    def probe(self) -> None:
        """Find out, by trying, that create-only writes are honoured.

        Raises:
            StoreUnsupported: they are not.
        """


def open_store(url: str) -> Store:
    """Open the store a run URL names: a local path, `file://`, `s3://bucket/prefix`, or any fsspec one.

    Raises:
        SettingsError: a URL without bucket, with credentials, or of an unknown scheme.
    """
    raise NotImplementedError
