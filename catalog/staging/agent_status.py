"""What an agent's status file says of a run, for a trainer whose checkpoints wait (format §7)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, NamedTuple

from recpoint.catalog.staging import owned, staged
from recpoint.catalog.stores.elapsed import now_ms
from recpoint.catalog.stores.run_url import naming_run
from recpoint.errors import StagingRefused

__all__ = ["AgentTrouble", "read_trouble"]

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
        found = json.loads(owned.read(run_dir.parent, staged.status_path(run_dir), _MOST_BYTES))
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
