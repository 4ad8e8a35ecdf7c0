"""The class that a training script uses."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor, nn
from torch.optim import Optimizer

from recpoint import kernels
from recpoint.catalog import staged
from recpoint.catalog.restore import RestoreReport
from recpoint.catalog.run import Run
from recpoint.catalog.store import open_store
from recpoint.errors import SettingsError
from recpoint.format.job import QuantizerName
from recpoint.trainer_plugin import rng_state, takeover
from recpoint.trainer_plugin.cutter import Cutter
from recpoint.trainer_plugin.model_state import ModelState
from recpoint.trainer_plugin.optimizer_state import OptimizerState
from recpoint.trainer_plugin.optimizer_watch import OptimizerWatch
from recpoint.trainer_plugin.pipeline import Pipeline
from recpoint.trainer_plugin.reader import Stateful, announce
from recpoint.trainer_plugin.restore_target import ModelTarget, check_partial
from recpoint.trainer_plugin.schedule import new_schedule
from recpoint.trainer_plugin.settings import Bits, OnError, Settings, StateBits, several
from recpoint.trainer_plugin.staging import StagingArea
from recpoint.trainer_plugin.statistics import Statistics, Stats
from recpoint.trainer_plugin.tables import find_tables, table_widths
from recpoint.trainer_plugin.termination import TerminationNotice
from recpoint.trainer_plugin.tracking import Tracker
from recpoint.trainer_plugin.training_state import TrainingState

__all__ = ["Checkpointer"]

_log = logging.getLogger("recpoint")


class Checkpointer:
    """Checkpoints of one training process.

        with Checkpointer(model, optimizer, run=URL, reader=reader, interval_batches=1000) as ckpt:
            ckpt.restore()
            for batch in reader:
                train(batch)  # up to and including optimizer.step()
                ckpt.step()

    Nothing that goes wrong with a checkpoint reaches the training loop: it is counted, logged
    (logger "recpoint"), shown in `stats`, and its rows are in the next checkpoint. With
    `on_error="raise"` the next `step` raises it instead.

    A checkpoint holds the state between two batches. Gradients are no part of it: call
    `zero_grad()` before each backward pass, as usual.

    Args:
        model: holds every parameter that the optimizers train.
        optimizers: one, or several.
        run: the run URL: a local path, `file://`, `s3://bucket/prefix`.
        reader: where batches come from, with `state_dict` and `load_state_dict`.
        schedulers: learning-rate schedulers.
        extras: name -> anything else with a state: gradient scalers, metrics.

    The remaining settings are described at `Settings`.

    Attributes:
        batches_done: batches whose updates the model holds.
        memory_bound_bytes: most that slots take in the staging area, known once training starts.

    Raises:
        SettingsError: a setting that cannot work; its name is in the message.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        run: str,
        reader: Stateful | None = None,
        schedulers: Sequence[Stateful] = (),
        extras: Mapping[str, Stateful] | None = None,
        interval_batches: int | None = None,
        interval_seconds: float | None = None,
        bits: Bits = "lossless",
        table_bits: Mapping[str, Bits] | None = None,
        quantizer: QuantizerName = "auto",
        state_bits: StateBits = "lossless",
        full_every: int = 16,
        max_staged_jobs: int = 1,
        staging: str | Path | None = None,
        on_error: OnError = "continue",
        row_local_optimizers: Sequence[type] = (),
        close_wait_seconds: float = 60.0,
        drain_seconds: float = 30.0,
        handle_sigterm: bool = True,
    ) -> None:
        self._settings = settings = Settings(
            interval_batches=interval_batches,
            interval_seconds=interval_seconds,
            bits=bits,
            table_bits={} if table_bits is None else table_bits,
            quantizer=quantizer,
            state_bits=state_bits,
            full_every=full_every,
            max_staged_jobs=max_staged_jobs,
            staging=staging,
            on_error=on_error,
            row_local_optimizers=row_local_optimizers,
            close_wait_seconds=close_wait_seconds,
            drain_seconds=drain_seconds,
            handle_sigterm=handle_sigterm,
        )
        with rng_state.untouched():
            self._store = open_store(run)
        given = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
        chosen = several("optimizers", given)
        self._tables = find_tables(model, chosen)
        widths = table_widths(self._tables, settings.bits, settings.table_bits)
        self._reader = reader
        self._state = TrainingState(
            model=ModelState(model, self._tables),
            optimizers=OptimizerState(model, chosen, self._tables),
            schedulers=[schedulers] if isinstance(schedulers, Stateful) else schedulers,
            reader=reader,
            extras={} if extras is None else extras,
        )
        self._trackers = {table.name: Tracker(table) for table in self._tables}
        row_local = tuple(settings.row_local_optimizers)
        self._watch = OptimizerWatch(chosen, self._trackers, row_local=row_local)
        self._cutter = Cutter(
            tables=self._tables,
            trackers=self._trackers,
            watch=self._watch,
            state=self._state,
            widths=widths,
            settings=settings,
        )
        self._area = StagingArea(
            Path(settings.staging) if settings.staging else staged.default_staging_root(),
            self._store.url,
        )
        self._schedule = new_schedule(settings.interval_batches, settings.interval_seconds)
        self._termination = TerminationNotice()
        self._pipeline: Pipeline | None = None
        self._closed = False
        self._left = self._granted = self.batches_done = 0
        kernels.warm_up()
        self.memory_bound_bytes = settings.max_staged_jobs * self._cutter.size_bytes()
        self._area.warn_if_small(self.memory_bound_bytes)
        self._watch.warn()

    def restore(
        self,
        step: int | None = None,
        *,
        fresh: bool = False,
        partial: Mapping[str, Sequence[str]] | None = None,
    ) -> RestoreReport | None:
        """Restore the newest checkpoint and take the run over; call it once, before training.

        Args:
            step: this checkpoint instead of the newest; newer ones are left behind.
            fresh: start from nothing, also when the run has checkpoints: a new line.
            partial: load only these values, and start a new line with a full:
                `{"tables": [names], "dense": [names of dense parameters and buffers]}`. Optimizer
                state, generators and reader stay as they are, and `batches_done` is 0.

        Returns:
            What was restored; None when there was nothing, or `fresh`.

        Raises:
            IncompatibleModel: the checkpoint does not fit, each difference named. Nothing here has
                changed, unless a newer, damaged one was tried first: tables may hold its rows.
            NothingToRestore: `step` is not there; or all are damaged, and tables may hold their
                rows: build the model anew before you start `fresh`.
            StagingError: another process trains this run here, or the area cannot be used.
            StoreError: the store cannot be read or written.
            SettingsError: called twice, or with options that exclude each other.
        """
        if self._pipeline is not None or self._closed:
            raise _misuse("restore()", "a second call", "one call before training")
        if fresh and (step is not None or partial is not None):
            raise _misuse("restore(fresh=True)", "step or partial with it", "fresh alone")
        wanted = None if partial is None else check_partial(partial)
        self._area.create()
        self._area.lock()
        generators = rng_state.capture()
        try:
            waiting = self._area.wait_until_drained(self._settings.drain_seconds)
            if waiting:
                _log.warning(
                    "%d checkpoint(s) of an earlier trainer are staged and not stored; they are "
                    "left behind. Next: keep an agent running: %s",
                    waiting,
                    self._area.agent_command(),
                )
            run = Run.create(self._store)
            if fresh:
                start = takeover.start_fresh(run)
            elif wanted is not None:
                start = takeover.start_from_parts(run, self._tables, self._state, wanted, step=step)
            else:
                start = takeover.start_restored(
                    run, lambda: ModelTarget(self._tables, self._state), step=step
                )
            if start.report is None or wanted is not None:
                rng_state.restore(generators)  # as in rng_state.untouched
            self._area.take_over(start.generation)
        except BaseException:
            self._area.close()
            raise
        self._begin(run, start)
        return start.report

    def _begin(self, run: Run, start: takeover.Start) -> None:
        self.batches_done = start.batches_done
        for tracker in self._trackers.values():
            tracker.forget()
            tracker.install()
        self._watch.install()
        full_bytes = self._cutter.size_bytes()
        self.memory_bound_bytes = self._settings.max_staged_jobs * full_bytes
        _log.info(
            "generation %d of %s: %d batches done; staged checkpoints take at most %d bytes of %s",
            start.generation,
            run.url,
            start.batches_done,
            self.memory_bound_bytes,
            self._area.root,
        )
        self._pipeline = pipeline = Pipeline(
            run=run,
            start=start,
            area=self._area,
            cutter=self._cutter,
            trackers=self._trackers,
            settings=self._settings,
        )
        pipeline.prepare(full_bytes)
        if self._settings.handle_sigterm:
            self._termination.install()
        self._grant(pipeline, self._schedule.restart(time.monotonic()))

    def step(self) -> None:
        """One more batch is done; take a checkpoint when one is due. Call after the optimizers.

        Raises:
            SettingsError: `restore` was not called.
            RecpointError: with `on_error="raise"`: what went wrong with a checkpoint.
        """
        pipeline = self._running("step()")
        self.batches_done += 1
        self._left -= 1
        pipeline.fetch()
        if self._left <= 0:
            self._decide(pipeline)
        if self._termination.requested:
            self._terminate(pipeline)
        pipeline.raise_noted()

    def checkpoint(self) -> bool:
        """Take a checkpoint now, whatever the interval says.

        Returns:
            Whether it was cut: not while earlier ones wait, after an error, or twice at one batch.
        """
        pipeline = self._running("checkpoint()")
        pipeline.fetch()
        cut = pipeline.take(self.batches_done)
        self._grant(pipeline, self._schedule.restart(time.monotonic()))
        pipeline.raise_noted()
        return cut

    def mark(self, table: str, ids: Tensor) -> None:
        """Rows of `table` changed in another way than by training; call it after the change.

        Args:
            table: name of the embedding module.
            ids: int32 or int64, any shape.

        Raises:
            SettingsError: no such table.
            IndexError: an id is out of range.
        """
        self._tracker(table).mark(ids)

    def mark_all(self, table: str) -> None:
        """All rows of `table`, or of its row states, changed or may have: reset, or decayed."""
        self._tracker(table).mark_all()

    @property
    def stats(self) -> Stats:
        """What happened to the checkpoints so far."""
        if self._pipeline is None:
            return Statistics().read(self.batches_done)
        if not self._closed:
            self._pipeline.fetch()
        return self._pipeline.statistics.read(self.batches_done)

    def close(self, *, final: bool = True) -> None:
        """End: a last checkpoint when there are new batches, and wait for the agent.

        Args:
            final: take that checkpoint and wait at most `close_wait_seconds` for outcomes. False:
                only make sure that what was cut is staged.

        Raises:
            RecpointError: with `on_error="raise"`: what went wrong with a checkpoint.
        """
        self._end(final=final)
        if self._pipeline is not None:
            self._pipeline.raise_noted()

    def _end(self, *, final: bool) -> None:
        if self._closed:
            return
        pipeline = self._pipeline
        try:
            if pipeline is not None and final:
                pipeline.finish(self.batches_done)
        finally:
            self._closed = True
            if pipeline is not None:
                pipeline.close()
            self._watch.remove()
            for tracker in self._trackers.values():
                tracker.remove()
            self._area.close()
            if self._termination.requested:
                self._termination.redeliver()
            self._termination.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error half the optimizers may have stepped, and it is the error to be raised.
        if error is None:
            self.close()
        else:
            self._end(final=False)

    def _running(self, call: str) -> Pipeline:
        if self._pipeline is None or self._closed:
            found = "closed" if self._closed else "not started"
            raise SettingsError(
                call,
                found=f"a Checkpointer that is {found}",
                expected="one that restore() has started",
                next_step="call restore() once before training; it is fine when there is nothing",
            )
        return self._pipeline

    def _tracker(self, table: str) -> Tracker:
        if table not in self._trackers:
            raise SettingsError(
                f"table {table!r}",
                found="no such table",
                expected=f"one of {sorted(self._trackers)!r:.400}",
                next_step="use the name of the embedding module, as in model.named_modules()",
            )
        return self._trackers[table]

    def _grant(self, pipeline: Pipeline, batches: int) -> None:
        self._left = self._granted = batches
        try:
            announce(self._reader, batches)
        except Exception as error:
            # The reader is the user's code, called for the checkpoint's sake: its failure here is
            # one of the checkpoint path and must not end training.
            pipeline.note_failure(error)

    def _decide(self, pipeline: Pipeline) -> None:
        more = self._schedule.extend(time.monotonic(), batches=self._granted)
        if more <= 0:
            pipeline.take(self.batches_done)
            more = self._schedule.restart(time.monotonic())
        self._grant(pipeline, more)

    def _terminate(self, pipeline: Pipeline) -> None:
        _log.warning("SIGTERM at batch %d: taking a final checkpoint", self.batches_done)
        pipeline.finish(self.batches_done)
        self._termination.redeliver()


def _misuse(call: str, found: str, expected: str) -> SettingsError:
    return SettingsError(
        call, found=found, expected=expected, next_step="see the docstring of Checkpointer.restore"
    )
