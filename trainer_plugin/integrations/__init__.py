"""Connects libraries that shard tables, each of which is an optional extra.

A model goes in, and out come the `TableSource`s of libraries that have sharded its tables:
`torchrec.py` looks whether there are any in a version that is supported, `torchrec_source.py` is
their source, and `fbgemm.py` marks the rows of the kernels that hold them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from torch import nn

from recpoint.embeddings.tables import TableSource

__all__ = ["find_sources"]

#: module that has to be loaded already -> module with `find(model) -> TableSource | None`.
_SOURCES: dict[str, str] = {
    "torchrec.distributed.embedding_types": "recpoint.trainer_plugin.integrations.torchrec",
}


def find_sources(model: nn.Module) -> list[TableSource]:
    """What supplies tables of this model; libraries that are not loaded cannot have made any."""
    found = []
    for package, module in _SOURCES.items():
        if package in sys.modules:
            find: Callable[[nn.Module], TableSource | None] = importlib.import_module(module).find
            source = find(model)
            if source is not None:
                found.append(source)
    return found
