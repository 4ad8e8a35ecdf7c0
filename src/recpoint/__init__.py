"""recpoint: cheap, frequent, proven recovery points for recommender training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recpoint import errors, loggers

if TYPE_CHECKING:
    from recpoint.catalog.restoring.reshard import TablePart
    from recpoint.catalog.restoring.restore_parts import restore_parts
    from recpoint.dashboards.trainer_metrics import export_metrics
    from recpoint.serving.follower import Follower
    from recpoint.trainer_plugin.checkpointer import Checkpointer
    from recpoint.trainer_plugin.failures import ExpectedFailures
    from recpoint.trainer_plugin.integrations.lightning import LightningCallback
    from recpoint.trainer_plugin.parts import Seed
    from recpoint.trainer_plugin.resumable_loader import ResumableLoader

__all__ = [
    "Checkpointer",
    "ExpectedFailures",
    "Follower",
    "LightningCallback",
    "ResumableLoader",
    "Seed",
    "TablePart",
    "errors",
    "export_metrics",
    "restore_parts",
]

loggers.guard()


def __getattr__(name: str) -> Any:
    # The trainer's side imports torch and compiles kernels: the command line does without it.
    if name == "Checkpointer":
        from recpoint.trainer_plugin.checkpointer import Checkpointer

        return Checkpointer
    if name == "ExpectedFailures":
        from recpoint.trainer_plugin.failures import ExpectedFailures

        return ExpectedFailures
    if name == "LightningCallback":
        from recpoint.trainer_plugin.integrations.lightning import LightningCallback

        return LightningCallback
    if name == "ResumableLoader":
        from recpoint.trainer_plugin.resumable_loader import ResumableLoader

        return ResumableLoader
    if name == "Seed":
        from recpoint.trainer_plugin.parts import Seed

        return Seed
    if name == "Follower":
        from recpoint.serving.follower import Follower

        return Follower
    if name == "export_metrics":
        from recpoint.dashboards.trainer_metrics import export_metrics

        return export_metrics
    if name == "TablePart":
        from recpoint.catalog.restoring.reshard import TablePart

        return TablePart
    if name == "restore_parts":
        from recpoint.catalog.restoring.restore_parts import restore_parts

        return restore_parts
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
