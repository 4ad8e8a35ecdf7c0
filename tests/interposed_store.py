"""Wraps a real store, and calls hooks before and after each of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from recpoint.catalog.store.contract import ObjectInfo, Store
from recpoint.errors import StoreUnavailable

__all__ = ["InterposedStore", "unavailable"]

Hook = Callable[[str, str], None]


def _nothing(call: str, key: str) -> None:
    pass


def unavailable(key: str) -> StoreUnavailable:
    """Return the error of a store whose answer was lost."""
    return StoreUnavailable(key, found="no answer", expected="one", next_step="try again")


class InterposedStore(Store):
    """Passes every call on to `inner`; `before` and `after` get the call's name and its key.

    The caller gets the errors that hooks raise. If `before` raises, the call did not happen; if
    `after` raises, the call happened and only its answer was lost.
    """

    def __init__(self, inner: Store, *, before: Hook = _nothing, after: Hook = _nothing) -> None:
        self.inner = inner
        self.url = inner.url
        self.before = before
        self.after = after
        self.calls: list[tuple[str, str]] = []

    def _around(self, call: str, key: str) -> Callable[[], None]:
        self.calls.append((call, key))
        self.before(call, key)
        return lambda: self.after(call, key)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        call_after = self._around("get", key)
        data = self.inner.get(key, max_bytes=max_bytes)
        call_after()
        return data

    def get_range(self, key: str, *, start: int, end: int) -> bytes:
        call_after = self._around("get_range", key)
        data = self.inner.get_range(key, start=start, end=end)
        call_after()
        return data

    def put(self, key: str, data: bytes) -> None:
        call_after = self._around("put", key)
        self.inner.put(key, data)
        call_after()

    def create(self, key: str, data: bytes | memoryview) -> None:
        call_after = self._around("create", key)
        self.inner.create(key, data)
        call_after()

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        call_after = self._around("list", prefix)
        yield from self.inner.list(prefix)
        call_after()

    def size(self, key: str) -> int:
        call_after = self._around("size", key)
        size_bytes = self.inner.size(key)
        call_after()
        return size_bytes

    def delete(self, key: str) -> None:
        call_after = self._around("delete", key)
        self.inner.delete(key)
        call_after()

    def list_unfinished(self) -> Iterator[ObjectInfo]:
        call_after = self._around("list_unfinished", "")
        yield from self.inner.list_unfinished()
        call_after()

    def delete_unfinished(self, key: str) -> None:
        call_after = self._around("delete_unfinished", key)
        self.inner.delete_unfinished(key)
        call_after()

    def probe(self) -> None:
        self.inner.probe()
