"""How long ago something was written, by clocks of which none is trusted alone (format §6.7)."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from recpoint.catalog.stores.store_contract import PROBE_PREFIX, Store
from recpoint.errors import StoreUnavailable
from recpoint.format.retention_records import Stamp

__all__ = ["Clocks", "host_seconds", "now_ms", "stamp_now", "store_ms"]

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
