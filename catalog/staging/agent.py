"""Locks a staging area for whoever finishes its jobs, and reads what an agent reports of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self

from recpoint.catalog.staging import area, locks, owned
from recpoint.catalog.staging.locks import Holder
from recpoint.catalog.staging.owned import make_root
from recpoint.catalog.store import durable
from recpoint.catalog.store.contract import now_ms
from recpoint.catalog.store.run_url import naming_run
from recpoint.errors import StagingError, StagingRefused

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


# The lock of who finishes what is staged, and what its file says of that one (format §7).
#
# One at a time does so in a staging area: an agent, or where none is a sweep or drain, which has it
# only as long as that takes. Whoever finds it taken has to tell these apart: an agent does the jobs
# of all runs sooner or later, and a sweep those of one run alone.


_SWEEP = re.compile(r"sweep ([A-Za-z0-9._-]+)\Z")


class AtWork(NamedTuple):
    """Who finishes jobs.

    Attributes:
        kind: `agent`, until it is told to end; `drain`, until nothing is left that can be done now;
            `sweep`, once, for one run.
        run: the name of that run's directory; empty: the jobs of all runs.
        process: its number, once it is at work.
    """

    kind: Literal["agent", "drain", "sweep"]
    run: str = ""
    process: str = ""

    @property
    def ends_by_itself(self) -> bool:
        """Whether nobody has to stop it: it ends when it is done."""
        return self.kind != "agent"

    @property
    def words(self) -> str:
        """What it leaves in the lock file, beside its process."""
        return f"{self.kind} {self.run}".rstrip()

    def serves(self, run_dir: Path) -> bool:
        """Whether it does the jobs of this run."""
        return self.run in ("", run_dir.name)

    def __str__(self) -> str:
        """As a message names it."""
        named = f"{self.kind} of {self.run}" if self.run else self.kind
        return f"an {named}" if self.kind == "agent" else f"a {named}"


AGENT: Final = AtWork("agent")
DRAIN: Final = AtWork("drain")


def sweep_of(run_dir: Path) -> AtWork:
    """A sweep of the run of this directory."""
    return AtWork("sweep", run_dir.name)


def agent_lock_path(staging: Path | str) -> Path:
    """Where the lock of a staging area is."""
    return Path(staging) / "agent.lock"


def at_work(staging: Path | str) -> AtWork | None:
    """Who finishes jobs in a staging area now; None: nobody.

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
        who: is to hold it.

    Raises (on entry):
        StagingError: another one holds it, or the staging area is open to others, or none at all.
    """

    def __init__(self, staging: Path | str, who: AtWork = AGENT) -> None:
        self._path = agent_lock_path(staging)
        self._who = who
        self._descriptor: int | None = None

    def take(self) -> AtWork | None:
        """Take it, to be released; None, or who has it.

        Raises:
            StagingError: the staging area is open to others, or none at all.
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
        """Take it anew where its file was removed meanwhile; None, or who has done so before.

        Costs two looks at a file as long as it is there.

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
        """Give it back, if it was taken."""
        if self._descriptor is not None:
            locks.release(self._descriptor)
            self._descriptor = None

    def refused(self, other: AtWork) -> StagingError:
        """The error of who found another one at work, and cannot leave it to that one."""
        return StagingError(
            str(self._path),
            found=f"a lock held by process {other.process}, {other}",
            expected="nobody else who finishes what is staged here",
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
    """Who a holder is; an agent where it does not say, as with those of older versions."""
    who = AGENT
    if holder.words == DRAIN.words:
        who = DRAIN
    elif sweep := _SWEEP.match(holder.words):
        who = AtWork("sweep", sweep[1])
    return who._replace(process=holder.process)


# What an agent's status file says of a run, for a trainer whose checkpoints wait (format §7).


_MOST_BYTES: Final = 65_536
_MOST_CHARACTERS: Final = 2_000
#: An agent writes it every five seconds: what is older is of one that is gone, or hangs.
_FRESH_MS: Final = 30_000
_NEXT: Final = ". Next: "


class AgentTrouble(NamedTuple):
    """Why an agent cannot store what is staged, by its last try.

    Attributes:
        error: kind of the error and what it says, in one line.
        next_step: what to do about it, in the error's own words; empty: it does not say.
        tries: that have failed so far.
    """

    error: str
    next_step: str
    tries: int

    @property
    def cause(self) -> tuple[str, str]:
        """The same while somebody has to do the same about it: keys differ between tries."""
        kind, _, _ = self.error.partition(":")
        return kind, self.next_step or self.error

    def __str__(self) -> str:
        return f"{self.error}{_NEXT}{self.next_step}" if self.next_step else self.error


def read_trouble(run_dir: Path, run_url: str) -> AgentTrouble | None:
    """Why the agent of this host cannot store this run's checkpoints now; None: it does not say.

    Training asks, so nothing is raised: a file that is not there, not whole, or of an agent that
    has not written it for half a minute says nothing.

    Args:
        run_dir: of the staging area.
        run_url: for the commands that an error proposes.
    """
    try:
        found = json.loads(owned.read(run_dir.parent, area.status_path(run_dir), _MOST_BYTES))
        alive_ms, tries, text = found["alive_ms"], found["failures"], found["last_error"]
    except (OSError, StagingRefused, ValueError, KeyError, TypeError, RecursionError):
        return None
    if type(alive_ms) is not int or type(tries) is not int or not isinstance(text, str):
        return None
    # If the clock was set back, the time lies in the future; a live agent writes it anew.
    if not text or tries < 1 or abs(now_ms() - alive_ms) > _FRESH_MS:
        return None
    line = naming_run(" ".join(text.split()), run_url)[:_MOST_CHARACTERS]
    error, _, next_step = line.rpartition(_NEXT)
    return AgentTrouble(error, next_step, tries) if error else AgentTrouble(line, "", tries)
