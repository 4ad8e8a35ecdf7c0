"""Repeats calls of a store after failures that may pass; no other module does so.

Callers write no loops over a store's failures. They put this decorator around the store and say
with `Retries` which failures it retries and for how long. Two modules do so:

- `catalog.store.records` creates every record through it, with `Retries()`. A commit or a claim
  must end with an answer. If the answer to a create is lost, only a look at the store shows
  whether the record was written (format §6.2).
- `catalog.store.store.open_store` puts it, with `Retries.of_refusals`, around an S3 store whose
  time-outs have `refused_seconds`. A starting trainer has such a store.

S3 has its own retries: after a time-out, a reset, a 429 or a 5xx the SDK sends the request again,
up to `S3Timeouts.attempts` times in all, and `S3Store` asks as often for a body that breaks off. So
a StoreThrottled or StoreUnavailable of an S3 store comes after several tries. A further layer of
retries multiplies the time that a dead store costs, so only the creates of records have one. After
a 403 or a 409 the SDK does not send the request again; `Retries.of_refusals` does. A local
directory has only this decorator's retries. Other stores have the retries of fsspec's packages.

Agents, flows, followers and dashboards try again at their next turn and need no decorator.
"""

from __future__ import annotations

import builtins
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Self, TypeVar

from recpoint.catalog.store.contract import ObjectInfo, Store, check_key, check_prefix, exists
from recpoint.errors import ObjectExists, ObjectNotFound, StoreError

__all__ = ["Retries", "RetryingStore"]


_Result = TypeVar("_Result")

_LOG = logging.getLogger("recpoint")

#: A generator of its own, because this also runs inside seeded training.
_chance = random.Random()


@dataclass(frozen=True, kw_only=True)
class Retries:
    """Which failures are retried, how often and how long; the bound that is reached first counts.

    Attributes:
        failures: says whether a failure is retried. It is false for "gone" and "exists", which are
            answers.
        tries: the most tries of one call, the first included.
        seconds: no try begins later than this after the first failure of a call.
        first_pause_seconds: the pause before the second try; it doubles before each further try. A
            random factor shortens each pause by up to half, so that many processes do not come
            back at once.
        longest_pause_seconds: the longest pause.
        puts: whether `put` is retried too.
    """

    failures: Callable[[StoreError], bool] = attrgetter("retryable")
    tries: float = 5
    seconds: float = math.inf
    first_pause_seconds: float = 0.1
    longest_pause_seconds: float = 4.0
    puts: bool = True

    @classmethod
    def of_refusals(cls, seconds: float) -> Self:
        """Return retries of refusals (403, 409) only, for so many seconds.

        `put` is not retried: a reader that may not write its lease goes on at once without a lease.
        """
        return cls(failures=attrgetter("refused"), tries=math.inf, seconds=seconds, puts=False)


class RetryingStore(Store):
    """`store`, with each failed call repeated while `retries` allows it.

    - Reads, `size` and listings are repeated. A listing that broke off continues after the last key
      that it gave.
    - `put`, `delete`, `delete_many` (for the objects that are left) and `delete_unfinished` are
      repeated. The second try may replace or remove an object that another writer has written
      since the first try. So may the first try itself, because a request whose answer was lost can
      arrive at any later time.
    - `create` and `create_from_file` are repeated only if a look finds no object. If it finds an
      object, they raise ObjectExists. The object may be the caller's own, from an earlier try, or
      another writer's; `create_or_read` returns its bytes, which show whose it is.
    - `probe` is repeated from its beginning.
    - ObjectNotFound, ObjectExists and all other failures that `retries` does not name end the call
      at once and are raised unchanged. So is the last failure once time or tries are used up.

    The first failure of a call is logged as a warning that says how long the call is retried.
    Later failures are not logged.

    Args:
        store: where the objects are.
        retries: which failures are retried, and for how long.
    """

    def __init__(self, store: Store, retries: Retries) -> None:
        self.url = store.url
        self.scratch_mode = store.scratch_mode
        self._store = store
        self._retries = retries

    def __repr__(self) -> str:
        return f"RetryingStore({self._store!r})"

    @property
    def refusals(self) -> int:
        return self._store.refusals

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._again(lambda: self._store.get(key, max_bytes=max_bytes))

    def get_lent(
        self, key: str, *, max_bytes: int, lend: Callable[[int], memoryview]
    ) -> bytes | memoryview:
        """Ask `lend` for memory in each try."""
        return self._again(lambda: self._store.get_lent(key, max_bytes=max_bytes, lend=lend))

    def get_range(self, key: str, *, start: int, end: int) -> bytes:
        return self._again(lambda: self._store.get_range(key, start=start, end=end))

    def put(self, key: str, data: bytes) -> None:
        if self._retries.puts:
            self._again(lambda: self._store.put(key, data))
        else:
            self._store.put(key, data)

    def create(self, key: str, data: bytes | memoryview) -> None:
        self._create(key, lambda: self._store.create(key, data))

    def create_from_file(self, key: str, path: Path) -> None:
        self._create(key, lambda: self._store.create_from_file(key, path))

    def create_or_read(self, key: str, data: bytes, *, max_bytes: int) -> bytes | None:
        """Write the object if there is none; otherwise return the bytes under its key.

        Any number of processes may call this at once: one of them creates the object. A process
        whose answer was lost recognises its own bytes in the returned ones.

        Returns:
            None if this call created the object and got the answer; otherwise the bytes under
            `key`, which this very call may have written.

        Raises:
            StoreError: after the last try it is still unknown whether the object was written, or
                the store refuses.
            ObjectNotFound: at each try an object was there and was removed before it was read.
            MalformedObject: the object under `key` is larger than `max_bytes`.
        """

        def create_or_get() -> bytes | None:
            try:
                self.create(key, data)
            except ObjectExists:
                return self.get(key, max_bytes=max_bytes)
            return None

        # If the object that stood in the way is gone, the bytes may be written again.
        return self._again(create_or_get, replace(self._retries, failures=_is_gone))

    def scratch_directory(self) -> Path:
        return self._again(self._store.scratch_directory)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._listed(check_prefix(prefix))

    def size(self, key: str) -> int:
        return self._again(lambda: self._store.size(key))

    def delete(self, key: str) -> None:
        self._again(lambda: self._store.delete(key))

    def delete_many(self, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
        return self._delete_many([check_key(key) for key in keys])

    def _delete_many(self, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
        failures, remaining = _Failures(self._retries), dict.fromkeys(keys)
        while True:
            try:
                for removed in self._store.delete_many(builtins.list(remaining)):
                    for key in removed:
                        del remaining[key]
                    if removed:
                        failures = _Failures(self._retries)
                    yield removed
                return
            except StoreError as error:
                if not failures.pause_after(error):
                    raise

    def list_unfinished(self) -> Iterator[ObjectInfo]:
        # This listing has no order in which it could continue, so it starts again; it is short.
        yield from self._again(lambda: builtins.list(self._store.list_unfinished()))

    def delete_unfinished(self, key: str) -> None:
        self._again(lambda: self._store.delete_unfinished(key))

    def probe(self) -> None:
        self._again(self._store.probe)

    def _create(self, key: str, create: Callable[[], None]) -> None:
        def create_and_look() -> None:
            try:
                create()
            except StoreError as error:
                # After a failure that is not retryable it is known that nothing was written.
                if error.retryable and self._is_there(key):
                    raise exists(f"{self.url}/{key}") from error
                raise

        self._again(create_and_look)

    def _is_there(self, key: str) -> bool:
        """Say whether an object is known to be there."""
        try:
            self._store.size(key)
        except StoreError:
            return False  # missing or unknown; if it is there, the next create meets it
        return True

    def _listed(self, prefix: str) -> Iterator[ObjectInfo]:
        failures, last_key = _Failures(self._retries), ""
        while True:
            try:
                for info in self._store.list(prefix):
                    if info.key > last_key:
                        last_key = info.key
                        yield info
                return
            except StoreError as error:
                if not failures.pause_after(error):
                    raise

    def _again(self, call: Callable[[], _Result], retries: Retries | None = None) -> _Result:
        """Return the result of `call`, repeated as `retries` allows; None: the store's retries."""
        failures = _Failures(self._retries if retries is None else retries)
        while True:
            try:
                return call()
            except StoreError as error:
                if not failures.pause_after(error):
                    raise


def _is_gone(error: StoreError) -> bool:
    return isinstance(error, ObjectNotFound)


class _Failures:
    """The failures of one call so far."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._count = 0
        self._deadline = 0.0
        self._pause_seconds = retries.first_pause_seconds

    def pause_after(self, error: StoreError) -> bool:
        """Wait until the next try and return True; return False at once if there is none."""
        retries, now = self._retries, time.monotonic()
        if not retries.failures(error):
            return False
        if self._count == 0:
            self._deadline = now + retries.seconds
        self._count += 1
        if self._count >= retries.tries or now + self._pause_seconds > self._deadline:
            return False
        if self._count == 1:
            times = "" if math.isinf(retries.tries) else f" {retries.tries - 1:.0f} times"
            most = "" if math.isinf(retries.seconds) else f" for {retries.seconds:.0f} s"
            _LOG.warning("trying again%s%s at most: %s", times, most, error)
        time.sleep(self._pause_seconds * _chance.uniform(0.5, 1.0))
        self._pause_seconds = min(2 * self._pause_seconds, retries.longest_pause_seconds)
        return True
