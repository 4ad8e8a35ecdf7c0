"""recpoint: cheap, frequent, proven recovery points for recommender training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recpoint import errors

if TYPE_CHECKING:
    from recpoint.trainer_plugin.checkpointer import Checkpointer

__all__ = ["Checkpointer", "errors"]


def __getattr__(name: str) -> Any:
    # The trainer's side imports torch and compiles kernels: the command line does without it.
    if name == "Checkpointer":
        from recpoint.trainer_plugin.checkpointer import Checkpointer

        return Checkpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
