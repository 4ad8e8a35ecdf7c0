"""Locks a staging area for the process that finishes its jobs, and names that process (§7).

One process at a time finishes the jobs of a staging area: an agent, or, if there is none, a sweep
or a drain, which holds the lock only while it works. A process that finds the lock held must know
which it is: an agent does the jobs of all runs sooner or later, a sweep only the jobs of one run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self

from recpoint.catalog.staging import locks
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.locks import Holder
from recpoint.catalog.staging.owned import make_root
from recpoint.catalog.store import durable
from recpoint.errors import StagingError

__all__ = [
    "AGENT",
    "AgentLock",
    "AtWork",
    "DRAIN",
    "agent_lock_path",
    "at_work",
    "sweep_of",
]


_SWEEP = re.compile(r"sweep ([A-Za-z0-9._-]+)\Z")


class AtWork(NamedTuple):
    """A process that finishes jobs.

    Attributes:
        kind: `agent` works until it is told to end, `drain` until nothing is left that can be done
            now, `sweep` once, for one run.
        run: the name of the run's directory; empty: the jobs of all runs.
        process: the process number, if it is at work; otherwise empty.
    """

    kind: Literal["agent", "drain", "sweep"]
    run: str = ""
    process: str = ""

    @property
    def ends_by_itself(self) -> bool:
        """Whether it ends when it is done, so nobody has to stop it."""
        return self.kind != "agent"

    @property
    def words(self) -> str:
        """What it writes into the lock file after its process number."""
        return f"{self.kind} {self.run}".rstrip()

    def serves(self, staged_run: StagedRun) -> bool:
        """Say whether it does the jobs of this run."""
        return self.run in ("", staged_run.name)

    def __str__(self) -> str:
        """Return its name in messages."""
        named = f"{self.kind} of {self.run}" if self.run else self.kind
        return f"an {named}" if self.kind == "agent" else f"a {named}"


AGENT: Final = AtWork("agent")
DRAIN: Final = AtWork("drain")


def sweep_of(staged_run: StagedRun) -> AtWork:
    """Return a sweep of the run with this directory."""
    return AtWork("sweep", staged_run.name)


def agent_lock_path(staging: Path | str) -> Path:
    """Return the path of the lock of a staging area."""
    return Path(staging) / "agent.lock"


def at_work(staging: Path | str) -> AtWork | None:
    """Return the process that finishes jobs in a staging area now; None if there is none.

    Raises:
        StagingRefused: the staging area, or its lock, is another user's.
        OSError: the file system does not say.
    """
    holder = locks.holder(agent_lock_path(staging))
    return None if holder is None else _said_by(holder)


class AgentLock:
    """The lock of a staging area; the kernel releases it however its holder ends.

    Args:
        staging: the staging area.
        who: the process that takes the lock.

    Raises (on entry):
        StagingError: another process holds it, or the staging area is open to others or cannot be
            used.
    """

    def __init__(self, staging: Path | str, who: AtWork = AGENT) -> None:
        self._path = agent_lock_path(staging)
        self._who = who
        self._descriptor: int | None = None

    def take(self) -> AtWork | None:
        """Take the lock and return None, or return the process that holds it.

        Raises:
            StagingError: the staging area is open to others or cannot be used.
        """
        try:
            make_root(self._path.parent)
            taken = locks.take(self._path, self._who.words)
        except OSError as error:
            raise StagingError(
                str(self._path.parent),
                found=error.strerror or str(error),
                expected="a directory that the agent can create and write",
                next_step="free space there, or give another directory, to trainer and agent: "
                "RECPOINT_STAGING"
                if error.errno in durable.NO_ROOM
                else "give another directory: --staging or RECPOINT_STAGING",
            ) from error
        if isinstance(taken, Holder):
            return _said_by(taken)
        self._descriptor = taken
        return None

    def keep(self) -> AtWork | None:
        """Take the lock again if its file was removed; return another process that was faster.

        Returns None if this process still holds the lock, or holds it again. Costs two looks at
        a file while the file exists.

        Raises:
            StagingError: see `take`.
        """
        lost = self._descriptor
        if lost is None or not locks.is_lost(lost, self._path):
            return None
        other = self.take()
        if other is None:
            locks.release(lost)
        return other

    def release(self) -> None:
        """Release the lock if it was taken."""
        if self._descriptor is not None:
            locks.release(self._descriptor)
            self._descriptor = None

    def refused(self, other: AtWork) -> StagingError:
        """Return the error for a process that needs the lock while `other` holds it."""
        return StagingError(
            str(self._path),
            found=f"a lock held by process {other.process}, {other}",
            expected="no other process that finishes the jobs staged here",
            next_step="it ends by itself: run this again after it"
            if other.ends_by_itself
            else "use the agent that runs, or stop it first",
        )

    def __enter__(self) -> Self:
        other = self.take()
        if other is not None:
            raise self.refused(other)
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _said_by(holder: Holder) -> AtWork:
    """Return the process that holds the lock; an agent if it does not say, as older versions."""
    who = AGENT
    if holder.words == DRAIN.words:
        who = DRAIN
    elif sweep := _SWEEP.match(holder.words):
        who = AtWork("sweep", sweep[1])
    return who._replace(process=holder.process)
