"""Yields the batches of a training that ends, and calls what has to be called between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from recpoint.errors import SettingsError
from recpoint.trainer_plugin.setting_checks import checked_whole
from recpoint.trainer_plugin.state.reader import Passes, tell_epoch
from recpoint.trainer_plugin.state.training_state import TrainingState

__all__ = ["Bound", "Loop"]

B = TypeVar("B")

_MOST = 10**15
_END: Any = object()


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Where a training ends. Both numbers count from the beginning of the run.

    Attributes:
        epochs: passes over the reader; None: `total` is the bound.
        total: batches; None: `epochs` is the bound.

    Raises:
        SettingsError: both are given, or neither; or one is no number that can be.
    """

    epochs: int | None
    total: int | None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.total is None):
            raise SettingsError(
                "batches(epochs=..., total=...)",
                found="neither" if self.epochs is None else "both",
                expected="exactly one of them, which says when training ends",
                next_step="batches(epochs=3), or batches(total=100_000)",
            )
        for name, value in (("epochs", self.epochs), ("total", self.total)):
            if value is not None:
                object.__setattr__(self, name, checked_whole(f"batches({name})", value, 1, _MOST))

    def is_met(self, passes: Passes, batches_done: int) -> bool:
        """Whether training has had what it was to have."""
        if self.epochs is not None:
            return passes.done >= self.epochs
        assert self.total is not None
        return batches_done >= self.total


class Loop:
    """Goes through the reader as often as a training asks for; one for each Checkpointer.

    A loop that ends in the middle of an epoch leaves it open, and the next one goes on there.

    Args:
        state: holds the count of passes, beside the reader's position.
        batches_done: returns how many batches training has done.
        step: what is called after each batch.
        count: counts a batch, and does nothing else.

    Attributes:
        is_waiting: whether training has a batch that it asked for, and has not asked for the next.
    """

    def __init__(
        self,
        state: TrainingState,
        *,
        batches_done: Callable[[], int],
        step: Callable[[], None],
        count: Callable[[], None],
    ) -> None:
        self._state = state
        self._batches_done = batches_done
        self._step = step
        self._count = count
        self._source: object = None
        self._pass: Iterator[Any] | None = None
        self._may_be_empty = False
        self.is_waiting = False

    def check(self, bound: Bound, *, has_position: bool) -> None:
        """Refuse what cannot end where it should after a restart.

        Args:
            bound: where training ends.
            has_position: whether checkpoints hold a position in the batches.

        Raises:
            SettingsError: checkpoints do not say which epoch training is in; or a batch of another
                loop is not done.
        """
        if self.is_waiting:
            raise SettingsError(
                "batches()",
                found="a call while another loop over batches() has a batch",
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
                next_step="Checkpointer(reader=...), which recpoint.ResumableLoader(loader) is for "
                "any DataLoader; or batches(reader, total=...)",
            )
        if self._state.passes is None and self._batches_done() > 0:
            raise SettingsError(
                "batches(epochs=...)",
                found=f"{self._batches_done()} batches that were trained without batches(), so "
                "that nobody knows in how many epochs",
                expected="a run that was trained with batches() from its beginning",
                next_step="batches(total=...), or restore(fresh=True)",
            )

    def run(self, source: Iterable[B], bound: Bound) -> Iterator[B]:
        """The batches of `source` up to the bound; each is counted when the next is asked for.

        Raises:
            SettingsError: the source gives no batch, and the bound is not met.
        """
        if self._state.passes is None:
            self._state.passes = Passes()
        # The position that was restored may be the end of an epoch.
        self._may_be_empty |= self._pass is None and self._batches_done() > 0
        while not bound.is_met(self._passes, self._batches_done()):
            batch = self._next(source)
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
                # The loop was left. The reader's position is after this batch, and so is the count.
                self._count()
                raise
            finally:
                self.is_waiting = False
            self._step()

    def end(self) -> None:
        """Let go of the epoch that is open."""
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
            self._pass = None  # where it stands is not known
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
                next_step="give such a reader, or a bound that this one reaches",
            )
