"""Takes a due checkpoint from the check for room, through the cut, to its hand-over.

A failed checkpoint raises nothing here: the failure is noted, see `outcomes`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import NamedTuple

from recpoint.catalog.run.ends import tell_ended
from recpoint.catalog.run.run import Run
from recpoint.embeddings.tables.marks import Tracker
from recpoint.errors import RecordTooLarge, StagingError
from recpoint.format.naming import shared_attempt
from recpoint.interrupts import is_interrupted
from recpoint.trainer_plugin.pipeline.ahead import Ahead
from recpoint.trainer_plugin.pipeline.busy import BusyStaging
from recpoint.trainer_plugin.pipeline.coming_rows import ComingRows
from recpoint.trainer_plugin.pipeline.handoff import Handoff
from recpoint.trainer_plugin.pipeline.lead import FullsLead
from recpoint.trainer_plugin.pipeline.outcomes import Outcomes, WaitingLog
from recpoint.trainer_plugin.policy import FULL, ChainLink
from recpoint.trainer_plugin.ranks.agreement import (
    LOST_AT_ONCE,
    NO_NEEDS,
    NOTHING,
    AgreedSchedule,
    Lost,
    RecordNeeds,
    Replicas,
    Sketch,
    after_cut,
    agree_on_cut,
    agree_on_lost,
    drift_between,
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
from recpoint.trainer_plugin.snapshot import device_memory
from recpoint.trainer_plugin.snapshot.cut import Cut, Cutter
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable
from recpoint.trainer_plugin.snapshot.memory_bound import MemoryBound
from recpoint.trainer_plugin.snapshot.plan import CutRequest, new_attempt
from recpoint.trainer_plugin.snapshot.record_bound import RecordBound
from recpoint.trainer_plugin.snapshot.staging import StagingArea
from recpoint.trainer_plugin.state import rng

__all__ = ["Pipeline"]


_log = logging.getLogger("recpoint")


#: Why a trainer that another one has superseded has lost what it trained.
_SUPERSEDED = "StaleWriter: another trainer has started on the run"


class CheckpointPlan(NamedTuple):
    """The plan of a checkpoint, made in the stall that cuts it.

    Attributes:
        link: its place in the chain.
        tables: the tables that it holds.
        sketch: sketch of the state that must be equal on all ranks.
        needs: what this rank would write into records.
    """

    link: ChainLink
    tables: tuple[LiveTable, ...]
    sketch: Sketch
    needs: RecordNeeds


class _Agreed(NamedTuple):
    """What all ranks have agreed to do.

    Attributes:
        plan: plan of this rank; None: a rank cannot cut, so no rank cuts.
        again: a rank already has a checkpoint of this batch.
        refused: state that is stored once differs between ranks, or records would be too large; the
            failure has been noted.
    """

    plan: CheckpointPlan | None
    again: bool
    refused: bool = False


class Pipeline:
    """Takes the checkpoints of one trainer, from its start on. Used by the training thread only.

    Args:
        run: the run.
        start: result of the trainer's start.
        area: the staging area.
        cutter: cuts snapshots.
        memory: the most memory that snapshots take.
        records: estimates the records of coming checkpoints.
        trackers: trackers of the tables that this rank stores, by `Table.key`.
        settings: settings of the Checkpointer.
        ends: returns whether the process is about to end.
        ranks: the ranks of the job.
        replicas: checks the state that is equal on all ranks.
        coming: knows the rows of coming batches; None: the reader does not look ahead.
        fulls_window: how many batches before its cut a full is copied; 0: it is copied in the
            stall; None: that follows from what is measured, or from these rows.

    Attributes:
        ahead: copies rows of the next checkpoint before its cut; None: all are copied in stalls.
        busy: says whether a checkpoint can be staged now.
        outcomes: learns the outcomes of checkpoints that were cut.
        statistics: counts and timings of the checkpoints.
        schedule: says when a checkpoint is due.
    """

    def __init__(
        self,
        *,
        run: Run,
        start: Start,
        area: StagingArea,
        cutter: Cutter,
        memory: MemoryBound,
        records: RecordBound,
        trackers: Mapping[str, Tracker],
        settings: Settings,
        ends: Callable[[], bool],
        ranks: Ranks,
        replicas: Replicas,
        coming: ComingRows | None = None,
        fulls_window: int | None = 0,
    ) -> None:
        self._run = run
        self._ranks = ranks
        self._replicas = replicas
        self._generation = start.generation
        self._token = start.token
        self._area = area
        self._cutter = cutter
        self._memory = memory
        self._records = records
        self._trackers = trackers
        self._settings = settings
        self._ledger = Ledger(trackers, start.tip, start.base_history)
        self._handoff = Handoff(
            area,
            run=run.id,
            run_url=run.url,
            ranks=ranks.count,
            jobs=settings.staging.jobs,
            ranks_seconds=settings.timeouts.ranks_seconds,
            tells=ranks.rank == memory.host.ranks[0],
        )
        self._last_cut = start.batches_done
        self._cuts = 0
        self._has_warned_of_drift = False
        self._ends = ends
        self._skipped_in_row = 0
        self._ended_step: int | None = None  # batches done at the end that was told last
        self.statistics = Statistics()
        self.statistics.start(start.batches_done, restored=start.report is not None)
        self._waiting = WaitingLog(area, self.statistics, batches_done=start.batches_done)
        self.outcomes = Outcomes(
            handoff=self._handoff,
            ledger=self._ledger,
            area=area,
            cutter=cutter,
            records=records,
            settings=settings,
            statistics=self.statistics,
            waiting=self._waiting,
            ends=ends,
            on_superseded=self._say_superseded,
            batches_done=start.batches_done,
        )
        self.busy = BusyStaging(
            settings.staging, area, self._ledger, self._handoff, self.outcomes, self.statistics
        )
        self._outlook = Outlook(
            settings.failures, start.past, rule=cutter.parts.rule, statistics=self.statistics
        )
        self.schedule = self._new_schedule()
        self.ahead = (
            None
            if coming is None and fulls_window == 0
            else Ahead(
                coming,
                FullsLead(
                    fulls_window,
                    share=settings.options.copy_share,
                    batches_done=start.batches_done,
                ),
                cutter=cutter,
                trackers=trackers,
                ledger=self._ledger,
                area=area,
                is_free=lambda: self.busy.is_free,
                full_bytes=lambda: memory.own_bytes // settings.staging.jobs,
            )
        )

    def _new_schedule(self) -> Schedule:
        batches, seconds = self._settings.interval_batches, self._settings.interval_seconds
        if batches is not None:
            return BatchInterval(batches)
        assert seconds is not None  # the settings have been checked
        own_schedule: Schedule = (
            AutoInterval(self._outlook.interval_seconds)
            if seconds == "auto"
            else SecondsInterval(seconds)
        )
        return AgreedSchedule(own_schedule, self._ranks) if self._ranks.several else own_schedule

    def prepare(self) -> None:
        """Do work that must not lengthen a stall: move tables, reserve a slot, start the thread."""
        self._cutter.prepare_tables()
        self._records.measure(self.statistics.precision)
        try:
            free_slot = self._area.free_slot(self._ledger.busy_slots)
            free_slot.reserve(self._cutter.size_bytes())
        except StagingError as error:
            self.outcomes.note_failure(error)
        self.outcomes.has_thread()

    def take(self, batches_done: int, *, late: bool = False) -> bool:
        """Cut a checkpoint and hand it over.

        Args:
            batches_done: batches so far.
            late: the checkpoint was skipped before: take it if there is room now, else do nothing.

        Returns:
            Whether the checkpoint was cut and handed over.

        Raises:
            RanksDiffer: ranks that share rows do different things.
        """
        self._cutter.cache.announce()
        able = self.outcomes.has_thread()
        is_repeated = self._ledger.newest_step == batches_done
        if self.outcomes.superseded:
            self.busy.end_wait()
        room = able and not is_repeated and not self.outcomes.superseded
        room = room and (self.busy.is_free if late else self.busy.has_room())
        started_ns = time.perf_counter_ns()
        plan = self._plan(batches_done) if room else None
        if self._ranks.several:
            agreed = self._agreed(plan, batches_done, is_repeated=is_repeated)
            plan, is_repeated = agreed.plan, agreed.again
            if agreed.refused:
                return False  # the failure has been noted
        elif plan is None and (room or not able):
            self.busy.end_wait()  # so that it is not tried again at every batch
            return False  # the failure has been noted
        if is_repeated:
            # A second attempt would be refused as a conflict with the first, and the next
            # checkpoint would have to be a full. That one also holds rows marked by hand meanwhile.
            _log.info("no checkpoint at batch %d: there is one already", batches_done)
            return False
        if plan is None:
            if not self.busy.is_due and not late:
                # Earlier checkpoints are not finished. The rows stay dirty and are in the next one.
                self.statistics.skipped += 1
                self._skipped_in_row += 1
                if self.outcomes.superseded:
                    self._waiting.superseded(batches_done, self._skipped_in_row)
                else:
                    self._waiting.skipped(batches_done, self._skipped_in_row)
            return False
        self.busy.end_wait()
        with ExitStack() as stall:
            return self._cut(batches_done, plan, started_ns, stall)

    def _plan(self, batches_done: int) -> CheckpointPlan | None:
        """Plan a checkpoint at this batch; None: that failed, and the failure is noted."""
        try:
            for tracker in self._trackers.values():
                tracker.report_surprise()
            self._area.create_if_cleared()
            link, tables = self._cutter.link(
                step=batches_done, tip=self._ledger.tip, base_history=self._ledger.base_history
            )
            if self.ahead is not None:
                link = self.ahead.link_at_cut(link, tables)
            needs = self._records.needs(link, tables, self.statistics.precision)
            if not self._ranks.several:
                fitting = self._records.fitting(link, [needs])
                if self.ahead is not None and fitting != link:
                    self.ahead.void("an increment's manifest would be too large")
                link = fitting
            self.statistics.unmarked_rows = self._cutter.unmarked.found
            sketch = self._replicas.sketch() if self._ranks.several else NOTHING
        except Exception as error:
            # An error here must not stop training, as in _cut.
            self.outcomes.note_failure(error)
            return None
        return CheckpointPlan(link, tables, sketch, needs)

    def _agreed(
        self, plan: CheckpointPlan | None, batches_done: int, *, is_repeated: bool
    ) -> _Agreed:
        """Agree with the other ranks on whether all cut, and on full or increment."""
        agreed = agree_on_cut(
            self._ranks,
            batches_done,
            link=None if plan is None else plan.link,
            tip=self._ledger.tip,
            again=is_repeated,
            cuts=self._cuts,
            lost=self._ledger.take_lost(LOST_AT_ONCE),
            sketch=NOTHING if plan is None else plan.sketch,
            needs=NO_NEEDS if plan is None else plan.needs,
            measured=self._cutter.parts.measured_here(),
        )
        self._cutter.parts.agree_on_prices(agreed.measured)
        self._drop(agreed.lost)
        if plan is None or not agreed.cut:
            return _Agreed(None, agreed.again)
        if agreed.unlike:
            # State that is stored once would be restored to all ranks, which is wrong for some.
            self.outcomes.note_failure(self._replicas.differences(agreed.sketches))
            return _Agreed(None, agreed.again, refused=True)
        drift = None if self._has_warned_of_drift else drift_between(agreed.sketches)
        if drift is not None:
            self._has_warned_of_drift = True
            _log.warning("%s", drift)
        try:
            link = self._records.fitting(plan.link if agreed.increment else FULL, agreed.needs)
        except RecordTooLarge as error:  # on all ranks, which have heard the same
            self.outcomes.note_failure(error)
            return _Agreed(None, agreed.again, refused=True)
        if self.ahead is not None and link != plan.link:
            self.ahead.void("the ranks agreed on another kind of checkpoint")
        self._cuts = agreed.number
        return _Agreed(plan._replace(link=link), agreed.again)

    def _drop(self, lost: Lost) -> bool:
        """Have the agent drop this rank's parts of lost checkpoints.

        Returns:
            Whether this rank has such parts.
        """
        dropped = [ref for ref in self._ledger.pending if ref in lost]
        for ref in dropped:
            self._handoff.cancel(ref)
        return bool(dropped)

    @property
    def is_overdue(self) -> bool:
        """Whether the last due checkpoint was skipped, and may be taken late."""
        # Ranks learn at different times that they are superseded, but must grant the same batches.
        return self._skipped_in_row > 0 and (self._ranks.several or not self.outcomes.superseded)

    @property
    def pending(self) -> int:
        """Number of checkpoints that were cut and have no outcome yet; any thread may read it."""
        return len(self._ledger)

    def _cut(
        self, batches_done: int, plan: CheckpointPlan, started_ns: int, stall: ExitStack
    ) -> bool:
        """Copy everything into a slot and hand it over.

        Args:
            batches_done: batches so far.
            plan: of the checkpoint.
            started_ns: `time.perf_counter_ns` when the stall began.
            stall: takes what to call at its end.

        Returns:
            Whether it succeeded on all ranks; a failure is noted.
        """
        self._skipped_in_row = 0
        if batches_done > self.statistics.started_batches:
            device_memory.of_this_process().note_trained()
        cut: Cut | None = None
        failure: Exception | None = None
        try:
            stall.callback(self._cutter.cache.prepare())
            window = None if self.ahead is None else self.ahead.window
            slot = self._area.free_slot(self._ledger.busy_slots) if window is None else window.slot
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
            cut = self._cutter.cut(slot, request, started_ns=started_ns, window=window)
        except Exception as error:
            # An error of the disk, a driver or a user's state_dict must not stop training. It is
            # noted below.
            failure = error
        finally:
            if self.ahead is not None:
                self.statistics.add_copied(self.ahead.take_copied(cut))
                self.statistics.unmarked_rows = self._cutter.unmarked.found
        try:
            if cut is not None:
                self._memory.cut(cut.snapshot.used_bytes)
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
            self._take_back(cut)  # another rank failed, so this rank's part is useless
            assert failure is not None
            self.outcomes.note_failure(failure)
            return False
        self._last_cut = batches_done
        self._ledger.add(cut.pending)
        self.statistics.stalled((time.perf_counter_ns() - started_ns) / 1e6)
        try:
            self._handoff.submit(cut.snapshot)
        except BaseException as error:  # otherwise its outcome would be awaited for ever
            self._ledger.lost(cut.pending.ref, type(error).__name__)
            raise
        return True

    def _take_back(self, cut: Cut | None) -> None:
        """Make the rows of a cut that is not handed over dirty again."""
        if cut is not None:
            cut.snapshot.device.release()
            for name, rows in cut.pending.dirty.items():
                self._trackers[name].merge_back(rows)

    def _attempt(self, step: int) -> str:
        """Return the attempt's name: equal on all ranks without exchange; random for one rank."""
        if not self._ranks.several:
            return new_attempt()
        return shared_attempt(self._token, step, cut=self._cuts)

    def finish(self, batches_done: int) -> None:
        """Take a last checkpoint if there are new batches, and wait for every outcome.

        Waits for outcomes at most `Timeouts.close_seconds`, and only shortly if no agent runs.
        Always waits until each checkpoint that was cut is staged, because the process may end after
        this.

        Raises:
            RanksDiffer: ranks that share rows do different things.
        """
        self._cutter.cache.announce()
        deadline = time.monotonic() + self._settings.timeouts.close_seconds
        self.busy.end_wait()  # the last checkpoint waits for room instead
        if self._ranks.several:
            # Checkpoints that can never be complete are dropped first; one may be of this batch.
            self.outcomes.wait_until_staged()
            lost = self._ledger.take_lost(LOST_AT_ONCE)
            if self._drop(agree_on_lost(self._ranks, lost, step=batches_done)):
                self.outcomes.wait(deadline, until_below=1)
        self.outcomes.wait(deadline, until_below=self._settings.staging.jobs)
        on_its_way = len(self._ledger) > 0 and self._ledger.newest_step == batches_done
        wants_last = batches_done > self.outcomes.last_safe and not on_its_way
        answers = self._ranks.exchange(
            "the end of training", [wants_last], batches_done=batches_done
        )
        if any(wants for (wants,) in answers):
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
            is_taken = self.take(batches_done)
        except BaseException:
            if not (alone and is_interrupted()):
                raise
            is_taken = False  # what was raised is kept, and raised where `close` ends
        if alone and not is_taken and is_interrupted():
            self.take(batches_done)

    def say_failed(self, error: BaseException, batches_done: int) -> None:
        """Note in the store that an exception has ended training.

        Args:
            error: the exception.
            batches_done: number of batches that training has completed.
        """
        if self.outcomes.superseded:
            self._waiting.ends_superseded()
            self._tell_ended(f"failed: {_SUPERSEDED}", self.outcomes.last_safe)
        elif self._ended_step != batches_done:  # else a handler raises after SIGTERM: it has ended
            self._tell_ended(f"failed: {_named(error)}", batches_done)

    def _say_superseded(self) -> None:
        self._tell_ended("superseded", self.outcomes.last_safe)

    def say_ended(self, batches_done: int | None = None) -> None:
        """Note, on this host and in the store, that training has ended and was not killed.

        Args:
            batches_done: number of batches that training has completed; None: only those of the
                newest checkpoint count.
        """
        self._area.say_ended()
        if self.outcomes.superseded:
            self._waiting.ends_superseded()
            self._tell_ended(f"failed: {_SUPERSEDED}", self.outcomes.last_safe)
            return
        step = self._last_cut if batches_done is None else batches_done
        self._ended_step = step
        self._tell_ended("terminated" if self._ends() else "finished", step)

    def _tell_ended(self, reason: str, step: int) -> None:
        if self._ranks.rank:
            return
        try:
            with rng.untouched():
                tell_ended(self._run, self._generation, step=step, reason=reason)
        except Exception as error:
            # Also errors of a user's or a device's random generator. Only what people are told
            # depends on this note.
            _log.warning("no note in the store that training has ended was written: %s", error)

    def close(self) -> None:
        """End the threads; each checkpoint that was cut has been staged then."""
        if self.ahead is not None:
            self.ahead.close()
        self._handoff.close()
        self.outcomes.fetch()


def _named(error: BaseException) -> str:
    """Return the class of an exception, and its text if that can be made."""
    try:
        text = str(error)
    except Exception:  # a user's __str__; the exception itself reaches the user
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
