"""Names the versions that a sink holds, as the sink itself records them."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from recpoint.format.dtypes import item_bytes
from recpoint.format.records import (
    CheckpointRef,
    HexToken,
    Part,
    PartT,
    validate,
)
from recpoint.format.untrusted_json import parse_json

__all__ = [
    "EMPTY_FIRST",
    "CommittedVersion",
    "DeferredRows",
    "SinkTable",
    "SinkVersion",
    "TableChange",
    "parsed",
]

#: What to do with a sink whose records or rows are damaged.
EMPTY_FIRST: Final = (
    "delete the sink's file or directory, or its keys in Redis; then recpoint publish-to SINK URL"
)

_MAX_BYTES: Final = 16 << 20


class SinkTable(Part):
    """A table of a version.

    Attributes:
        name: its name in the model.
        rows: number of rows of the table in the checkpoint; of a keyed table: of its slots, and the
            sink has the rows that keys have.
        dim: values in a row.
        dtype: dtype of a value; values are little-endian.
        ids: what the ids are: numbers of the table's rows; keys (format §3.8); or slots of a keyed
            table, each with its key as the only value. The last are for publishers, who learn from
            them which key has lost its row.
    """

    name: Annotated[str, Field(min_length=1, max_length=1024)]
    rows: Annotated[int, Field(ge=1)]
    dim: Annotated[int, Field(ge=1)]
    dtype: Literal["F64", "F32", "F16", "BF16", "I64"]
    ids: Literal["rows", "keys", "slots"]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dim * item_bytes(self.dtype)


class SinkVersion(Part):
    """A checkpoint of a run, as a sink is to hold it.

    Attributes:
        run: id of the run.
        checkpoint: the checkpoint.
        tables: its tables, those that the sink is to hold.
    """

    run: HexToken
    checkpoint: CheckpointRef
    tables: Annotated[tuple[SinkTable, ...], Field(strict=False)]

    def table(self, name: str) -> SinkTable | None:
        """Return a table by name; None: the version has no such table."""
        return next((table for table in self.tables if table.name == name), None)


class DeferredRows(Part):
    """Rows of a table that a version under a budget left as they were at an older version.

    Attributes:
        rows: how many there are.
        size_bytes: of these rows.
        oldest: the oldest checkpoint that one of them stands at.
        oldest_number: number of the sink's version that had this checkpoint.
    """

    rows: Annotated[int, Field(ge=1)]
    size_bytes: Annotated[int, Field(ge=1)]
    oldest: CheckpointRef
    oldest_number: Annotated[int, Field(ge=1, lt=2**48)]


class TableChange(Part):
    """What a version brought to one table of the sink.

    Attributes:
        table: the table's name.
        rows_put: rows that were put.
        rows_deleted: rows that were deleted.
        digest: sum of the digests of the rows that were put (format §3.6), 16 hex digits.
        deferred: rows that did not come yet; None: all rows are those of the version.
    """

    table: str
    rows_put: Annotated[int, Field(ge=0)]
    rows_deleted: Annotated[int, Field(ge=0)]
    digest: Annotated[str, Field(pattern=r"\A[0-9a-f]{16}\z")]
    deferred: DeferredRows | None = None


class CommittedVersion(Part):
    """A whole version that readers of a sink see.

    Attributes:
        number: 1 for the first version of the sink, and one more for each later one.
        version: what it is.
        parent: the version that it was made from by its changes; None: all rows came anew.
        changes: what it brought, for each table.
        committed_ms: when the sink committed it, in Unix milliseconds by the sink's clock.
    """

    number: Annotated[int, Field(ge=1, lt=2**48)]
    version: SinkVersion
    parent: CheckpointRef | None
    changes: Annotated[tuple[TableChange, ...], Field(strict=False)]
    committed_ms: Annotated[int, Field(ge=0, lt=2**53)]

    @property
    def deferred(self) -> DeferredRows | None:
        """The rows of all tables that stand at older versions; None: there are none."""
        of_tables = [change.deferred for change in self.changes if change.deferred is not None]
        if not of_tables:
            return None
        oldest = min(of_tables, key=lambda deferred: deferred.oldest_number)
        return DeferredRows(
            rows=sum(deferred.rows for deferred in of_tables),
            size_bytes=sum(deferred.size_bytes for deferred in of_tables),
            oldest=oldest.oldest,
            oldest_number=oldest.oldest_number,
        )


def parsed(kind: type[PartT], data: bytes | str, *, name: str) -> PartT:
    """Return a record of a sink.

    Args:
        kind: what it is.
        data: its JSON.
        name: where it lies, for errors.

    Raises:
        MalformedObject: it is no such record.
    """
    next_step = EMPTY_FIRST
    raw = data.encode() if isinstance(data, str) else data
    fields = parse_json(raw, name=name, next_step=next_step, max_bytes=_MAX_BYTES)
    return validate(kind, fields, name=name, next_step=next_step)
