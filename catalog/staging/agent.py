"""Locks a staging area for the process that finishes its jobs, and reads what an agent reports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self

from recpoint.catalog.staging import locks
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.locks import Holder
from recpoint.catalog.staging.notes import read_note
from recpoint.catalog.staging.owned import make_root
from recpoint.catalog.store import durable
from recpoint.catalog.store.contract import now_ms
from recpoint.catalog.store.run_url import naming_run
from recpoint.errors import StagingError
from recpoint.format.notes import STATUS_NOTE

__all__ = [
    "AGENT",
    "AgentLock",
    "AgentTrouble",
    "AtWork",
    "DRAIN",
    "agent_lock_path",
    "at_work",
    "read_trouble",
    "sweep_of",
]


# The lock of the process that finishes jobs, and what its file says about the process (format §7).
#
# One process at a time finishes the jobs of a staging area: an agent, or, if there is none, a sweep
# or a drain, which holds the lock only while it works. A process that finds the lock held must know
# which it is: an agent does the jobs of all runs sooner or later, a sweep only the jobs of one run.


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
        """Says whether it does the jobs of this run."""
        return self.run in ("", staged_run.name)

    def __str__(self) -> str:
        """Returns its name in messages."""
        named = f"{self.kind} of {self.run}" if self.run else self.kind
        return f"an {named}" if self.kind == "agent" else f"a {named}"


AGENT: Final = AtWork("agent")
DRAIN: Final = AtWork("drain")


def sweep_of(staged_run: StagedRun) -> AtWork:
    """Returns a sweep of the run with this directory."""
    return AtWork("sweep", staged_run.name)


def agent_lock_path(staging: Path | str) -> Path:
    """Returns the path of the lock of a staging area."""
    return Path(staging) / "agent.lock"


def at_work(staging: Path | str) -> AtWork | None:
    """Returns the process that finishes jobs in a staging area now; None if there is none.

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
        """Take the lock again if its file was removed; returns another process that was faster.

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
        """Returns the error for a process that needs the lock while `other` holds it."""
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
    """Returns the process that holds the lock; an agent if it does not say, as older versions."""
    who = AGENT
    if holder.words == DRAIN.words:
        who = DRAIN
    elif sweep := _SWEEP.match(holder.words):
        who = AtWork("sweep", sweep[1])
    return who._replace(process=holder.process)


# The status file of an agent, read by a trainer whose checkpoints wait (format §7).


_MOST_CHARACTERS: Final = 2_000
#: An agent writes the file every five seconds. If the file is older, the agent hangs or is gone.
_FRESH_MS: Final = 30_000
_NEXT: Final = ". Next: "


class AgentTrouble(NamedTuple):
    """Why an agent's last try to store a staged checkpoint failed.

    Attributes:
        error: the error's type and message, in one line.
        next_step: what to do about it, in the error's own words; empty: it does not say.
        tries: how many tries have failed so far.
    """

    error: str
    next_step: str
    tries: int

    @property
    def cause(self) -> tuple[str, str]:
        """Equal for errors that need the same action, because keys in messages differ by try."""
        kind, _, _ = self.error.partition(":")
        return kind, self.next_step or self.error

    def __str__(self) -> str:
        return f"{self.error}{_NEXT}{self.next_step}" if self.next_step else self.error


def read_trouble(staged_run: StagedRun, run_url: str) -> AgentTrouble | None:
    """Returns why this host's agent cannot store this run's checkpoints; None: it does not say.

    The training process calls this, so nothing is raised. A file that is missing, not whole, or not
    written for half a minute says nothing.

    Args:
        staged_run: the run's directory in the staging area.
        run_url: put into the commands that the error proposes.
    """
    status = read_note(staged_run, STATUS_NOTE)
    if status is None or not status.last_error or status.failures < 1:
        return None
    # If the clock was set back, the time lies in the future; a live agent overwrites it.
    if abs(now_ms() - status.alive_ms) > _FRESH_MS:
        return None
    line = naming_run(" ".join(status.last_error.split()), run_url)[:_MOST_CHARACTERS]
    error, _, next_step = line.rpartition(_NEXT)
    return AgentTrouble(*((error, next_step) if error else (line, "")), tries=status.failures)
