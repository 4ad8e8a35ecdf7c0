"""Collects what became of checkpoints that were handed over, and logs those that wait."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import recpoint.errors
from recpoint.catalog.staging.agent import AgentTrouble, read_trouble
from recpoint.catalog.store.run_url import name_run_in
from recpoint.errors import CheckpointCancelled, RecpointError
from recpoint.format.records import CheckpointRef
from recpoint.interrupts import is_interrupted
from recpoint.trainer_plugin.pipeline.handoff import Answered, Event, Failed, Handoff, Staged
from recpoint.trainer_plugin.policy import superseded
from recpoint.trainer_plugin.schedule.ledger import Ledger, Statistics
from recpoint.trainer_plugin.settings import Settings
from recpoint.trainer_plugin.snapshot.cut import Cutter
from recpoint.trainer_plugin.snapshot.staging import StagingArea

__all__ = ["Outcomes", "WaitingLog"]


# What the log says of checkpoints that wait for the agent: why, and what to do about it.


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


# What becomes of checkpoints that were handed over: learned, counted, waited for.
#
# A checkpoint that comes to nothing raises nothing here: it is noted, and raised by `raise_noted`
# only when the settings ask for that.


#: How long the end of training waits for an agent to appear when none is there.
_AGENT_GRACE_SECONDS = 2.0
_WAIT_SLICE_SECONDS = 0.2


class Outcomes:
    """The outcomes of one trainer's checkpoints. Used by the training thread only.

    Args:
        handoff: where they were handed over.
        ledger: those on their way.
        area: where they are staged.
        cutter: learns what stored tables were quantized with.
        settings: of the checkpointer.
        statistics: what happened is counted there.
        ends: whether the process is to end.
        batches_done: when training began.

    Attributes:
        last_safe: batches of the newest checkpoint that is stored.
        superseded: another trainer owns the run: nothing more of this one is stored.
    """

    def __init__(
        self,
        *,
        handoff: Handoff,
        ledger: Ledger,
        area: StagingArea,
        cutter: Cutter,
        settings: Settings,
        statistics: Statistics,
        ends: Callable[[], bool],
        batches_done: int,
    ) -> None:
        self._handoff = handoff
        self._ledger = ledger
        self._area = area
        self._cutter = cutter
        self._settings = settings
        self._statistics = statistics
        self._ends = ends
        self._unraised: BaseException | None = None
        self._answered_seconds = -math.inf  # monotonic, when the newest answer was learned
        self.last_safe = batches_done
        self.superseded = False

    def has_news(self) -> bool:
        """Whether `fetch` has something to act on, or `raise_noted` to raise; costs no lock."""
        return self._unraised is not None or self._handoff.has_events()

    def fetch(self) -> None:
        """Act on what has happened since the last call; costs nothing when nothing has."""
        if self._handoff.has_events():
            for event in self._handoff.events():
                self._apply(event)

    def has_thread(self) -> bool:
        """Start the background thread where there is none; False: it cannot be, which is noted."""
        self._handoff.ensure_alive()
        self.fetch()
        if self._handoff.broken is not None:
            self.note_failure(self._handoff.broken)
        return self._handoff.broken is None

    def wait(
        self, deadline: float, *, until_below: int, for_agent_seconds: float | None = None
    ) -> None:
        """Wait until fewer than `until_below` checkpoints are on their way.

        A signal's handler that raises, as Ctrl-C does, ends the wait.

        Args:
            deadline: no longer than until this monotonic time.
            until_below: see above.
            for_agent_seconds: nor longer than this without an agent; given: during training, so
                nor once the process is to end. None: as long as a moment.
        """
        training = for_agent_seconds is not None
        patience = _AGENT_GRACE_SECONDS if for_agent_seconds is None else for_agent_seconds
        agent_seen = time.monotonic()
        while True:
            self.fetch()
            now = time.monotonic()
            if len(self._ledger) < until_below or now >= deadline or (training and self._ends()):
                return
            if is_interrupted():
                return
            if self._area.agent_is_running():
                agent_seen = now
            elif now - agent_seen > patience and not self._handoff.is_staging():
                return
            if self._handoff.ensure_alive():
                continue
            self._handoff.wait_for_event(min(_WAIT_SLICE_SECONDS, deadline - now))

    def wait_until_staged(self) -> None:
        """Wait until all that was cut is in the staging area, or was given up; which is noted."""
        while self._handoff.is_staging():
            if not self._handoff.ensure_alive():
                self._handoff.wait_for_event(_WAIT_SLICE_SECONDS)
            self.fetch()
        # What came of the last one is there with the end of its staging, and maybe not fetched yet.
        self.fetch()

    def note_failure(self, error: BaseException) -> None:
        """Count and log what went wrong; with `on_error="raise"` keep it for `raise_noted`."""
        name_run_in(error, self._area.run_url)
        self._statistics.lost(error)
        _log.error("a checkpoint failed: %s", self._statistics.last_error)
        if self._settings.options.on_error == "raise" and self._unraised is None:
            self._unraised = error

    def raise_noted(self) -> None:
        """Raise what `note_failure` kept, once."""
        if self._unraised is not None:
            error, self._unraised = self._unraised, None
            raise error

    def _apply(self, event: Event) -> None:
        if isinstance(event, Staged):
            self._statistics.staged += 1
        elif isinstance(event, Failed):
            self._ledger.lost(event.ref, type(event.error).__name__)
            self.note_failure(event.error)
        else:
            if event.outcome.result == "committed":
                self._committed(event)
            else:
                self._rejected(event)
            self._answered_seconds = time.monotonic()

    def _committed(self, event: Answered) -> None:
        outcome = event.outcome
        pending = self._ledger.committed(
            event.ref, stored_bytes=outcome.stored_bytes, links_to_read=outcome.links_to_read
        )
        if pending is None:
            return
        self.last_safe = event.ref.step
        self._cutter.remember_quantizers(pending, outcome.quantizers)
        self._statistics.safe(
            event.ref.step,
            pending.cut_seconds,
            kind=pending.link.kind,
            stored_bytes=outcome.stored_bytes,
            committed_ms=outcome.finished_ms,
            # Of several that wait, each would count the same outage, and the work on the others.
            turn_seconds=max(pending.cut_seconds, self._answered_seconds),
        )

    def _rejected(self, event: Answered) -> None:
        outcome = event.outcome
        self._ledger.lost(event.ref, outcome.error_type)
        self.superseded = self.superseded or superseded(outcome.error_type)
        if outcome.error_type == CheckpointCancelled.__name__:
            self._statistics.cancelled += 1
            return
        self.note_failure(_rejection(event.ref, outcome.error_type, outcome.error))


def _rejection(ref: CheckpointRef, error_type: str, text: str) -> RecpointError:
    """The agent's error as one of ours, of the class that it had there if there is such a one."""
    found = getattr(recpoint.errors, error_type, None)
    if not (isinstance(found, type) and issubclass(found, RecpointError)):
        found = RecpointError
    return found(
        f"checkpoint of {ref}",
        found=f"rejected by the agent: {text}",
        expected="a commit",
        next_step="see the message; the next checkpoint holds these rows too",
    )
