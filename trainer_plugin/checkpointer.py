"""Defines the Checkpointer that a training script uses, and builds its parts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recpoint.catalog.overview.overview import HistogramReading
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import RestoreReport
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.run_url import naming_errors
from recpoint.embeddings.marks import Tracker
from recpoint.embeddings.tables import Table, held_ids, zero_rows
from recpoint.errors import SettingsError
from recpoint.format.manifest import Kind
from recpoint.interrupts import Hold, held
from recpoint.trainer_plugin.assembly import assemble, look_at
from recpoint.trainer_plugin.loop import Bound, Loop
from recpoint.trainer_plugin.pipeline.pipeline import Pipeline
from recpoint.trainer_plugin.pipeline.reader_pace import Pace
from recpoint.trainer_plugin.policy import Policy, PolicyName, as_policy
from recpoint.trainer_plugin.ranks.ranks import AgreedEnd, Ranks
from recpoint.trainer_plugin.restore.start import (
    Job,
    StagedParts,
    Start,
    Wanted,
    announce_start,
    open_run,
    start_training,
    store_of,
    take_area,
)
from recpoint.trainer_plugin.restore.target import Seed
from recpoint.trainer_plugin.schedule.ledger import Statistics, Stats
from recpoint.trainer_plugin.settings import (
    Bits,
    ExpectedFailures,
    Options,
    Precision,
    Settings,
    Staging,
    Timeouts,
    as_precision,
    as_staging,
)
from recpoint.trainer_plugin.state import rng
from recpoint.trainer_plugin.state.reader import Stateful

__all__ = ["Checkpointer", "Observation", "observe"]


# The class that a training script uses.


T = TypeVar("T")
B = TypeVar("B")

_log = logging.getLogger("recpoint")


class Checkpointer:
    """Checkpoints of one training process.

        with Checkpointer(model, optimizer, run=URL, reader=reader, interval_batches=1000) as ckpt:
            ckpt.restore()
            for batch in ckpt.batches(epochs=3):
                train(batch)  # up to and including optimizer.step()

    A loop of one's own calls `step` after each batch instead.

    Nothing that goes wrong with a checkpoint reaches the training loop: it is counted, logged
    (logger "recpoint"), shown in `stats`, and its rows are in the next checkpoint. With
    `Options(on_error="raise")` the next `step` raises it instead.

    A checkpoint holds the state between two batches. Gradients are no part of it: call
    `zero_grad()` before each backward pass, as usual. With `set_to_none=False` a parameter that a
    batch leaves out has a gradient of zeros, with which momentum goes on; after a restore it has
    none until it takes part, and its optimizer passes it over.

    Args:
        model: holds every parameter that the optimizers train.
        optimizers: one, or several.
        run: the run URL: a local path, `file://`, `s3://bucket/prefix`.
        reader: where batches come from, with `state_dict` and `load_state_dict`; `ResumableLoader`
            makes one of a DataLoader. None: the script knows which batches to go on with.
        schedulers: learning-rate schedulers; one that is left out begins anew with each restart.
        extras: name -> anything else with a state: gradient scalers, metrics. Of several ranks each
            has its own, which the rank of the same number gets back; those of ranks that are gone
            are dropped, and a rank that was not there gets those of rank 0, with generators that
            are seeded from the checkpoint's name and its number.

        interval_batches: batches from one checkpoint to the next; this or `interval_seconds`.
        interval_seconds: seconds from one checkpoint to the next, kept to a whole batch; "auto":
            from what a checkpoint is measured to cost and how often the job fails.
        bits: how rows are stored: "lossless", 8, 4, 3 or 2 bits a value, "auto": as few as the
            restores that the job has to expect allow; or a `Precision`.
        policy: what a checkpoint holds: a policy, such as `Consecutive(full_every=16)`, `OneShot`,
            `Intermittent` or `Continuous`; or the name of one, with its defaults.
        failures: how often the job is expected to fail, for what is "auto"; None: as its past
            suggests.
        staging: the staging area's directory; None: where the agent looks by default; or a
            `Staging`, with how many checkpoints wait there and what happens when they do.
        timeouts: how long training waits for the agent and for other ranks.
        options: what an error does, SIGTERM, what is told of a start, and what is assumed and
            checked of optimizers.

    Attributes:
        batches_done: batches whose updates the model holds.
        epochs_done: passes over the reader that `batches` has been through.
        memory_bound_bytes: most that slots take in the staging area, with the state that is there:
            what optimizers make of it when they first step counts from the `step()` after that.
        host_memory_bound_bytes: the same of all ranks whose staging areas share a file system; of
            several, what they have grown by counts from the next checkpoint that is due.

    Raises:
        SettingsError: a setting that cannot work; its name is in the message.
        RankLost: another rank could not build its own, and raised why; or did not answer.
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
        interval_seconds: float | Literal["auto"] | None = None,
        bits: Precision | Bits = "lossless",
        policy: Policy | PolicyName = "consecutive",
        failures: ExpectedFailures | None = None,
        staging: Staging | str | Path | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
        options: Options = Options(),  # noqa: B008 - frozen
    ) -> None:
        # First of all: whatever fails from here on on one rank, the others hear of.
        waits = timeouts if isinstance(timeouts, Timeouts) else Timeouts()
        self._ranks = Ranks(wait_seconds=waits.ranks_seconds)
        with self._ranks.together("looking at what the Checkpointer is given"):
            _refuse_inference_mode("Checkpointer()")
            self._settings = settings = Settings(
                interval_batches=interval_batches,
                interval_seconds=interval_seconds,
                precision=as_precision(bits),
                policy=as_policy(policy),
                failures=failures,
                staging=as_staging(staging),
                timeouts=timeouts,
                options=options,
            )
            settings.check_ranks(self._ranks.count)
            with rng.untouched():
                self._store = store_of(run)
            trained = look_at(model, optimizers)
        parts = assemble(
            self._ranks,
            trained,
            settings,
            run_url=self._store.url,
            reader=reader,
            schedulers=schedulers,
            extras=extras,
        )
        self._reader = reader
        self._tables, self._sources = trained.tables, trained.sources
        self._shards, self._trackers, self._watch = parts.shards, parts.trackers, parts.watch
        self._state, self._cutter, self._area = parts.state, parts.cutter, parts.area
        self._memory, self._replicas = parts.memory, parts.replicas
        self._end = AgreedEnd(self._ranks, wait_seconds=settings.timeouts.ranks_seconds)
        self._pipeline: Pipeline | None = None
        self._pace: Pace | None = None
        self._closed = False
        self._is_busy = False  # in one of its calls
        self._loop = Loop(
            self._state,
            batches_done=lambda: self.batches_done,
            step=self._step,
            count=self._count_batch,
        )
        self._has_position = reader is not None or bool(extras)
        self._close_wanted: bool | None = None  # by a call from within another; `final` of it
        self._process = os.getpid()
        self.batches_done = 0
        try:
            if self._replicas.stored_elsewhere:
                self._memory.measure()  # which is less now
            share = self._memory.agree()
            self._area.refuse_if_small(share, jobs=settings.staging.jobs)
            self._area.warn_if_small(share)
            self._watch.warn()
        except BaseException:  # a warning that is an error, for one
            self._ranks.close()  # so that the others notice when they next ask
            raise

    def restore(
        self,
        step: int | None = None,
        *,
        generation: int | None = None,
        fresh: bool = False,
        partial: Mapping[str, Sequence[str]] | None = None,
        seed: Seed | None = None,
        validated_only: bool = False,
        validated_within: int | None = None,
    ) -> RestoreReport | None:
        """Restore the newest checkpoint and take the run over; call it once, before training.

        Args:
            step: this checkpoint instead of the newest; newer ones are left behind.
            generation: with `step`: also one that was superseded, which counts again then.
            fresh: start from nothing, also when the run has checkpoints: a new line.
            partial: load only these values, and start a new line with a full:
                `{"tables": [names], "dense": [names of dense parameters and buffers]}`. Optimizer
                state, generators and reader stay as they are, and `batches_done` is 0.
            seed: when the run has no checkpoint, begin with these parts of another run's.
            validated_only: pass over newer checkpoints that nobody has validated.
            validated_within: pass over them if one that was validated is at most so many batches
                older; else the newest is restored, as it is by default. The cost is up to so many
                batches of each start, so it must be less than a life between two failures brings:
                where each is shorter, and nothing newer is validated meanwhile, training stays
                where it is.

        Returns:
            What was restored; None when there was nothing, or `fresh`.

        Raises:
            IncompatibleModel: the checkpoint does not fit, each difference named. Nothing here has
                changed, unless a newer, damaged one was tried first: tables may hold its rows.
            NothingToRestore: `step` is not there; none counts, since a start that was to begin
                anew ended before its first; or all are damaged, and tables may hold their rows:
                build the model anew before you start `fresh`.
            StagingError, StoreError: area or store cannot be used; or another process trains here.
            SettingsError: called twice, in a forked child, or under `torch.inference_mode()`; or
                options exclude each other.
            BaseException: what a signal's handler has raised. Either nothing has begun, and the
                call can be repeated; or all has, and training can go on from there.
        """
        self._refuse_child("restore()")
        if self._pipeline is not None or self._closed or self._is_busy:
            raise _misuse("restore()", "a second call", "one call before training")
        _refuse_inference_mode("restore()")
        with naming_errors(self._store.url):
            selection = Selection(
                step=step,
                generation=generation,
                validated_only=validated_only,
                validated_within=validated_within,
            )
            wanted = Wanted(selection, fresh, partial, seed)
            wanted.check()
            self._state.refuse_inference()  # states may have come to be since then
            self._state.warn_of_schedulers()
            report = self._whole(lambda hold: self._restore(wanted, hold))
        if self._settings.options.handle_sigterm:
            self.take_sigterm()
        return report

    def _whole(self, call: Callable[[Hold], T]) -> T:
        """Do all of something, whatever handlers of signals raise meanwhile: that is raised last.

        What a handler or a `state_dict` asks of this object meanwhile is refused or done after it.
        """
        try:
            with held() as hold:
                self._is_busy = True
                try:
                    if self._closed:  # by a handler of a signal, a moment ago
                        raise _misuse("a call", "a Checkpointer that is closed", "an open one")
                    return call(hold)
                finally:
                    self._is_busy = False
        finally:
            if self._close_wanted is not None:
                self._stop(final=self._close_wanted)

    def _restore(self, wanted: Wanted, hold: Hold) -> RestoreReport | None:
        generators, gradients = rng.capture(), torch.is_grad_enabled()
        try:
            staged = take_area(self._area, self._ranks)
            # As long as this takes, it may be interrupted: training has not begun, and a repeated
            # call writes over what is there.
            run, start = hold.let_through(lambda: self._taken_over(wanted, staged))
            if not start.resumed:
                rng.restore(generators)  # as in rng_state.untouched
            self._area.take_over(start.generation)
        except BaseException:
            torch.set_grad_enabled(gradients)  # a `no_grad` may have been left where it began
            self._area.close()
            raise
        self._begin(run, start)
        return start.report

    def _taken_over(self, wanted: Wanted, staged: StagedParts) -> tuple[Run, Start]:
        drain_seconds = self._settings.timeouts.drain_seconds
        run = open_run(self._store, self._area, self._ranks, staged, drain_seconds)
        job = Job(
            ranks=self._ranks,
            tables=self._tables,
            names=frozenset(shard.name for shard in self._shards),
            state=self._state,
            staged=max((generation for parts in staged for generation, _ in parts), default=0),
        )
        return run, start_training(run, job, self._settings.policy, wanted)

    def _begin(self, run: Run, start: Start) -> None:
        self.batches_done = start.batches_done
        for name, tracker in self._trackers.items():
            tracker.forget(start.changed.get(name))
            tracker.install()
        for source in self._sources:
            source.track(self._trackers)
        self._watch.install()
        self._memory.measure()
        share = self._memory.agree()
        self._area.clear_other_ranks(share.ranks, start.generation)
        _log.info(
            "generation %d of %s: %d batches done; staged checkpoints take at most %d bytes of %s"
            "; those of all %d rank(s) of this host %d bytes",
            start.generation,
            run.url,
            start.batches_done,
            self.memory_bound_bytes,
            self._area.root,
            len(share.ranks),
            share.bound_bytes,
        )
        self._pipeline = pipeline = Pipeline(
            run=run,
            start=start,
            area=self._area,
            cutter=self._cutter,
            memory=self._memory,
            trackers=self._trackers,
            settings=self._settings,
            ends=lambda: self._end.is_due,
            ranks=self._ranks,
            replicas=self._replicas,
        )
        pipeline.prepare()
        self._state.warn_of_batches(start.batches_done)
        self._pace = Pace(self._reader, pipeline)
        self._pace.restart(start.batches_done)
        if self._settings.options.announce and self._ranks.rank == 0:
            announce_start(run.url, start.report, resumed=start.resumed, left=start.left)

    def take_sigterm(self) -> None:
        """Take SIGTERM from now on, as `restore` does unless `Options.handle_sigterm` is False.

        For frameworks that put a handler of their own in place later: it is the one that the signal
        is handed on to after the last checkpoint.
        """
        self._end.watch()

    @property
    def memory_bound_bytes(self) -> int:
        """See `Attributes`."""
        return self._memory.own_bytes

    @property
    def host_memory_bound_bytes(self) -> int:
        """See `Attributes`."""
        return self._memory.host.bound_bytes

    @property
    def epochs_done(self) -> int:
        """See `Attributes`."""
        passes = self._state.passes
        return 0 if passes is None else passes.done

    @overload
    def batches(
        self, reader: Iterable[B], *, epochs: int | None = None, total: int | None = None
    ) -> Iterator[B]: ...

    @overload
    def batches(
        self, reader: None = None, *, epochs: int | None = None, total: int | None = None
    ) -> Iterator[Any]: ...

    def batches(
        self,
        reader: Iterable[Any] | None = None,
        *,
        epochs: int | None = None,
        total: int | None = None,
    ) -> Iterator[Any]:
        """The batches that are left to train, with `step` after each; call it after `restore`.

        Both bounds count from the beginning of the run, whichever process trained: a training that
        was killed trains what is left, and one that is finished trains nothing. A batch counts when
        the next one is asked for, and when the loop is left by `break`. The reader is iterated once
        for each epoch. Before an epoch begins, `set_epoch` is called with its number, from 0 on, of
        the reader, its samplers and its dataset, where they have it.

        Args:
            reader: where batches come from; None: the reader that the Checkpointer was given. For
                one that is wrapped, in a progress bar for instance, or that is no reader itself.
            epochs: passes over the reader; this or `total`.
            total: batches, from as many passes as that takes.

        Raises:
            SettingsError: not exactly one bound; no reader; `restore` was not called; with
                `epochs`, checkpoints that do not say where in which epoch training is; or, from the
                loop, a reader that gives no more batches before the bound is met.
            RecpointError, BaseException: from the loop, as by `step`.
        """
        self._running("batches()")
        bound = Bound(epochs=epochs, total=total)
        source: object = self._reader if reader is None else reader
        if not isinstance(source, Iterable):
            raise SettingsError(
                "batches(reader)",
                found="no reader" if source is None else f"a {type(source).__name__}",
                expected="an iterable of batches",
                next_step="Checkpointer(reader=...), or batches(reader, ...)",
            )
        self._loop.check(bound, has_position=self._has_position)
        return self._loop.run(source, bound)

    def step(self) -> None:
        """One more batch is done; take a checkpoint when one is due. Call after the optimizers.

        A loop over `batches` calls it.

        Raises:
            SettingsError: `restore` was not called; or this is a forked child of the process that
                built this; or a loop over `batches` calls it already.
            RecpointError: with `Options.on_error="raise"`: what went wrong with a checkpoint.
            BaseException: what a signal's handler has raised, once a checkpoint that is due has
                been cut.
        """
        if self._loop.is_waiting:
            raise SettingsError(
                "step()",
                found="a call in a loop over batches(), which calls it after each batch",
                expected="no other call",
                next_step="take step() out of the loop",
            )
        self._step()

    def _step(self) -> None:
        pipeline, pace = self._running("step()")
        self.batches_done += 1
        if (
            pace.is_over(self.batches_done)
            or pipeline.outcomes.has_news()
            or self._memory.has_grown()
            or self._end.is_due
        ):
            self._whole(lambda _: self._act(pipeline, pace))
        if self._end.is_done:
            self._end.hand_on()

    def _count_batch(self) -> None:
        if not self._is_over():
            self.batches_done += 1

    def _act(self, pipeline: Pipeline, pace: Pace) -> None:
        pipeline.outcomes.fetch()
        self._memory.follow()
        pace.step(self.batches_done)
        if self._end.is_due:
            self._end.end_if_last(self.batches_done, pipeline.finish)
        pipeline.outcomes.raise_noted()

    def checkpoint(self) -> bool:
        """Take a checkpoint now, whatever the interval says.

        Returns:
            Whether it was cut: not while earlier ones wait (see `Staging.when_busy`), after an
            error, twice at one batch, or from within another: from a `state_dict`, a signal's
            handler.
        """
        if self._is_busy:
            # It would be cut into the slot that is being written, as of the same batch.
            _log.info("no checkpoint at batch %d: one is being cut", self.batches_done)
            return False
        pipeline, pace = self._running("checkpoint()")
        return self._whole(lambda _: self._take(pipeline, pace))

    def _take(self, pipeline: Pipeline, pace: Pace) -> bool:
        pipeline.outcomes.fetch()
        cut = pace.take(self.batches_done)
        pipeline.outcomes.raise_noted()
        return cut

    def mark(self, table: str, ids: Tensor) -> None:
        """Rows of `table` changed in another way than by training; call it after the change.

        Name all that did since the last step of their optimizer, or of their row states: with this,
        what was changed in place until now counts as told.

        Args:
            table: name of the embedding module.
            ids: int32 or int64, any shape; positions in the whole table, of which this process
                marks those that it holds.

        Raises:
            SettingsError: no such table.
            IndexError: an id is out of range.
            ValueError: ids are not int32 or int64.
        """
        for one, tracker in self._named(table):
            tracker.mark(ids if one.rows == one.table_rows else held_ids(one, ids))

    def mark_all(self, table: str) -> None:
        """All rows of `table`, or of its row states, changed or may have: reset, or decayed.

        Args:
            table: name of the embedding module.

        Raises:
            SettingsError: no such table.
        """
        for _, tracker in self._named(table):
            tracker.mark_all()

    def delete_rows(self, table: str, ids: Tensor) -> None:
        """Rows that are not in use any more: they and their row states become zeros, here and in
        checkpoints, until they are trained again. Call it after a step.

        Args:
            table: name of the embedding module.
            ids: as for `mark`.

        Raises:
            SettingsError, IndexError, ValueError: as from `mark`.
        """
        for one, tracker in self._named(table):
            here = held_ids(one, ids)
            states = list(self._state.optimizers.row_states(one).tensors.values())
            with held():
                tracker.notice_changes(states)  # the mark below would count for other changes, too
                zero_rows(one, states, here)
                tracker.mark(here)

    @property
    def stats(self) -> Stats:
        """What happened to the checkpoints so far."""
        if self._pipeline is None:
            return Statistics().read(self.batches_done)
        if self._pipeline.outcomes.has_news() and not (self._is_over() or self._is_busy):
            with held():
                self._pipeline.outcomes.fetch()
        return self._pipeline.statistics.read(self.batches_done)

    def close(self, *, final: bool = True) -> None:
        """End: a last checkpoint when there are new batches, and wait for the agent.

        Args:
            final: take that checkpoint and wait at most `Timeouts.close_seconds` for outcomes.
                False: only make sure that what was cut is staged.

        From a handler of a signal or a `state_dict`, in the middle of another call, it returns at
        once, and all this happens when that call ends.

        Raises:
            RecpointError: with `Options.on_error="raise"`: what went wrong with a checkpoint.
            BaseException: what a signal's handler raised. It ends the wait for outcomes. It does
                not end the last checkpoint, unless a second one interrupts a `state_dict` of yours;
                with several ranks the first that interrupts a `state_dict` does.
        """
        if self._is_busy:
            self._close_wanted = final
            return
        self._stop(final=final, told=not final)
        if self._pipeline is not None:
            self._pipeline.outcomes.raise_noted()

    def _is_over(self) -> bool:
        """Whether there is nothing to end any more, or nothing of this process.

        A forked child may leave the `with` block too: slots, threads and ranks are its parent's,
        and memory that a checkpoint is staged in both would write to.
        """
        return self._closed or os.getpid() != self._process

    def _stop(self, *, final: bool, told: bool = False) -> None:
        """End, as `close` says; `told`: leave word that training has ended though not `final`."""
        if self._is_over():
            return
        try:
            with held():
                self._stop_whole(final=final, told=told)
        finally:
            self._end.close()

    def _stop_whole(self, *, final: bool, told: bool) -> None:
        pipeline = self._pipeline
        self._is_busy, self._close_wanted = True, None
        try:
            if pipeline is not None and final:
                pipeline.finish(self.batches_done)
            elif pipeline is not None and told:
                pipeline.say_ended()
        finally:
            self._is_busy, self._closed = False, True
            self._loop.end()
            if pipeline is not None:
                pipeline.close()
            self._watch.remove()
            for source in self._sources:
                source.untrack()
            for tracker in self._trackers.values():
                tracker.remove()
            self._area.close()
            self._ranks.close()

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
            self._stop(final=False)

    def _running(self, call: str) -> tuple[Pipeline, Pace]:
        if self._is_busy:
            raise _misuse(call, "a call from within another one", "calls between two batches")
        if self._pipeline is None or self._pace is None or self._closed:
            raise SettingsError(
                call,
                found=f"a Checkpointer that is {'closed' if self._closed else 'not started'}",
                expected="one that restore() has started",
                next_step="call restore() once before training; it is fine when there is nothing",
            )
        self._refuse_child(call)
        return self._pipeline, self._pace

    def _refuse_child(self, call: str) -> None:
        if os.getpid() != self._process:
            raise SettingsError(
                call,
                found=f"a forked child (process {os.getpid()}) of the one that built this "
                f"Checkpointer (process {self._process})",
                expected="the process that built it: a child would stage its own state as that "
                "one's, in its slots",
                next_step="train and checkpoint in one process, and build the Checkpointer after "
                "it was forked",
            )

    def _named(self, table: str) -> list[tuple[Table, Tracker]]:
        """The pieces of a table that this process holds."""
        found = [
            (shard.table, self._trackers[shard.key])
            for shard in self._shards
            if shard.name == table and shard.table is not None
        ]
        if not any(shard.name == table for shard in self._shards):
            raise SettingsError(
                f"table {table!r}",
                found="no such table",
                expected=f"one of {sorted({shard.name for shard in self._shards})!r:.400}",
                next_step="use the name of the embedding module, as in model.named_modules()",
            )
        return found


def _misuse(call: str, found: str, expected: str) -> SettingsError:
    return SettingsError(
        call, found=found, expected=expected, next_step="see the docstring of Checkpointer.restore"
    )


def _refuse_inference_mode(call: str) -> None:
    """What is made there cannot be changed elsewhere: bitmaps here, and optimizer state."""
    if torch.is_inference_mode_enabled():
        raise SettingsError(
            call,
            found="a call under torch.inference_mode()",
            expected="a call outside it, since training could not change what is made under it",
            next_step=f"call {call} outside torch.inference_mode()",
        )


# What a monitoring thread may see of a Checkpointer, without training noticing that it looks.


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A trainer's checkpoints at one moment.

    What became of a checkpoint is learned in `step()`: while training pauses, for an evaluation
    for instance, `pending` and the counters stand still, and the lag grows.

    Attributes:
        run: the run URL.
        running: between `restore()` and `close()`.
        batches: trained by this process.
        lag_batches, lag_seconds: as in `Stats`; None: not running.
        interval_seconds: how long the last interval between due checkpoints took; None: not known.
        committed, skipped, cancelled, failed: checkpoints, by what became of them.
        unmarked_rows: as in `Stats`.
        pending: cut, and no outcome known yet.
        failures: of the failed, how many by cause (`recpoint.catalog.overview.overview`).
        stalls: how long training waited for each, in seconds.
        stored_bytes: bytes of chunks of the committed, by kind.
        restores: checkpoints that this process has restored and gone on from.
        last_commit_ms: when the newest was committed, in milliseconds since the epoch; None: none.
        agent_running: whether an agent serves the staging area.
        staging_free_bytes: space that snapshots may take; None: unknown.
        staging_bound_bytes: the most that they take.
    """

    run: str
    running: bool
    batches: int
    lag_batches: int | None
    lag_seconds: float | None
    interval_seconds: float | None
    committed: int
    skipped: int
    cancelled: int
    failed: int
    unmarked_rows: int
    pending: int
    failures: Mapping[str, int]
    stalls: HistogramReading
    stored_bytes: Mapping[Kind, int]
    restores: int
    last_commit_ms: int | None
    agent_running: bool
    staging_free_bytes: int | None
    staging_bound_bytes: int


def observe(checkpointer: Checkpointer) -> Observation:
    """Look at a Checkpointer from any thread, at any time; changes nothing and takes no lock.

    Single numbers are read one after another while training goes on: they may be of moments that
    are microseconds apart. Asks the file system three things, and neither the store nor the device.
    """
    # Private to this package, and read only: a property of the public class would be an invitation
    # to call from other threads what may be called from the training thread alone.
    pipeline, area = checkpointer._pipeline, checkpointer._area
    running = pipeline is not None and not checkpointer._closed
    statistics = Statistics() if pipeline is None else pipeline.statistics
    safe = statistics.safe_batches  # first: batches_done only grows, so that no lag is negative
    done = checkpointer.batches_done
    return Observation(
        run=area.run_url,
        running=running,
        batches=max(0, done - statistics.started_batches),
        lag_batches=max(0, done - safe) if running else None,
        lag_seconds=statistics.lag_seconds if running else None,
        interval_seconds=statistics.interval_seconds,
        committed=statistics.committed,
        skipped=statistics.skipped,
        cancelled=statistics.cancelled,
        failed=statistics.failed,
        unmarked_rows=statistics.unmarked_rows,
        pending=0 if pipeline is None else pipeline.pending,
        failures=dict(statistics.failures),
        stalls=statistics.stalls.read(),
        stored_bytes=dict(statistics.stored_bytes),
        restores=statistics.restores,
        last_commit_ms=statistics.last_commit_ms,
        agent_running=area.agent_is_running(),
        staging_free_bytes=area.free_bytes(),
        staging_bound_bytes=checkpointer.memory_bound_bytes,
    )
