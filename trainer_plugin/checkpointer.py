"""Defines the Checkpointer that a training script uses, and builds its parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import RestoreReport
from recpoint.catalog.store.run_url import naming_errors
from recpoint.errors import (
    IncompatibleModel,
    NothingToRestore,
    SettingsError,
)
from recpoint.trainer_plugin.assembly import assemble, look_at
from recpoint.trainer_plugin.batches.loop import Bound
from recpoint.trainer_plugin.batches.pipelined import Pipelined
from recpoint.trainer_plugin.loss_setting import Loss
from recpoint.trainer_plugin.observation import Observation
from recpoint.trainer_plugin.policy import Policy, PolicyName, as_policy
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.restore.parts import Seed
from recpoint.trainer_plugin.restore.start import StartRequest, store_of
from recpoint.trainer_plugin.schedule.ledger import Stats
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
from recpoint.trainer_plugin.training import CheckpointedTraining

__all__ = ["Checkpointer"]

B = TypeVar("B")


class Checkpointer:
    """Takes and restores the checkpoints of one training process.

        with Checkpointer(model, optimizer, run=URL, reader=reader, interval_batches=1000) as ckpt:
            ckpt.restore()
            for batch in ckpt.batches(epochs=3):
                train(batch)  # up to and including optimizer.step()

    If you write the training loop yourself, call `step` after each batch instead.

    An error in a checkpoint does not reach the training loop. It is counted, logged (logger
    "recpoint") and shown in `stats`, and the next checkpoint holds the failed checkpoint's rows.
    With `Options(on_error="raise")` the next `step` raises the error instead.

    A checkpoint holds the state between two batches, without gradients: call `zero_grad()` before
    each backward pass, as usual. With `set_to_none=False`, a parameter that a batch does not use
    has a gradient of zeros, and momentum still moves it. After a restore, the parameter has no
    gradient until a batch uses it, so its optimizer skips it until then.

    Args:
        model: the model; it holds every parameter that the optimizers train.
        optimizers: one optimizer, or several.
        run: the run URL: a local path, `file://` or `s3://bucket/prefix`.
        reader: the source of batches, with `state_dict` and `load_state_dict`; `ResumableLoader`
            makes a DataLoader resumable. None: the script itself finds the batch to continue with.
        schedulers: learning-rate schedulers. One that is not given starts anew at each restart.
        extras: name -> any other object with a state, such as gradient scalers and metrics. Each
            rank has its own extras, and the rank of the same number gets their states back. If
            there are fewer ranks after a restart, the states of missing ranks are dropped. If there
            are more, a new rank gets the states of rank 0, and its random generators are seeded
            from the checkpoint's name and the rank's number.

        interval_batches: batches between checkpoints; give this or `interval_seconds`.
        interval_seconds: seconds between checkpoints, rounded to a whole batch; "auto": computed
            from the measured cost of a checkpoint and how often the job fails.
        bits: how rows are stored: "lossless"; 8, 6, 5, 4, 3 or 2 bits a value; "auto": as few bits
            as the expected restores allow; a `Loss`: as few as it allows; or a `Precision`.
        policy: what a checkpoint holds: a policy such as `Consecutive(full_every=16)`, `OneShot`,
            `Intermittent` or `Continuous`, or the name of a policy, with its defaults.
        failures: how often the job is expected to fail, for settings that are "auto"; None:
            estimated from the job's past.
        staging: the directory of the staging area; None: the agent's default directory; or a
            `Staging`, which also says how many checkpoints may wait there and what happens when
            there are as many.
        timeouts: how long training waits for the agent and for other ranks.
        options: what an error does, whether SIGTERM is handled, whether a start is announced, and
            what is assumed and checked about optimizers.

    Attributes:
        batches_done: batches whose updates the model holds.
        epochs_done: complete passes over the reader in `batches`.
        memory_bound_bytes: the most bytes that this process's slots take in the staging area. State
            that optimizers create in their first step counts from the next `step()` on.
        host_memory_bound_bytes: the same for all ranks whose staging areas share a file system. If
            these are several ranks, growth counts from the next checkpoint that is due.
        lookahead_bytes: with a `Lookahead` as the reader: memory that it takes in this process now.

    Raises:
        SettingsError: a setting cannot work; the message names it.
        RankLost: another rank could not build its Checkpointer, and raised the reason there; or it
            did not answer.
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
        bits: Precision | Bits | Loss = "lossless",
        policy: Policy | PolicyName = "consecutive",
        failures: ExpectedFailures | None = None,
        staging: Staging | str | Path | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
        options: Options = Options(),  # noqa: B008 - frozen
    ) -> None:
        # First, so that the other ranks hear of any later failure on this rank.
        waits = timeouts if isinstance(timeouts, Timeouts) else Timeouts()
        self._ranks = Ranks(wait_seconds=waits.ranks_seconds)
        with self._ranks.together("looking at what the Checkpointer is given"):
            _refuse_inference_mode("Checkpointer()")
            settings = Settings(
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
                store = store_of(run)
            trained = look_at(model, optimizers)
        self._parts = assemble(
            self._ranks,
            trained,
            settings,
            run_url=store.url,
            reader=reader,
            schedulers=schedulers,
            extras=extras,
        )
        self._url = store.url
        self._training = CheckpointedTraining(
            self._parts,
            store,
            self._ranks,
            settings,
            reader=reader,
            has_position=reader is not None or bool(extras),
        )
        try:
            self._parts.check_room(jobs=settings.staging.jobs)
            self._parts.area.room.warn_if_small(self._parts.memory.host)
            self._parts.records.refuse_if_large()
            self._parts.watch.warn()
        except BaseException:  # such as a warning that a filter turns into an error
            self._ranks.close()  # so that the other ranks notice when they next ask
            raise

    def restore(
        self,
        step: int | None = None,
        *,
        generation: int | None = None,
        fresh: bool = False,
        partial: Mapping[str, Sequence[str] | Mapping[str, str]] | None = None,
        seed: Seed | None = None,
        validated_only: bool = False,
        validated_within: int | None = None,
    ) -> RestoreReport | None:
        """Restore the newest checkpoint and take over the run. Call it once, before training.

        Args:
            step: restore the checkpoint of this step instead of the newest; newer checkpoints are
                left behind.
            generation: with `step`: the generation of the checkpoint. This also restores a
                checkpoint that was superseded; it then counts again.
            fresh: start a new line from nothing, even if the run has checkpoints.
            partial: load only these values and start a new line with a full checkpoint:
                `{"tables": [names], "dense": [names of dense parameters and buffers]}`, or instead
                of a list `{name in the model: name in the checkpoint}`. Optimizer state,
                generators and reader stay as they are, and `batches_done` is 0.
            seed: if the run has no checkpoint, start from these parts of another checkpoint.
            validated_only: skip newer checkpoints that nobody has validated.
            validated_within: skip them only if a validated checkpoint is at most this many batches
                older than the newest; otherwise restore the newest, as by default. Each start may
                lose up to this many batches. The number must therefore be less than the batches
                that the job trains between two failures; otherwise training may never advance.

        Returns:
            A report; None if the run had no checkpoint, with `fresh`, or another tool's `seed`.

        Raises:
            IncompatibleModel: the checkpoint does not fit the model; the message names each
                mismatch, and what to change for it. Nothing has changed here, unless a newer,
                damaged checkpoint was tried first: tables may then hold its rows.
            NothingToRestore: the run has no checkpoint of `step`; or no checkpoint counts, because
                the newest start began a new line and ended before its first checkpoint; or all
                checkpoints are damaged, and tables may hold their rows: build the model anew before
                a start with `fresh`.
            StagingError, StoreError: the staging area or the store cannot be used, or another
                process trains here.
            SettingsError: this is a second call, a call in a forked child, or a call under
                `torch.inference_mode()`; or two arguments exclude each other.
            BaseException: a signal handler raised it. Either nothing has started, and you can
                repeat the call; or the restore is complete, and training can go on.
        """
        self._training.refuse_second_start()
        _refuse_inference_mode("restore()")
        with naming_errors(self._url):
            selection = Selection(
                step=step,
                generation=generation,
                validated_only=validated_only,
                validated_within=validated_within,
            )
            request = StartRequest(selection, fresh, partial, seed)
            request.check()
            self._parts.state.refuse_unwritable()  # states may have been created since __init__
            self._parts.state.not_given.warn_of_schedulers()
            try:
                return self._training.start(request)
            except (IncompatibleModel, NothingToRestore) as error:
                # Its message says what to change in the script. A traceback through recpoint would
                # push the message out of sight; that of a cause is kept.
                raise error.with_traceback(None) from error.__cause__

    def take_sigterm(self) -> None:
        """Handle SIGTERM from now on, as `restore` does unless `Options.handle_sigterm` is False.

        Call it after a framework has installed a handler of its own: after the last checkpoint,
        the signal is passed on to the framework's handler.
        """
        self._training.end.watch()

    @property
    def batches_done(self) -> int:
        """Batches whose updates the model holds."""
        return self._training.batches_done

    @property
    def memory_bound_bytes(self) -> int:
        """The most bytes that this process's slots take in the staging area."""
        return self._parts.memory.own_bytes

    @property
    def host_memory_bound_bytes(self) -> int:
        """The most bytes of all ranks whose staging areas share a file system."""
        return self._parts.memory.host.bound_bytes

    @property
    def lookahead_bytes(self) -> int:
        """Bytes that a `Lookahead` as the reader takes in this process now; 0 without one.

        These are the batches that are read ahead, and, while rows are copied before a checkpoint,
        two bitmaps of one bit for each row of each table, and 16 bytes for each row that the
        batches until the checkpoint look up.
        """
        return self._training.lookahead_bytes

    @property
    def epochs_done(self) -> int:
        """Complete passes over the reader in `batches`."""
        passes = self._parts.state.passes
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
        """Yield the batches that are left to train, calling `step` after each one.

        Call it after `restore`. Both bounds count from the beginning of the run, across restarts: a
        job that was killed trains the batches that are left, and a finished job trains none. A
        batch counts as done when its optimizer step is done: the loop shows that when it asks for
        the next batch, or leaves by `break`. No checkpoint is cut while gradients wait for a step.
        The reader is iterated once for each epoch. Before each epoch, `set_epoch` is called with
        the epoch's number, from 0 on, on the reader, its samplers and its dataset if they have that
        method.

        Args:
            reader: the source of batches; None: the Checkpointer's reader. Pass it if the reader is
                wrapped, for instance in a progress bar, or if the source of batches is not the
                reader itself.
            epochs: number of passes over the reader; give this or `total`.
            total: number of batches, over as many passes as they take.

        A pipeline of TorchRec or a prefetcher takes batches before it trains them. A pipeline is
        recognized, unless it needs `pipelined`; for a prefetcher, `Options.in_flight` says how many
        batches it takes. Checkpoints then hold the position after the last batch trained.

        Raises:
            SettingsError: not exactly one bound was given; there is no reader; `restore` was not
                called; with `epochs`: checkpoints do not hold the position within the epoch; or,
                from the loop: the reader ends before the bound is reached; the loop reads ahead
                otherwise than `Options.in_flight` says; or it asks for batches in another thread or
                in the middle of a step.
            RecpointError, BaseException: from the loop, for the reasons that `step` gives.
        """
        self._training.running("batches()")
        return self._training.loop.run(reader, Bound(epochs=epochs, total=total))

    def pipelined(self, pipeline: Any) -> Pipelined:
        """Return the train pipeline so that each call of its `progress` counts one batch.

            pipeline = checkpoints.pipelined(TrainPipelineSemiSync(model, optimizer, device))
            batches = checkpoints.batches(epochs=3)
            while True:
                try:
                    pipeline.progress(batches)
                except StopIteration:
                    break

        Checkpoints are cut between two calls of `progress`. This is right for each pipeline of
        TorchRec, and for any other object with such a `progress`, however far it reads ahead. Do
        not call `step` then. Call it after `restore`.

        Args:
            pipeline: has `progress(iterator)`, which trains one batch, or raises StopIteration.

        Raises:
            SettingsError: `restore` was not called; the pipeline moves rows out of their tables; or
                the reader is neither a `ResumableLoader` nor a `Lookahead`.
        """
        self._training.running("pipelined()")
        return self._training.loop.pipelined(pipeline)

    def step(self) -> None:
        """Count one more batch, and take a checkpoint if one is due.

        Call it after the optimizers have stepped. If gradients are accumulated, a checkpoint that
        is due waits for the step. A loop over `batches` needs no call. If batches are read ahead,
        call it for each batch, also for one that is left out.

        Raises:
            SettingsError: `restore` was not called; this is a forked child of the process that
                built the Checkpointer; or a loop over `batches` already calls it.
            RecpointError: with `Options.on_error="raise"`: the error of a failed checkpoint.
            BaseException: a signal handler raised it; a checkpoint that was due has been cut.
        """
        self._training.step()

    def measure(self, batch: Any) -> None:
        """With a `Loss`: have what rounding costs measured on the batch that is trained next.

            for batch in reader:
                checkpoints.measure(batch)
                train(batch)  # up to and including optimizer.step()
                checkpoints.step()

        A loop that calls `step` calls this before the forward pass of each batch; most calls return
        at once, because `Loss.share` says how many batches are measured. Loops over `batches`, and
        `pipelined`, do it themselves. Without a `Loss` the call does nothing.

        Args:
            batch: what `Loss.of` gets; the model must not have been trained with it.

        Raises:
            SettingsError: the model may be learning from this batch, or has learned from it; the
                batch cannot be measured; or for the reasons that `step` gives.
            Exception: `Loss.of` raised it at the first batch.
        """
        self._training.measure(batch)

    def checkpoint(self) -> bool:
        """Take a checkpoint now, whether or not one is due.

        Returns:
            Whether the checkpoint was cut. It is not cut while earlier checkpoints wait (see
            `Staging.when_busy`), after an error, a second time at the same batch, before the steps
            of the batch that a loop over `batches` is working on, or during another call of this
            object (from a `state_dict` or a signal handler).
        """
        return self._training.checkpoint()

    def mark(self, table: str, ids: Tensor) -> None:
        """Mark rows of `table` that you changed in another way than by training.

        Call it after the change. Name all rows that you changed, or whose row states you changed,
        since the last step of the table's optimizer: this call counts every in-place change until
        now as reported.

        Args:
            table: name of the embedding module.
            ids: int32 or int64, any shape: positions in the whole table. This process marks the
                rows that it holds.

        Raises:
            SettingsError: the model has no such table.
            IndexError: an id is out of range.
            ValueError: ids are not int32 or int64.
        """
        self._parts.tables.mark(table, ids)

    def mark_all(self, table: str) -> None:
        """Mark all rows of `table`, for instance after you reset or decayed its rows or row states.

        Args:
            table: name of the embedding module.

        Raises:
            SettingsError: the model has no such table.
        """
        self._parts.tables.mark_all(table)

    def delete_rows(self, table: str, ids: Tensor) -> None:
        """Set rows that are no longer used, and their row states, to zero.

        They are zero here and in checkpoints until they are trained again. Call it after a step.

        Args:
            table: name of the embedding module.
            ids: as for `mark`.

        Raises:
            SettingsError, IndexError, ValueError: for the reasons that `mark` gives.
        """
        self._parts.tables.delete_rows(table, ids)

    @property
    def stats(self) -> Stats:
        """Return counts and timings of this process's checkpoints so far."""
        return self._training.stats()

    def observe(self) -> Observation:
        """Read the state of checkpointing. Unlike all else here, any thread may call it.

        It changes nothing and takes no lock. It reads the numbers one after another while training
        goes on, so they may be microseconds apart. It makes three requests to the file system and
        none to the store or the device.
        """
        return self._training.observe()

    def close(self, *, final: bool = True) -> None:
        """End checkpointing: take a last checkpoint if batches are new, and wait for the agent.

        If a signal handler or a `state_dict` calls it during another call of this object, it
        returns at once, and the work is done when that call ends.

        Args:
            final: take the last checkpoint and wait at most `Timeouts.close_seconds` for the
                outcomes of checkpoints. False: only make sure that checkpoints that were cut are
                staged.

        Raises:
            RecpointError: with `Options.on_error="raise"`: the error of a failed checkpoint.
            BaseException: a signal handler raised it. It ends the wait for outcomes. It does not
                end the last checkpoint, unless a second one interrupts a `state_dict` of yours;
                with several ranks the first that interrupts a `state_dict` does.
        """
        self._training.close(final=final)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error, some optimizers may have stepped and others not: take no checkpoint. The
        # error must reach the caller, not an error of the checkpointing.
        if error is None:
            self.close()
            return
        if self._parts.cache is not None:
            self._parts.cache.end_failed_step()  # checkpoints wait for rows that wait for its end
        self._training.stop(final=False, error=error)


def _refuse_inference_mode(call: str) -> None:
    """Refuse inference mode: bitmaps and optimizer state made there cannot be changed elsewhere."""
    if torch.is_inference_mode_enabled():
        raise SettingsError(
            call,
            found="a call under torch.inference_mode()",
            expected="a call outside it, because training cannot change tensors made under it",
            next_step=f"call {call} outside torch.inference_mode()",
        )
