"""Has the batch that is trained next looked at, at a moment between two batches.

What is looked at must be a batch that the model has not learned from, and no pass may be open: a
look runs forward passes of its own. Loops over `batches` and `Pipelined` offer each batch here. A
loop that calls `step` hands it over by `Checkpointer.measure`, at a moment that is checked.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final, Protocol

from recpoint.errors import SettingsError
from recpoint.trainer_plugin.batches.count import BatchCount
from recpoint.trainer_plugin.batches.signs import TrainingSigns

__all__ = ["LooksAtBatches", "NextBatch"]

_log = logging.getLogger("recpoint")

_NO_BATCH: Final = object()


class LooksAtBatches(Protocol):
    """Looks at batches before they are trained; `loss.meter.LossMeter` does."""

    def look(self, batch: Any) -> None:
        """Look at the batch that is trained next; the model is not changed by it."""


class NextBatch:
    """Hands the batch that is trained next to who looks at it.

    Args:
        signs: what training does.
        count: decides which batches are trained.
        meter: looks at batches; None: nobody does.

    Attributes:
        is_awaited: whether somebody looks at batches.
    """

    def __init__(
        self, signs: TrainingSigns, count: BatchCount, meter: LooksAtBatches | None
    ) -> None:
        self._signs = signs
        self._count = count
        self._meter = meter
        self.is_awaited = meter is not None
        self._has_none = True  # no batch was handed over, and nobody was warned of that
        self._handed_batch: Any = _NO_BATCH  # by `measure`, and not counted

    def offer(self, batch: Any) -> None:
        """Have a batch looked at by which a loop of recpoint's own goes on.

        In the middle of a pass nobody looks at it: the next batch may do as well.

        Args:
            batch: the batch that is trained next.
        """
        if self._meter is None or (self._count.reads_ahead and self._is_in_pass):
            return
        self._has_none = False
        self._meter.look(batch)

    def measure(self, batch: Any) -> None:
        """Have a batch looked at that a loop of the user's own is about to train.

        A second call with the batch does nothing: its loss says nothing more about rounding.

        Args:
            batch: as the loss function gets it.

        Raises:
            SettingsError: the model may be learning from this batch, or has learned from it.
            Exception: as `LooksAtBatches.look`.
        """
        signs, thread = self._signs, threading.get_ident()
        if signs.thread not in (None, thread):
            raise _refused("a call in another thread than the optimizer steps")
        if self._is_in_pass:
            raise _refused("a forward pass in training mode whose backward pass has not come")
        if self._count.has_stepped:
            raise _refused("an optimizer step since the last batch was counted by step()")
        if self._count.has_trained_newest:
            raise _refused("a batch that the optimizers have stepped for: no other was taken since")
        if self._meter is not None and batch is not self._handed_batch:
            self._has_none, self._handed_batch = False, batch
            self._meter.look(batch)

    def note_counted(self) -> None:
        """Forget the batch that is counted. Warn once if no batch was handed over before."""
        self._handed_batch = _NO_BATCH
        if self._has_none and self._meter is not None:
            self._has_none = False
            _log.warning(
                "bits=Loss(...): a batch was trained, and none was measured before, so rows get 8 "
                "bits. Next: call checkpoints.measure(batch) before the forward pass of each "
                "batch; a train pipeline must take its batches from checkpoints.batches()"
            )

    @property
    def _is_in_pass(self) -> bool:
        signs = self._signs
        return signs.last_forward > max(signs.last_backward, signs.last_step)


def _refused(found: str) -> SettingsError:
    return SettingsError(
        "measure()",
        found=found,
        expected="a call in the training thread, right before the forward pass of a batch that the "
        "model has not been trained with",
        next_step="take the batch, call checkpoints.measure(batch), train it, and then call "
        "checkpoints.step(); evaluate the model in model.eval() or under torch.no_grad()",
    )
