"""Calls another embedding server from a server, over TCP."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
from recpoint.embeddings.server.peer_wire import (
    differences_request,
    members_request,
    parity_rows_note,
    received_members,
    rows_note,
)
from recpoint.embeddings.server.protection import Reach
from recpoint.embeddings.server.stream import DECODED, PARITY_ROWS, ROWS, Stream
from recpoint.embeddings.server.tcp import TcpTransport, received
from recpoint.embeddings.server.transport import greeting_seconds
from recpoint.errors import HomeError, ServerLost

__all__ = ["TcpPeer", "reach_with"]

T = TypeVar("T")

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
        pieces = differences_request(messages, self._incarnation)

        def ask(stream: Stream) -> None:
            stream.send(pieces)
            received(stream)

        self._call(ask)

    def rows(
        self, wanted: Sequence[TableSlots], *, recover: bool, is_condensed: bool = False
    ) -> Members:
        """See `Peer`."""
        note = rows_note(recover=recover, is_condensed=is_condensed)
        return self._members(ROWS, note, wanted, is_condensed)

    def parity_rows(
        self,
        wanted: Sequence[TableSlots],
        at: Mapping[int, tuple[int, int]],
        *,
        is_condensed: bool = False,
    ) -> Members:
        """See `Peer`."""
        note = parity_rows_note(at, is_condensed=is_condensed)
        return self._members(PARITY_ROWS, note, wanted, is_condensed)

    def decoded(self, wanted: Sequence[TableSlots], lost: int) -> Members:
        """See `Peer`."""
        return self._members(DECODED, {"lost": lost}, wanted, False)

    def _members(
        self,
        kind: int,
        note: Mapping[str, object],
        wanted: Sequence[TableSlots],
        is_condensed: bool,
    ) -> Members:
        count = sum(len(one.slots) for one in wanted)
        row_bytes = CONDENSED_BYTES if is_condensed else self._row_bytes[wanted[0].table]
        pieces = members_request(kind, note, wanted, row_bytes, self._incarnation)

        def ask(stream: Stream) -> Members:
            stream.send(pieces)
            return received_members(received(stream, most=count), stream, wanted, row_bytes)

        return self._call(ask)

    def _call(self, ask: Callable[[Stream], T]) -> T:
        try:
            answer = self._transport.call(ask)
        except HomeError as error:
            if self._is_closed:
                raise OutOfStep("the other server is lost") from error
            if isinstance(error, ServerLost):
                # The call may have waited for another server there. A greeting waits for none.
                self._greet()
            raise
        self._unreached_at = None
        return answer

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
