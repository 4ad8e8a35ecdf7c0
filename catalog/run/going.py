"""Manifests that a retention may still delete although a reader holds a lease (format §6.6).

A retention lists the leases before each manifest that it deletes. It does not see a lease that is
written after that listing until this one manifest is gone. But the manifest was announced before,
so the reader looks at the announcement.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Final, Self

from recpoint.catalog.run.chain import Chain
from recpoint.catalog.run.deletions import TAKE_OVER_SECONDS, Standing, read_deletion, standing
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import Clocks
from recpoint.errors import FormatError, RetentionRefused, StoreError
from recpoint.format.naming import DELETION_KEY

__all__ = [
    "Going",
]


_LOG = logging.getLogger("recpoint.leases")

#: How long a reader waits in all for a retention to see its lease. The retention lists the leases
#: before each manifest, and before it ends it reads all manifests again.
_WAIT_SECONDS: Final = 30.0
_ASK_SECONDS: Final = 0.5


class Going:
    """The manifests that were announced for deletion when the reader's lease was written.

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
        """Read the announcement; never raises, because a restore matters more than this check.

        Call this after the lease was written and before a manifest is read. A manifest that is not
        named then is either gone already, so the reader does not find it, or is announced later, by
        a retention that sees the lease.

        Args:
            run: the run.
            leased: whether the reader has a lease of everything. Without it nothing is read, and no
                manifest counts as announced.
        """
        if not leased:
            return cls(run)
        try:
            deletion = read_deletion(run)
        except (FormatError, StoreError) as error:
            # No retention deletes under an announcement that cannot be read.
            _LOG.info("reading without knowing what is being deleted: %s", error)
            return cls(run)
        return cls(run, () if deletion is None else deletion.manifests)

    def require_staying(self, chain: Chain) -> None:
        """Wait until no manifest of `chain` can be deleted any more.

        An announcement that is old enough to be taken over is ignored: a retention that takes it
        over looks at the leases after that.

        Raises:
            RetentionRefused: a manifest is still announced, after half a minute for all chains
                together.
            ObjectNotFound: a manifest is gone.
            StoreError: the store does not say whether a manifest is gone.
        """
        own_keys = self._manifests.intersection(
            Representation.of(manifest).key for manifest in chain.all_manifests
        )
        if not own_keys:
            return
        if self._until is None:
            self._until = time.monotonic() + _WAIT_SECONDS
        while (other := self._announced(own_keys)) is not None:
            if time.monotonic() >= self._until:
                raise self._refused(min(own_keys), other)
            time.sleep(_ASK_SECONDS)
        for key in own_keys:
            self._run.store.size(key)

    def _announced(self, mine: Collection[str]) -> Standing | None:
        """Return the announcement under which one of these may be deleted; None if none."""
        try:
            announced = standing(self._run, Clocks.read(self._run.store))
        except StoreError as error:
            return Standing(None, f"an unknown process ({error.found})", 0.0)
        if announced is None or announced.age_seconds >= TAKE_OVER_SECONDS:
            return None
        if announced.deletion is not None and not set(mine).intersection(
            announced.deletion.manifests
        ):
            return None
        return announced

    def _refused(self, key: str, there: Standing) -> RetentionRefused:
        minutes = max(1, round((TAKE_OVER_SECONDS - there.age_seconds) / 60))
        url = self._run.url
        return RetentionRefused(
            key,
            found=f"its key in {DELETION_KEY}, announced by {there.who}: it is being deleted",
            expected="a checkpoint that no retention has begun to delete",
            next_step=f"choose another: recpoint list {url}; if that retention was killed, this "
            f"one can be read again in {minutes} minutes, unless recpoint retain {url} runs first",
        )
