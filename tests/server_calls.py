"""Calls of an embedding server, as tests make them without a home."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from recpoint.embeddings.home.contract import TableRows
from recpoint.embeddings.server.messages import AddTable, Fetch, WriteBack
from recpoint.embeddings.server.transport import SlotRows, Transport

__all__ = ["add_table", "fetch_rows", "write_rows"]


def add_table(
    transport: Transport, incarnation: int, *, rows: int, record_bytes: int, table: str = "t"
) -> None:
    message = AddTable(
        incarnation=incarnation,
        table=table,
        rows=rows,
        record_bytes=record_bytes,
        all_rows=rows,
    )
    transport.call(message)


def fetch_rows(
    transport: Transport,
    wanted: Sequence[TableRows],
    *,
    incarnation: int,
    frozen: int | None = None,
) -> list[Tensor]:
    """Return for each table whether the server has the row; records go to the tensors."""
    message = Fetch(
        incarnation=incarnation, tables=tuple(row_part.table for row_part in wanted), frozen=frozen
    )
    return list(
        transport.call(
            message, [SlotRows(row_part.ids, row_part.records) for row_part in wanted]
        ).tensors
    )


def write_rows(
    transport: Transport,
    changed: Sequence[TableRows],
    *,
    incarnation: int,
    trainer: int,
    batch: int,
) -> None:
    message = WriteBack(
        incarnation=incarnation,
        tables=tuple(row_part.table for row_part in changed),
        trainer=trainer,
        batch=batch,
    )
    transport.call(message, [SlotRows(row_part.ids, row_part.records) for row_part in changed])
