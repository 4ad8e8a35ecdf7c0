"""Builds the DLRMs that are published for Criteo's data, for training on rows of that shape."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["KAGGLE", "MLPERF", "CriteoDLRM", "Widths"]


class Widths(NamedTuple):
    """Sizes of a DLRM: values in an embedding row, and units in each layer of both towers."""

    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]


#: Naumov et al., 2019, as configured in their repository's `bench/dlrm_s_criteo_kaggle.sh`.
KAGGLE = Widths(16, (13, 512, 256, 64, 16), (512, 256, 1))

#: The DLRM of MLPerf Training v0.7 to v2.1 (Criteo Terabyte).
MLPERF = Widths(128, (13, 512, 256, 128), (1024, 1024, 512, 256, 1))


class CriteoDLRM(nn.Module):
    """A DLRM with dot products between all vectors.

    Args:
        tables: column name -> rows of its table.
        sparse: whether the tables have sparse gradients.
        widths: of its layers and embedding rows.
    """

    def __init__(
        self, tables: dict[str, int], *, sparse: bool = True, widths: Widths = KAGGLE
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {name: nn.Embedding(rows, widths.dim, sparse=sparse) for name, rows in tables.items()}
        )
        self.bottom = _layers(widths.bottom, last=nn.ReLU())
        vectors = len(tables) + 1
        self.first, self.second = torch.tril_indices(vectors, vectors, offset=-1)
        self.top = _layers((widths.dim + len(self.first), *widths.top), last=nn.Identity())

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Return logits F32 [n] of dense F32 [n, 13] and sparse I64 [n, 26]."""
        rows = [table(sparse[:, c]) for c, table in enumerate(self.tables.values())]
        bottom = self.bottom(dense)
        stacked = torch.stack([bottom, *rows], dim=1)
        dots = (stacked @ stacked.transpose(1, 2))[:, self.first, self.second]
        logits: Tensor = self.top(torch.cat([bottom, dots], dim=1))
        return logits.squeeze(1)


def _layers(widths: tuple[int, ...], *, last: nn.Module) -> nn.Sequential:
    layers: list[nn.Module] = []
    for narrow, wide in itertools.pairwise(widths):
        layers += [nn.Linear(narrow, wide), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last)
