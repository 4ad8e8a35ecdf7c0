"""Holds some rows of a table beside all others, in another form, and finds them by id."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["RowsBeside"]


class RowsBeside:
    """Rows in arrays of their own, sorted by id.

    The arrays are replaced and never written to, because two copies of a table share them.

    Args:
        arrays: without rows: their dtypes and the shapes of a row's entries.
    """

    def __init__(self, *arrays: Tensor) -> None:
        self.ids = torch.empty(0, dtype=torch.int64, device="cpu")
        self._arrays = arrays
        self._added: list[tuple[Tensor, tuple[Tensor, ...]]] = []

    @property
    def nbytes(self) -> int:
        """Memory of the rows, in bytes."""
        return self.ids.nbytes + sum(array.nbytes for array in self._arrays)

    def add(self, ids: Tensor, *arrays: Tensor) -> None:
        """Add rows that are not yet found; `finish` makes them findable.

        Args:
            ids: int64 [n]; no id is added twice before `finish`.
            arrays: [n, …] each; kept as they are.
        """
        self._added.append((ids, arrays))

    def drop_added(self) -> None:
        """Forget the rows that were added since `finish`."""
        self._added.clear()

    def finish(self, is_beside: Tensor) -> None:
        """Sort the added rows in; drop rows that are no longer beside, and old ones of new rows.

        Args:
            is_beside: bool [rows of the table]: which rows are beside now.
        """
        ids = torch.cat([self.ids, *(ids for ids, _ in self._added)])
        is_old = torch.arange(ids.numel(), device="cpu") < self.ids.numel()
        keep = is_beside[ids] & ~(is_old & torch.isin(ids, ids[~is_old]))
        kept = torch.nonzero(keep).flatten()
        order = kept[ids[kept].argsort()]
        added = zip(*(arrays for _, arrays in self._added), strict=True)
        parts = list(added) or [() for _ in self._arrays]
        self._arrays = tuple(
            torch.cat([array, *new])[order] for array, new in zip(self._arrays, parts, strict=True)
        )
        self.ids = ids[order]
        self._added.clear()

    def find(self, ids: Tensor) -> list[Tensor]:
        """Return the arrays' entries of rows that are beside.

        Args:
            ids: int64 [n], all of them beside.
        """
        places = torch.searchsorted(self.ids, ids)
        return [array[places] for array in self._arrays]

    def share(self, source: RowsBeside) -> None:
        """Have the rows of another copy of the table."""
        self.ids, self._arrays = source.ids, source._arrays
        self._added.clear()
