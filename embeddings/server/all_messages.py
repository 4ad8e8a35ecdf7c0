"""Knows all messages to an embedding server, and reads one from JSON."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from recpoint.embeddings.server.messages import (
    AddTable,
    AskRejection,
    AskSizes,
    Begin,
    CheckStripes,
    ClearTable,
    DropPart,
    Fetch,
    Freeze,
    NameRows,
    OpenPart,
    Release,
    SealPart,
    SendNewRows,
    WriteBack,
)
from recpoint.embeddings.server.parity_messages import (
    AskKnown,
    DecodeRows,
    GetParityRows,
    GetRows,
    GiveUp,
    JoinServer,
    ListTables,
    LoseServer,
    OpenServer,
    Protect,
    SendDifferences,
    TakeBack,
)
from recpoint.embeddings.server.transport import (
    Greet,
)
from recpoint.format.records import first_defect

__all__ = [
    "AnyMessage",
    "parsed",
]

AnyMessage: TypeAlias = (
    Greet
    | Begin
    | AddTable
    | Freeze
    | Release
    | ClearTable
    | AskSizes
    | Fetch
    | WriteBack
    | CheckStripes
    | OpenPart
    | NameRows
    | SendNewRows
    | SealPart
    | AskRejection
    | DropPart
    | Protect
    | JoinServer
    | OpenServer
    | LoseServer
    | TakeBack
    | GiveUp
    | ListTables
    | AskKnown
    | SendDifferences
    | GetRows
    | GetParityRows
    | DecodeRows
)
_ANY: Final[TypeAdapter[AnyMessage]] = TypeAdapter(
    Annotated[AnyMessage, Field(discriminator="kind")]
)


def parsed(text: bytes) -> AnyMessage:
    """Return the message that was sent as JSON.

    Raises:
        ValueError: it is none; says what it has instead, in few words.
    """
    try:
        return _ANY.validate_json(text)
    except ValidationError as error:
        fault, expected = first_defect(error)
        raise ValueError(f"a message with {fault}: {expected}") from None
