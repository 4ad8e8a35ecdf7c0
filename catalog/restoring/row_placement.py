"""From a checked row chunk to the tensors of a model: decode the rows that count, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from recpoint.catalog.chunks.chunk_reader import StoredRows
from recpoint.catalog.restoring.restore_target import TableTarget
from recpoint.kernels import quantize, row_gather

__all__ = ["place"]

#: Rows that cannot go straight to their places are converted in memory of this size.
_PASS_BYTES: Final = 8 << 20


def place(stored: StoredRows, positions: Tensor | None, into: TableTarget) -> None:
    """Put rows of a chunk in their places; ids and shapes have been checked against the table.

    Args:
        stored: the chunk.
        positions: which of its rows, int64 [m]; None: all.
        into: the table's tensors, on any device.
    """
    if positions is not None and positions.numel() == 0:
        return
    rows = stored.rows
    ids: range | Tensor = rows
    among = slice(None)
    if positions is not None and isinstance(rows, range):
        # Positions in the chunk are ids in its part of the table: no ids have to be made of them.
        ids, among = positions, slice(rows.start, rows.stop)
    elif positions is not None and isinstance(rows, Tensor):
        # By numpy: torch's threads would wait for a core that others read chunks on.
        ids = torch.from_numpy(rows.numpy()[positions.numpy()])
    values = into.values[among]
    if stored.scheme == "exact":
        _put(stored.values, positions, values, ids)
    elif values.is_cpu and values.dtype == torch.float32:
        _decode(stored, positions, values, ids)
    else:
        _decode_in_passes(stored, positions, values, ids)
    for part, dest in zip(stored.row_states, into.row_states, strict=True):
        if dest is not None:
            _put(part, positions, dest[among], ids)


def _decode(
    stored: StoredRows, positions: Tensor | None, dest: Tensor, ids: range | Tensor
) -> None:
    if isinstance(ids, range):
        dest, given = dest[ids.start : ids.stop], None
    else:
        given = ids
    quantize.dequantize_rows(
        stored.values,
        stored.scale,
        stored.offset,
        dest,
        given,
        bits=stored.bits,
        positions=positions,
    )


def _decode_in_passes(
    stored: StoredRows, positions: Tensor | None, dest: Tensor, ids: range | Tensor
) -> None:
    """For a table on a GPU, where the codes are decoded, or of half precision."""

    def decoded(part: slice) -> Tensor:
        codes, scale, offset = (
            _chosen(source, positions, part).to(dest.device)
            for source in (stored.values, stored.scale, stored.offset)
        )
        rows = quantize.dequantize_packed(codes, scale, offset, dim=dest.shape[1], bits=stored.bits)
        return rows.to(dest.dtype)  # rounds, format §3.2

    _in_passes(decoded, dest, ids)


def _put(source: Tensor, positions: Tensor | None, dest: Tensor, ids: range | Tensor) -> None:
    """Copy rows as they are, or BF16 to F32, which is exact (format §3.5)."""
    if isinstance(ids, range):
        dest[ids.start : ids.stop].copy_(source)
    elif dest.is_cpu and dest.dtype == source.dtype:
        if positions is None:
            row_gather.scatter(source, ids, dest)
        else:
            row_gather.move(source, positions, dest, ids)
    else:
        _in_passes(
            lambda part: _chosen(source, positions, part).to(dest.device).to(dest.dtype), dest, ids
        )


def _chosen(source: Tensor, positions: Tensor | None, part: slice) -> Tensor:
    return source[part] if positions is None else source[positions[part]]


def _in_passes(rows: Callable[[slice], Tensor], dest: Tensor, ids: range | Tensor) -> None:
    row_bytes = max(1, dest.nbytes // max(1, len(dest)))
    step = max(1, _PASS_BYTES // row_bytes)
    for start in range(0, len(ids), step):
        part = slice(start, start + step)
        given = ids[part]
        if isinstance(given, range):
            dest[given.start : given.stop].copy_(rows(part))
        else:
            row_gather.scatter(rows(part), given.to(dest.device), dest)
