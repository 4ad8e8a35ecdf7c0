"""Says which of the rows that a rank stores coming batches look up, and when last.

A rank sends each owner of rows only ids of that owner's rows, and each row once, under the last
batch that looks it up. So what a rank sends follows the rows that its own batches look up, however
many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.kernels import copy_ahead, dirty_bitmap

__all__ = ["OwnedRows", "own_ids", "packed_ids", "unpacked_ids"]

#: The most rows of which ids are sent in 32 bits.
_NARROW_ROWS = 1 << 31


class OwnedRows(NamedTuple):
    """Consecutive rows of a table that a rank stores.

    Attributes:
        key: name of the table, or of some of its columns; differs for each entry of a rank.
        name: name of the whole table.
        first_row: position in the whole table.
        rows: number of rows.
    """

    key: str
    name: str
    first_row: int
    rows: int


class _RowSpan(NamedTuple):
    """Rows of a whole table. Shards of its columns may have the same."""

    name: str
    first_row: int
    rows: int


def _spans(owned: Iterable[OwnedRows]) -> list[_RowSpan]:
    """Return the rows that a rank owns of any columns, each range once."""
    return list(dict.fromkeys(_RowSpan(*rows[1:]) for rows in owned))


def own_ids(
    batches: Sequence[Mapping[str, Tensor]], owned: Sequence[OwnedRows]
) -> list[dict[str, Tensor]]:
    """Return the ids of batches by the keys of owned rows, as positions in these rows.

    Args:
        batches: for each batch, name of a table -> ids in the whole table: int32 or int64 [n].
        owned: the rows.

    Returns:
        For each batch, `OwnedRows.key` -> ids, some of them outside the owned rows.
    """
    return [
        {
            rows.key: _shifted(batch[rows.name], rows.first_row)
            for rows in owned
            if rows.name in batch
        }
        for batch in batches
    ]


def packed_ids(batches: Sequence[Mapping[str, Tensor]], owned: Sequence[OwnedRows]) -> Tensor:
    """Return a message to the owner of rows: which of them the batches look up last.

    Args:
        batches: as for `own_ids`.
        owned: the rows of the owner.

    Returns:
        uint8 [n]: for each span of rows and each batch the number of ids, int64; then these ids, as
        positions in the span, int32 or int64.
    """
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    counts, ids = [nothing], [nothing]
    for span in _spans(owned):
        uses = copy_ahead.last_uses(
            [_shifted(batch.get(span.name, nothing), span.first_row) for batch in batches],
            rows=span.rows,
            seen=dirty_bitmap.new(span.rows),
        )
        counts.append(uses.starts.diff())
        ids.append(uses.ids)
    sent_ids = torch.cat(ids).to(_id_dtype(owned))
    return torch.cat([torch.cat(counts).view(torch.uint8), sent_ids.view(torch.uint8)])


def unpacked_ids(
    message: Tensor, owned: Sequence[OwnedRows], batches: int
) -> list[dict[str, Tensor]]:
    """Return what `packed_ids` was given, as far as it concerns these rows.

    Args:
        message: as `packed_ids` returned it for the same rows.
        owned: the rows.
        batches: number of batches.

    Returns:
        For each batch, `OwnedRows.key` -> ids of owned rows, as positions in these rows.
    """
    spans = _spans(owned)
    head_bytes = 8 * batches * len(spans)
    # Cloned, because numbers must lie at addresses that fit their size.
    counts = message[:head_bytes].clone().view(torch.int64).tolist()
    ids = message[head_bytes:].clone().view(_id_dtype(owned)).split(counts)
    first_part = {span: index * batches for index, span in enumerate(spans)}
    return [
        {rows.key: ids[first_part[_RowSpan(*rows[1:])] + batch] for rows in owned}
        for batch in range(batches)
    ]


def _shifted(ids: Tensor, first_row: int) -> Tensor:
    return ids.long() - first_row if first_row else ids


def _id_dtype(owned: Sequence[OwnedRows]) -> torch.dtype:
    is_narrow = max((rows.rows for rows in owned), default=0) <= _NARROW_ROWS
    return torch.int32 if is_narrow else torch.int64
