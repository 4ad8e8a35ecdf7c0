"""Collects the outcomes of checkpoints that were handed over, and logs checkpoints that wait.

The outcomes of checkpoints that were handed over: learned, counted, waited for. A failed checkpoint
raises nothing here. The failure is noted, and `raise_noted` raises it only if the settings ask for
that.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import recpoint.errors
from recpoint.catalog.staging.agent_trouble import AgentTrouble, read_trouble
from recpoint.catalog.store.run_url import name_run_in
from recpoint.errors import CheckpointCancelled, RecordTooLarge, RecpointError, StaleWriter
from recpoint.format.records import CheckpointRef
from recpoint.interrupts import is_interrupted
from recpoint.trainer_plugin.pipeline.handoff import Answered, Event, Failed, Handoff, Staged
from recpoint.trainer_plugin.policy import superseded
from recpoint.trainer_plugin.schedule.ledger import Ledger, Statistics
from recpoint.trainer_plugin.settings import Settings
from recpoint.trainer_plugin.snapshot.cut import Cutter
from recpoint.trainer_plugin.snapshot.record_bound import RecordBound
from recpoint.trainer_plugin.snapshot.staging import StagingArea
from recpoint.units import duration_text

__all__ = ["Outcomes", "WaitingLog"]


_log = logging.getLogger("recpoint")

#: What to do about two trainers on one run.
STOP_ONE_TRAINER = (
    "stop this trainer; if it is the one that should train, stop the other one and start this one "
    "again, which restores the newest checkpoint"
)

#: If this many due checkpoints in a row are skipped, a short interval is not the reason.
_MANY_SKIPPED = 8


class WaitingLog:
    """Logs due checkpoints that were not cut, and checkpoints still staged at the end.

    People who watch a training see its log, but not the agent's log on each host. So an error that
    keeps the agent from storing is repeated here, once for each cause until something is stored.

    Args:
        area: the staging area in which checkpoints wait.
        statistics: statistics of the trainer; `agent_error` is set here.
    """

    def __init__(self, area: StagingArea, statistics: Statistics, *, batches_done: int) -> None:
        self._area = area
        self._statistics = statistics
        # The last cause that was logged, and the number of commits before it.
        self._last_news: tuple[tuple[str, str], int] | None = None
        # Due checkpoints that were not cut since the last commit, and whether a warning said so.
        self._missed = 0
        self._warned = False
        self._staged_batches = batches_done

    def staged(self, step: int) -> None:
        """Note the batches of the newest checkpoint that is staged or stored."""
        self._staged_batches = step

    def skipped(self, batches_done: int, in_row: int) -> None:
        """Log that a due checkpoint was not cut, as a warning if no later one may be cut either.

        One or two skipped in a row mean a short interval. If there are more, or no agent runs,
        somebody must look at the store or the host, and may see only warnings. The warning is
        repeated at growing distances.

        Args:
            batches_done: batches so far.
            in_row: number of due checkpoints skipped since the last one that was cut.
        """
        self._missed += 1
        agent = self._area.agent_is_running()
        trouble = self._trouble(agent=agent)
        doubled = in_row & (in_row - 1) == 0  # 1, 2, 4, 8, …
        if not self._is_news(trouble) and not (doubled and (in_row >= _MANY_SKIPPED or not agent)):
            _log.info("no checkpoint at batch %d: earlier ones still wait", batches_done)
            return
        self._warned = True
        reason, next_step = self._why(trouble, agent=agent)
        _log.warning(
            "no checkpoint at batch %d, %d in a row not taken: earlier ones wait in %s, and %s. "
            "If this host failed now, %d batches would be lost. If only this process failed, and "
            "an agent stored what is staged, %d would be lost. Next: %s",
            batches_done,
            in_row,
            self._area.staged_run,
            reason,
            self._statistics.read(batches_done).lag_batches,
            batches_done - self._staged_batches,
            next_step,
        )

    def stored(self, step: int) -> None:
        """Log that checkpoints are stored again, if a warning has said that they are not.

        It is a warning too: whoever saw the other may see only warnings.

        Args:
            step: batches of the checkpoint that was committed.
        """
        if self._warned:
            _log.warning(
                "checkpoints are stored again: that of batch %d is committed, after %d were not "
                "taken",
                step,
                self._missed,
            )
        self._missed, self._warned = 0, False

    def ends(self, staged: int) -> None:
        """Log that training ends while `staged` checkpoints are not stored."""
        agent = self._area.agent_is_running()
        trouble = self._trouble(agent=agent)
        reason, next_step = self._why(trouble, agent=agent)
        if agent and trouble is None:
            next_step = "leave the agent running"
        _log.warning(
            "training ends with %d checkpoint(s) staged in %s and not stored%s%s. Next: %s",
            staged,
            self._area.staged_run,
            "" if agent and trouble is None else f", and {reason}",
            "" if trouble is None else ". They stay there for the agent",
            next_step,
        )

    def superseded(self, batches_done: int, in_row: int) -> None:
        """Log that a due checkpoint was not cut, because another trainer owns the run.

        No later checkpoint can come, so it is a warning, repeated at doubling distances.

        Args:
            batches_done: batches so far.
            in_row: number of due checkpoints skipped since the last one that was cut.
        """
        doubled = in_row & (in_row - 1) == 0  # 1, 2, 4, 8, …
        _log.log(
            logging.WARNING if doubled else logging.INFO,
            "no checkpoint at batch %d, %d in a row not taken: another trainer has started on %s, "
            "and nothing that this trainer trains is stored any more. %d batches of this trainer "
            "are lost when it ends. Next: %s",
            batches_done,
            in_row,
            self._area.run_url,
            self._statistics.read(batches_done).lag_batches,
            STOP_ONE_TRAINER,
        )

    def ends_superseded(self) -> None:
        """Log that training ends after another trainer has started on the run."""
        _log.warning(
            "training ends, and nothing that it trained after step %d is stored: another trainer "
            "has started on %s. Next: %s",
            self._staged_batches,
            self._area.run_url,
            STOP_ONE_TRAINER,
        )

    def _trouble(self, *, agent: bool) -> AgentTrouble | None:
        trouble = None
        if agent:
            trouble = read_trouble(self._area.staged_run, self._area.run_url)
        self._statistics.agent_error = None if trouble is None else str(trouble)
        return trouble

    def _is_news(self, trouble: AgentTrouble | None) -> bool:
        if trouble is None:
            return False
        last_news, self._last_news = self._last_news, (trouble.cause, self._statistics.committed)
        return last_news != self._last_news

    def _why(self, trouble: AgentTrouble | None, *, agent: bool) -> tuple[str, str]:
        if not agent:
            return "no agent is running", self._area.agent_command()
        status_hint = "see the agent's log and status.json there"
        if trouble is None:
            persist_seconds = self._statistics.persist_seconds
            if persist_seconds is not None:  # it stores, but more slowly than checkpoints are due
                return (
                    "the agent has not stored them: it takes "
                    f"{duration_text(persist_seconds)} for a checkpoint",
                    f"set a longer interval, of more than {duration_text(persist_seconds)}; or "
                    f"{status_hint}",
                )
            return "the agent has not stored them", status_hint
        tries = f"{trouble.tries} {'try' if trouble.tries == 1 else 'tries'}"
        return (
            f"the agent cannot store them ({tries}): {trouble.error}",
            trouble.next_step or status_hint,
        )


#: How long the end of training waits for an agent to appear if none runs.
_AGENT_GRACE_SECONDS = 2.0
_WAIT_SLICE_SECONDS = 0.2


class Outcomes:
    """Learns the outcomes of one trainer's checkpoints. Used by the training thread only.

    Args:
        handoff: the thread to which checkpoints were handed over.
        ledger: the checkpoints that wait for an outcome.
        area: the staging area.
        cutter: learns the quantizers of stored tables.
        records: learns which checkpoints had too large records.
        settings: settings of the Checkpointer.
        statistics: counts the outcomes.
        waiting: logs when checkpoints that waited are stored again.
        ends: returns whether the process is about to end.
        on_superseded: called once, when another trainer is found to own the run.
        batches_done: batches done when training began.

    Attributes:
        last_safe: batches of the newest checkpoint that is stored.
        superseded: another trainer owns the run, so nothing more of this trainer is stored.
    """

    def __init__(
        self,
        *,
        handoff: Handoff,
        ledger: Ledger,
        area: StagingArea,
        cutter: Cutter,
        records: RecordBound,
        settings: Settings,
        statistics: Statistics,
        waiting: WaitingLog,
        ends: Callable[[], bool],
        on_superseded: Callable[[], None],
        batches_done: int,
    ) -> None:
        self._handoff = handoff
        self._ledger = ledger
        self._area = area
        self._cutter = cutter
        self._records = records
        self._settings = settings
        self._statistics = statistics
        self._waiting = waiting
        self._ends = ends
        self._on_superseded = on_superseded
        self._unraised: BaseException | None = None
        self._answered_seconds = -math.inf  # monotonic time at which the newest answer was learned
        self.last_safe = batches_done
        self.superseded = False

    def has_news(self) -> bool:
        """Whether `fetch` has an event or `raise_noted` has an error; takes no lock."""
        return self._unraised is not None or self._handoff.has_events()

    def fetch(self) -> None:
        """Act on the events since the last call; costs nothing if there are none."""
        if self._handoff.has_events():
            for event in self._handoff.events():
                self._apply(event)

    def has_thread(self) -> bool:
        """Start the background thread if none runs.

        Returns:
            Whether the thread runs. If it cannot be started, the failure is noted.
        """
        self._handoff.ensure_alive()
        self.fetch()
        if self._handoff.broken is not None:
            self.note_failure(self._handoff.broken)
        return self._handoff.broken is None

    def wait(
        self, deadline: float, *, until_below: int, for_agent_seconds: float | None = None
    ) -> None:
        """Wait until fewer than `until_below` checkpoints are on their way.

        If a signal handler raises, as for Ctrl-C, the wait ends.

        Args:
            deadline: monotonic time at which the wait ends.
            until_below: number of checkpoints; see above.
            for_agent_seconds: the longest wait without an agent, in seconds. A number means that
                training is going on, so the wait also ends once the process is about to end. None:
                training is over; the wait without an agent is short (2 s).
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
        """Wait until each checkpoint that was cut is staged, or has failed, which is noted."""
        while self._handoff.is_staging():
            if not self._handoff.ensure_alive():
                self._handoff.wait_for_event(_WAIT_SLICE_SECONDS)
            self.fetch()
        # The event of the last checkpoint comes with the end of its staging; fetch it, too.
        self.fetch()

    def note_failure(self, error: BaseException) -> None:
        """Count and log a failure, and keep it for `raise_noted` if the settings ask for that."""
        name_run_in(error, self._area.run_url)
        self._statistics.lost(error)
        _log.error("a checkpoint failed: %s", self._statistics.last_error)
        options = self._settings.options
        raises = options.on_error == "raise" or (
            options.on_superseded == "raise" and isinstance(error, StaleWriter)
        )
        if raises and self._unraised is None:
            self._unraised = error

    def raise_noted(self) -> None:
        """Raise the error that `note_failure` kept, once."""
        if self._unraised is not None:
            error, self._unraised = self._unraised, None
            raise error

    def _apply(self, event: Event) -> None:
        if isinstance(event, Staged):
            self._statistics.staged += 1
            self._waiting.staged(event.ref.step)
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
        self._cutter.parts.remember_quantizers(pending, outcome.quantizers)
        self._statistics.safe(
            event.ref.step,
            pending.cut_seconds,
            kind=pending.link.kind,
            stored_bytes=outcome.stored_bytes,
            committed_ms=outcome.finished_ms,
            # Counted from the last answer: otherwise, of several checkpoints that wait, each would
            # count the same outage and the work on the others.
            turn_seconds=max(pending.cut_seconds, self._answered_seconds),
        )
        self._waiting.stored(event.ref.step)

    def _rejected(self, event: Answered) -> None:
        outcome = event.outcome
        self._waiting.staged(self.last_safe)
        pending = self._ledger.lost(event.ref, outcome.error_type)
        if pending is not None and outcome.error_type == RecordTooLarge.__name__:
            self._records.rejected(pending.link.kind)
        if superseded(outcome.error_type) and not self.superseded:
            self.superseded = True
            self._on_superseded()
        if outcome.error_type == CheckpointCancelled.__name__:
            self._statistics.cancelled += 1
            return
        self.note_failure(_rejection(event.ref, outcome.error_type, outcome.error))


def _rejection(ref: CheckpointRef, error_type: str, text: str) -> RecpointError:
    """Return the agent's error as a `RecpointError`, of the same class if it exists here."""
    error_class = getattr(recpoint.errors, error_type, None)
    if not (isinstance(error_class, type) and issubclass(error_class, RecpointError)):
        error_class = RecpointError
    return error_class(
        f"checkpoint of {ref}",
        found=f"rejected by the agent: {text}",
        expected="a commit",
        next_step=f"no later checkpoint of this trainer is stored either: {STOP_ONE_TRAINER}"
        if superseded(error_type)
        else "see the message; the next checkpoint also holds these rows",
    )
