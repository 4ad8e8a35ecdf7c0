"""Takes the checkpoints of one generation: from a start of the trainer to its end or a rewind."""

from __future__ import annotations

import logging
from collections.abc import Callable

from recpoint.catalog.run.run import Run
from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin.assembly import Assembly
from recpoint.trainer_plugin.batches.uncounted import Uncounted
from recpoint.trainer_plugin.pipeline.pipeline import Pipeline
from recpoint.trainer_plugin.pipeline.reader_pace import Pace
from recpoint.trainer_plugin.ranks.ranks import AgreedEnd, Ranks
from recpoint.trainer_plugin.restore.start import Start
from recpoint.trainer_plugin.restore.start_log import announce_start
from recpoint.trainer_plugin.servers_note import ServersNote
from recpoint.trainer_plugin.settings import Settings

__all__ = ["RunningGeneration"]

_log = logging.getLogger("recpoint")


class RunningGeneration:
    """What runs beside training since the trainer's newest start.

    Args:
        parts: know the model.
        run: the run.
        start: result of the start.
        settings: settings of the Checkpointer.
        ranks: the ranks of the job.
        end: decides whether this process must end.
        reader: the Checkpointer's reader.
        is_stalled: returns whether a call of the Checkpointer is in progress.

    Attributes:
        pipeline: takes the checkpoints.
        has_begun: whether checkpoints can be taken.
    """

    def __init__(
        self,
        parts: Assembly,
        run: Run,
        start: Start,
        *,
        settings: Settings,
        ranks: Ranks,
        end: AgreedEnd,
        reader: object,
        is_stalled: Callable[[], bool],
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._leads = ranks.rank == 0
        self._end = end
        self._is_stalled = is_stalled
        self._servers_note: ServersNote | None = None
        self._uncounted: Uncounted | None = None  # until the first batch is counted
        self._has_larger_table = False  # since the last preparation
        self.pipeline = Pipeline(
            run=run,
            start=start,
            area=parts.area,
            cutter=parts.cutter,
            memory=parts.memory,
            records=parts.records,
            trackers=parts.trackers,
            settings=settings,
            ends=lambda: end.is_due,
            ranks=ranks,
            replicas=parts.replicas,
            coming=parts.coming,
            fulls_window=parts.fulls_window,
        )
        self._pace = Pace(reader, self.pipeline)
        self.has_begun = False

    def begin(self, run_url: str, start: Start) -> None:
        """Prepare for checkpoints, and begin the first interval.

        Args:
            run_url: URL of the run.
            start: as the constructor was given it.
        """
        parts = self._parts
        self.pipeline.prepare()
        if parts.cache is not None and self._leads:
            self._servers_note = ServersNote(
                parts.cache.home,
                parts.area,
                generation=start.generation,
                is_stalled=self._is_stalled,
            )
            self._servers_note.start()
        parts.state.not_given.begin(start.batches_done)
        self.has_begun = True
        self._pace.restart(start.batches_done)
        if self._leads:
            self._uncounted = Uncounted(parts.state.optimizers.parameters(), parts.signs)
            if self._settings.options.announce:
                announce_start(
                    run_url,
                    start.report,
                    seeded_from=start.seeded_from,
                    resumed=start.resumed,
                    left_count=start.left,
                )

    def note_counted(self) -> None:
        """Take note that a batch was counted: no warning of uncounted ones is due any more."""
        if self._uncounted is not None:
            self._uncounted.end()
            self._uncounted = None

    def has_work(self, batches_done: int) -> bool:
        """Whether `act` has anything to do after a batch; costs little."""
        pipeline, pace = self.pipeline, self._pace
        return (
            pace.is_over(batches_done)
            or pipeline.outcomes.has_news()
            or self._parts.memory.has_grown()
            or self._end.is_due
            or (
                pipeline.ahead is not None
                and pipeline.ahead.is_near(batches_done, pace.left(batches_done))
            )
        )

    def act(self, batches_done: int) -> None:
        """Take a checkpoint if one is due, and do what else is due after a batch.

        Raises:
            RecpointError: with `Options.on_error="raise"`: the error of a failed checkpoint.
        """
        pipeline, pace = self.pipeline, self._pace
        pipeline.outcomes.fetch()
        if self._parts.memory.follow():
            self._parts.records.warn_if_large(pipeline.statistics.precision)
        if self._has_larger_table:
            self._prepare_again()
        pace.step(batches_done)
        if pipeline.ahead is not None:
            pipeline.ahead.step(batches_done, pace.left(batches_done))
        if self._end.is_due:
            self._end.end_if_last(batches_done, pipeline.finish)
        pipeline.outcomes.raise_noted()

    def note_larger_table(self) -> None:
        """Take note that a table has more rows now; `act` prepares for its checkpoints.

        Not at once: in the middle of a batch, the position of a reader may not be known.
        """
        self._has_larger_table = True
        self._parts.memory.note_larger_table()

    def _prepare_again(self) -> None:
        self._has_larger_table = False
        try:
            self.pipeline.prepare()
        except Exception as error:
            if came_from_handler(error):
                raise
            # A user's state_dict failed. The cut meets the same error and counts it.
            _log.warning("no slot was made ready for a table that has more rows: %s", error)

    def void_window(self, reason: str) -> None:
        """Have the next checkpoint copy all its rows in the stall."""
        if self.pipeline.ahead is not None:
            self.pipeline.ahead.void(reason)

    def take(self, batches_done: int) -> bool:
        """Take a checkpoint now, due or not; return whether it was cut.

        Raises:
            RecpointError: as `act`.
        """
        self.pipeline.outcomes.fetch()
        cut = self._pace.take(batches_done)
        self.pipeline.outcomes.raise_noted()
        return cut

    def end(
        self, batches_done: int, *, final: bool, told: bool, error: BaseException | None
    ) -> None:
        """End checkpoints with training; arguments as for `CheckpointedTraining.stop`."""
        if self._uncounted is not None and (final or told):
            self._uncounted.warn()
        if final:
            if not self._parts.count.is_between_steps:
                _log.warning(
                    "training ends after batch %d while gradients wait for an optimizer step: "
                    "the last checkpoint does not hold them, so a restart trains on without "
                    "them. Next: step the optimizers before close()",
                    batches_done,
                )
            self.pipeline.finish(batches_done)
        elif told:
            self.pipeline.say_ended()
        elif error is not None:
            self.pipeline.say_failed(error, batches_done)

    def close(self) -> None:
        """End the threads; each checkpoint that was cut has been staged then."""
        self.note_counted()
        self.pipeline.close()
        if self._servers_note is not None:
            self._servers_note.end()
            self._servers_note = None
