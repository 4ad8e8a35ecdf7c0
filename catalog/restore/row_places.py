"""Finds where rows of a table are among the chunks of a full, for many ids at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["RowPlaces", "row_places"]

#: Where the chunks have at most so many rows for each id, a map of all these rows is faster than a
#: search for each id.
_DENSE: Final = 16

_Positions = np.ndarray[Any, np.dtype[np.int64]]


class RowPlaces(NamedTuple):
    """Which ids are rows of a chunk.

    Attributes:
        ids: positions among the ids, int64 [n], ascending.
        rows: their positions in the chunk, int64 [n].
    """

    ids: Tensor
    rows: Tensor


def row_places(chunks: Sequence[range | Tensor], ids: Tensor) -> list[RowPlaces]:
    """Return for each chunk which ids are among its rows.

    Args:
        chunks: the rows of each chunk: a range, or int64 [m], ascending.
        ids: int64 [n], ascending, without duplicates.
    """
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    if not ids.numel():
        return [RowPlaces(none, none) for _ in chunks]
    wanted = ids.numpy()
    first, stop = int(wanted[0]), int(wanted[-1]) + 1
    spans = [_span(rows, first, stop) for rows in chunks]
    found = None
    if sum(map(len, spans)) <= _DENSE * len(wanted):
        found = _mapped(chunks, spans, wanted)
    if found is None:
        found = [_searched(rows, wanted) for rows in chunks]
    return [RowPlaces(torch.from_numpy(own), torch.from_numpy(rows)) for own, rows in found]


def _span(rows: range | Tensor, first: int, stop: int) -> range:
    """Return the positions of the rows from `first` to before `stop`."""
    if isinstance(rows, range):
        return range(*(min(max(end - rows.start, 0), len(rows)) for end in (first, stop)))
    return range(*np.searchsorted(rows.numpy(), [first, stop]).tolist())


def _mapped(
    chunks: Sequence[range | Tensor], spans: Sequence[range], wanted: _Positions
) -> list[tuple[_Positions, _Positions]] | None:
    """Return the places by a map; None: a row is in two chunks, of which a map knows one only."""
    first = int(wanted[0])
    # Of each row between the first and the last id: its number among the rows of all spans.
    numbers = np.full(int(wanted[-1]) + 1 - first, -1, np.int64)
    before = 0
    for rows, span in zip(chunks, spans, strict=True):
        own = slice(before, before + len(span))
        if isinstance(rows, range):
            start = rows.start + span.start - first
            numbers[start : start + len(span)] = np.arange(own.start, own.stop)
        else:
            numbers[rows.numpy()[span.start : span.stop] - first] = np.arange(own.start, own.stop)
        before += len(span)
    if np.count_nonzero(numbers >= 0) < before:
        return None
    number_of_id = numbers[wanted - first]
    found, before = [], 0
    for span in spans:
        is_own = (number_of_id >= before) & (number_of_id < before + len(span))
        own_ids = np.flatnonzero(is_own)
        found.append((own_ids, number_of_id[own_ids] - before + span.start))
        before += len(span)
    return found


def _searched(rows: range | Tensor, wanted: _Positions) -> tuple[_Positions, _Positions]:
    if isinstance(rows, range):
        own_ids = np.arange(*np.searchsorted(wanted, [rows.start, rows.stop]))
        return own_ids, wanted[own_ids] - rows.start
    of_chunk = rows.numpy()
    positions = np.searchsorted(of_chunk, wanted)
    np.minimum(positions, len(of_chunk) - 1, out=positions)
    own_ids = np.flatnonzero(of_chunk[positions] == wanted)
    return own_ids, positions[own_ids]
