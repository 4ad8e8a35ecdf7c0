"""A map from row ids to places, as a dictionary: what the fast version must equal."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["RowMap"]


class RowMap:
    """Maps ids of rows to places."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def put(self, ids: Tensor, first: int) -> None:
        """Give each row a place, instead of the one that it had."""
        for place, row in enumerate(ids.tolist(), first):
            self._places[row] = place

    def find(self, ids: Tensor) -> Tensor:
        """Return the place of each row, or -1: int64 [n]."""
        return _integers([self._places.get(row, -1) for row in ids.tolist()])

    def items(self) -> tuple[Tensor, Tensor]:
        """Return all rows, ascending, and their places."""
        rows = sorted(self._places)
        return _integers(rows), _integers([self._places[row] for row in rows])


def _integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")
