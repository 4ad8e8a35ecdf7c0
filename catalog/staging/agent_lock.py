"""The lock of who finishes what is staged, and what its file says of that one (format §7).

One at a time does so in a staging area: an agent, or where none is a sweep or drain, which has it
only as long as that takes. Whoever finds it taken has to tell these apart: an agent does the jobs
of all runs sooner or later, and a sweep those of one run alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self

from recpoint.catalog.staging import host_lock
from recpoint.catalog.staging.host_lock import Holder
from recpoint.catalog.staging.owned import make_root
from recpoint.catalog.stores import durable
from recpoint.errors import StagingError

__all__ = ["AGENT", "DRAIN", "AgentLock", "AtWork", "agent_lock_path", "at_work", "sweep_of"]

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
    holder = host_lock.holder(agent_lock_path(staging))
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
            taken = host_lock.take(self._path, self._who.words)
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
        if lost is None or not host_lock.is_lost(lost, self._path):
            return None
        other = self.take()
        if other is None:
            host_lock.release(lost)
        return other

    def release(self) -> None:
        """Give it back, if it was taken."""
        if self._descriptor is not None:
            host_lock.release(self._descriptor)
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
