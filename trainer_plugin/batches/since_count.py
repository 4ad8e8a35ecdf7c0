"""Compares the signs of training with those at the moment when batches were last counted."""

from __future__ import annotations

from recpoint.trainer_plugin.batches.signs import TrainingSigns

__all__ = ["SinceCount"]


class SinceCount:
    """What training has done since batches were last counted.

    Args:
        signs: what training does.

    Attributes:
        last_event: number of the newest event when batches were last counted.
    """

    def __init__(self, signs: TrainingSigns) -> None:
        self._signs = signs
        self.forget()

    def forget(self) -> None:
        """Take the signs as they are now for those of the last count, of no batch."""
        self._note_signs()
        self._steps_a_batch = 0  # of all optimizers, for the batch that was counted last
        self._backwards_a_batch = 0  # of the batch that was counted last
        self._changes_before = 0
        self._gradients_before: tuple[tuple[int, int], ...] = ()

    def watch_changes(self) -> None:
        """Compare parameters with what they are now."""
        self._changes_before = self._signs.changes()

    def end_batch(self) -> None:
        """Take note of the passes and steps of the batch that is counted now."""
        self._backwards_a_batch = self._signs.backwards - self._backwards_before
        self._steps_a_batch = self._signs.all_steps - self._all_steps_before

    def begin(self) -> None:
        """Compare with the signs as they are now, because batches are counted now."""
        self._note_signs()
        if not self._signs.last_backward:
            self._gradients_before = self._signs.gradients()

    def _note_signs(self) -> None:
        self.last_event = self._signs.now
        self._steps_before, self._backwards_before = self._signs.steps, self._signs.backwards
        self._all_steps_before = self._signs.all_steps

    @property
    def steps(self) -> int:
        """Steps of the optimizer that has stepped most often."""
        return self._signs.steps - self._steps_before

    @property
    def batches(self) -> int:
        """Batches that training has done: each takes as many backward passes as the last one.

        If the last one took none, each takes one step.
        """
        if not self._backwards_a_batch:
            return self.steps
        return (self._signs.backwards - self._backwards_before) // self._backwards_a_batch

    @property
    def has_trained(self) -> bool:
        """Whether a backward pass or an optimizer step was seen."""
        return self._signs.has_trained_since(self.last_event)

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped."""
        return self._signs.last_step > self.last_event

    @property
    def has_all_steps(self) -> bool:
        """Whether optimizers have stepped as often as for the batch before."""
        steps = self._signs.all_steps - self._all_steps_before
        return self.has_stepped and steps >= self._steps_a_batch

    @property
    def has_passed_back(self) -> bool:
        """Whether a backward pass has run, also one that only gradients show."""
        return self._signs.last_backward > self.last_event or self.has_new_gradients

    @property
    def has_new_gradients(self) -> bool:
        """Whether a backward pass has run that is not seen: a model was called by its parts.

        Loops keep the gradients of the last step until the next batch, so old ones say nothing.
        """
        if self._signs.last_backward:
            return False
        gradients = self._signs.gradients()
        return bool(gradients) and gradients != self._gradients_before

    @property
    def has_changes(self) -> bool:
        """Whether parameters have changed since `watch_changes`."""
        return self._signs.changes() != self._changes_before

    def has_stepped_unseen(self) -> bool:
        """Whether an optimizer whose hooks do not work has stepped, as far as that can be seen."""
        changes = self._signs.changes()
        has_changed, self._changes_before = changes != self._changes_before, changes
        return has_changed
