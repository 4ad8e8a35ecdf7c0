"""Connects what keeps tables in its own form: TorchRec, an optional extra, and keyed tables.

The input is a model; the output is the `TableSource` of each library that has sharded tables of the
model. `torchrec.py` finds out whether there are such tables, and `torchrec_names.py` whether
TorchRec and FBGEMM have all that is read of them. `torchrec_source.py` is the source of the tables.
`fbgemm.py` marks rows of the kernels that hold them. `train_pipelines.py` recognizes pipelines.
`torchrec_optimizers.py` finds the optimizers of torch, and warm-ups, in those of TorchRec.
`managed_collisions.py` keeps what maps raw ids to rows, of tables that are sharded or not.
`keyed.py` is the source of keyed tables, which are recpoint's own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from recpoint.embeddings.tables.tables import TableSource

__all__ = ["RateSchedule", "find_sources", "take_apart"]

#: module that must be loaded already -> module with `find(model) -> TableSource | None`.
_SOURCES: dict[str, str] = {
    "recpoint.embeddings.tables.keyed": "recpoint.trainer_plugin.integrations.keyed",
    "torchrec.distributed.embedding_types": "recpoint.trainer_plugin.integrations.torchrec",
    "torchrec.modules.mc_modules": "recpoint.trainer_plugin.integrations.managed_collisions",
}


def find_sources(model: nn.Module) -> list[TableSource]:
    """Return the sources of a model's tables; only loaded libraries can have sharded any."""
    sources = []
    for package, module in _SOURCES.items():
        if package in sys.modules:
            find: Callable[[nn.Module], TableSource | None] = importlib.import_module(module).find
            source = find(model)
            if source is not None:
                sources.append(source)
    return sources


class RateSchedule(Protocol):
    """Sets learning rates by a count of steps, as an optimizer around other optimizers.

    It is stored as a scheduler is. A restore loads it after the optimizers, whose state it shares.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return its position, as values that format §3.4 can store."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; the learning rates of groups do not change."""

    def differences(self, state: object) -> list[str]:
        """Return why `load_state_dict` cannot load `state`, one sentence for each reason."""


def take_apart(
    optimizers: Sequence[Optimizer],
) -> tuple[Sequence[Optimizer], Sequence[RateSchedule]]:
    """Return the optimizers of torch in the given ones, and what sets learning rates around them.

    Raises:
        SettingsError: an optimizer of TorchRec has state that cannot be stored.
    """
    if not any(
        base.__module__.startswith("torchrec.optim.keyed")
        for optimizer in optimizers
        for base in type(optimizer).__mro__
    ):
        return optimizers, ()
    from recpoint.trainer_plugin.integrations.torchrec_names import check_packages

    check_packages()
    from recpoint.trainer_plugin.integrations import torchrec_optimizers

    return torchrec_optimizers.take_apart(optimizers)
