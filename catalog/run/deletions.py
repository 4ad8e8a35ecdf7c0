"""Announces deletions: who owns one, how long it holds, who may take it over (format §6.6).

Pins are safe because a retention names each manifest in `deletion.json` from before its last look
at the pins until after the deletion. So a retention deletes only under its own announcement,
never removes another's, and stops if its own is gone.
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import NamedTuple

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import Clocks, host_seconds, stamp_now
from recpoint.catalog.store.records import Records
from recpoint.errors import FormatError, ObjectNotFound, RetentionRefused, StoreError
from recpoint.format.naming import DELETION_KEY
from recpoint.format.record_kinds import DELETION
from recpoint.format.retention_records import Deletion

__all__ = [
    "Announcement",
    "Standing",
    "TAKE_OVER_SECONDS",
    "announce",
    "read_deletion",
    "standing",
    "take_over",
]


#: An announcement of this age belongs to a killed retention: a living one deletes nothing more
#: under it.
TAKE_OVER_SECONDS = 1800.0

#: How long a retention deletes under one announcement; then it announces the rest again. This is
#: half of the time until another may take over; a last request may be under way for the other half.
_WORKING_SECONDS = TAKE_OVER_SECONDS / 2

#: Tokens of announcements under which this process stopped working after an error. It may go on
#: without waiting. The announcements stay in the store, because a delete whose answer was lost may
#: still arrive.
_stopped: set[str] = set()


class Standing(NamedTuple):
    """The announcement in the store.

    Attributes:
        deletion: the record; None: it cannot be read, or is of another run.
        who: who announced it, for people.
        age_seconds: its age at least.
    """

    deletion: Deletion | None
    who: str
    age_seconds: float

    def may_be_taken_over(self, after_seconds: float) -> bool:
        """Say whether no retention works under it any more."""
        stopped_here = self.deletion is not None and self.deletion.token in _stopped
        return stopped_here or self.age_seconds >= after_seconds


class Announcement:
    """An announcement of this retention.

    Args:
        run: the run.
        deletion: the announced deletion.
        begun_seconds: when it was announced, by `host_seconds`.
        taken_over: it continues a deletion that another began; if false, nothing was deleted yet.
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
        """Keys of the manifests that are going to be deleted."""
        return self._deletion.manifests

    @property
    def is_spent(self) -> bool:
        """Whether it is too old to delete under it, because another may soon take it over."""
        return host_seconds() - self._begun_seconds >= _WORKING_SECONDS

    def require_standing(self) -> None:
        """Check that the announcement in the store is still this one.

        Raises:
            RetentionRefused: it is not; pins no longer see it, so nothing may be deleted under it.
            StoreError: the store cannot be read.
        """
        if not self._stands():
            raise RetentionRefused(
                DELETION_KEY,
                found="no announcement of this retention; it is gone, or another's is there",
                expected=f"its own announcement, {self._deletion.token}, while it deletes",
                next_step=f"recpoint retain {self._run.url} makes a new plan",
            )

    def withdraw(self) -> None:
        """Remove it, if it is still in the store, after all deletions were done, or none."""
        if self._stands():
            self._run.store.delete(DELETION_KEY)

    def stop(self) -> None:
        """Leave it in the store; this process may continue under it at any time."""
        _stopped.add(self._deletion.token)

    def _stands(self) -> bool:
        try:
            announced = read_deletion(self._run)
        except FormatError:
            return False
        return announced is not None and announced.token == self._deletion.token


def read_deletion(run: Run) -> Deletion | None:
    """Return the announced deletion, of a retention at work or of a killed one; None if none.

    Raises:
        FormatError: the record cannot be read.
    """
    try:
        # The run is not checked: callers decide about the record of another run.
        return Records(run.store, DELETION, run=None).read()
    except ObjectNotFound:
        return None


def standing(run: Run, clocks: Clocks) -> Standing | None:
    """Return the announcement in the store; None if there is none.

    Raises:
        StoreError: the store cannot be read.
    """
    deletion: Deletion | None = None
    holder = "an unknown process (the record cannot be read)"
    try:
        deletion = read_deletion(run)
        if deletion is None:
            return None
        holder = f"process {deletion.pid} of {deletion.host}"
        if deletion.run != run.id:
            holder, deletion = f"{holder}, for run {deletion.run}", None
    except FormatError:
        pass
    # Listed after the read: if another announcement came in between, this one only looks younger.
    info = next((info for _, info in run.records(DELETION).listed()), None)
    if info is None:
        return None
    if deletion is None or deletion.stamp.written_ms > clocks.wall_ms:
        # The stamp cannot be used, so only the store's clock gives the age.
        store_ms = clocks.wall_ms if clocks.store_ms is None else clocks.store_ms
        return Standing(deletion, holder, (store_ms - info.modified_ms) / 1000)
    age_seconds = clocks.age_seconds(deletion.stamp, modified_ms=info.modified_ms)
    return Standing(deletion, holder, age_seconds)


def announce(run: Run, manifests: tuple[str, ...]) -> Announcement:
    """Announce, create-only, the manifests that are going to be deleted.

    Raises:
        RetentionRefused: another retention has announced a deletion meanwhile.
        StoreError: the store refuses or cannot be reached.
    """
    deletion, begun_seconds = _deletion(run, manifests), host_seconds()
    try:
        created = run.records(DELETION).create(deletion)
    except (StoreError, ObjectNotFound):
        _stopped.add(deletion.token)  # it may have been written anyway
        raise
    if created == "other":
        raise _at_work(run, _who(run), TAKE_OVER_SECONDS)
    return Announcement(run, deletion, begun_seconds=begun_seconds, taken_over=False)


def take_over(
    run: Run, there: Standing, manifests: tuple[str, ...], *, after_seconds: float
) -> Announcement:
    """Replace an announcement under which no retention works any more.

    It is replaced, not removed first, so a pin of its manifests is refused at every moment. If two
    processes take it over at once, both name the same manifests, and each looks before it deletes:
    the one whose announcement is not in the store stops.

    Args:
        run: the run.
        there: the result of `standing`.
        manifests: what to announce if it is unknown what the old announcement named.
        after_seconds: how old the announcement must be.

    Raises:
        RetentionRefused: it is younger: a retention is at work.
        StoreError: the store refuses or cannot be reached.
    """
    if not there.may_be_taken_over(after_seconds):
        raise _at_work(run, there.who, after_seconds - there.age_seconds)
    manifest_keys = manifests if there.deletion is None else there.deletion.manifests
    deletion, begun_seconds = _deletion(run, manifest_keys), host_seconds()
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
        found=f"a deletion announced by {who}, which is at work or was killed",
        expected="one retention that deletes at a time",
        next_step=f"let it end, then recpoint retain {run.url}; if it was killed, this command "
        f"finishes its deletion in {minutes} minutes, when the announcement is old enough",
    )


def _who(run: Run) -> str:
    try:
        deletion = read_deletion(run)
    except (FormatError, StoreError):
        deletion = None
    return "another process" if deletion is None else f"process {deletion.pid} of {deletion.host}"


def _deletion(run: Run, manifests: tuple[str, ...]) -> Deletion:
    return Deletion(
        run=run.id,
        token=secrets.token_hex(16),
        host=socket.gethostname()[:255],
        pid=os.getpid(),
        manifests=manifests,
        stamp=stamp_now(),
    )
