"""The DLRM that is published for the Criteo Kaggle data, to be trained on rows of that shape."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

__all__ = ["CriteoDLRM"]

DIM = 16
BOTTOM = (13, 512, 256, 64, DIM)
TOP = (512, 256, 1)


class CriteoDLRM(nn.Module):
    """Naumov et al., 2019, as configured in its repository's `bench/dlrm_s_criteo_kaggle.sh`.

    Args:
        tables: column name -> rows of its table.
        sparse: whether the tables have sparse gradients.
    """

    def __init__(self, tables: dict[str, int], *, sparse: bool = True) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {name: nn.Embedding(rows, DIM, sparse=sparse) for name, rows in tables.items()}
        )
        self.bottom = _layers(BOTTOM, last=nn.ReLU())
        vectors = len(tables) + 1
        self.first, self.second = torch.tril_indices(vectors, vectors, offset=-1)
        self.top = _layers((DIM + len(self.first), *TOP), last=nn.Identity())

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Logits F32 [n] of dense F32 [n, 13] and sparse I64 [n, 26]."""
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
