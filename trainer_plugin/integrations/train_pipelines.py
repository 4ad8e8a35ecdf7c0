"""Recognizes TorchRec's train pipelines, which take batches before they train them.

A pipeline is known by the names of its classes, so that TorchRec need not be imported.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from recpoint.errors import SettingsError

__all__ = ["asking_pipeline", "is_pipeline", "refuse_pipeline"]

_PIPELINES: Final = frozenset({"TrainPipeline", "GradientAccumulationWrapper"})
#: They move rows or optimizer states out of GPU memory while a batch is trained.
_STASHING: Final = frozenset({"TrainPipelineSparseDistEmbStash", "TrainPipelineSparseDistOptStash"})
#: They look up the rows of a batch, and map its ids, in the step that trains it.
_LOOKING_UP_IN_STEP: Final = frozenset(
    {"TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite"}
)
#: Frames from `next()` in a pipeline to the code that asks: profilers and wrappers lie between.
_MOST_FRAMES: Final = 40


def is_pipeline(value: object) -> bool:
    """Whether the value is a train pipeline of TorchRec, or wraps one."""
    return bool(_names(value) & _PIPELINES)


def asking_pipeline() -> object | None:
    """Return the pipeline that asks for a batch in this call; None: no pipeline asks.

    A pipeline gets an iterator and says nothing about itself, so its methods are looked for among
    the callers.
    """
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        names = frame.f_code.co_varnames
        if frame.f_code.co_argcount and names[0] == "self":
            caller = frame.f_locals.get("self")
            if is_pipeline(caller):
                return caller
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def refuse_pipeline(pipeline: object) -> None:
    """Refuse a pipeline under which a cut would copy memory that has been moved, or is ahead.

    Raises:
        SettingsError: the pipeline stashes rows or optimizer states; or the model has managed
            collisions, and the pipeline may map ids of batches that are not trained yet.
    """
    stashing = _names(pipeline) & _STASHING
    if stashing:
        raise SettingsError(
            f"a {type(pipeline).__name__}",
            found="a pipeline that moves rows or optimizer states out of a table's memory while a "
            "batch is trained, so a checkpoint could hold other values",
            expected="a pipeline that leaves them in place",
            next_step="train with TrainPipelineSparseDist",
        )
    inner = getattr(pipeline, "_pipeline", pipeline)
    if type(inner).__name__ not in _LOOKING_UP_IN_STEP and _maps_ids(inner):
        raise SettingsError(
            f"a {type(inner).__name__}",
            found="a pipeline that may map ids of later batches before a batch is trained, with a "
            "model that has managed collisions",
            expected=f"one of {', '.join(sorted(_LOOKING_UP_IN_STEP))}",
            next_step="train with TrainPipelineSparseDist",
        )


def _maps_ids(pipeline: object) -> bool:
    """Whether the pipeline's model has managed collisions."""
    model: Any = getattr(pipeline, "_model", None)
    modules = model.modules() if hasattr(model, "modules") else ()
    return any("ManagedCollisionModule" in _names(module) for module in modules)


def _names(value: object) -> set[str]:
    return {
        base.__name__
        for base in type(value).__mro__
        if (base.__module__ or "").startswith("torchrec.")
    }
