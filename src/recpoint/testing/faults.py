"""Wraps a real store so that chosen calls fail in a planned way and all others do real work."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from recpoint.catalog.store.contract import check_key, check_prefix
from recpoint.catalog.store.store import ObjectInfo, Store
from recpoint.errors import (
    StoreError,
    StoreThrottled,
    StoreUnavailable,
)

__all__ = ["OPERATIONS", "READS", "WRITES", "Fault", "FaultStore", "Operation"]

Operation = Literal[
    "get", "get_range", "put", "create", "list", "size", "delete",
    "list_unfinished", "delete_unfinished", "probe",
]  # fmt: skip

OPERATIONS: frozenset[Operation] = frozenset(get_args(Operation))
READS: frozenset[Operation] = frozenset({"get", "get_range"})
WRITES: frozenset[Operation] = frozenset({"put", "create", "delete", "delete_unfinished"})


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planned fault: what goes wrong, and in which calls.

    Attributes:
        kind: `flip`: a read returns data with one bit flipped; `short`: a read silently loses its
            second half; `fail`: the call raises `error` and does nothing; `lost_reply`: the call
            does its work and then raises StoreUnavailable; `break_off`: a listing yields its first
            half and then raises StoreUnavailable.
        on: the operations that fail.
        key_contains: only calls with this text in their key fail.
        after: so many matching calls succeed first.
        times: then so many calls fail; None: all further calls.
        error: the exception that the kind `fail` raises.
        once_each: every call fails once, and succeeds when the same thread repeats it; `after` and
            `times` are ignored.
    """

    kind: Literal["flip", "short", "fail", "lost_reply", "break_off"]
    on: frozenset[Operation]
    key_contains: str = ""
    after: int = 0
    times: int | None = 1
    error: type[StoreError] = StoreUnavailable
    once_each: bool = False

    @classmethod
    def flip(cls, *, key_contains: str = "", after: int = 0, times: int | None = 1) -> Fault:
        """Make reads return data with one bit flipped."""
        return cls(kind="flip", on=READS, key_contains=key_contains, after=after, times=times)

    @classmethod
    def short(cls, *, key_contains: str = "", after: int = 0, times: int | None = 1) -> Fault:
        """Make reads return data without its second half."""
        return cls(kind="short", on=READS, key_contains=key_contains, after=after, times=times)

    @classmethod
    def lost_reply(cls, *, key_contains: str = "", after: int = 0, times: int | None = 1) -> Fault:
        """Make writes succeed and then raise StoreUnavailable, as if the reply was lost."""
        return cls(
            kind="lost_reply", on=WRITES, key_contains=key_contains, after=after, times=times
        )

    @classmethod
    def throttle(cls, times: int | None, *, on: frozenset[Operation] = READS | WRITES) -> Fault:
        """Make the first `times` calls (None: all calls) raise StoreThrottled."""
        return cls(kind="fail", on=on, times=times, error=StoreThrottled)

    @classmethod
    def stop_after(cls, writes: int, *, error: type[StoreError] = StoreUnavailable) -> Fault:
        """Make all writes fail after the first `writes` of them."""
        return cls(kind="fail", on=WRITES, after=writes, times=None, error=error)

    @classmethod
    def once_for_each_call(
        cls,
        *,
        on: frozenset[Operation] = OPERATIONS,
        kind: Literal["fail", "lost_reply", "break_off"] = "fail",
        error: type[StoreError] = StoreUnavailable,
    ) -> Fault:
        """Make every call fail at the first try and succeed at the second."""
        return cls(kind=kind, on=on, error=error, once_each=True)


class FaultStore(Store):
    """Calls `store`, with the faults of `plan`; all faults that match a call strike together.

    In another process, which gets the store as a pickle, the plan begins anew.

    Attributes:
        calls: (operation, key) of every call so far, in order.
    """

    def __init__(self, store: Store, plan: Sequence[Fault] = ()) -> None:
        self.url = store.url
        self.calls: builtins.list[tuple[Operation, str]] = []
        self._store = store
        self._plan = [(fault, _Count()) for fault in plan]

    def __repr__(self) -> str:
        return f"FaultStore({self._store!r})"

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `Store.get`."""
        faults = self._begin("get", key)
        return _damaged(self._store.get(key, max_bytes=max_bytes), faults)

    def get_range(self, key: str, *, start: int, end: int) -> bytes:
        """See `Store.get_range`."""
        faults = self._begin("get_range", key)
        return _damaged(self._store.get_range(key, start=start, end=end), faults)

    def put(self, key: str, data: bytes) -> None:
        """See `Store.put`."""
        faults = self._begin("put", key)
        self._store.put(key, data)
        self._end(key, faults)

    def create(self, key: str, data: bytes | memoryview) -> None:
        """See `Store.create`."""
        faults = self._begin("create", key)
        self._store.create(key, data)
        self._end(key, faults)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`."""
        faults = self._begin("list", prefix)
        listing = self._store.list(prefix)
        broken = any(fault.kind == "break_off" for fault in faults)
        return self._broken_off(builtins.list(listing), prefix) if broken else listing

    def size(self, key: str) -> int:
        """See `Store.size`."""
        self._begin("size", key)
        return self._store.size(key)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        faults = self._begin("delete", key)
        self._store.delete(key)
        self._end(key, faults)

    def list_unfinished(self) -> Iterator[ObjectInfo]:
        """See `Store.list_unfinished`."""
        self._begin("list_unfinished", "")
        return self._store.list_unfinished()

    def delete_unfinished(self, key: str) -> None:
        """See `Store.delete_unfinished`."""
        faults = self._begin("delete_unfinished", key)
        self._store.delete_unfinished(key)
        self._end(key, faults)

    def probe(self) -> None:
        """See `Store.probe`."""
        self._begin("probe", "")
        self._store.probe()

    def _begin(self, operation: Operation, key: str) -> builtins.list[Fault]:
        """Return the faults that strike this call; raise if a fault makes it fail."""
        self.calls.append((operation, key))
        if not _is_taken(operation, key):
            return []  # the store itself refuses this key
        striking = [
            fault
            for fault, count in self._plan
            if operation in fault.on
            and fault.key_contains in key
            and count.strikes(fault, operation, key)
        ]
        for fault in striking:
            if fault.kind == "fail":
                raise self._error(fault.error, key, f"a planned fault in {operation}")
        return striking

    def _end(self, key: str, faults: Sequence[Fault]) -> None:
        if any(fault.kind == "lost_reply" for fault in faults):
            raise self._error(StoreUnavailable, key, "a reply that was lost on purpose")

    def _broken_off(self, infos: builtins.list[ObjectInfo], prefix: str) -> Iterator[ObjectInfo]:
        yield from infos[: len(infos) // 2]
        raise self._error(StoreUnavailable, prefix, "a listing that breaks off on purpose")

    def _error(self, kind: type[StoreError], key: str, found: str) -> StoreError:
        return kind(
            f"{self.url}/{key}",
            found=found,
            expected="an answer",
            next_step="try again" if kind.retryable else "change the plan of the faults",
        )


def _is_taken(operation: Operation, key: str) -> bool:
    """Whether a store accepts the key, or the prefix of a listing."""
    try:
        if operation == "list":
            check_prefix(key)
        elif operation == "delete_unfinished":
            directory, slash, name = key.rpartition("/")
            check_key(f"{directory}{slash}x{name}")  # a local one begins with a dot
        elif operation not in ("list_unfinished", "probe"):
            check_key(key)
    except ValueError:
        return False
    return True


class _Count:
    """Counts the calls that a fault matches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._matched = 0
        self._struck: set[tuple[int, Operation, str]] = set()

    def __reduce__(self) -> tuple[object, ...]:
        return (_Count, ())

    def strikes(self, fault: Fault, operation: Operation, key: str) -> bool:
        with self._lock:
            if fault.once_each:
                call = (threading.get_ident(), operation, key)
                self._struck ^= {call}
                return call in self._struck
            self._matched += 1
            past = self._matched - fault.after
        return past > 0 and (fault.times is None or past <= fault.times)


def _damaged(data: bytes, faults: Sequence[Fault]) -> bytes:
    for fault in faults:
        if fault.kind == "flip" and data:
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]
        elif fault.kind == "short":
            data = data[: len(data) // 2]
    return data
