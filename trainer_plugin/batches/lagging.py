"""Warns of an optimizer that steps less often than another one and accumulates gradients.

A checkpoint is cut after a step. It holds no gradients, so those that wait for a later step of
another optimizer are missing after a restart. The optimizer of a generator that trains less often
than its discriminator has gradients of its last step only; these do not change, and nothing is
said.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.optim import Optimizer

from recpoint.trainer_plugin.batches.signs import TrainingSigns

__all__ = ["LaggingOptimizers"]

_log = logging.getLogger("recpoint")

#: Identity of each gradient of an optimizer, and how often it was changed in place.
_Gradients = tuple[tuple[int, int], ...]


class LaggingOptimizers:
    """Compares gradients of optimizers that have no step in a batch in which another one has.

    Args:
        signs: say when each optimizer has stepped.
        optimizers: those of the Checkpointer.
    """

    def __init__(self, signs: TrainingSigns, optimizers: Sequence[Optimizer]) -> None:
        self._signs = signs
        # Of one optimizer alone, `BatchCount` sees whether gradients wait.
        self._optimizers = tuple(optimizers) if len(optimizers) > 1 else ()
        # By number of an optimizer that has been behind: its gradients after its last step.
        self._after_step: dict[int, _Gradients] = {}

    def look(self, last_count: int) -> None:
        """Look at a batch in which an optimizer has stepped; warn once.

        Args:
            last_count: number of the newest event when the batch before was counted.
        """
        for number, optimizer in enumerate(self._optimizers):
            last_step = self._signs.last_step_of(optimizer)
            if last_step > last_count:
                if number in self._after_step:
                    self._after_step[number] = _gradients(optimizer)
                continue
            gradients = _gradients(optimizer)
            if number not in self._after_step and last_step:
                self._after_step[number] = gradients  # whether they have changed shows later
            elif gradients != self._after_step.get(number, ()):
                self._warn(number, optimizer)
                self._optimizers = ()
                return

    def _warn(self, number: int, optimizer: Optimizer) -> None:
        _log.warning(
            "optimizer %d of %d (%s) has not stepped for a batch for which another one has, and "
            "has new gradients: unless the loop sets them to zero, a restart from a checkpoint "
            "that is cut before its next step trains on without them. Next: step all optimizers "
            "for the same batches; or take checkpoints with checkpoint(), after their steps",
            number + 1,
            len(self._optimizers),
            type(optimizer).__name__,
        )


def _gradients(optimizer: Optimizer) -> _Gradients:
    return tuple(
        (id(parameter.grad), parameter.grad._version)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )
