"""Estimates an object's age from the two listings between which it appeared, by no clock."""

from __future__ import annotations

import time

from recpoint.catalog.overview.overview import Age
from recpoint.catalog.store.contract import ObjectInfo

__all__ = [
    "Appearances",
]


class Appearances:
    """Remembers between which listings each object appeared. For one thread at a time."""

    def __init__(self) -> None:
        # Monotonic times between which an object appeared that the first listing did not have.
        self._appeared: dict[str, tuple[float, float]] = {}
        self._known: set[str] = set()
        self._first_seen: float | None = None
        self._last_began = 0.0

    def note_listing(self, keys: set[str], began: float) -> None:
        """Note the keys of a listing that began at monotonic time `began`."""
        now = time.monotonic()
        if self._first_seen is None:
            self._first_seen = now
        else:
            for key in keys - self._known:
                self._appeared[key] = (self._last_began, now)
            for key in self._known - keys:
                self._appeared.pop(key, None)
        self._known, self._last_began = keys, began

    def age(self, info: ObjectInfo) -> Age:
        """Return an object's age by the store's time, limited to the bounds observed here."""
        now = time.monotonic()
        store_seconds = time.time() - info.modified_ms / 1000
        if info.key in self._appeared:
            absent_seconds, seen_seconds = self._appeared[info.key]
            return Age.of(
                store_seconds=store_seconds, least=now - seen_seconds, most=now - absent_seconds
            )
        first = now if self._first_seen is None else self._first_seen
        least = now - first if info.key in self._known else 0.0
        return Age.of(store_seconds=store_seconds, least=least, most=None)
