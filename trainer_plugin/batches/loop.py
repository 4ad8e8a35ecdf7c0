"""Yields the batches of a training up to its bound, and counts each when its step is done."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from recpoint.errors import RankLost, ServerLost, SettingsError
from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin.batches.count import BatchCount, warn_of_dropped
from recpoint.trainer_plugin.batches.next_batch import NextBatch
from recpoint.trainer_plugin.batches.pipelined import Pipelined
from recpoint.trainer_plugin.setting_checks import checked_whole
from recpoint.trainer_plugin.state.reader import Passes, tell_epoch
from recpoint.trainer_plugin.state.training_state import TrainingState

__all__ = ["Bound", "Loop"]

B = TypeVar("B")

_log = logging.getLogger("recpoint")

_MOST = 10**15
_END: Any = object()


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The point at which a training ends. Both numbers count from the beginning of the run.

    Attributes:
        epochs: number of passes over the reader; None: `total` is the bound.
        total: number of batches; None: `epochs` is the bound.

    Raises:
        SettingsError: both are given, or neither; or the number is out of range.
    """

    epochs: int | None
    total: int | None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.total is None):
            raise SettingsError(
                "batches(epochs=..., total=...)",
                found="neither" if self.epochs is None else "both",
                expected="exactly one of them, which says when training ends",
                next_step="call batches(epochs=3) or batches(total=100_000), for instance",
            )
        for name, value in (("epochs", self.epochs), ("total", self.total)):
            if value is not None:
                object.__setattr__(self, name, checked_whole(f"batches({name})", value, 1, _MOST))

    def is_met(self, passes: Passes, batches_done: int) -> bool:
        """Whether training has reached the bound.

        Args:
            passes: passes over the reader so far.
            batches_done: batches trained so far.
        """
        if self.epochs is not None:
            return passes.done >= self.epochs
        assert self.total is not None
        return batches_done >= self.total


class _UntrainedBatch(NamedTuple):
    """A batch that the loop was given and that does not count as trained.

    Attributes:
        passes: passes over the reader after it.
        batch: the batch; None: nobody looks at batches.
    """

    passes: Passes
    batch: Any


class Loop:
    """Iterates the reader until the bound of a training; each Checkpointer has one.

    A loop that ends in the middle of an epoch leaves the epoch open, and the next loop continues
    there.

    Args:
        state: the training state; it holds the passes and the reader's position, both after the
            last batch that is trained.
        count: decides which batches are trained.
        reader: the Checkpointer's reader.
        has_position: whether checkpoints hold a position in the batches.
        batches_done: returns how many batches training has done.
        note_done: notes that one more batch is trained.
        act: called after batches were counted: takes a checkpoint if one is due and may be cut.
        rewind: called when the reader raises that an embedding server is lost, or that another
            rank has found this. Either it brings everything back to a checkpoint, or it raises.
        next_batch: has each batch looked at before it is trained.

    Attributes:
        is_waiting: whether training is working on a batch that the loop yielded.
    """

    def __init__(
        self,
        state: TrainingState,
        count: BatchCount,
        *,
        reader: object,
        has_position: bool,
        batches_done: Callable[[], int],
        note_done: Callable[[], None],
        act: Callable[[], None],
        rewind: Callable[[ServerLost | RankLost], None],
        next_batch: NextBatch,
    ) -> None:
        self._state = state
        self._count = count
        self._reader = reader
        self._has_position = has_position
        self._batches_done = batches_done
        self._note_done = note_done
        self._act = act
        self._rewind = rewind
        self._next_batch = next_batch
        self._source: object = None
        self._pass: Iterator[Any] | None = None
        self._batches: weakref.ref[Generator[Any, None, None]] | None = None
        self._may_be_empty = False
        self._taken: deque[_UntrainedBatch] = deque()  # batches that are not trained
        self._passes = Passes()  # after the last batch that was taken
        self._resumed_at = 0  # batch of the open epoch at which its iterator began
        self._resumed: tuple[int, int] | None = None  # of a resumed epoch: its batches, and where
        self._uncounted = 0  # batches that `Pipelined` has trained and that are not counted
        self._is_counted_early = False  # the batch in training is counted before the next ask
        self._has_landed = False  # a batch of the newest loop was counted
        self._is_offered = False  # somebody could look at the oldest of the taken batches
        self.is_waiting = False

    def refuse_step(self) -> None:
        """Refuse a call of `step` in a loop, which counts its batches itself.

        Raises:
            SettingsError: training is working on a batch that the loop yielded.
        """
        if self.is_waiting:
            raise _done_by_loop("step()", "calls step() after each batch")

    def measure(self, batch: Any) -> None:
        """Have a batch looked at that a loop of the user's own is about to train.

        Raises:
            SettingsError: a loop over `batches` or a pipeline has its batches looked at; or as
                `NextBatch.measure`.
        """
        if self.is_waiting or self._count.pipeline.is_driven:
            raise _done_by_loop("measure()", "has its batches measured")
        self._next_batch.measure(batch)

    def _check(self, bound: Bound) -> None:
        """Refuse a loop that would not end at its bound after a restart.

        Raises:
            SettingsError: checkpoints do not say which epoch training is in; or another loop has
                not finished its batch.
        """
        if self.is_waiting:
            raise SettingsError(
                "batches()",
                found="a call inside another loop over batches()",
                expected="one loop at a time",
                next_step="leave the other loop first; if it was left by break, and a variable "
                "keeps its iterator, call close() of that iterator",
            )
        if bound.epochs is None:
            return
        if not self._has_position:
            raise SettingsError(
                "batches(epochs=...)",
                found="a Checkpointer without a reader: a restart would begin the epoch again",
                expected="one whose checkpoints hold the position in the batches",
                next_step="pass Checkpointer(reader=...), where recpoint.ResumableLoader(loader) "
                "serves for any DataLoader; or call batches(reader, total=...)",
            )
        if self._state.passes is None and self._batches_done() > 0:
            raise SettingsError(
                "batches(epochs=...)",
                found=f"{self._batches_done()} batches that were trained without batches(), so "
                "their number of epochs is not known",
                expected="a run that was trained with batches() from its beginning",
                next_step="call batches(total=...), or start a new line with restore(fresh=True)",
            )

    def run(self, reader: Iterable[Any] | None, bound: Bound) -> Iterator[Any]:
        """Yield the batches that are left up to the bound, as `_run` does.

        Args:
            reader: the source of batches; None: the Checkpointer's reader.
            bound: where training ends.

        Raises:
            SettingsError: there is no reader; or training would not end at the bound after a
                restart, or another loop has not finished its batch.
        """
        source: object = self._reader if reader is None else reader
        if not isinstance(source, Iterable):
            raise SettingsError(
                "batches(reader)",
                found="no reader" if source is None else f"a {type(source).__name__}",
                expected="an iterable of batches",
                next_step="pass it as Checkpointer(reader=...) or as batches(reader, ...)",
            )
        self._check(bound)
        batches = self._run(source, bound)
        self._batches = weakref.ref(batches)
        return batches

    def pipelined(self, pipeline: Any) -> Pipelined:
        """Return the train pipeline, so that each call of its `progress` counts one batch.

        Raises:
            SettingsError: the pipeline, or the reader with it, cannot be checkpointed.
        """
        self._count.drive(pipeline)
        return Pipelined(pipeline, self._finish_batches, self._progressed)

    def leave(self) -> None:
        """Count what is trained of a loop that is over.

        A loop may have been left by `break` while a variable keeps its iterator: Python tells the
        iterator only when nothing refers to it any more. A pipeline trains its last batches after
        it has asked for the last one.
        """
        batches = None if self._batches is None else self._batches()
        if batches is not None and self.is_waiting:
            batches.close()
        self._land_rest()
        untrained = len(self._taken)
        if untrained:
            _log.info(
                "%d batches were taken and not trained: a restart trains them after batch %d",
                untrained,
                self._batches_done(),
            )

    def _progressed(self) -> None:
        """Take note that `Pipelined` has trained one more batch; `_finish_batches` counts it."""
        self._uncounted += 1

    def _finish_batches(self) -> None:
        """Count the batches that `Pipelined` has trained, act, and offer the next batch."""
        if self._land_progressed():
            self._next_batch.note_counted()
            self._act()
        self._offer_oldest()

    def count_now(self) -> bool:
        """Count the batch that training is working on, if its step is done.

        Returns:
            Whether a checkpoint may be cut now.
        """
        self._land_progressed()
        if self.is_waiting and self._count.may_count():
            self._land(self._count.trained(len(self._taken)))
            self._is_counted_early = True
        if not self.is_waiting:
            return True  # a loop of the user's own says when
        return self._count.is_between_steps and (self._count.reads_ahead or not self._taken)

    def _land_progressed(self) -> int:
        progressed, self._uncounted = self._uncounted, 0
        for _ in range(progressed):
            self._count.progressed()
            self._note_landed()
        return progressed

    def _run(self, source: Iterable[B], bound: Bound) -> Generator[B, None, None]:
        """Yield the batches of `source` up to the bound; a batch counts when its step is done.

        Its step is looked for when the next batch is asked for: the user's code after the step is
        done by then.

        Raises:
            SettingsError: the source gives no batch, and the bound is not reached; or whether
                batches are trained cannot be told.
        """
        self._land_rest()
        if not self._count.pipeline.keeps_taken():
            warn_of_dropped(len(self._taken))
            self._land(len(self._taken))
        self._resume()
        self._has_landed = False
        self._count.begin_loop()
        while not bound.is_met(self._passes, self._batches_done() + len(self._taken)):
            try:
                batch = self._next(source)
            except (ServerLost, RankLost) as error:
                self._rewind(error)
                self._taken.clear()
                self._resume()
                continue
            if batch is _END:
                self._end_pass(bound)
                continue
            self._offer(batch)
            passes_done, batches = self._passes
            self._passes = Passes(passes_done, batches + 1)
            self._taken.append(
                _UntrainedBatch(self._passes, batch if self._next_batch.is_awaited else None)
            )
            self._may_be_empty = False
            try:
                self.is_waiting = True
                yield batch
            except GeneratorExit:
                # The loop was left. In a plain loop the reader's position is after this batch.
                self._land(self._count.abandoned(len(self._taken)))
                raise
            finally:
                self.is_waiting = False
            if self._is_counted_early:
                self._is_counted_early = False
                continue
            trained = self._count.trained(len(self._taken))
            self._land(trained)
            if trained:
                self._act()

    def _offer(self, newest: Any) -> None:
        """Offer the batch that is trained next, where that is known.

        Args:
            newest: the batch that the loop gets now.

        Raises:
            SettingsError: a pipeline of TorchRec asks for it while it trains another batch.
        """
        pipeline = self._count.pipeline
        if not self._count.reads_ahead:
            self._next_batch.offer(newest)
        elif pipeline.keeps_batches and not pipeline.is_driven and self._next_batch.is_awaited:
            raise SettingsError(
                "Checkpointer(bits=Loss(...)): batches()",
                found="a pipeline of TorchRec, which asks for batches while it trains another one",
                expected="a pipeline whose batches can be measured between two calls of progress()",
                next_step="call pipeline = checkpoints.pipelined(pipeline)",
            )
        elif not pipeline.is_driven and self._has_landed:
            self._offer_oldest()

    def _offer_oldest(self) -> None:
        """Offer the oldest batch of a loop that reads ahead, once."""
        if self._taken and not self._is_offered:
            self._is_offered = True
            self._next_batch.offer(self._taken[0].batch)

    def _land_rest(self) -> None:
        """Count what a loop that is over has trained since it asked for its last batch."""
        self._land_progressed()
        self._land(self._count.left(len(self._taken)))

    def _land(self, trained: int) -> None:
        for _ in range(trained):
            self._count.land()
            self._note_landed()

    def _note_landed(self) -> None:
        self._has_landed, self._is_offered = True, False
        if self._taken:
            self._taken.popleft()
            # The reader's position is before the oldest batch that is taken, which may be the first
            # of the next epoch.
            following = self._taken[0].passes if self._taken else None
            self._state.passes = (
                self._passes if following is None else Passes(following.done, following.batches - 1)
            )
        self._note_done()

    def _resume(self) -> None:
        """Take note of the position that was restored."""
        if self._state.passes is None:
            self._state.passes = Passes()
        if not self._taken:
            self._passes = self._state.passes
        # It may be the end of an epoch, so that no batch is left in it.
        self._may_be_empty |= self._pass is None and self._batches_done() > 0

    def end(self) -> None:
        """Release the source and iterator of the open epoch."""
        self._source = self._pass = None

    def _next(self, source: Iterable[Any]) -> Any:
        if self._pass is None or self._source is not source:
            if not self._passes.batches:
                tell_epoch(source, self._passes.done)
            self._resumed_at = self._passes.batches
            self._source, self._pass = source, iter(source)
        try:
            return next(self._pass, _END)
        except BaseException:
            self._pass = None  # its position is unknown after an error
            raise

    def _end_pass(self, bound: Bound) -> None:
        self._pass = None
        if self._passes.batches:
            self._warn_of_short_epoch()
            self._passes = Passes(self._passes.done + 1, 0)
            if not self._taken:
                self._state.passes = self._passes
        elif self._may_be_empty:
            self._may_be_empty = False
        else:
            end_text = f"epochs={bound.epochs}" if bound.total is None else f"total={bound.total}"
            raise SettingsError(
                f"batches({end_text})",
                found=f"no batch in epoch {self._passes.done + 1}, after {self._batches_done()} "
                "batches",
                expected="a reader that begins anew each time it is iterated",
                next_step="pass such a reader, or a bound that this reader reaches",
            )

    def _warn_of_short_epoch(self) -> None:
        """Warn if the reader skipped batches in a resumed epoch, or in the epoch after it.

        Some datasets begin each later epoch at the position that was loaded, too.
        """
        passes_done, batches = self._passes
        expected = None
        if self._resumed_at:
            expected = _length(self._source)
            self._resumed = batches, self._resumed_at
        elif self._resumed is not None:
            whole, resumed_at = self._resumed
            self._resumed = None
            expected = whole if whole - batches >= resumed_at else None
        if expected is not None and batches < expected:
            _log.warning(
                "epoch %d ended after %d batches, and %d were expected, since training was resumed "
                "inside an epoch: the reader, a %s, may skip batches after its state was loaded. "
                "Next: see whether its dataset begins an epoch after the resumed one at the "
                "beginning; persistent_workers=False often helps",
                passes_done + 1,
                batches,
                expected,
                type(self._source).__name__,
            )


def _done_by_loop(call: str, does: str) -> SettingsError:
    return SettingsError(
        call,
        found=f"a call where batches() or checkpoints.pipelined(pipeline) {does} itself",
        expected=f"no call of {call} there",
        next_step=f"remove {call} from the loop",
    )


def _length(source: object) -> int | None:
    """Return the number of batches of an epoch; None: unknown."""
    try:
        return len(source) if isinstance(source, Sized) else None
    except Exception as error:
        if came_from_handler(error):
            raise
        return None  # the `__len__` of a user's object may raise any error
