"""Calls another embedding server from a server, over TCP."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from recpoint.embeddings.parity.peers import (
    Differences,
    Members,
    OutOfStep,
    Peer,
    Sent,
    TableSlots,
)
from recpoint.embeddings.parity.stripe_check import CONDENSED_BYTES
from recpoint.embeddings.server.parity_messages import (
    DecodeRows,
    GetParityRows,
    GetRows,
    SendDifferences,
    SentNote,
)
from recpoint.embeddings.server.protection import Reach
from recpoint.embeddings.server.tcp import TcpTransport
from recpoint.embeddings.server.transport import Message, Reply, SlotRows, greeting_seconds
from recpoint.errors import HomeError, ServerLost
from recpoint.format.records import Part

__all__ = ["TcpPeer", "reach_with"]

AnswerT = TypeVar("AnswerT", bound=Part)

#: How long a server says that it has not reached another one. The leader looks more often.
_REPORT_SECONDS: Final = 5.0


def reach_with(token: bytes, *, timeout_seconds: float = 60.0) -> Reach:
    """Return what makes calls to another server that knows a token.

    Args:
        token: what both servers know.
        timeout_seconds: how long a call may take.
    """

    def reach(host: str, port: int, incarnation: int, row_bytes: Mapping[str, int]) -> Peer:
        transport = TcpTransport((host, port), token, timeout_seconds=timeout_seconds)
        return TcpPeer(
            transport, incarnation, row_bytes, greeting_seconds=greeting_seconds(timeout_seconds)
        )

    return reach


class TcpPeer(Peer):
    """Calls one incarnation of another server.

    Args:
        transport: to that server. `close` closes it.
        incarnation: of that server.
        row_bytes: for each table the bytes of a coded row.
        greeting_seconds: how long the server may take to say that it lives, once a call has failed.
    """

    def __init__(
        self,
        transport: TcpTransport,
        incarnation: int,
        row_bytes: Mapping[str, int],
        *,
        greeting_seconds: float = 15.0,
    ) -> None:
        self._greeting_seconds = greeting_seconds
        self._unreached_at: float | None = None
        self._transport = transport
        self._incarnation = incarnation
        self._row_bytes = row_bytes
        self._is_closed = False

    def differences(self, messages: Sequence[tuple[Sent, Differences]]) -> None:
        """See `Peer`."""
        message = SendDifferences(
            incarnation=self._incarnation,
            messages=tuple(SentNote.of(*sent) for sent in messages),
        )
        self._call(
            message, [SlotRows(slot_rows.slots, slot_rows.rows) for _, slot_rows in messages]
        )

    def rows(
        self, wanted: Sequence[TableSlots], *, recover: bool, is_condensed: bool = False
    ) -> Members:
        """See `Peer`."""
        message = GetRows(
            incarnation=self._incarnation,
            tables=tuple(row_part.table for row_part in wanted),
            each_bytes=self._row_bytes_of(wanted, is_condensed),
            recover=recover,
            is_condensed=is_condensed,
        )
        return self._members(message, wanted)

    def parity_rows(
        self,
        wanted: Sequence[TableSlots],
        at: Mapping[int, tuple[int, int]],
        *,
        is_condensed: bool = False,
    ) -> Members:
        """See `Peer`."""
        message = GetParityRows(
            incarnation=self._incarnation,
            tables=tuple(row_part.table for row_part in wanted),
            each_bytes=self._row_bytes_of(wanted, is_condensed),
            moments=GetParityRows.moments_of(at),
            is_condensed=is_condensed,
        )
        return self._members(message, wanted)

    def decoded(self, wanted: Sequence[TableSlots], lost: int) -> Members:
        """See `Peer`."""
        message = DecodeRows(
            incarnation=self._incarnation,
            tables=tuple(row_part.table for row_part in wanted),
            each_bytes=self._row_bytes_of(wanted, False),
            lost=lost,
        )
        return self._members(message, wanted)

    def _row_bytes_of(self, wanted: Sequence[TableSlots], is_condensed: bool) -> int:
        return CONDENSED_BYTES if is_condensed else self._row_bytes[wanted[0].table]

    def _members(
        self, message: GetRows | GetParityRows | DecodeRows, wanted: Sequence[TableSlots]
    ) -> Members:
        reply = self._call(message, [SlotRows(row_part.slots.contiguous()) for row_part in wanted])
        if len(reply.answer.generations) != len(wanted):
            raise ValueError(f"{len(reply.answer.generations)} tables, expected {len(wanted)}")
        is_known, rows = reply.tensors
        return Members(
            is_known=is_known,
            rows=rows,
            moment=reply.answer.moment,
            generations=reply.answer.generations,
        )

    def _call(self, message: Message[AnswerT], rows: Sequence[SlotRows]) -> Reply[AnswerT]:
        try:
            reply = self._transport.call(message, rows)
        except HomeError as error:
            if self._is_closed:
                raise OutOfStep("the other server is lost") from error
            if isinstance(error, ServerLost):
                # The call may have waited for another server there. A greeting waits for none.
                self._greet()
            raise
        self._unreached_at = None
        return reply

    def _greet(self) -> None:
        """Find out whether the other server is reached at all."""
        try:
            self._transport.hello(within_seconds=self._greeting_seconds)
        except HomeError:
            self._unreached_at = time.monotonic()
        else:
            self._unreached_at = None

    @property
    def is_unreached(self) -> bool:
        """See `Peer`. It is forgotten after some seconds; the next call that fails says so anew."""
        failed_at = self._unreached_at
        return failed_at is not None and time.monotonic() < failed_at + _REPORT_SECONDS

    def close(self) -> None:
        """Close the connections, also those of calls that are under way: they raise OutOfStep."""
        self._is_closed = True
        self._transport.close()
