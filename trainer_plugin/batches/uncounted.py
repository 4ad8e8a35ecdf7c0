"""Warns of a training whose own loop forgets to call `step`: no checkpoint would ever be due."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterable
from typing import Final

from torch import Tensor

from recpoint.trainer_plugin.batches.signs import TrainingSigns

__all__ = ["Uncounted"]

_log = logging.getLogger("recpoint")

#: So many steps of one optimizer without a counted batch mean that the loop forgets `step`. A loop
#: that counts a batch after accumulated steps, or takes a few steps to warm up, takes fewer.
_MANY_STEPS: Final = 16

_NEXT: Final = "Next: call step() after each batch, or loop over batches(), which calls step()"


class Uncounted:
    """Warns if training goes on, or ends, and no batch was counted.

    While training goes on, it warns once, when one optimizer has stepped often. Steps of several
    optimizers on the same batches do not add up, and backward passes whose gradients accumulate
    do not count. At the end it compares torch's counters of in-place changes, so steps need no
    hook. If the process ends without `end`, it warns at exit.

    Args:
        parameters: of the optimizers; they are kept until `end`.
        signs: count the steps of each optimizer.
    """

    def __init__(self, parameters: Iterable[Tensor], signs: TrainingSigns) -> None:
        self._before = [
            (parameter, parameter._version)
            for parameter in parameters
            if not parameter.is_inference()
        ]
        self._process = os.getpid()
        self._signs = signs
        self._steps_before = signs.steps
        signs.on_step = self._stepped
        atexit.register(self.warn)

    def _stepped(self) -> None:
        steps = self._signs.steps - self._steps_before
        if steps < _MANY_STEPS or os.getpid() != self._process:
            return
        self._signs.on_step = None
        _log.warning(
            "an optimizer has stepped %d times, and its Checkpointer has counted no batch: no "
            "checkpoint is due until it counts some. %s",
            steps,
            _NEXT,
        )

    def warn(self) -> None:
        """Warn if parameters have changed; then `end`. A forked child says nothing."""
        versions = self._before
        self.end()
        if os.getpid() != self._process or all(
            parameter._version == version for parameter, version in versions
        ):
            return
        _log.warning(
            "training ends, and its Checkpointer has counted no batch, although parameters have "
            "changed: no checkpoint was due. %s",
            _NEXT,
        )

    def end(self) -> None:
        """Forget the parameters: a batch was counted, or an error has ended training."""
        self._before = []
        self._signs.on_step = None
        atexit.unregister(self.warn)
