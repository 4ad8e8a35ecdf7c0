"""Runs the training of one process: starts it, counts batches, goes back, and ends it."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import RestoreReport
from recpoint.catalog.store.contract import Store
from recpoint.embeddings.home.initial import Initial
from recpoint.embeddings.tables.tables import Table
from recpoint.errors import RankLost, ServerLost, SettingsError
from recpoint.interrupts import Hold, held
from recpoint.trainer_plugin.assembly import Assembly
from recpoint.trainer_plugin.batches.loop import Loop
from recpoint.trainer_plugin.batches.next_batch import NextBatch
from recpoint.trainer_plugin.generation import RunningGeneration
from recpoint.trainer_plugin.life_cycle import LifeCycle, misuse
from recpoint.trainer_plugin.observation import Observation
from recpoint.trainer_plugin.ranks.ranks import AgreedEnd, Ranks
from recpoint.trainer_plugin.restore.rewinds import Rewinds
from recpoint.trainer_plugin.restore.start import StartRequest, TrainerStarts
from recpoint.trainer_plugin.schedule.ledger import Statistics, Stats
from recpoint.trainer_plugin.settings import Settings
from recpoint.trainer_plugin.state.lookahead import Lookahead
from recpoint.trainer_plugin.state.reader import Stateful

__all__ = ["CheckpointedTraining", "trainings_of"]

_log = logging.getLogger("recpoint")

_trainings: weakref.WeakSet[CheckpointedTraining] = weakref.WeakSet()


def trainings_of(weight: Tensor) -> list[CheckpointedTraining]:
    """Return the trainings of this process that have a table of that weight and have not ended."""
    return [
        training
        for training in list(_trainings)
        if not training.life.is_over and training.table_of(weight) is not None
    ]


class CheckpointedTraining:
    """The training of one Checkpointer, over all generations that it starts.

    Args:
        parts: know the model.
        store: store of the run.
        ranks: the ranks of the job.
        settings: settings of the Checkpointer.
        reader: the Checkpointer's reader.
        has_position: whether checkpoints hold a position in the batches.

    Attributes:
        batches_done: batches whose updates the model holds.
        end: decides whether this process must end.
        generation: takes checkpoints since the newest start; None: nothing has started.
        life: says which calls may run.
        loop: yields the batches that are left.
        next_batch: has the batch that is trained next measured.
    """

    def __init__(
        self,
        parts: Assembly,
        store: Store,
        ranks: Ranks,
        settings: Settings,
        *,
        reader: Stateful | None,
        has_position: bool,
    ) -> None:
        self._parts = parts
        self._ranks = ranks
        self._settings = settings
        self._reader = reader
        self._starts = TrainerStarts(
            store,
            parts.area,
            parts.job,
            settings.policy,
            drain_seconds=settings.timeouts.drain_seconds,
        )
        self._rewinds = Rewinds(
            settings.options.rewinds,
            check=lambda: self.running("batches()"),
            back=lambda lost: self.life.run_whole(functools.partial(self._go_back, lost)),
        )
        self.batches_done = 0
        self.end = AgreedEnd(ranks, wait_seconds=settings.timeouts.ranks_seconds)
        self.generation: RunningGeneration | None = None
        self.life = LifeCycle(lambda final: self.stop(final=final))
        self.next_batch = NextBatch(parts.signs, parts.count, parts.loss)
        self.loop = Loop(
            parts.state,
            parts.count,
            reader=reader,
            has_position=has_position,
            batches_done=lambda: self.batches_done,
            note_done=self._note_done,
            act=self._act_between_steps,
            rewind=self._rewinds.rewind,
            next_batch=self.next_batch,
        )
        if parts.loss is not None:
            parts.loss.batches_done = lambda: self.batches_done
        _trainings.add(self)

    def running(self, call: str) -> RunningGeneration:
        """Return the generation that takes checkpoints.

        Raises:
            SettingsError: training has not started, or has ended; or the call comes during another
                one, or in a forked child.
        """
        self.life.refuse_busy(call)
        generation = self.generation
        if generation is None or not generation.has_begun or self.life.is_closed:
            state = "closed" if self.life.is_closed else "not started"
            raise SettingsError(
                call,
                found=f"a Checkpointer that is {state}",
                expected="one that restore() has started",
                next_step="call restore() once before training, also if there is no checkpoint yet",
            )
        self.life.refuse_child(call)
        return generation

    def refuse_second_start(self) -> None:
        """Refuse a start after the first.

        Raises:
            SettingsError: training has started or ended, or this is a forked child.
        """
        self.life.refuse_child("restore()")
        if self.generation is not None or self.life.is_closed or self.life.is_busy:
            raise misuse("restore()", "a second call", "one call before training")

    def start(self, request: StartRequest) -> RestoreReport | None:
        """Restore what is wanted, and begin a generation; see `Checkpointer.restore`."""
        report = self.life.run_whole(lambda hold: self._start(request, hold))
        if self._settings.options.handle_sigterm:
            self.end.watch()
        return report

    def _start(self, request: StartRequest, hold: Hold) -> RestoreReport | None:
        run, start = self._starts.start(request, hold)
        self.batches_done = start.batches_done
        self._parts.track(start.changed)
        self._parts.memory.begin(
            run.url, generation=start.generation, batches_done=start.batches_done
        )
        self.generation = RunningGeneration(
            self._parts,
            run,
            start,
            settings=self._settings,
            ranks=self._ranks,
            end=self.end,
            reader=self._reader,
            is_stalled=lambda: self.life.is_busy,
        )
        self.generation.begin(run.url, start)
        return start.report

    def _go_back(self, lost: ServerLost | RankLost, hold: Hold) -> None:
        if self.generation is not None:  # None: lost in the restore
            self.generation.close()
        self.generation = None
        self._parts.untrack()
        self._parts.cutter.unmarked.forget()
        self._parts.area.close()
        request = StartRequest(Selection(), fresh=False, partial=None, seed=None)
        if self._start(request, hold) is None:
            # The run would begin anew, and the model has been trained: this is the end.
            self.life.request_end(final=False)
            raise lost

    def step(self) -> None:
        """Count a batch, and take a checkpoint if one is due; see `Checkpointer.step`."""
        self.loop.refuse_step()
        self.running("step()")
        self._parts.count.stepped()
        self.next_batch.note_counted()
        self._note_done()
        self._act_between_steps()

    def measure(self, batch: Any) -> None:
        """Have a batch measured that is trained next; see `Checkpointer.measure`."""
        self.running("measure()")
        self.loop.measure(batch)

    def _note_done(self) -> None:
        if self.life.is_over:
            return
        self.batches_done += 1
        if self.generation is not None:
            self.generation.note_counted()

    def _act_between_steps(self) -> None:
        if not self._parts.count.may_cut(ends=self.end.is_due):
            return
        generation = self.running("step()")
        if generation.has_work(self.batches_done):
            self.life.run_whole(lambda _: generation.act(self.batches_done))
        if self.end.is_done:
            self.end.hand_on()

    @property
    def model(self) -> nn.Module:
        """The model of the Checkpointer."""
        return self._parts.trained.module

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the Checkpointer."""
        return self._parts.trained.optimizers

    def table_of(self, weight: Tensor) -> Table | None:
        """Return the table of that weight; None: there is none."""
        tables = (table for table in self._parts.trained.tables if table.weight is weight)
        return next(tables, None)

    def rule_of(self, table: str) -> Initial | None:
        """Return the rule for first values of new rows of a table; None: there is none."""
        return self._parts.job.growth.rule(table)

    def learn_rule(self, weight: Tensor, initial: Initial) -> None:
        """Learn the rule for first values of new rows of the table of that weight."""
        table = self.table_of(weight)
        if table is not None:
            self._parts.job.growth.learn(table, initial, {})

    def refuse_growth(self, call: str) -> None:
        """Refuse to give a table more rows now.

        Raises:
            SettingsError: another call is in progress; this is not the thread that trains; or a
                forward pass waits for its backward pass, which expects as many rows as it has seen.
        """
        self.life.refuse_busy(call)
        signs = self._parts.signs
        if signs.thread not in (None, threading.get_ident()):
            raise SettingsError(
                call,
                found="a call in another thread than the optimizer steps",
                expected="a call in the training thread, between two batches",
                next_step="have the training loop make the call, for instance for the largest id "
                "of a batch that it takes",
            )
        if signs.last_forward > max(signs.last_backward, signs.last_step):
            raise SettingsError(
                call,
                found="a forward pass in training mode whose backward pass has not come",
                expected="a call between two batches",
                next_step="call it before the forward pass, or after optimizer.step(); evaluate "
                "the model in model.eval() or under torch.no_grad()",
            )

    def before_growth(self) -> None:
        """Let go of the memory of tables, of which one is about to be replaced."""
        if self.generation is not None:
            self.generation.void_window("a table was given more rows")

    def follow_growth(
        self, weight: Tensor, initial: Initial, entries: Mapping[str, Tensor]
    ) -> None:
        """Go on with the table of that weight, which has more rows now.

        Args:
            weight: the table's weight.
            initial, entries: as for `Assembly.follow_growth`.
        """
        table = self.table_of(weight)
        assert table is not None  # trainings_of has found it
        self._parts.follow_growth(table, initial, entries)
        if self.generation is not None:
            self.generation.note_larger_table()

    def checkpoint(self) -> bool:
        """Take a checkpoint now; see `Checkpointer.checkpoint`."""
        if self.life.is_busy:
            # It would be written into the slot that another checkpoint is being written to.
            _log.info("no checkpoint at batch %d: another call is in progress", self.batches_done)
            return False
        generation = self.running("checkpoint()")
        if not self.loop.count_now():
            _log.info(
                "no checkpoint at batch %d: the next batch is in training, and its optimizer step "
                "is not done",
                self.batches_done,
            )
            return False
        return self.life.run_whole(lambda _: generation.take(self.batches_done))

    def learn_outcomes(self) -> None:
        """Learn the outcomes of checkpoints, unless a call is in progress or training is over."""
        if self.generation is None or self.life.is_over or self.life.is_busy:
            return
        outcomes = self.generation.pipeline.outcomes
        if outcomes.has_news():
            with held():
                outcomes.fetch()

    @property
    def lookahead_bytes(self) -> int:
        """Bytes that a `Lookahead` takes in this process; see `Checkpointer.lookahead_bytes`."""
        if not isinstance(self._reader, Lookahead):
            return 0
        ahead = None if self.generation is None else self.generation.pipeline.ahead
        return self._reader.held_bytes if ahead is None else ahead.size_bytes

    def stats(self) -> Stats:
        """Return counts and timings of this process's checkpoints so far."""
        self.learn_outcomes()
        parts = self._parts
        return self._statistics.read(
            self.batches_done, parts.cache_stats, parts.loss_figures, parts.key_counts
        )

    @property
    def _statistics(self) -> Statistics:
        generation = self.generation  # read once: training may go back in another thread
        return Statistics() if generation is None else generation.pipeline.statistics

    def observe(self) -> Observation:
        """Read the state of checkpointing, in any thread; see `Checkpointer.observe`."""
        parts, cache = self._parts, self._parts.cache
        generation = self.generation  # read once: training may go back meanwhile
        statistics = Statistics() if generation is None else generation.pipeline.statistics
        return Observation.of(
            statistics,
            parts.area,
            # Read before batches_done, which grows: no lag is negative.
            safe_batches=statistics.safe_batches,
            batches_done=self.batches_done,
            running=generation is not None and not self.life.is_closed,
            pending=0 if generation is None else generation.pipeline.pending,
            bound_bytes=parts.memory.own_bytes,
            cache=parts.cache_stats,
            keyed=parts.key_counts,
            servers=None if cache is None or self._ranks.rank else cache.home.servers_now(),
        )

    def close(self, *, final: bool) -> None:
        """End training, after the call in progress if there is one; see `Checkpointer.close`."""
        if self.life.is_busy:
            self.life.request_end(final=final)
            return
        self.stop(final=final, told=not final)
        if self.generation is not None:
            self.generation.pipeline.outcomes.raise_noted()

    def stop(self, *, final: bool, told: bool = False, error: BaseException | None = None) -> None:
        """End as `close` does; with `told`, record the end of training even if not `final`.

        With `error`, record that this exception ended training.
        """
        if self.life.is_over:
            return
        try:
            with held():
                self._stop(final=final, told=told, error=error)
        finally:
            self.end.close()

    def _stop(self, *, final: bool, told: bool, error: BaseException | None) -> None:
        generation = self.generation
        try:
            with self.life.ending():
                if generation is not None:
                    if final or told:
                        self.loop.leave()
                    generation.end(self.batches_done, final=final, told=told, error=error)
        finally:
            self.loop.end()
            if generation is not None:
                generation.close()
            self._parts.untrack()
            self._parts.area.close()
            if self._parts.coming is not None:
                self._parts.coming.close()
            self._ranks.close()
