"""Turns calls between servers into requests and answers of `stream.py`, and back.

What is not a tensor travels as JSON. A moment is a list: an incarnation, and for each receiver its
number, its incarnation, and the number of a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from recpoint.embeddings.parity.peers import (
    Differences,
    Members,
    Moment,
    Sent,
    TableShare,
    TableSlots,
)
from recpoint.embeddings.server.stream import (
    DECODED,
    DIFFERENCES,
    ROWS,
    Answer,
    Malformed,
    Part,
    Piece,
    Request,
    Stream,
    parse,
    text_of,
)

if TYPE_CHECKING:
    from recpoint.embeddings.server.server import EmbeddingServer

__all__ = [
    "answer_peer",
    "differences_request",
    "members_request",
    "parity_rows_note",
    "received_members",
    "rows_note",
]


def differences_request(
    messages: Sequence[tuple[Sent, Differences]], incarnation: int
) -> list[Piece]:
    """Return what to send for `Peer.differences` to a server of this incarnation."""
    notes = [
        {
            "tables": given.tables,
            "source": sent.source,
            "incarnation": sent.incarnation,
            "number": sent.number,
            "write": sent.write,
            "shares": [[server, *share] for server, share in sent.shares.items()],
            "settled": sent.settled,
        }
        for sent, given in messages
    ]
    request = Request(
        kind=DIFFERENCES,
        text=text_of({"messages": notes}),
        parts=[Part(given.rows.shape[1], len(given.slots)) for _, given in messages],
        incarnation=incarnation,
    )
    slots = [given.slots for _, given in messages]
    return [*request.pieces, *slots, *(given.rows for _, given in messages)]


def rows_note(*, recover: bool, is_condensed: bool) -> dict[str, object]:
    """Return what a request for `Peer.rows` says."""
    return {"recover": recover, "condensed": is_condensed}


def parity_rows_note(at: Mapping[int, tuple[int, int]], *, is_condensed: bool) -> dict[str, object]:
    """Return what a request for `Peer.parity_rows` says."""
    moments = [[source, *moment] for source, moment in at.items()]
    return {"at": moments, "condensed": is_condensed}


def members_request(
    kind: int,
    note: Mapping[str, object],
    wanted: Sequence[TableSlots],
    row_bytes: int,
    incarnation: int,
) -> list[Piece]:
    """Return what to send to a server of this incarnation.

    Args:
        kind: ROWS, PARITY_ROWS or DECODED.
        note: what the request says.
        wanted: rows or parity rows.
        row_bytes: of the rows in the answer.
        incarnation: of the server.
    """
    request = Request(
        kind=kind,
        text=text_of({**note, "tables": [one.table for one in wanted]}),
        parts=[Part(row_bytes, len(one.slots)) for one in wanted],
        incarnation=incarnation,
    )
    return [*request.pieces, *(one.slots.contiguous() for one in wanted)]


def received_members(
    answer: Answer, stream: Stream, wanted: Sequence[TableSlots], row_bytes: int
) -> Members:
    """Receive the rest of an answer with members.

    Raises:
        Malformed: it is none.
    """
    said = parse(answer.text)
    count = sum(len(one.slots) for one in wanted)
    generations = said.get("generations")
    if not isinstance(generations, list) or len(generations) != len(wanted):
        raise Malformed("another number of tables than was asked for")
    if answer.count != count:
        raise Malformed("another number of rows than was asked for")
    bits = np.frombuffer(stream.receive(-(-count // 8)), dtype=np.uint8)
    is_known = torch.from_numpy(np.unpackbits(bits, count=count)).view(torch.bool)
    rows = torch.empty(count, row_bytes, dtype=torch.uint8, device="cpu")
    stream.receive_into(rows)
    return Members(
        is_known=is_known,
        rows=rows,
        moment=_moment(said.get("moment")),
        generations=[_number(one) for one in generations],
    )


def answer_peer(
    server: EmbeddingServer, request: Request, rows: Sequence[tuple[Tensor, Tensor]]
) -> list[Piece]:
    """Answer a request of another server.

    Raises:
        Malformed: it is none.
        ServerLost, HomeError, OutOfStep, ValueError: the server's error.
    """
    note = parse(request.text)
    member = server.member(request.incarnation)
    if request.kind == DIFFERENCES:
        member.other_servers.receive(_messages(note.get("messages"), rows))
        return Answer().pieces
    tables = note.get("tables")
    if (
        not isinstance(tables, list)
        or len(tables) != len(rows)
        or not all(isinstance(table, str) for table in tables)
    ):
        raise Malformed("rows without names of tables")
    wanted = [
        TableSlots(table, slots.clone()) for table, (slots, _) in zip(tables, rows, strict=True)
    ]
    is_condensed = note.get("condensed") is True
    if request.kind == DECODED:
        found = member.recovery.decoded(wanted, _number(note.get("lost")))
    elif request.kind == ROWS:
        recover = note.get("recover") is True
        found = member.rows(wanted, recover=recover, is_condensed=is_condensed)
    else:
        at = {source: (its, last) for source, its, last in _numbers(note.get("at"), 3)}
        found = member.parity_rows(wanted, at, is_condensed=is_condensed)
    row_bytes = request.parts[0].record_bytes
    if found.rows.shape[1] != row_bytes:
        raise ValueError(f"rows of {row_bytes} bytes, expected {found.rows.shape[1]}")
    incarnation, last = found.moment
    moment = [incarnation, [[receiver, *sent] for receiver, sent in last.items()]]
    said = {"moment": moment, "generations": found.generations}
    head = Answer(text=text_of(said), count=len(found.rows))
    return [*head.pieces, np.packbits(found.is_known.numpy()).tobytes(), found.rows]


def _messages(
    notes: object, rows: Sequence[tuple[Tensor, Tensor]]
) -> list[tuple[Sent, Differences]]:
    if (
        not isinstance(notes, list)
        or len(notes) != len(rows)
        or not all(isinstance(note, dict) for note in notes)
    ):
        raise Malformed("another number of messages than of rows")
    return [(_sent(note), _differences(note, *one)) for note, one in zip(notes, rows, strict=True)]


def _sent(note: Mapping[str, object]) -> Sent:
    numbers = [note.get(name) for name in ("source", "incarnation", "number", "write", "settled")]
    (source, incarnation, number, write, settled), *_ = _numbers([numbers], 5)
    shares = {one: (its, last) for one, its, last in _numbers(note.get("shares"), 3)}
    return Sent(
        source=source,
        incarnation=incarnation,
        number=number,
        write=write,
        shares=shares,
        settled=settled,
    )


def _differences(note: Mapping[str, object], slots: Tensor, records: Tensor) -> Differences:
    tables = note.get("tables")
    if not isinstance(tables, list) or not all(
        isinstance(one, list) and len(one) == 3 and isinstance(one[0], str) for one in tables
    ):
        raise Malformed("differences without tables")
    numbers = _numbers([numbers for _, *numbers in tables], 2)
    shares = [TableShare(name, *two) for (name, *_), two in zip(tables, numbers, strict=True)]
    return Differences(tables=shares, slots=slots, rows=records)


def _moment(said: object) -> Moment:
    if not isinstance(said, list) or len(said) != 2:
        raise Malformed("no moment")
    sent = {receiver: (its, number) for receiver, its, number in _numbers(said[1], 3)}
    return _number(said[0]), sent


def _number(said: object) -> int:
    ((number,),) = _numbers([[said]], 1)
    return number


def _numbers(said: Any, each: int) -> list[list[int]]:
    """Return lists of so many integers, 0 or more.

    Raises:
        Malformed: it is something else.
    """
    if isinstance(said, list) and all(
        isinstance(one, list)
        and len(one) == each
        and all(type(number) is int and number >= 0 for number in one)
        for one in said
    ):
        return said
    raise Malformed("no lists of numbers")
