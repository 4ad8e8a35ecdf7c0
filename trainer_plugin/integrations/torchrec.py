"""Whether a model has tables that TorchRec has sharded, in a version that is supported.

Imports nothing of TorchRec that another version may not have.
"""

from __future__ import annotations

import torchrec
from torch import nn

from recpoint.embeddings.tables import TableSource
from recpoint.errors import SettingsError

__all__ = ["find"]

_SUPPORTED = "1.8"


def find(model: nn.Module) -> TableSource | None:
    """The sharded tables of a model; None where there are none.

    Raises:
        SettingsError: a version of TorchRec, a module, a compute kernel or a fused optimizer that
            is not supported; it is named.
    """
    sharded: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        part = any(name.startswith(f"{above}.") if above else True for above, _ in sharded)
        if not part and _is_a(module, "ShardedEmbeddingModule"):
            sharded.append((name, module))
        elif _is_a(module, "DMPCollection"):
            raise SettingsError(
                f"module {name!r}",
                found="a DMPCollection: replicas of a table differ until they are synchronized",
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
            expected=f"version {_SUPPORTED}, the one whose tables are understood",
            next_step=f"pip install --no-deps 'torchrec=={_SUPPORTED}.*'",
        )
    from recpoint.trainer_plugin.integrations.torchrec_source import TorchRecSource

    return TorchRecSource(model, sharded)


def _is_a(module: nn.Module, kind: str) -> bool:
    """By name: where a class is defined differs between versions."""
    return any(
        base.__name__ == kind and base.__module__.startswith("torchrec.")
        for base in type(module).__mro__
    )
