"""Knows the train pipeline that takes the batches of a loop, and trains them later."""

from __future__ import annotations

import weakref

from recpoint.trainer_plugin.integrations.train_pipelines import asking_pipeline

__all__ = ["LoopPipeline"]


class LoopPipeline:
    """The train pipeline of a training, if there is one.

    Attributes:
        is_driven: whether `Pipelined` counts the batches.
        keeps_batches: whether a pipeline takes batches: it trains them even after a loop was left.
    """

    def __init__(self) -> None:
        # The pipeline that asked for batches last, and the one that `Pipelined` drives.
        self._asked: weakref.ref[object] | None = None
        self._driven: weakref.ref[object] | None = None
        self.is_driven = self.keeps_batches = False

    def drive(self, pipeline: object) -> None:
        """Take note that `Pipelined` drives this pipeline."""
        self.is_driven = self.keeps_batches = True
        self._driven = weakref.ref(pipeline)

    def ask(self, pipeline: object) -> None:
        """Take note that this pipeline asks for batches."""
        self.keeps_batches = True
        self._asked = weakref.ref(pipeline)

    def keeps_taken(self) -> bool:
        """Whether who asks for a batch now trains the batches that were taken before, too.

        A pipeline trains them even after a loop was left. Another pipeline does not have them.
        """
        if not self.keeps_batches:
            return False
        pipeline = asking_pipeline() if self._driven is None else self._driven()
        if pipeline is None:
            return True
        is_other = self._asked is not None and self._asked() is not pipeline
        self._asked = weakref.ref(pipeline)
        return not is_other
