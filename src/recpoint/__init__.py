"""Saves and restores checkpoints of recommender training, cheaply, often and verified."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from recpoint import errors, loggers

if TYPE_CHECKING:
    __version__: str

    from recpoint import embeddings
    from recpoint.catalog.restore.placement import TablePart
    from recpoint.catalog.restore.restore import restore_parts
    from recpoint.dashboards.metrics.trainer import export_metrics
    from recpoint.embeddings.keyed.admission import Probability, Seen
    from recpoint.embeddings.keyed.embedding import KeyedEmbedding, KeyedEmbeddingBag
    from recpoint.embeddings.keyed.eviction import LeastRecent, LeastUsed
    from recpoint.embeddings.parity.stripes import Parity
    from recpoint.serving.follower import Follower
    from recpoint.trainer_plugin.checkpointer import Checkpointer
    from recpoint.trainer_plugin.grow import grow
    from recpoint.trainer_plugin.lightning import LightningCallback
    from recpoint.trainer_plugin.loss_setting import Loss
    from recpoint.trainer_plugin.policy import Consecutive, Continuous, Intermittent, OneShot
    from recpoint.trainer_plugin.restore.parts import Seed
    from recpoint.trainer_plugin.settings import (
        ExpectedFailures,
        Options,
        Precision,
        Staging,
        Timeouts,
    )
    from recpoint.trainer_plugin.state.lookahead import Lookahead
    from recpoint.trainer_plugin.state.reader import ResumableLoader

__all__ = [
    "Checkpointer",
    "Consecutive",
    "Continuous",
    "ExpectedFailures",
    "Follower",
    "Intermittent",
    "KeyedEmbedding",
    "KeyedEmbeddingBag",
    "LeastRecent",
    "LeastUsed",
    "LightningCallback",
    "Lookahead",
    "Loss",
    "OneShot",
    "Options",
    "Parity",
    "Precision",
    "Probability",
    "ResumableLoader",
    "Seed",
    "Seen",
    "Staging",
    "TablePart",
    "Timeouts",
    "__version__",
    "embeddings",
    "errors",
    "export_metrics",
    "grow",
    "restore_parts",
]

loggers.guard()

#: The module of each public name, imported when the name is first used: the trainer's modules
#: import torch and compile kernels, which the command line does without.
_HOMES = {
    "Checkpointer": "recpoint.trainer_plugin.checkpointer",
    "Consecutive": "recpoint.trainer_plugin.policy",
    "Continuous": "recpoint.trainer_plugin.policy",
    "ExpectedFailures": "recpoint.trainer_plugin.settings",
    "Follower": "recpoint.serving.follower",
    "Intermittent": "recpoint.trainer_plugin.policy",
    "KeyedEmbedding": "recpoint.embeddings.keyed.embedding",
    "KeyedEmbeddingBag": "recpoint.embeddings.keyed.embedding",
    "LeastRecent": "recpoint.embeddings.keyed.eviction",
    "LeastUsed": "recpoint.embeddings.keyed.eviction",
    "LightningCallback": "recpoint.trainer_plugin.lightning",
    "Lookahead": "recpoint.trainer_plugin.state.lookahead",
    "Loss": "recpoint.trainer_plugin.loss_setting",
    "OneShot": "recpoint.trainer_plugin.policy",
    "Options": "recpoint.trainer_plugin.settings",
    "Parity": "recpoint.embeddings.parity.stripes",
    "Precision": "recpoint.trainer_plugin.settings",
    "Probability": "recpoint.embeddings.keyed.admission",
    "ResumableLoader": "recpoint.trainer_plugin.state.reader",
    "Seed": "recpoint.trainer_plugin.restore.parts",
    "Seen": "recpoint.embeddings.keyed.admission",
    "Staging": "recpoint.trainer_plugin.settings",
    "TablePart": "recpoint.catalog.restore.placement",
    "Timeouts": "recpoint.trainer_plugin.settings",
    "export_metrics": "recpoint.dashboards.metrics.trainer",
    "grow": "recpoint.trainer_plugin.grow",
    "restore_parts": "recpoint.catalog.restore.restore",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("recpoint")
    if name == "embeddings":
        return importlib.import_module("recpoint.embeddings")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
