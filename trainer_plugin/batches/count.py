"""Counts a batch when training has done its optimizer step, whoever takes batches and when.

A plain loop trains each batch before it asks for the next. A prefetcher or a pipeline takes batches
ahead; then each batch that is trained is the oldest of those taken. Both loops look alike from
outside until training shows signs, so this module decides by these:

- A pipeline of TorchRec is recognized when it asks for its first batch.
- `Options.in_flight` says how far any other loop reads ahead; 0: not at all.
- If a second batch is asked for, and training has shown no sign since it got the first, the loop
  either reads ahead or has left a batch out. That is refused at once, before anything is stored.
- Once training has shown signs, a batch after which it shows none was left out.

The loops that this module tells apart, and what it counts at an ask for the next batch:

| loop | signs since the last ask | counted |
|---|---|---|
| plain | a step | the batch; a checkpoint may be cut |
| plain, accumulating, or a step left out | a backward pass | the batch; a checkpoint waits |
| plain, a batch left out | none | the batch; a checkpoint waits for a step |
| reading ahead, filling | none, until the first batch is trained | nothing |
| reading ahead | a backward pass or a step | the oldest batch |
| a loop that calls `step`, and `Pipelined` | any | the oldest batch; a checkpoint waits |

A checkpoint is cut only after an optimizer step: gradients that wait for one are in no checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from torch.optim import Optimizer

from recpoint.errors import SettingsError
from recpoint.trainer_plugin.batches import count_refusals
from recpoint.trainer_plugin.batches.lagging import LaggingOptimizers
from recpoint.trainer_plugin.batches.loop_pipeline import LoopPipeline
from recpoint.trainer_plugin.batches.signs import TrainingSigns
from recpoint.trainer_plugin.batches.since_count import SinceCount
from recpoint.trainer_plugin.batches.threads import BatchThreads
from recpoint.trainer_plugin.integrations.train_pipelines import asking_pipeline, refuse_pipeline
from recpoint.trainer_plugin.settings import MOST_IN_FLIGHT
from recpoint.trainer_plugin.state.in_flight import CountedReader

__all__ = ["BatchCount", "warn_of_dropped"]

_log = logging.getLogger("recpoint")

#: After so many batches without an optimizer step, a checkpoint waits for no step any more: its
#: hooks may not work, or every step is left out. After a SIGTERM there is less time.
_MOST_WITHOUT_STEP: Final = 1024
_MOST_AT_END: Final = 16


class BatchCount:
    """Decides which of the batches that a loop has taken are trained.

    Args:
        signs: what training does.
        optimizers: those of the Checkpointer.
        reader: the Checkpointer's reader.
        most_in_flight: `Options.in_flight`.

    Attributes:
        reads_ahead: whether the loop takes batches ahead of training.
        pipeline: the train pipeline that takes the batches, if one does.
        is_between_steps: whether a checkpoint may be cut: no gradient waits for an optimizer step.
        batches_without_step: batches with a backward pass since the last optimizer step.
        awaits_fetch: whether the next fetch shows if the reader's position is that of a trained
            batch. A loop with `step` has taken two batches and trained one. It has left a batch out
            for the first time, or it begins to read ahead.
    """

    def __init__(
        self,
        signs: TrainingSigns,
        optimizers: Sequence[Optimizer],
        reader: object,
        *,
        most_in_flight: int | None,
    ) -> None:
        self._signs = signs
        self._since = SinceCount(signs)
        self._threads = BatchThreads(signs)
        self._lagging = LaggingOptimizers(signs, optimizers)
        self._reader = reader
        self._counted = reader if isinstance(reader, CountedReader) else None
        self._allowed = most_in_flight
        self._limit = MOST_IN_FLIGHT if most_in_flight is None else most_in_flight
        self.pipeline = LoopPipeline()
        self.reads_ahead = False
        self._has_warned = False  # of a loop that reads less far ahead than `most_in_flight`
        self._forget()

    def _forget(self) -> None:
        self.is_between_steps = True
        self._has_trained = False  # training has shown signs
        self._untrained_fetches = 0  # batches that the reader gave since a sign of training
        self._threads.forget()
        self._is_in_loop = False  # a loop over `batches` takes the batches
        self._is_filled = False  # a batch was trained since the loop began to take batches
        self._has_landed = False  # a batch was counted since the last fetch
        self._leaves_out = self.awaits_fetch = False
        self.batches_without_step = 0
        self._since.forget()
        self._last_fetch = self._signs.now  # number of the newest event when a batch was fetched
        self._trained_in_a_row = 0  # asks of a loop that has trained one batch before each

    def begin(self) -> None:
        """Watch the reader's fetches; `end` undoes it.

        Raises:
            SettingsError: the reader's position cannot be that of an earlier batch, and
                `Options.in_flight` says that it must.
        """
        self._forget()
        self._since.watch_changes()
        if self._counted is not None:
            self._counted.before_fetch = self._before_fetch
        if self._allowed or self.reads_ahead:
            self._read_ahead()

    def end(self) -> None:
        """Leave the reader as it was."""
        if self._counted is not None:
            self._counted.before_fetch = None
            self._counted.in_flight.end_counting()

    def drive(self, pipeline: object) -> None:
        """Have `Pipelined` count the batches of that pipeline.

        Raises:
            SettingsError: the pipeline, or the reader with it, cannot be checkpointed.
        """
        refuse_pipeline(pipeline)
        self._read_ahead()
        self.pipeline.drive(pipeline)

    def _read_ahead(self) -> None:
        """From now on, the loop takes batches ahead: each trained batch is the oldest of them."""
        if self._counted is not None:
            self._counted.in_flight.read_ahead(self._threads.training)
        elif self._reader is not None:
            raise SettingsError(
                "reader",
                found=f"a {type(self._reader).__name__}, whose position is ahead of training, "
                "because the training loop takes batches before it trains them",
                expected="a reader that keeps the positions of such batches",
                next_step="pass Checkpointer(reader=recpoint.ResumableLoader(reader)), and take "
                "the batches from it",
            )
        self.reads_ahead = True

    def land(self) -> None:
        """Count the oldest batch of the reader as trained."""
        self._has_landed = True
        if self._counted is not None and self.reads_ahead:
            self._counted.in_flight.land()

    # Loops over `batches`.

    def begin_loop(self) -> None:
        """Look at who asks for the first batch of a loop over `batches`."""
        self._is_filled = self._has_landed = self._has_trained = False
        self._is_in_loop = True
        self._trained_in_a_row = 0
        self._look_at_caller()
        self._since.begin()  # what came before the loop is no sign of its batches

    def trained(self, taken: int) -> int:
        """Return how many batches were trained since batches were last counted.

        Args:
            taken: batches that the loop was given and that do not count as trained.

        Raises:
            SettingsError: whether the batch was trained cannot be told; or the loop asks for
                batches in the middle of a step, or in another thread.
        """
        if not taken or self.pipeline.is_driven:
            return 0
        if self._since.has_stepped:
            self._refuse_thread("batches()", "take batches there from iter(reader)")
        has_trained = self._has_trained_one()
        if not self.reads_ahead:
            if not has_trained:
                self._refuse_unclear()
            elif not self.is_between_steps:
                self._refuse_mid_step(self._signs.last_backward)
            trained = taken
        elif has_trained:
            self._refuse_mid_step(max(self._signs.last_forward, self._signs.last_backward))
            if not (self._trained_in_a_row or self._is_filled or self.pipeline.keeps_batches):
                self._look_at_first(taken)
            trained = 1
        else:
            self._refuse_more(taken)
            trained = 0
        self._look_at_steps()
        if self._signs.last_step and not has_trained:
            self.is_between_steps = False  # the batch may be trained together with the next one
        self._trained_in_a_row = self._trained_in_a_row + 1 if has_trained else 0
        if self.reads_ahead and not self.pipeline.keeps_batches and self._trained_in_a_row == 1:
            self.is_between_steps = False  # whether one batch is trained for each ask shows later
        return trained

    def _look_at_first(self, taken: int) -> None:
        """Look whether a loop that reads ahead has trained one batch, the first that it took.

        Raises:
            SettingsError: it may have trained several.
        """
        steps = self._since.steps
        if 2 <= steps <= taken:
            raise SettingsError(
                "the training loop",
                found=f"{steps} optimizer steps since it took {taken} batches: it has trained one "
                "batch with several steps, or several batches",
                expected="a loop that trains one batch, with one step of each optimizer, before it "
                "takes the next one",
                next_step="take batches from iter(reader), and call checkpoints.step() after each",
            )
        if self._allowed is not None and taken <= self._allowed and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Options(in_flight=%d): the loop over batches() trains a batch while it holds %d "
                "others. If it has left a batch out before its first optimizer step, checkpoints "
                "count the wrong batches. Next: pass Options(in_flight=%d)",
                self._allowed,
                taken - 1,
                taken - 1,
            )

    def left(self, taken: int) -> int:
        """Return how many batches were trained since a loop has asked for its last batch.

        Args:
            taken: as for `trained`.
        """
        self._is_in_loop = False
        if self.pipeline.is_driven:
            return 0
        trained = self._since.batches
        self._look_at_steps()
        return min(taken, trained) if self.reads_ahead else taken

    def abandoned(self, taken: int) -> int:
        """Return how many batches were trained when the loop is left while it works on a batch.

        Args:
            taken: as for `trained`.
        """
        has_trained = self._has_trained_one()
        if taken and not (
            has_trained or self.reads_ahead or self._allowed == 0 or self.pipeline.is_driven
        ):
            _log.warning(
                "a loop over batches() was left before it has trained the batch that it got last. "
                "The batch counts as trained: a restart goes on after it. Next: leave the loop "
                "after the optimizer step; or pass Checkpointer(options=Options(in_flight=1)), "
                "which keeps the position before the batch"
            )
        self._look_at_steps()
        return min(taken, int(has_trained)) if self.reads_ahead else taken

    def may_count(self) -> bool:
        """Whether the batch that the loop works on counts as trained now: its step is done."""
        if self.pipeline.is_driven:
            return False
        if self._allowed == 0:
            return True
        # Another optimizer may still have to step, as it has for the batch before.
        return self._since.has_all_steps

    def may_cut(self, *, ends: bool) -> bool:
        """Whether a checkpoint may be cut now. Warns if it waits for a step no longer.

        Args:
            ends: whether training is about to end.
        """
        if self.awaits_fetch:
            return False
        if self.is_between_steps:
            return True
        most_batches = _MOST_AT_END if ends else _MOST_WITHOUT_STEP
        if self.batches_without_step == most_batches:
            _log.warning(
                "optimizers have not stepped for %d batches with backward passes, so a checkpoint "
                "waits no longer: it holds no gradients that wait for a step. Next: pass the "
                "optimizers that train the model to Checkpointer(model, optimizers)",
                most_batches,
            )
        return self.batches_without_step >= most_batches

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since batches were last counted."""
        return self._since.has_stepped

    @property
    def has_trained_newest(self) -> bool:
        """Whether an optimizer has stepped since the reader gave its newest batch.

        False if the reader does not say when it gives batches, or the loop reads ahead.
        """
        reader = self._counted
        if reader is None or not reader.begun or self.reads_ahead or self._allowed:
            return False
        return self._signs.last_step > self._last_fetch

    def _has_trained_one(self) -> bool:
        """Whether training has shown signs since batches were last counted."""
        return not self.pipeline.is_driven and self._since.has_trained

    def _look_at_steps(self) -> None:
        """Note whether optimizers have stepped since the last call, and that batches are counted.

        A backward pass that comes after the step is a user's own look at gradients.
        """
        self._since.end_batch()
        if self._since.has_stepped:
            self._lagging.look(self._since.last_event)
            self.is_between_steps = self._has_trained = True
            self.batches_without_step = 0
        elif self._since.has_passed_back:
            self._has_trained = True
            self.batches_without_step += 1
            self.is_between_steps = not self._signs.last_step and self._since.has_stepped_unseen()
        self._since.begin()

    def _refuse_mid_step(self, last_pass: int) -> None:
        """Refuse a loop that asks for a batch while it trains another one.

        Args:
            last_pass: number of the newest pass that belongs to a batch in training.

        Raises:
            SettingsError: after an optimizer step, the next forward or backward pass has begun.
        """
        if self._since.last_event < self._signs.last_step < last_pass:
            raise count_refusals.mid_step()

    # Loops that call `step`, and fetches of the reader in loops of any kind.

    def stepped(self) -> None:
        """Count a batch because a loop of the user's own has called `step`.

        Raises:
            SettingsError: `Pipelined` counts the batches already.
        """
        if self.pipeline.is_driven:
            raise SettingsError(
                "step()",
                found="a call, although checkpoints.pipelined(pipeline) counts each batch itself",
                expected="no call of step()",
                next_step="remove step() from the loop",
            )
        self._refuse_late_step()
        if self.awaits_fetch:
            raise count_refusals.second_step()
        is_plain = self._counted is not None and self._allowed is None and not self.reads_ahead
        self.awaits_fetch = is_plain and self._untrained_fetches > 1 and not self._leaves_out
        self.progressed()

    def _refuse_late_step(self) -> None:
        """Refuse a plain loop that takes the next batch before it calls `step` for the last one.

        Raises:
            SettingsError: the reader's position is after a batch that is not trained.
        """
        signs, last_count = self._signs, self._since.last_event
        trained = max(signs.last_backward, signs.last_step)
        if signs.last_backward > last_count:
            trained = signs.last_backward
        is_late = self._untrained_fetches and last_count < trained <= self._last_fetch
        if self._counted is None or self._allowed is not None or self.reads_ahead or not is_late:
            return
        raise count_refusals.late_step()

    def progressed(self) -> None:
        """Count a batch because the user, or `Pipelined`, says that it is trained."""
        self.land()
        self._look_at_steps()
        self._has_trained = True

    def _before_fetch(self) -> None:
        reader = self._counted
        assert reader is not None
        self._look_at_caller()
        if reader.in_flight.has_ended and self._untrained_fetches:
            self._untrained_fetches -= 1  # the last fetch has given no batch
        if not reader.begun:
            self._is_filled = self._has_landed = False
            if not reader.in_flight.has_ended:
                self._untrained_fetches = 0  # who took them begins anew
            keeps = (
                self.pipeline.keeps_taken()
                if self.pipeline.keeps_batches
                else reader.in_flight.has_ended
            )
            if not (keeps or self._is_in_loop):
                warn_of_dropped(len(reader.in_flight))
                reader.in_flight.forget()
        has_trained = self._signs.has_trained_since(self._last_fetch)
        if self.reads_ahead:
            # A thread may take several batches after each that is trained.
            reader.in_flight.thread = self._threads.training
            self._threads.warn()
            if not self._has_landed and reader.in_flight.is_asked_in_training:
                self._refuse_more(len(reader.in_flight))
            elif len(reader.in_flight) > self._limit:
                raise count_refusals.too_many(len(reader.in_flight), self._limit)
        else:
            self._look_at_thread()
            self._leaves_out |= self.awaits_fetch
            self.awaits_fetch = False
            if has_trained or self._has_landed:
                self._untrained_fetches = 0
            elif self._untrained_fetches:
                self._refuse_unclear()
        self._is_filled |= self._has_landed
        self._has_trained |= has_trained
        self._untrained_fetches += 1
        self._has_landed = False
        self._last_fetch = self._signs.now

    def _look_at_caller(self) -> None:
        """Recognize a pipeline that asks for batches, unless the loop is known."""
        if self.reads_ahead or self._allowed is not None:
            return
        if self._has_trained and self._counted is not None and self._counted.begun:
            return
        pipeline = asking_pipeline()
        if pipeline is not None:
            refuse_pipeline(pipeline)
            self._read_ahead()
            self.pipeline.ask(pipeline)

    def _look_at_thread(self) -> None:
        """Refuse a thread that takes batches which another one trains.

        Training may have moved to the thread that asks: its next step shows that.
        """
        if self._threads.note_fetch():
            self._has_trained = False
        elif self._signs.last_step > self._last_fetch:
            self._refuse_thread("the reader", "pass Checkpointer(options=Options(in_flight=N))")

    def _refuse_thread(self, subject: str, remedy: str) -> None:
        if self._allowed != 0:
            self._threads.refuse_other(subject, remedy)

    def _refuse_more(self, taken: int) -> None:
        """Refuse a batch that a loop asks for before it has trained one of those that it has.

        Raises:
            SettingsError: the loop has trained batches before, so it reads further ahead than
                before or has left a batch out; or it has as many as `Options.in_flight` allows.
        """
        if taken > self._limit:
            raise count_refusals.too_many(taken, self._limit)
        if self._is_filled and taken:
            raise SettingsError(
                "the training loop",
                found="a batch that was asked for, although no batch was trained since the one "
                "before: the loop has left a batch out, or reads further ahead than at first",
                expected="a loop that trains one batch for each that it takes, once it has taken "
                "as many as it reads ahead",
                next_step="leave batches out in the reader; or call checkpoints.step() for each "
                "batch, also for one that is left out",
            )

    def _refuse_unclear(self) -> None:
        """Refuse a batch that is asked for before the batch before it was trained.

        Raises:
            SettingsError: training has shown no sign yet, so the loop may read ahead.
        """
        if self._has_trained or self._allowed is not None:
            return
        if self._since.has_new_gradients or self._since.has_changes:
            # A model was called by its parts, or an optimizer's steps have no hook.
            self._has_trained = True
            return
        raise count_refusals.unclear()


def warn_of_dropped(dropped: int) -> None:
    """Warn of batches that a loop had taken, and had not trained when it was left."""
    if dropped:
        _log.warning(
            "a training loop was left, and another one begins: %d batches that the first one had "
            "taken and not trained count as left out. Next: train them before another loop or "
            "pipeline begins; if a pipeline still holds them, call checkpoints.pipelined(pipeline)",
            dropped,
        )
