"""Finds out whether a model has tables that a supported version of TorchRec has sharded.

This module imports only names that every version of TorchRec has.
"""

from __future__ import annotations

import torchrec
from torch import nn

from recpoint.embeddings.tables.tables import TableSource
from recpoint.errors import SettingsError

__all__ = ["find"]

_SUPPORTED = "1.8"


def find(model: nn.Module) -> TableSource | None:
    """Return the source of a model's sharded tables; None if it has no such tables.

    Raises:
        SettingsError: the version of TorchRec, a module, a compute kernel or a fused optimizer is
            not supported; the message names it.
    """
    sharded: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        _refuse_replicas_of(name, module)
        part = any(name.startswith(f"{above}.") if above else True for above, _ in sharded)
        if not part and _is_a(module, "ShardedEmbeddingModule"):
            sharded.append((name, module))
        elif _is_a(module, "DMPCollection"):
            raise SettingsError(
                f"module {name!r}",
                found="a DMPCollection, in which replicas of a table differ until synchronized",
                expected="a DistributedModelParallel",
                next_step="shard each table once over all ranks",
            )
    if not sharded:
        return None
    version = str(torchrec.__version__)
    if version.split("+")[0].split(".")[:2] != _SUPPORTED.split("."):
        raise SettingsError(
            "torchrec",
            found=f"version {version}",
            expected=f"version {_SUPPORTED}, the only one that recpoint supports",
            next_step=f"pip install --no-deps 'torchrec=={_SUPPORTED}.*'",
        )
    from recpoint.trainer_plugin.integrations.torchrec_source import TorchRecSource

    return TorchRecSource(model, sharded)


def _refuse_replicas_of(name: str, module: nn.Module) -> None:
    """Refuse a module inside a `DMPCollection`: another group of ranks has a replica of its tables.

    Raises:
        SettingsError: the module's sharding environment has two dimensions.
    """
    if any(base.__name__ == "ShardingEnv2D" for base in type(vars(module).get("_env")).__mro__):
        raise SettingsError(
            f"module {name!r}",
            found="a module of a DMPCollection, in which replicas of a table differ until they are "
            "synchronized",
            expected="a module that DistributedModelParallel has sharded",
            next_step="shard each table once over all ranks",
        )


def _is_a(module: nn.Module, kind: str) -> bool:
    """Whether a class of this name is among the bases; versions define it in other modules."""
    return any(
        base.__name__ == kind and base.__module__.startswith("torchrec.")
        for base in type(module).__mro__
    )
