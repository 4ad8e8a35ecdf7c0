"""Takes a due checkpoint from the question of room to its hand-over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from recpoint.catalog.run.run import Run, tell_ended
from recpoint.embeddings.marks import Tracker
from recpoint.errors import StagingError
from recpoint.format.naming import shared_attempt
from recpoint.interrupts import is_interrupted
from recpoint.trainer_plugin.pipeline.handoff import Handoff
from recpoint.trainer_plugin.pipeline.outcomes import Outcomes, WaitingLog
from recpoint.trainer_plugin.policy import FULL, Link
from recpoint.trainer_plugin.ranks.agreement import (
    LOST_AT_ONCE,
    NOTHING,
    AgreedSchedule,
    Lost,
    Replicas,
    Sketch,
    after_cut,
    agree_on_cut,
    agree_on_lost,
    incomplete,
)
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.restore.start import Start
from recpoint.trainer_plugin.schedule.ledger import Ledger, Statistics
from recpoint.trainer_plugin.schedule.outlook import Outlook
from recpoint.trainer_plugin.schedule.schedule import (
    AutoInterval,
    BatchInterval,
    Schedule,
    SecondsInterval,
)
from recpoint.trainer_plugin.settings import Settings
from recpoint.trainer_plugin.snapshot.cut import Cut, Cutter
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable
from recpoint.trainer_plugin.snapshot.memory_bound import MemoryBound
from recpoint.trainer_plugin.snapshot.plan import CutRequest, new_attempt
from recpoint.trainer_plugin.snapshot.staging import StagingArea
from recpoint.trainer_plugin.state import rng

__all__ = ["Pipeline"]


# From a due checkpoint to its hand-over: whether there is room for it, cutting, the last one.
#
# Nothing here raises for what goes wrong with a checkpoint: it is noted, see `outcomes`.


_log = logging.getLogger("recpoint")


class Plan(NamedTuple):
    """What a checkpoint is to be, found in the stall that cuts it."""

    link: Link
    tables: tuple[LiveTable, ...]
    sketch: Sketch  # of what all ranks have alike


class _Agreed(NamedTuple):
    """What all ranks do.

    Attributes:
        plan: of this rank; None: one of them cannot cut, so that none does.
        again: one of them has a checkpoint of this batch.
        unlike: what one of them stores is not what all have; that is noted.
    """

    plan: Plan | None
    again: bool
    unlike: bool = False


class Pipeline:
    """The checkpoints of one trainer, from its start on. Used by the training thread only.

    Attributes:
        outcomes: what became of those that were cut.
        statistics: what happened to them.
        schedule: when they are due.
    """

    def __init__(
        self,
        *,
        run: Run,
        start: Start,
        area: StagingArea,
        cutter: Cutter,
        memory: MemoryBound,
        trackers: Mapping[str, Tracker],
        settings: Settings,
        ends: Callable[[], bool],
        ranks: Ranks,
        replicas: Replicas,
    ) -> None:
        self._run = run
        self._ranks = ranks
        self._replicas = replicas
        self._generation = start.generation
        self._token = start.token
        self._area = area
        self._cutter = cutter
        self._memory = memory
        self._trackers = trackers
        self._settings = settings
        self._ledger = Ledger(trackers, start.tip, start.base_history)
        self._handoff = Handoff(area, run=run.id, run_url=run.url, ranks=ranks.count)
        self._last_cut = start.batches_done
        self._cuts = 0
        self._ends = ends
        self._due_until: float | None = None  # monotonic; a checkpoint is due and waits for room
        self._cancelled_at: int | None = None  # the newest stored batch when one was cancelled
        self._skipped_in_row = 0
        self.statistics = Statistics()
        self.statistics.start(start.batches_done, restored=start.report is not None)
        self.outcomes = Outcomes(
            handoff=self._handoff,
            ledger=self._ledger,
            area=area,
            cutter=cutter,
            settings=settings,
            statistics=self.statistics,
            ends=ends,
            batches_done=start.batches_done,
        )
        self._waiting = WaitingLog(area, self.statistics)
        self._outlook = Outlook(
            settings.failures, start.past, rule=cutter.rule, statistics=self.statistics
        )
        self.schedule = self._new_schedule()

    def _new_schedule(self) -> Schedule:
        batches, seconds = self._settings.interval_batches, self._settings.interval_seconds
        if batches is not None:
            return BatchInterval(batches)
        assert seconds is not None  # the settings have been checked
        own: Schedule = (
            AutoInterval(self._outlook.interval_seconds)
            if seconds == "auto"
            else SecondsInterval(seconds)
        )
        return AgreedSchedule(own, self._ranks) if self._ranks.several else own

    def prepare(self) -> None:
        """What no stall is to pay for: pages of the tables, a reserved slot, the thread."""
        self._cutter.prepare_tables()
        try:
            self._area.free_slot(set()).reserve(self._cutter.size_bytes())
        except StagingError as error:
            self.outcomes.note_failure(error)
        self.outcomes.has_thread()

    def take(self, batches_done: int, *, late: bool = False) -> bool:
        """Cut a checkpoint and hand it over; False when that was not possible.

        Args:
            batches_done: so far.
            late: it has been skipped already: take it if there is room now, and do nothing else.
        """
        able = self.outcomes.has_thread()
        again = self._ledger.newest_step == batches_done
        if self.outcomes.superseded:
            self._due_until = None
        room = able and not again and not self.outcomes.superseded
        room = room and (self._is_free() if late else self._has_room())
        started_ns = time.perf_counter_ns()
        plan = self._plan(batches_done) if room else None
        if self._ranks.several:
            heard = self._agreed(plan, batches_done, again=again)
            plan, again = heard.plan, heard.again
            if heard.unlike:
                return False  # noted
        elif plan is None and (room or not able):
            self._due_until = None  # nor tried at every batch
            return False  # noted
        if again:
            # A second attempt could only be refused as a conflict with the first, and its rows
            # would cost a full. What was marked by hand since then is in the next one.
            _log.info("no checkpoint at batch %d: there is one already", batches_done)
            return False
        if plan is None:
            if not self.is_due and not late:
                # With the earlier ones unfinished, these rows stay dirty and are in the next one.
                self.statistics.skipped += 1
                self._skipped_in_row += 1
                if self.outcomes.superseded:
                    told = "no checkpoint at batch %d: another trainer owns the run"
                    _log.info(told, batches_done)
                else:
                    self._waiting.skipped(batches_done, self._skipped_in_row)
            return False
        self._due_until = None
        return self._cut(batches_done, plan, started_ns)

    def _plan(self, batches_done: int) -> Plan | None:
        """What a checkpoint at this batch would be; None: that cannot be told, and is noted."""
        try:
            for tracker in self._trackers.values():
                tracker.report_surprise()
            self._area.create_if_cleared()
            link, tables = self._cutter.link(
                step=batches_done, tip=self._ledger.tip, base_history=self._ledger.base_history
            )
            self.statistics.unmarked_rows = self._cutter.unmarked.found
            sketch = self._replicas.sketch() if self._ranks.several else NOTHING
        except Exception as error:
            # As in _cut.
            self.outcomes.note_failure(error)
            return None
        return Plan(link, tables, sketch)

    def _agreed(self, plan: Plan | None, batches_done: int, *, again: bool) -> _Agreed:
        """The same with what all ranks need."""
        heard = agree_on_cut(
            self._ranks,
            batches_done,
            link=None if plan is None else plan.link,
            tip=self._ledger.tip,
            again=again,
            cuts=self._cuts,
            lost=self._ledger.take_lost(LOST_AT_ONCE),
            sketch=NOTHING if plan is None else plan.sketch,
        )
        self._drop(heard.lost)
        if plan is None or not heard.cut:
            return _Agreed(None, heard.again)
        if heard.unlike:
            # What is stored once would be restored to all: a checkpoint that is none for some.
            self.outcomes.note_failure(self._replicas.differences(heard.sketches))
            return _Agreed(None, heard.again, unlike=True)
        self._cuts = heard.number
        return _Agreed(plan if heard.increment else plan._replace(link=FULL), heard.again)

    def _drop(self, lost: Lost) -> bool:
        """Have the agent drop this rank's parts of them; whether there are any."""
        dropped = [ref for ref in self._ledger.pending if ref in lost]
        for ref in dropped:
            self._handoff.cancel(ref)
        return bool(dropped)

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is to be taken as soon as the agent has dropped the earlier one."""
        return self._due_until is not None

    @property
    def is_overdue(self) -> bool:
        """Whether the last due checkpoint was skipped, and may be taken late."""
        # Ranks learn at different times that they are superseded, and have to grant the same.
        return self._skipped_in_row > 0 and (self._ranks.several or not self.outcomes.superseded)

    @property
    def pending(self) -> int:
        """Checkpoints that were cut and are not stored yet; any thread may ask."""
        return len(self._ledger)

    def _has_room(self) -> bool:
        """Whether a checkpoint can be cut now; what `when_busy` says is done about it."""
        if self._is_free():
            return True
        staging = self._settings.staging
        if staging.when_busy == "wait":
            self.statistics.waited += 1
            deadline = time.monotonic() + staging.busy_wait_seconds
            self.outcomes.wait(deadline, until_below=staging.jobs, for_agent_seconds=0.0)
            return self._is_free()
        if self._due_until is not None:
            if time.monotonic() >= self._due_until:
                self._due_until = None
        elif staging.when_busy == "cancel" and self._cancelled_at != self.outcomes.last_safe:
            self._cancel()
        return False

    def _is_free(self) -> bool:
        return not self.outcomes.superseded and len(self._ledger) < self._settings.staging.jobs

    def _cancel(self) -> None:
        """Ask the agent to drop the checkpoint that is on its way; once until one is stored.

        Else, with a store slower than the interval, each would be dropped for the next.
        """
        if not self._area.agent_is_running():
            return
        for ref in self._ledger.pending:
            _log.info("checkpoint of %s is to be dropped for a newer one", ref)
            self._handoff.cancel(ref)
        self._cancelled_at = self.outcomes.last_safe
        self._due_until = time.monotonic() + self._settings.staging.busy_wait_seconds

    def _cut(self, batches_done: int, plan: Plan, started_ns: int) -> bool:
        """Copy everything into a slot and hand it over; False when that failed."""
        self._skipped_in_row = 0
        cut: Cut | None = None
        failure: Exception | None = None
        try:
            slot = self._area.free_slot(self._ledger.busy_slots)
            request = CutRequest(
                step=batches_done,
                generation=self._generation,
                attempt=self._attempt(batches_done),
                link=plan.link,
                tables=plan.tables,
                tip=self._ledger.tip,
                interval_batches=batches_done - self._last_cut,
                history=self._outlook.history(
                    interval_seconds=self._settings.interval_seconds,
                    interval_batches=self._settings.interval_batches,
                ),
            )
            cut = self._cutter.cut(slot, request, started_ns=started_ns)
        except Exception as error:
            # Disk, driver, a user's state_dict: none of it may stop training. Noted, not lost.
            failure = error
        try:
            if cut is not None:
                self._memory.cut(cut.snapshot.slot_bytes + cut.snapshot.sample.size_bytes)
            failed, bounds = after_cut(
                self._ranks,
                failed=failure is not None,
                bound_bytes=self._memory.own_bytes,
                step=batches_done,
            )
            self._memory.note_bounds(bounds)
            if failed and failure is None:
                failure = incomplete(batches_done, failed, self._ranks.count)
        except BaseException:
            self._take_back(cut)
            raise
        if cut is None or failure is not None:
            self._take_back(cut)  # a part of a checkpoint that another rank has no part of
            assert failure is not None
            self.outcomes.note_failure(failure)
            return False
        self._last_cut = batches_done
        self._ledger.add(cut.pending)
        self.statistics.stalled((time.perf_counter_ns() - started_ns) / 1e6)
        try:
            self._handoff.submit(cut.snapshot)
        except BaseException as error:  # else it would be waited for, and nothing cut after it
            self._ledger.lost(cut.pending.ref, type(error).__name__)
            raise
        return True

    def _take_back(self, cut: Cut | None) -> None:
        """What was cut is not handed over: its rows are dirty again."""
        if cut is not None:
            for name, rows in cut.pending.dirty.items():
                self._trackers[name].merge_back(rows)

    def _attempt(self, step: int) -> str:
        """All ranks find the same without asking; alone, a name that nobody has had before."""
        if not self._ranks.several:
            return new_attempt()
        return shared_attempt(self._token, step, cut=self._cuts)

    def finish(self, batches_done: int) -> None:
        """A last checkpoint when there are new batches, and wait for every outcome.

        Waits for outcomes at most `Timeouts.close_seconds`, and no longer than a moment when there
        is no agent. That what was cut is staged is always waited for: the process may end after
        this.
        """
        deadline = time.monotonic() + self._settings.timeouts.close_seconds
        self._due_until = None  # the last one is waited for
        if self._ranks.several:
            # A part that others wait for in vain, of this very batch perhaps, goes first.
            self.outcomes.wait_until_staged()
            lost = self._ledger.take_lost(LOST_AT_ONCE)
            if self._drop(agree_on_lost(self._ranks, lost, step=batches_done)):
                self.outcomes.wait(deadline, until_below=1)
        self.outcomes.wait(deadline, until_below=self._settings.staging.jobs)
        on_its_way = len(self._ledger) > 0 and self._ledger.newest_step == batches_done
        wanted = batches_done > self.outcomes.last_safe and not on_its_way
        said = self._ranks.exchange("the end of training", [wanted], batches_done=batches_done)
        if any(one for (one,) in said):
            self._take_last(batches_done)
        self.outcomes.wait(deadline, until_below=1)
        self.outcomes.wait_until_staged()
        self.say_ended(batches_done)
        if len(self._ledger):
            self._waiting.ends(len(self._ledger))

    def _take_last(self, batches_done: int) -> None:
        """Take the last checkpoint; if a signal's handler ended a `state_dict` in it, once more.

        In a step the next checkpoint would have these rows, and here none comes. A second signal
        ends the second try: a `state_dict` may hang. Several ranks would have to agree on that try,
        and make one alone.
        """
        alone = not self._ranks.several
        try:
            taken = self.take(batches_done)
        except BaseException:
            if not (alone and is_interrupted()):
                raise
            taken = False  # what was raised is kept, and raised where `close` ends
        if alone and not taken and is_interrupted():
            self.take(batches_done)

    def say_ended(self, batches_done: int | None = None) -> None:
        """Leave word, on this host and in the store, that training has ended and was not killed.

        Args:
            batches_done: that are worth keeping; None: only those of the newest checkpoint.
        """
        self._area.say_ended()
        if self.outcomes.superseded or self._ranks.rank:
            return
        step = self._last_cut if batches_done is None else batches_done
        reason: Literal["finished", "terminated"] = "terminated" if self._ends() else "finished"
        try:
            with rng.untouched():
                tell_ended(self._run, self._generation, step=step, reason=reason)
        except Exception as error:
            # Of a generator of the user's or of a device. Nothing but what people are told depends
            # on this word.
            _log.warning("no word in the store that training has ended: %s", error)

    def close(self) -> None:
        """End the thread; everything that was cut is staged by then."""
        self._handoff.close()
        self.outcomes.fetch()
