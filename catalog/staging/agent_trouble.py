"""Reads the status file of an agent for a trainer whose checkpoints wait (format §7)."""

from __future__ import annotations

from typing import Final, NamedTuple

from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.notes import read_note
from recpoint.catalog.store.contract import now_ms
from recpoint.catalog.store.run_url import naming_run
from recpoint.format.notes import STATUS_NOTE

__all__ = [
    "AgentTrouble",
    "read_trouble",
]


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
    """Return why this host's agent cannot store this run's checkpoints; None: it does not say.

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
