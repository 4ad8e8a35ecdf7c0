"""Finds out whether a model has tables that TorchRec has sharded.

This module imports nothing of TorchRec, so that names which a version lacks can be refused.
"""

from __future__ import annotations

from torch import nn

from recpoint.catalog.restore.state import canonical_name
from recpoint.embeddings.tables.managed_collisions import has_torchrec_base
from recpoint.embeddings.tables.tables import TableSource
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.integrations.torchrec_names import (
    check_attributes,
    check_packages,
    check_recognition,
)

__all__ = ["find"]


def find(model: nn.Module) -> TableSource | None:
    """Return the source of a model's sharded tables; None if it has no such tables.

    Raises:
        SettingsError: a module, a compute kernel or a fused optimizer is not supported, or TorchRec
            lacks something that recpoint reads; the message names it.
    """
    check_recognition(model)
    sharded: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        _refuse_replicas_of(name, module)
        part = any(name.startswith(f"{above}.") if above else True for above, _ in sharded)
        if not part and has_torchrec_base(module, "ShardedEmbeddingModule"):
            sharded.append((name, module))
        elif has_torchrec_base(module, "DMPCollection"):
            raise SettingsError(
                f"module {name!r}",
                found="a DMPCollection, in which replicas of a table differ until synchronized",
                expected="a DistributedModelParallel",
                next_step="shard each table once over all ranks",
            )
    if not sharded:
        return None
    check_packages()
    for name, module in sharded:
        # Without `_env` nothing would tell that the module belongs to a DMPCollection.
        check_attributes(module, ("_env",), of=f"module {canonical_name(model, name)!r}")
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
