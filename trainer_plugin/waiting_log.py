"""What the log says of checkpoints that wait for the agent: why, and what to do about it."""

from __future__ import annotations

import logging

from recpoint.catalog.staging.agent_status import AgentTrouble, read_trouble
from recpoint.trainer_plugin.staging import StagingArea
from recpoint.trainer_plugin.statistics import Statistics

__all__ = ["WaitingLog"]

_log = logging.getLogger("recpoint")

#: So many due checkpoints without one in between are no longer a matter of a short interval.
_MANY_SKIPPED = 8


class WaitingLog:
    """Tells of due checkpoints that were not cut, and of what is staged in the end.

    Whoever watches a training sees its log, and not the agent's on each host: what keeps the agent
    from storing is repeated here, once for each cause until something is stored.

    Args:
        area: where they wait.
        statistics: of the trainer; its `agent_error` is set.
    """

    def __init__(self, area: StagingArea, statistics: Statistics) -> None:
        self._area = area
        self._statistics = statistics
        self._told: tuple[tuple[str, str], int] | None = None  # a cause, and commits before it

    def skipped(self, batches_done: int, in_row: int) -> None:
        """Say that a due checkpoint was not cut; loudly when it looks as if none will be.

        One or two in a row are a short interval. More, or no agent, is a store or a host that
        needs somebody, who may see warnings only: told at growing distances, not at each.

        Args:
            batches_done: so far.
            in_row: how many were not cut since the last that was.
        """
        agent = self._area.agent_is_running()
        trouble = self._trouble(agent=agent)
        doubled = in_row & (in_row - 1) == 0  # 1, 2, 4, 8, …
        if not self._is_news(trouble) and not (doubled and (in_row >= _MANY_SKIPPED or not agent)):
            _log.info("no checkpoint at batch %d: earlier ones still wait", batches_done)
            return
        why, next_step = self._why(trouble, agent=agent)
        _log.warning(
            "no checkpoint at batch %d, %d in a row not taken: earlier ones wait in %s, and %s. "
            "%d batches would be lost now. Next: %s",
            batches_done,
            in_row,
            self._area.run_directory,
            why,
            self._statistics.read(batches_done).lag_batches,
            next_step,
        )

    def ends(self, staged: int) -> None:
        """Say that training ends with so many checkpoints that are not stored."""
        agent = self._area.agent_is_running()
        trouble = self._trouble(agent=agent)
        why, next_step = self._why(trouble, agent=agent)
        if agent and trouble is None:
            next_step = "leave the agent running"
        _log.warning(
            "training ends with %d checkpoint(s) staged in %s and not stored%s%s. Next: %s",
            staged,
            self._area.run_directory,
            "" if agent and trouble is None else f", and {why}",
            "" if trouble is None else ". They stay there for it",
            next_step,
        )

    def _trouble(self, *, agent: bool) -> AgentTrouble | None:
        trouble = None
        if agent:
            trouble = read_trouble(self._area.run_directory, self._area.run_url)
        self._statistics.agent_error = None if trouble is None else str(trouble)
        return trouble

    def _is_news(self, trouble: AgentTrouble | None) -> bool:
        if trouble is None:
            return False
        told, self._told = self._told, (trouble.cause, self._statistics.committed)
        return told != self._told

    def _why(self, trouble: AgentTrouble | None, *, agent: bool) -> tuple[str, str]:
        if not agent:
            return "no agent is running", self._area.agent_command()
        there = "see the agent's log and status.json there"
        if trouble is None:
            return "the agent has not stored them", there
        tries = f"{trouble.tries} {'try' if trouble.tries == 1 else 'tries'}"
        return f"the agent cannot store them ({tries}): {trouble.error}", trouble.next_step or there
