"""The store that staged jobs go to, opened once for all steps of a job."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from recpoint.catalog.stores.store import S3Timeouts, Store, open_store

__all__ = ["forget_stores", "job_store"]

#: Few attempts: whoever persists tries again by pauses of its own, which follow the interval.
_TIMEOUTS: Final = S3Timeouts(attempts=3)


@lru_cache(maxsize=4)
def job_store(run_url: str, attempt: str) -> Store:
    """The store of a run, for the steps of one attempt.

    A new client of an object store takes a fifth of a second.
    """
    return open_store(run_url, timeouts=_TIMEOUTS)


def forget_stores() -> None:
    """Open stores anew from here on: after a failure, since credentials may have been changed."""
    job_store.cache_clear()
