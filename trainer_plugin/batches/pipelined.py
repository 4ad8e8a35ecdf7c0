"""Wraps a train pipeline, so that checkpoints are cut between two calls of its `progress`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Pipelined"]


class Pipelined:
    """A train pipeline, of TorchRec or one with the same `progress`, that counts its batches.

    `Checkpointer.pipelined` makes it. Each call of `progress` trains one batch. All other
    attributes are those of the pipeline.

    Args:
        pipeline: the pipeline.
        finish_batches: called before each `progress`: counts the batch before, and cuts a
            checkpoint if one is due.
        note: called after each `progress`: one more batch is trained.
    """

    def __init__(
        self, pipeline: Any, finish_batches: Callable[[], None], note: Callable[[], None]
    ) -> None:
        self._pipeline = pipeline
        self._finish_batches = finish_batches
        self._note = note

    def progress(self, dataloader_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Train one batch, as the pipeline's own `progress` does.

        Raises:
            StopIteration: as the pipeline: no batch is left.
            SettingsError, RecpointError, BaseException: for the reasons that `Checkpointer.step`
                gives.
        """
        self._finish_batches()
        output = self._pipeline.progress(dataloader_iter, *args, **kwargs)
        self._note()
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)
