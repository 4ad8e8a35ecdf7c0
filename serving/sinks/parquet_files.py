"""Rows of a version in Parquet files: what a version changed in one table, and all rows of it.

A file has the columns `id`, int64, and `row`, a list of the table's dim values; BF16, which Parquet
lacks, is bytes of the row's length. A file of deletions has the column `id` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from recpoint.format.dtypes import torch_dtype
from recpoint.serving.sinks.records import SinkTable

__all__ = ["RowsById", "DeltaWriter", "read_ids", "read_rows"]

_VALUES: Final = {
    "F64": pa.float64(),
    "F32": pa.float32(),
    "F16": pa.float16(),
    "I64": pa.int64(),
}


def _schema(table: SinkTable) -> pa.Schema:
    values = _VALUES.get(table.dtype)
    row = pa.binary(table.row_bytes) if values is None else pa.list_(values, table.dim)
    return pa.schema([pa.field("id", pa.int64(), False), pa.field("row", row, False)])


_DELETED: Final = pa.schema([pa.field("id", pa.int64(), False)])


class DeltaWriter:
    """Writes one file, a group of rows for each call; of rows that were put, or deleted.

    Args:
        path: the file, which is made by the first call.
        table: the table; None: the file names deleted rows.
    """

    def __init__(self, path: Path, table: SinkTable | None) -> None:
        self._path, self._table = path, table
        self._schema = _DELETED if table is None else _schema(table)
        self._writer: pq.ParquetWriter | None = None
        self.rows = 0

    def write(self, ids: Tensor, rows: Tensor | None) -> None:
        """Append rows: ids int64 [n], and [n, dim] of the table's dtype, or None if deleted."""
        if not len(ids):
            return
        columns = [pa.array(ids.numpy())]
        if rows is not None:
            assert self._table is not None
            columns.append(_row_column(self._table, rows))
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, self._schema, compression="zstd")
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))
        self.rows += len(ids)

    def close(self) -> None:
        """Write the end of the file; without rows there is no file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _row_column(table: SinkTable, rows: Tensor) -> pa.Array:
    field = _schema(table).field("row").type
    if table.dtype in _VALUES:
        values = pa.array(rows.numpy().reshape(-1), type=field.value_type)
        return pa.FixedSizeListArray.from_arrays(values, type=field)
    data = rows.contiguous().view(torch.uint8).numpy()
    return pa.FixedSizeBinaryArray.from_buffers(field, len(rows), [None, pa.py_buffer(data)])


def read_ids(path: Path) -> Iterator[Tensor]:
    """Return the ids of a file, int64 [n], a group of rows at a time."""
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            yield _ids(file.read_row_group(group, columns=["id"]))


def read_rows(path: Path, table: SinkTable) -> Iterator[tuple[Tensor, Tensor]]:
    """Return ids, int64 [n], and their rows, [n, dim], a group of rows at a time."""
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            columns = file.read_row_group(group).combine_chunks()
            chunk = columns.column("row").chunk(0)
            count = len(chunk)
            if table.dtype in _VALUES:
                values = torch.from_numpy(np.array(chunk.flatten().to_numpy(zero_copy_only=False)))
            else:
                first = chunk.offset * table.row_bytes
                data = bytearray(chunk.buffers()[1])[first : first + count * table.row_bytes]
                values = torch.frombuffer(data, dtype=torch_dtype(table.dtype))
            yield _ids(columns), values.view(count, table.dim)


def _ids(columns: pa.Table) -> Tensor:
    return torch.from_numpy(np.array(columns.column("id").to_numpy()))


class RowsById(NamedTuple):
    """The rows of a table at one version; never changed.

    Attributes:
        ids: int64 [n], ascending.
        rows: [n, dim], in this order.
    """

    ids: Tensor
    rows: Tensor

    @classmethod
    def none(cls, table: SinkTable) -> Self:
        """Return a table without rows."""
        dtype = torch_dtype(table.dtype)
        return cls(
            torch.empty(0, dtype=torch.int64, device="cpu"),
            torch.empty(0, table.dim, dtype=dtype, device="cpu"),
        )

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return where ids [n] lie, and which of them there are, bool [n]."""
        if not len(self.ids):
            return torch.zeros_like(ids), torch.zeros(len(ids), dtype=torch.bool, device="cpu")
        places = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        return places, self.ids[places] == ids

    def changed(self, gone_ids: Tensor, ids: Tensor, rows: Tensor) -> RowsById:
        """Return the rows after a version: without `gone_ids`, and with `rows` for `ids`."""
        stays = torch.ones(len(self.ids), dtype=torch.bool, device="cpu")
        for changed_ids in (gone_ids, ids):
            places, present = self.places(changed_ids)
            stays[places[present]] = False
        all_ids = torch.cat([self.ids[stays], ids])
        order = all_ids.argsort()
        return RowsById(all_ids[order], torch.cat([self.rows[stays], rows])[order])
