"""Keeps the positions of batches that a training loop has taken from a reader and not trained.

A prefetcher or a pipeline takes batches before it trains them. A checkpoint must then hold the
position before the oldest batch that is not trained, although the reader itself is further on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from recpoint.errors import SettingsError
from recpoint.trainer_plugin.settings import MOST_IN_FLIGHT

__all__ = ["CountedReader", "InFlight", "TakenBatch"]


@dataclass(frozen=True)
class TakenBatch:
    """A batch that was taken and not trained.

    Attributes:
        position: the reader's position before the batch; or the error of the reader's
            `state_dict`; None: positions were not kept.
        generators: states of the global generators when the batch was asked for; None: unknown, or
            another thread asked, whose draws come at any moment between those of the model.
        ids: name of a table -> ids that the batch looks up; None: unknown.
    """

    position: Any
    generators: Any = None
    ids: Mapping[str, Tensor] | None = None


class InFlight:
    """The batches of one reader that were taken and not trained, oldest first.

    A thread may take batches while the training thread counts them: a batch is in flight before it
    is read, so the position before it does not depend on when the read ends.

    Attributes:
        is_counted: whether batches that are trained are counted by `land`. Otherwise all batches
            that were taken count as trained.
        reads_ahead: whether the training loop takes batches ahead, so that positions are kept.
        thread: identity of the training thread.
        has_ended: whether the reader's newest epoch has given its last batch.
    """

    def __init__(self) -> None:
        self.is_counted = self.reads_ahead = False
        self.has_ended = True
        self.thread = threading.get_ident()
        self._taken_batches: deque[TakenBatch] = deque()

    def __len__(self) -> int:
        return len(self._taken_batches)

    @property
    def oldest(self) -> TakenBatch:
        """The batch that is trained next."""
        return self._taken_batches[0]

    @property
    def ids(self) -> list[Mapping[str, Tensor]]:
        """The ids of each batch, as far as they are known; another thread may take batches."""
        return [taken_batch.ids or {} for taken_batch in list(self._taken_batches)]

    @property
    def later_generators(self) -> list[Any]:
        """States of the generators when each batch but the oldest was asked for, where known."""
        generators = [taken_batch.generators for taken_batch in list(self._taken_batches)[1:]]
        return [] if None in generators else generators

    @property
    def is_asked_in_training(self) -> bool:
        """Whether this is the training thread, so that it draws when training does not."""
        return threading.get_ident() == self.thread

    def take(self, batch: TakenBatch) -> None:
        """Add a batch that is about to be read; nothing happens if batches are not counted.

        Raises:
            SettingsError: more batches are in flight than are kept.
        """
        self.has_ended = False
        if not self.is_counted:
            return
        if len(self._taken_batches) > MOST_IN_FLIGHT:
            raise SettingsError(
                "the training dataloader",
                found=f"{len(self._taken_batches)} batches that were read and not trained",
                expected=f"at most {MOST_IN_FLIGHT} beside the one in training",
                next_step="have the training loop read fewer batches ahead, or count each batch "
                "that is trained",
            )
        self._taken_batches.append(batch)

    def drop_newest(self) -> None:
        """Forget the batch that was added last, because there was none to read."""
        if self._taken_batches:
            self._taken_batches.pop()

    def land(self) -> None:
        """Count the oldest batch as trained."""
        if self._taken_batches:
            self._taken_batches.popleft()

    def forget(self) -> None:
        """Forget all batches: the position was set, or the training loop has dropped them."""
        self._taken_batches.clear()

    def read_ahead(self, thread: int) -> None:
        """Keep the positions of batches from now on, and count those that are trained.

        Args:
            thread: identity of the training thread.
        """
        self.is_counted = self.reads_ahead = True
        self.thread = thread

    def end_counting(self) -> None:
        """Have all batches count as trained again."""
        self.is_counted = self.reads_ahead = False
        self.forget()


@runtime_checkable
class CountedReader(Protocol):
    """A reader of recpoint's own, whose position can be that of an earlier batch.

    Attributes:
        before_fetch: if set, called each time before the reader is asked for the next batch.
        in_flight: the batches that were taken and not trained.
        begun: whether a batch has been asked for since the last `iter`.
    """

    before_fetch: Callable[[], None] | None
    in_flight: InFlight
    begun: bool
