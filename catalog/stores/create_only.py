"""Create-only writes whose answer may get lost (format §6.2)."""

from __future__ import annotations

import random
import time

from recpoint.catalog.stores.store_contract import Store
from recpoint.errors import ObjectExists, ObjectNotFound, StoreThrottled, StoreUnavailable

__all__ = ["create_or_read"]

_TRIES = 5
_FIRST_WAIT_SECONDS = 0.05
_WAIT_FACTOR = 2.5

#: Not the process's generator: this also runs inside seeded training.
_jitter = random.Random()


def create_or_read(store: Store, key: str, data: bytes, *, max_bytes: int) -> bytes | None:
    """Write the object if there is none; otherwise say what is there.

    Safe to call from any number of processes: of all of them one creates the object, and those
    whose answer was lost recognise their own bytes in what comes back.

    Returns:
        None when this call created the object and was told so; else the bytes under `key`, which
        may be the ones that this very call wrote.

    Raises:
        StoreError: it is still unknown after several tries, or the store refuses.
        MalformedObject: what is there is larger than `max_bytes`.
    """
    wait_seconds = _FIRST_WAIT_SECONDS
    for remaining in reversed(range(_TRIES)):
        try:
            store.create(key, data)
        except ObjectExists:
            pass
        except (StoreThrottled, StoreUnavailable):
            # Ambiguous: the object may be there now, or arrive later. Only a read tells, and a
            # later arrival is found by the next try, which then meets ObjectExists.
            if not remaining:
                raise
        else:
            return None
        try:
            return store.get(key, max_bytes=max_bytes)
        except ObjectNotFound:
            # Nothing there (or removed since): the same bytes may be written again.
            if not remaining:
                raise
        except (StoreThrottled, StoreUnavailable):
            if not remaining:
                raise
        time.sleep(wait_seconds * _jitter.uniform(0.5, 1.5))
        wait_seconds *= _WAIT_FACTOR
    raise AssertionError("unreachable: the last try returns or raises")
