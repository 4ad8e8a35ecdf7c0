"""Turns rows into bytes and back, and dense layers into one object, as every sink stores them.

A row is its values one after another, little-endian, as torch has them in memory. Dense layers are
a safetensors file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import safetensors.torch
import torch
from torch import Tensor

from recpoint.errors import SinkError, UnknownTable
from recpoint.format.dtypes import torch_dtype
from recpoint.serving.sinks.records import EMPTY_FIRST, SinkTable, SinkVersion

__all__ = [
    "bytes_of_dense",
    "bytes_of_rows",
    "dense_of_bytes",
    "equal_rows",
    "joined_bytes",
    "rows_of_bytes",
    "table_of",
]


def bytes_of_rows(rows: Tensor) -> list[bytes]:
    """Return the bytes of each row.

    Args:
        rows: [n, dim], contiguous, on the CPU.
    """
    data = joined_bytes(rows)
    row_bytes = rows.shape[1] * rows.element_size()
    return [data[first : first + row_bytes] for first in range(0, len(data), row_bytes)]


def joined_bytes(rows: Tensor) -> bytes:
    """Return the bytes of rows one after another; arguments as for `bytes_of_rows`."""
    return rows.view(torch.uint8).numpy().tobytes()


def rows_of_bytes(
    url: str, table: SinkTable, ids: Tensor, stored: Sequence[bytes | None]
) -> tuple[Tensor, Tensor]:
    """Return rows, [n, dim], zeros where there is none, and which there are, bool [n].

    Args:
        url: of the sink, for errors.
        table: the table.
        ids: int64 [n].
        stored: the bytes of each row; None: there is no such row.

    Raises:
        SinkError: a row has another number of bytes than its table's rows.
    """
    present = torch.tensor([row is not None for row in stored], dtype=torch.bool, device="cpu")
    no_row = bytes(table.row_bytes)
    data = bytearray(b"".join(no_row if row is None else row for row in stored))
    lengths = {len(row) for row in stored if row is not None}
    if lengths - {table.row_bytes}:
        place = next(i for i, r in enumerate(stored) if r is not None and len(r) != len(no_row))
        raise SinkError(
            f"{url}, row {int(ids[place])} of table {table.name!r:.80}",
            found=f"{len(stored[place] or b'')} bytes",
            expected=f"{table.row_bytes}",
            next_step=EMPTY_FIRST,
        )
    if not data:
        return torch.empty(0, table.dim, dtype=torch_dtype(table.dtype), device="cpu"), present
    rows = torch.frombuffer(data, dtype=torch_dtype(table.dtype))
    return rows.view(len(stored), table.dim), present


def equal_rows(rows: Tensor, other_rows: Tensor) -> Tensor:
    """Return which rows, [n, dim], n > 0, have the same bits: bool [n]."""
    is_equal = rows.contiguous().view(torch.uint8) == other_rows.contiguous().view(torch.uint8)
    return is_equal.view(len(rows), -1).all(dim=1)


def bytes_of_dense(dense: Mapping[str, Tensor]) -> bytes:
    """Return dense layers as a safetensors file."""
    return safetensors.torch.save({name: t.detach().contiguous() for name, t in dense.items()})


def dense_of_bytes(data: bytes) -> dict[str, Tensor]:
    """Return dense layers, by name, on the CPU."""
    return safetensors.torch.load(data)


def table_of(url: str, version: SinkVersion, name: str) -> SinkTable:
    """Return a table of a version.

    Raises:
        UnknownTable: the version has no such table.
    """
    table = version.table(name)
    if table is None:
        raise UnknownTable(
            f"{url}, table {name!r:.200}",
            found=f"no such table in {version.checkpoint}",
            expected=f"one of {', '.join(repr(t.name) for t in version.tables):.500}",
            next_step="look up one of these, or name the table in publish-to --table",
        )
    return table
