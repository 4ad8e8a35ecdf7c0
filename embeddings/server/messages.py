"""Defines the messages of trainers to an embedding server, and the server's answers.

First come those about rows, and then those about a checkpoint whose rows the server stages
(`PartStager`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from recpoint.embeddings.server.transport import (
    Done,
    Hosts,
    Message,
    Name,
    Number,
    Positive,
    RecordUse,
    RowMessage,
    SlotRows,
    TablesMessage,
)
from recpoint.format.job import Job
from recpoint.format.records import Part

__all__ = [
    "AddTable",
    "AskRejection",
    "AskSizes",
    "Begin",
    "Begun",
    "CheckStripes",
    "ClearTable",
    "DropPart",
    "Fetch",
    "Freeze",
    "FrozenReader",
    "HomeSizes",
    "NameRows",
    "NamedTable",
    "OpenPart",
    "PartProgress",
    "PartRejection",
    "Release",
    "SealPart",
    "SendNewRows",
    "WriteBack",
]


class Begun(Part):
    """The incarnation that a server has taken."""

    incarnation: Positive


class Begin(Message[Begun]):
    """Has the server forget everything and work for a training.

    If this owner has begun this round already, or a later one, the server does nothing, and the
    message may name any incarnation.
    """

    kind: Literal["begin"] = "begin"
    incarnation: Number
    owner: Positive
    round: Number = 0
    is_protected: bool = False


class AddTable(Message[Done]):
    """Has the server make room for its part of a table.

    Attributes:
        rows: slots of rows on this server.
        record_bytes: of a record.
        all_rows: rows of the table on all servers.
        generation: with parity: how often the other servers have cleared the table.
        is_lost: with parity: whether the server has to recover the rows.
    """

    kind: Literal["add_table"] = "add_table"
    incarnation: Number
    table: Name
    rows: Number
    record_bytes: Number
    all_rows: Number
    generation: Number = 0
    is_lost: bool = False


class FrozenReader(Part):
    """The number of a reader of frozen rows."""

    number: Number


class Freeze(Message[FrozenReader]):
    """Has the server keep slots start … stop - 1 of a table as they are, for `Fetch`.

    Attributes:
        trainer: number of the trainer.
        batch: increases with each write, freeze or clear of this trainer to the table.
        open_from: the trainer's first freeze of the table, by `batch`, that is still open. Those
            before are released, so a freeze whose answer was lost is not kept for ever.
    """

    kind: Literal["freeze"] = "freeze"
    incarnation: Number
    table: Name
    start: Number
    stop: Number
    trainer: Number
    batch: Number
    open_from: Number


class Release(Message[Done]):
    """Has the server give up a reader of frozen rows."""

    kind: Literal["release"] = "release"
    incarnation: Number
    number: Number


class ClearTable(Message[Done]):
    """Has the server forget all rows of a table, and release its frozen rows.

    Attributes:
        trainer, batch: see `Freeze`.
        generation: with parity: how often the table has been cleared then.
    """

    kind: Literal["clear"] = "clear"
    incarnation: Number
    table: Name
    trainer: Number
    batch: Number
    generation: Number = 0


class HomeSizes(Part):
    """What `Home.size_bytes` returns."""

    size_bytes: dict[str, int]


class AskSizes(Message[HomeSizes]):
    """Asks how many bytes the server's rows take."""

    kind: Literal["sizes"] = "sizes"
    incarnation: Number


class Fetch(TablesMessage[Done]):
    """Reads records, as `Home.fetch_all` does.

    The reply's tensors: for each table bool [n], whether the server has the row.

    Attributes:
        tables: names.
        frozen: number of the reader that `Freeze` returned, for rows of its table alone; None: the
            rows as they are now.
    """

    records: ClassVar[RecordUse] = RecordUse.FILLED
    kind: Literal["fetch"] = "fetch"
    frozen: Number | None = None


class WriteBack(TablesMessage[Done]):
    """Stores records, as `Home.write_back_all` does.

    Attributes:
        tables: names.
        trainer: number of the trainer that writes.
        batch: increases with each write of this trainer to a table. A write that comes again is
            acknowledged and not done again, also if later writes were done since.
    """

    records: ClassVar[RecordUse] = RecordUse.SENT
    kind: Literal["write_back"] = "write_back"
    trainer: Number
    batch: Number


class CheckStripes(RowMessage[Done]):
    """Compares stripes with their parity, as `StripeMember.check` does.

    The slots beside it are those of first parity rows on this server. The reply's tensor:
    `StripeVerdict`s, uint8 [n].
    """

    kind: Literal["check"] = "check"
    incarnation: Number
    table: Name

    def room(self, rows: Sequence[SlotRows]) -> list[Tensor]:
        """Return memory for the verdicts."""
        return [torch.empty(len(rows[0].slots), dtype=torch.uint8, device="cpu")]


class NamedTable(Part):
    """A table of which a trainer will name rows.

    Attributes:
        index: index of the table in the job.
        frozen: number of the reader of frozen rows from which they are taken.
        count: how many rows the trainer will name.
        table: name of the table.
        rows: rows of the table on all servers.
    """

    index: Number
    frozen: Number
    count: Number
    table: Name
    rows: Number


class PartProgress(Part):
    """How far a server's part of a checkpoint is.

    Attributes:
        is_done: whether rows can be put, or whether the job is staged.
        awaited: how many trainers have not said as much.
    """

    is_done: bool
    awaited: Number


class OpenPart(Message[PartProgress]):
    """Says which checkpoint the server stages, and how many rows of each table will be named.

    Attributes:
        job: the job to stage, without rows.
        root: the staging area on the server's host.
        most: how many jobs of this server may be staged at the same time.
        trainer: number of the trainer.
        servers: how many servers there are.
        data, parity: the form of a stripe; 0: there is no parity.
        hosts: with parity: for each server the name of its host when the training began.
        tables: what this trainer will name.
    """

    kind: Literal["open_part"] = "open_part"
    incarnation: Number
    job: Job
    root: Name
    most: Positive
    trainer: Number
    servers: Positive
    data: Number
    parity: Number
    hosts: Hosts
    tables: tuple[NamedTable, ...]


class _OfReader(RowMessage[Done]):
    """Goes with slots of one reader's table. The reply's tensor: see the subclass, bool [n]."""

    incarnation: Number
    frozen: Number

    def room(self, rows: Sequence[SlotRows]) -> list[Tensor]:
        """Return memory for one bool for each row."""
        return [torch.empty(len(rows[0].slots), dtype=torch.bool, device="cpu")]


class NameRows(_OfReader):
    """Has the server stage rows that it has.

    The reply's tensor: whether the row's record is there. The others must come by `SendNewRows`.

    Attributes:
        frozen: number of the reader from which the rows are taken.
        first: how many rows were named before these.
    """

    kind: Literal["name_rows"] = "name_rows"
    first: Number


class SendNewRows(_OfReader):
    """Has the server stage records of rows that it does not have, and that were named before.

    Attributes:
        frozen: number of the reader from which the rows were named.
    """

    records: ClassVar[RecordUse] = RecordUse.SENT
    kind: Literal["send_new_rows"] = "send_new_rows"

    def room(self, rows: Sequence[SlotRows]) -> list[Tensor]:
        """Return no memory: the reply has no tensor."""
        return []


class SealPart(Message[PartProgress]):
    """Says that a trainer has put all its rows."""

    kind: Literal["seal_part"] = "seal_part"
    incarnation: Number
    attempt: Name
    trainer: Number


class PartRejection(Part):
    """Why the agent has rejected a part; None: it has not, or nothing is known."""

    reason: str | None


class AskRejection(Message[PartRejection]):
    """Asks whether the agent has rejected the server's part."""

    kind: Literal["rejected"] = "rejected"
    incarnation: Number
    attempt: Name


class DropPart(Message[Done]):
    """Has the server give up its part of a checkpoint.

    Attributes:
        attempt: name of the checkpoint's attempt.
        job, root: once a job was staged there, as of `OpenPart`; None: it was not.
    """

    kind: Literal["drop_part"] = "drop_part"
    incarnation: Number
    attempt: Name
    job: Job | None = None
    root: Name | None = None
