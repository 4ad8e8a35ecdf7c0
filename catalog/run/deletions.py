"""Announces deletions, and tells readers what a retention may still be deleting."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Collection
from typing import Final, NamedTuple, Self

from recpoint.catalog.run.chain import Chain
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.pins import read_deletion
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import Clocks, host_seconds, stamp_now
from recpoint.errors import FormatError, ObjectNotFound, RetentionRefused, StoreError
from recpoint.format.naming import DELETION_KEY
from recpoint.format.record_kinds import DELETION
from recpoint.format.retention_records import Deletion

__all__ = ["Announcement", "Going", "TAKE_OVER_SECONDS", "announce", "standing", "take_over"]


# The announcement of a deletion: whose it is, how long it holds, who may take it over (§6.6,
# announce).
#
# A pin is safe because whoever deletes a manifest has named it in `deletion.json` from before the
# last look until after the deletion. So nobody deletes under an announcement that is not their own,
# nobody removes another's, and whoever finds that theirs is gone stops.


#: So old, an announcement is of a retention that was killed: its own deletes nothing any more.
TAKE_OVER_SECONDS = 1800.0

#: So long a retention deletes under one announcement; then it announces what is left anew. Half
#: of the time after which another takes it over: a request may be under way for the other half.
_WORKING_SECONDS = TAKE_OVER_SECONDS / 2

#: Tokens of announcements that this very process has stopped working under, by an error: it need
#: not wait to go on. Their objects stay meanwhile, since a delete whose answer got lost may still
#: arrive.
_stopped: set[str] = set()


class Standing(NamedTuple):
    """The announcement that is there.

    Attributes:
        deletion: None: it cannot be read, or is of another run.
        who: for people.
        age_seconds: since it was made, at least.
    """

    deletion: Deletion | None
    who: str
    age_seconds: float

    def may_be_taken_over(self, after_seconds: float) -> bool:
        """Whether nobody works under it any more."""
        stopped_here = self.deletion is not None and self.deletion.token in _stopped
        return stopped_here or self.age_seconds >= after_seconds


class Announcement:
    """An announcement of this retention.

    Args:
        run: the run.
        deletion: what was announced.
        begun_seconds: when, by `host_seconds`.
        taken_over: it goes on with what another began; else nothing was deleted under it yet.
    """

    def __init__(
        self, run: Run, deletion: Deletion, *, begun_seconds: float, taken_over: bool
    ) -> None:
        self._run = run
        self._deletion = deletion
        self._begun_seconds = begun_seconds
        self.taken_over = taken_over

    @property
    def manifests(self) -> tuple[str, ...]:
        """Keys of what is going to be deleted."""
        return self._deletion.manifests

    @property
    def is_spent(self) -> bool:
        """Whether it is too old to delete under it: another may soon take it over."""
        return host_seconds() - self._begun_seconds >= _WORKING_SECONDS

    def require_standing(self) -> None:
        """Make sure that it is still the one that is there.

        Raises:
            RetentionRefused: it is not: pins no longer see it, so nothing may be deleted under it.
            StoreError: the store cannot be read.
        """
        if not self._stands():
            raise RetentionRefused(
                DELETION_KEY,
                found="the announcement of this retention is gone, or another's is there",
                expected=f"its own, {self._deletion.token}, while it deletes",
                next_step=f"recpoint retain {self._run.url}: it plans anew",
            )

    def withdraw(self) -> None:
        """Remove it, if it is still the one that is there: everything was done, or nothing."""
        if self._stands():
            self._run.store.delete(DELETION_KEY)

    def stop(self) -> None:
        """Leave it as it is, for this process to go on with whenever it likes."""
        _stopped.add(self._deletion.token)

    def _stands(self) -> bool:
        try:
            there = read_deletion(self._run)
        except FormatError:
            return False
        return there is not None and there.token == self._deletion.token


def standing(run: Run, clocks: Clocks) -> Standing | None:
    """The announcement that is there, if there is one.

    Raises:
        StoreError: the store cannot be read.
    """
    deletion: Deletion | None = None
    who = "nobody knows whom: it cannot be read"
    try:
        deletion = read_deletion(run)
        if deletion is None:
            return None
        who = f"process {deletion.pid} of {deletion.host}"
        if deletion.run != run.id:
            who, deletion = f"{who}, for run {deletion.run}", None
    except FormatError:
        pass
    # Listed after it was read: if another one came in between, it looks younger, never older.
    info = next((info for _, info in run.records(DELETION).listed()), None)
    if info is None:
        return None
    if deletion is None or deletion.stamp.written_ms > clocks.wall_ms:
        # Its stamp says nothing: the store's own clock alone.
        store_ms = clocks.wall_ms if clocks.store_ms is None else clocks.store_ms
        return Standing(deletion, who, (store_ms - info.modified_ms) / 1000)
    age_seconds = clocks.age_seconds(deletion.stamp, modified_ms=info.modified_ms)
    return Standing(deletion, who, age_seconds)


def announce(run: Run, manifests: tuple[str, ...]) -> Announcement:
    """Say what is going to be deleted, create-only.

    Raises:
        RetentionRefused: another retention has announced a deletion meanwhile.
        StoreError: the store refuses or cannot be reached.
    """
    deletion, begun_seconds = _deletion(run, manifests), host_seconds()
    try:
        created = run.records(DELETION).create(deletion)
    except (StoreError, ObjectNotFound):
        _stopped.add(deletion.token)  # it may have been written all the same
        raise
    if created == "other":
        raise _at_work(run, _who(run), TAKE_OVER_SECONDS)
    return Announcement(run, deletion, begun_seconds=begun_seconds, taken_over=False)


def take_over(
    run: Run, there: Standing, manifests: tuple[str, ...], *, after_seconds: float
) -> Announcement:
    """Put one's own in the place of an announcement under which nobody works any more.

    It is replaced, never removed first: a pin of what it names is refused at every moment. Two
    that take it over at once name the same manifests, and whose announcement is not there when
    they look before they delete stops.

    Args:
        run: the run.
        there: of `standing`.
        manifests: what to announce if nobody knows what it named.
        after_seconds: how old it has to be.

    Raises:
        RetentionRefused: it is younger: somebody is at work.
        StoreError: the store refuses or cannot be reached.
    """
    if not there.may_be_taken_over(after_seconds):
        raise _at_work(run, there.who, after_seconds - there.age_seconds)
    known = manifests if there.deletion is None else there.deletion.manifests
    deletion, begun_seconds = _deletion(run, known), host_seconds()
    try:
        run.records(DELETION).put(deletion)
    except StoreError:
        _stopped.add(deletion.token)
        raise
    return Announcement(run, deletion, begun_seconds=begun_seconds, taken_over=True)


def _at_work(run: Run, who: str, wait_seconds: float) -> RetentionRefused:
    minutes = max(1, round(wait_seconds / 60))
    return RetentionRefused(
        DELETION_KEY,
        found=f"the deletion that {who} has announced: it is at work, or was killed",
        expected="one retention that deletes at a time",
        next_step=f"let it end, then recpoint retain {run.url}; if it was killed, that finishes "
        f"what it began once the announcement is old enough, in {minutes} minutes",
    )


def _who(run: Run) -> str:
    try:
        deletion = read_deletion(run)
    except (FormatError, StoreError):
        deletion = None
    return "somebody" if deletion is None else f"process {deletion.pid} of {deletion.host}"


def _deletion(run: Run, manifests: tuple[str, ...]) -> Deletion:
    return Deletion(
        run=run.id,
        token=secrets.token_hex(16),
        host=socket.gethostname()[:255],
        pid=os.getpid(),
        manifests=manifests,
        stamp=stamp_now(),
    )


# What a retention may still be deleting as a reader comes with its lease (format §6.6).
#
# A retention lists the leases before each manifest that it deletes. Whoever comes after that is not
# seen before that one manifest is gone; but it was announced before, and this is where the reader
# looks.


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
