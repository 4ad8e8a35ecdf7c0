"""Reaches parts of a Checkpointer that have no public name."""

from __future__ import annotations

from recpoint import Checkpointer
from recpoint.trainer_plugin.pipeline.pipeline import Pipeline

__all__ = ["pipeline_of"]


def pipeline_of(checkpoints: Checkpointer) -> Pipeline:
    """Return what takes the checkpoints since `restore`."""
    generation = checkpoints._training.generation
    assert generation is not None
    return generation.pipeline
