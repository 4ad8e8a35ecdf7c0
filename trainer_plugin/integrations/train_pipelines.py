"""Recognizes TorchRec's train pipelines, which take batches before they train them.

A pipeline is known by the names of its classes, so that TorchRec need not be imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from recpoint.errors import SettingsError

__all__ = ["as_written", "asking_pipeline", "is_pipeline", "refuse_pipeline"]

_PIPELINES: Final = frozenset({"TrainPipeline", "GradientAccumulationWrapper"})
#: They move rows or optimizer states out of GPU memory while a batch is trained.
_STASHING: Final = frozenset({"TrainPipelineSparseDistEmbStash", "TrainPipelineSparseDistOptStash"})
#: They look up the rows of a batch, and map its ids, in the step that trains it.
_LOOKING_UP_IN_STEP: Final = frozenset(
    {"TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite"}
)
#: Where the classes of forward passes are defined that take what a pipeline has sent.
_PIPELINES_AT: Final = "torchrec.distributed.train_pipeline"
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


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Have a model look rows up as it was written, while a pipeline has changed its modules.

    A pipeline of TorchRec gives sharded modules, and what sends their ids to other ranks, another
    `forward`, which takes ids that the pipeline has sent before. It finds its own again after this.

    Raises:
        SettingsError: the pipeline has replaced modules by others.
    """
    changed: list[tuple[Any, Any]] = []
    for module in _forwarding(model):
        if "PipelinedPostproc" in _names(module):
            raise SettingsError(
                "Checkpointer(bits=Loss(...)): the train pipeline",
                found="pipeline_postproc=True, which replaces modules of the model",
                expected="a pipeline whose batches can be measured by forward passes outside it",
                next_step="build the pipeline without it; or pass bits=8",
            )
        forward = vars(module).get("forward")
        if type(forward).__module__.startswith(_PIPELINES_AT):
            changed.append((module, forward))
    try:
        for module, _ in changed:
            del module.forward
        yield
    finally:
        for module, forward in changed:
            module.forward = forward


def _forwarding(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model, and those that send ids to other ranks for them."""
    for module in model.modules():
        yield module
        for distribution in getattr(module, "_input_dists", ()):
            inner = getattr(distribution, "_dist", None)
            if isinstance(inner, nn.Module):
                yield inner


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
