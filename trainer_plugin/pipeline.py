"""From a due checkpoint to its outcome: cutting, handing over, learning what became of it.

Nothing here raises for what goes wrong with a checkpoint: it is noted, and raised by
`raise_noted` only when the settings ask for that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import recpoint.errors
from recpoint.catalog.run import Run
from recpoint.errors import RecpointError, StagingError
from recpoint.format.records import CheckpointRef
from recpoint.trainer_plugin.cutter import Cutter
from recpoint.trainer_plugin.handoff import Answered, Event, Failed, Handoff, Staged
from recpoint.trainer_plugin.ledger import Ledger
from recpoint.trainer_plugin.policy import superseded
from recpoint.trainer_plugin.settings import Settings
from recpoint.trainer_plugin.staging import StagingArea
from recpoint.trainer_plugin.statistics import Statistics
from recpoint.trainer_plugin.takeover import Start
from recpoint.trainer_plugin.tracking import Tracker

__all__ = ["Pipeline"]

_log = logging.getLogger("recpoint")

#: How long the end of training waits for an agent to appear when none is there.
_AGENT_GRACE_SECONDS = 2.0
_WAIT_SLICE_SECONDS = 0.2

#: So many due checkpoints without one in between are no longer a matter of a short interval.
_MANY_SKIPPED = 8


class Pipeline:
    """The checkpoints of one trainer, from its start on. Used by the training thread only."""

    def __init__(
        self,
        *,
        run: Run,
        start: Start,
        area: StagingArea,
        cutter: Cutter,
        trackers: Mapping[str, Tracker],
        settings: Settings,
    ) -> None:
        self._generation = start.generation
        self._area = area
        self._cutter = cutter
        self._trackers = trackers
        self._settings = settings
        self._ledger = Ledger(trackers, start.tip)
        self._handoff = Handoff(area, run=run.id, run_url=run.url)
        self._last_cut = start.batches_done
        self._last_safe = start.batches_done
        self._superseded = False
        self._skipped_in_row = 0
        self._unraised: BaseException | None = None
        self.statistics = Statistics()
        self.statistics.start(start.batches_done)

    def prepare(self, full_bytes: int) -> None:
        """What no stall is to pay for: pages of the tables, a reserved slot, the thread."""
        self._cutter.settle()
        try:
            self._area.free_slot(set()).reserve(full_bytes)
        except StagingError as error:
            self.note_failure(error)
        self._handoff.ensure_alive()

    def take(self, batches_done: int) -> bool:
        """Cut a checkpoint and hand it over; False when that was not possible."""
        if self._handoff.ensure_alive():
            self.fetch()
        tip = self._ledger.tip
        if tip is not None and (tip.ref.step, tip.ref.generation) == (
            batches_done,
            self._generation,
        ):
            # A second attempt could only be refused as a conflict with the first, and its rows
            # would cost a full. What was marked by hand since then is in the next one.
            _log.info("no checkpoint at batch %d: there is one already", batches_done)
            return False
        # With the earlier ones unfinished, these rows stay dirty and are in the next one.
        if self._superseded or len(self._ledger) >= self._settings.max_staged_jobs:
            self.statistics.skipped += 1
            self._skipped_in_row += 1
            self._tell_skipped(batches_done)
            return False
        started = time.perf_counter()
        try:
            for tracker in self._trackers.values():
                tracker.report_surprise()
            self._area.create_if_cleared()
            snapshot, pending, tip = self._cutter.cut(
                self._area.free_slot(self._ledger.busy_slots),
                step=batches_done,
                generation=self._generation,
                tip=self._ledger.tip,
                interval_batches=batches_done - self._last_cut,
            )
        except Exception as error:
            # Disk, driver, a user's state_dict: none of it may stop training. Noted, not lost.
            self.note_failure(error)
            return False
        self._last_cut = batches_done
        self._skipped_in_row = 0
        self._ledger.add(pending, tip)
        self.statistics.stalled((time.perf_counter() - started) * 1e3)
        self._handoff.submit(snapshot)
        return True

    def fetch(self) -> None:
        """Act on what has happened since the last call; costs nothing when nothing has."""
        if self._handoff.has_events():
            self._apply(self._handoff.events())

    def finish(self, batches_done: int) -> None:
        """A last checkpoint when there are new batches, and wait for every outcome.

        Waits for outcomes at most `close_wait_seconds`, and no longer than a moment when there is
        no agent. That what was cut is staged is always waited for: the process may end after this.
        """
        deadline = time.monotonic() + self._settings.close_wait_seconds
        self._wait(deadline, until_below=self._settings.max_staged_jobs)
        if batches_done > self._last_safe and not self._is_on_its_way(batches_done):
            self.take(batches_done)
        self._wait(deadline, until_below=1)
        self._wait_until_staged()
        if len(self._ledger):
            agent = self._area.agent_is_running()
            _log.warning(
                "training ends with %d checkpoint(s) staged in %s and not stored%s. Next: %s",
                len(self._ledger),
                self._area.run_directory,
                "" if agent else ", and no agent is running",
                "leave the agent running" if agent else self._area.agent_command(),
            )

    def close(self) -> None:
        """End the thread; everything that was cut is staged by then."""
        self._handoff.close()
        self.fetch()

    def note_failure(self, error: BaseException) -> None:
        """Count and log what went wrong; with `on_error="raise"` keep it for `raise_noted`."""
        self.statistics.failed += 1
        self.statistics.last_error = f"{type(error).__name__}: {error}"
        _log.error("a checkpoint failed: %s: %s", type(error).__name__, error)
        if self._settings.on_error == "raise" and self._unraised is None:
            self._unraised = error

    def raise_noted(self) -> None:
        """Raise what `note_failure` kept, once."""
        if self._unraised is not None:
            error, self._unraised = self._unraised, None
            raise error

    def _tell_skipped(self, batches_done: int) -> None:
        """Say that a due checkpoint was not cut; loudly when it looks as if none will be.

        One or two in a row are a short interval. More, or no agent, is a store or a host that
        needs somebody, who may see warnings only: told at growing distances, not at each.
        """
        in_row = self._skipped_in_row
        if self._superseded:
            _log.info("no checkpoint at batch %d: another trainer owns the run", batches_done)
            return
        agent = self._area.agent_is_running()
        doubled = in_row & (in_row - 1) == 0  # 1, 2, 4, 8, …
        if not (doubled and (in_row >= _MANY_SKIPPED or not agent)):
            _log.info("no checkpoint at batch %d: earlier ones still wait", batches_done)
            return
        _log.warning(
            "no checkpoint at batch %d, %d in a row not taken: earlier ones wait in %s, and %s. "
            "%d batches would be lost now. Next: %s",
            batches_done,
            in_row,
            self._area.run_directory,
            "the agent has not stored them" if agent else "no agent is running",
            self.statistics.read(batches_done).lag_batches,
            "see the agent's log and status.json there" if agent else self._area.agent_command(),
        )

    def _is_on_its_way(self, batches_done: int) -> bool:
        tip = self._ledger.tip
        return len(self._ledger) > 0 and tip is not None and tip.ref.step == batches_done

    def _wait(self, deadline: float, *, until_below: int) -> None:
        """Wait until fewer than `until_below` checkpoints are on their way."""
        agent_seen = time.monotonic()
        while True:
            self.fetch()
            now = time.monotonic()
            if len(self._ledger) < until_below or now >= deadline:
                return
            if self._area.agent_is_running():
                agent_seen = now
            elif now - agent_seen > _AGENT_GRACE_SECONDS and not self._handoff.is_staging():
                return
            if self._handoff.ensure_alive():
                continue
            self._handoff.wait_for_event(min(_WAIT_SLICE_SECONDS, deadline - now))

    def _wait_until_staged(self) -> None:
        while self._handoff.is_staging():
            if not self._handoff.ensure_alive():
                self._handoff.wait_for_event(_WAIT_SLICE_SECONDS)
            self.fetch()

    def _apply(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Staged):
                self.statistics.staged += 1
            elif isinstance(event, Failed):
                self._ledger.lost(event.ref, type(event.error).__name__)
                self.note_failure(event.error)
            elif event.outcome.result == "committed":
                pending = self._ledger.committed(event.ref)
                if pending is not None:
                    self._last_safe = event.ref.step
                    self.statistics.safe(event.ref.step, pending.cut_seconds)
            else:
                self._rejected(event)

    def _rejected(self, event: Answered) -> None:
        outcome = event.outcome
        self._ledger.lost(event.ref, outcome.error_type)
        self._superseded = self._superseded or superseded(outcome.error_type)
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
