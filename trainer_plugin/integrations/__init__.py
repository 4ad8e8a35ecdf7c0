"""Connects libraries that shard tables, each of which is an optional extra.

The input is a model; the output is the `TableSource` of each library that has sharded tables of the
model. `torchrec.py` finds out whether there are such tables, and `torchrec_names.py` whether
TorchRec and FBGEMM have all that is read of them. `torchrec_source.py` is the source of the tables.
`fbgemm.py` marks rows of the kernels that hold them. `train_pipelines.py` recognizes pipelines.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from torch import nn

from recpoint.embeddings.tables.tables import TableSource

__all__ = ["find_sources"]

#: module that must be loaded already -> module with `find(model) -> TableSource | None`.
_SOURCES: dict[str, str] = {
    "torchrec.distributed.embedding_types": "recpoint.trainer_plugin.integrations.torchrec",
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
