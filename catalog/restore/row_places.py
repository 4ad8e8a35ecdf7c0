"""Knows where rows of a table are among the chunks of a full, for many ids at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["FoundRows", "RowPlaces"]

#: Stands for a row that no chunk has, and for one that two chunks have.
_NOWHERE: Final = -1
_TWICE: Final = -2

_Numbers = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]


class FoundRows(NamedTuple):
    """Which ids are rows of a chunk.

    Attributes:
        chunk: number of the chunk, in the order in which chunks were added.
        ids: positions among the ids, int64 [n], ascending, n >= 1.
        rows: their positions in the chunk, int64 [n].
    """

    chunk: int
    ids: Tensor
    rows: Tensor


class _Chunk(NamedTuple):
    """A chunk with rows: the number of its first row among those of all chunks, and its ids."""

    start: int
    stop: int
    first_row: int
    last_row: int


class RowPlaces:
    """A map from rows to their places: four bytes for each row that may be asked for.

    Args:
        rows: ids are below it.
    """

    def __init__(self, rows: int) -> None:
        dtype = np.int32 if rows < 2**31 else np.int64
        self._numbers: _Numbers = np.full(rows, _NOWHERE, dtype)
        self._chunks: list[_Chunk] = []
        self._stop = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the map."""
        return self._numbers.nbytes

    def add(self, rows: range | Tensor) -> None:
        """Add the rows of a chunk. A row that an earlier chunk has will not be found any more.

        Args:
            rows: a range, or int64 [m], ascending.
        """
        start, self._stop = self._stop, self._stop + len(rows)
        ends = (int(rows[0]), int(rows[-1])) if len(rows) else (0, -1)
        self._chunks.append(_Chunk(start, self._stop, *ends))
        own = slice(rows.start, rows.stop) if isinstance(rows, range) else rows.numpy()
        numbers = np.arange(start, self._stop, dtype=self._numbers.dtype)
        numbers[self._numbers[own] != _NOWHERE] = _TWICE
        self._numbers[own] = numbers

    def find(self, ids: Tensor) -> Iterator[FoundRows]:
        """Yield for each chunk with any of the ids where they are.

        Args:
            ids: int64 [n], ascending, without duplicates, not negative.
        """
        wanted = ids.numpy()
        wanted = wanted[: int(np.searchsorted(wanted, len(self._numbers)))]
        if not len(wanted):
            return
        first, last = int(wanted[0]), int(wanted[-1])
        is_range = last - first == len(wanted) - 1
        numbers = self._numbers[first : last + 1] if is_range else self._numbers[wanted]
        for index, chunk in enumerate(self._chunks):
            if chunk.last_row < first or chunk.first_row > last:
                continue
            own_ids = np.flatnonzero((numbers >= chunk.start) & (numbers < chunk.stop))
            if len(own_ids):
                rows = numbers[own_ids].astype(np.int64) - chunk.start
                yield FoundRows(index, torch.from_numpy(own_ids), torch.from_numpy(rows))
