"""What a retention may still be deleting as a reader comes with its lease (format §6.6).

A retention lists the leases before each manifest that it deletes. Whoever comes after that is not
seen before that one manifest is gone; but it was announced before, and this is where the reader
looks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Final, Self

from recpoint.catalog.records.announcement import TAKE_OVER_SECONDS, Standing, standing
from recpoint.catalog.records.pins import read_deletion
from recpoint.catalog.runs.chain import Chain
from recpoint.catalog.runs.lineage import Representation
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.elapsed import Clocks
from recpoint.errors import FormatError, RetentionRefused, StoreError
from recpoint.format.naming import DELETION_KEY

__all__ = ["Going"]

_LOG = logging.getLogger("recpoint.leases")

#: So long a reader waits for a retention to see its lease, in all: it asks before each manifest,
#: and reads all manifests anew before it leaves.
_WAIT_SECONDS: Final = 30.0

_ASK_SECONDS: Final = 0.5


class Going:
    """The manifests of the announcement that was there once the reader's lease was written.

    Args:
        run: the run.
        manifests: their keys.
    """

    def __init__(self, run: Run, manifests: Collection[str] = ()) -> None:
        self._run = run
        self._manifests = frozenset(manifests)
        self._until: float | None = None

    @classmethod
    def read(cls, run: Run, *, leased: bool) -> Self:
        """Read the announcement; never an error, since a restore goes before what it protects.

        To be called after the lease was written, and before a manifest is read: what is not named
        then either is gone already, so that it is not found, or is announced later, by a retention
        that finds the lease.

        Args:
            run: the run.
            leased: whether the reader has a lease of everything; without one nothing is read, and
                nothing is known to go.
        """
        if not leased:
            return cls(run)
        try:
            deletion = read_deletion(run)
        except (FormatError, StoreError) as error:
            # Under one that cannot be read nobody goes on deleting.
            _LOG.info("reading without knowing what is being deleted: %s", error)
            return cls(run)
        return cls(run, () if deletion is None else deletion.manifests)

    def require_staying(self, chain: Chain) -> None:
        """Make sure that no manifest of `chain` is deleted any more, by waiting if need be.

        Of an announcement that is as old as one that may be taken over nobody deletes any more:
        whoever takes it over looks at the leases after that.

        Raises:
            RetentionRefused: one still is announced, after half a minute for all chains together.
            ObjectNotFound: one is gone.
            StoreError: the store does not say whether it is.
        """
        mine = self._manifests.intersection(Representation.of(one).key for one in chain.manifests)
        if not mine:
            return
        if self._until is None:
            self._until = time.monotonic() + _WAIT_SECONDS
        while (there := self._announced(mine)) is not None:
            if time.monotonic() >= self._until:
                raise self._refused(min(mine), there)
            time.sleep(_ASK_SECONDS)
        for key in mine:
            self._run.store.size(key)

    def _announced(self, mine: Collection[str]) -> Standing | None:
        """The announcement under which one of these may be deleted; None: there is none."""
        try:
            there = standing(self._run, Clocks.read(self._run.store))
        except StoreError as error:
            return Standing(None, f"nobody knows whom: {error.found}", 0.0)
        if there is None or there.age_seconds >= TAKE_OVER_SECONDS:
            return None
        if there.deletion is not None and not set(mine).intersection(there.deletion.manifests):
            return None
        return there

    def _refused(self, key: str, there: Standing) -> RetentionRefused:
        minutes = max(1, round((TAKE_OVER_SECONDS - there.age_seconds) / 60))
        url = self._run.url
        return RetentionRefused(
            key,
            found=f"it in {DELETION_KEY}, announced by {there.who}: it is being deleted",
            expected="a checkpoint that no retention has begun to delete",
            next_step=f"choose another: recpoint list {url}; if that retention was killed, this "
            f"one can be had again in {minutes} minutes, unless recpoint retain {url} comes first",
        )
