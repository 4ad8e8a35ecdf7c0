"""Yields the batches of a training up to its bound, and calls `step` after each batch.

`Uncounted` warns of a training whose own loop forgets to call `step`.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from recpoint.errors import RankLost, ServerLost, SettingsError
from recpoint.trainer_plugin.setting_checks import checked_whole
from recpoint.trainer_plugin.state.reader import Passes, tell_epoch
from recpoint.trainer_plugin.state.training_state import TrainingState

__all__ = ["Bound", "Loop", "Uncounted"]

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


class Loop:
    """Iterates the reader until the bound of a training; each Checkpointer has one.

    A loop that ends in the middle of an epoch leaves the epoch open, and the next loop continues
    there.

    Args:
        state: the training state; it holds the count of passes and the reader's position.
        batches_done: returns how many batches training has done.
        step: called after each batch.
        count: counts a batch and does nothing else.
        rewind: called when the reader raises that an embedding server is lost, or that another
            rank has found this. Either it brings everything back to a checkpoint, or it raises.

    Attributes:
        is_waiting: whether training is working on a batch that the loop yielded.
    """

    def __init__(
        self,
        state: TrainingState,
        *,
        batches_done: Callable[[], int],
        step: Callable[[], None],
        count: Callable[[], None],
        rewind: Callable[[ServerLost | RankLost], None],
    ) -> None:
        self._state = state
        self._batches_done = batches_done
        self._step = step
        self._count = count
        self._rewind = rewind
        self._source: object = None
        self._pass: Iterator[Any] | None = None
        self._batches: weakref.ref[Generator[Any, None, None]] | None = None
        self._may_be_empty = False
        self.is_waiting = False

    def check(self, bound: Bound, *, has_position: bool) -> None:
        """Refuse a loop that would not end at its bound after a restart.

        Args:
            bound: where training ends.
            has_position: whether checkpoints hold a position in the batches.

        Raises:
            SettingsError: checkpoints do not say which epoch training is in; or another loop has
                not finished its batch.
        """
        if self.is_waiting:
            raise SettingsError(
                "batches()",
                found="a call inside another loop over batches()",
                expected="one loop at a time",
                next_step="leave the other loop first",
            )
        if bound.epochs is None:
            return
        if not has_position:
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

    def run(self, source: Iterable[B], bound: Bound) -> Iterator[B]:
        """Yield the batches of `source` up to the bound, as `_run` does."""
        batches = self._run(source, bound)
        self._batches = weakref.ref(batches)
        return batches

    def leave(self) -> None:
        """Count the batch of a loop that was left by `break` while a variable keeps its iterator.

        Python tells the iterator only when nothing refers to it any more.
        """
        batches = None if self._batches is None else self._batches()
        if batches is not None and self.is_waiting:
            batches.close()

    def _run(self, source: Iterable[B], bound: Bound) -> Generator[B, None, None]:
        """Yield the batches of `source` up to the bound; a batch counts when the next is asked for.

        Raises:
            SettingsError: the source gives no batch, and the bound is not reached.
        """
        self._resume()
        while not bound.is_met(self._passes, self._batches_done()):
            try:
                batch = self._next(source)
            except (ServerLost, RankLost) as error:
                self._rewind(error)
                self._resume()
                continue
            if batch is _END:
                self._end_pass(bound)
                continue
            done, batches = self._passes
            self._state.passes = Passes(done, batches + 1)
            self._may_be_empty = False
            try:
                self.is_waiting = True
                yield batch
            except GeneratorExit:
                # The loop was left. The reader's position is after this batch, so count the batch.
                self._count()
                raise
            finally:
                self.is_waiting = False
            self._step()

    def _resume(self) -> None:
        """Take note of the position that was restored."""
        if self._state.passes is None:
            self._state.passes = Passes()
        # It may be the end of an epoch, so that no batch is left in it.
        self._may_be_empty |= self._pass is None and self._batches_done() > 0

    def end(self) -> None:
        """Release the source and iterator of the open epoch."""
        self._source = self._pass = None

    @property
    def _passes(self) -> Passes:
        assert self._state.passes is not None  # run() has begun to count
        return self._state.passes

    def _next(self, source: Iterable[Any]) -> Any:
        if self._pass is None or self._source is not source:
            if not self._passes.batches:
                tell_epoch(source, self._passes.done)
            self._source, self._pass = source, iter(source)
        try:
            return next(self._pass, _END)
        except BaseException:
            self._pass = None  # its position is unknown after an error
            raise

    def _end_pass(self, bound: Bound) -> None:
        self._pass = None
        if self._passes.batches:
            self._state.passes = Passes(self._passes.done + 1, 0)
        elif self._may_be_empty:
            self._may_be_empty = False
        else:
            wanted = f"epochs={bound.epochs}" if bound.total is None else f"total={bound.total}"
            raise SettingsError(
                f"batches({wanted})",
                found=f"no batch in epoch {self._passes.done + 1}, after {self._batches_done()} "
                "batches",
                expected="a reader that begins anew each time it is iterated",
                next_step="pass such a reader, or a bound that this reader reaches",
            )


class Uncounted:
    """Warns once, at the end of a training that changed its parameters and counted no batch.

    It compares torch's counters of in-place changes, so steps need no hook. If the process ends
    without `end`, it warns at exit.

    Args:
        parameters: of the optimizers; they are kept until `end`.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._before = [(one, one._version) for one in parameters if not one.is_inference()]
        self._process = os.getpid()
        atexit.register(self.warn)

    def warn(self) -> None:
        """Warn if parameters have changed; then `end`. A forked child says nothing."""
        before = self._before
        self.end()
        if os.getpid() != self._process or all(one._version == then for one, then in before):
            return
        _log.warning(
            "training ends, and its Checkpointer has counted no batch, although parameters have "
            "changed: no checkpoint was due. Next: call step() after each batch, or loop over "
            "batches(), which calls step()"
        )

    def end(self) -> None:
        """Forget the parameters: a batch was counted, or an error has ended training."""
        self._before = []
        atexit.unregister(self.warn)
