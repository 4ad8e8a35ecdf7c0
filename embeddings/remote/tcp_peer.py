"""Calls another embedding server from a server, over TCP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from recpoint.embeddings.parity.peers import (
    Differences,
    Members,
    OutOfStep,
    Peer,
    Sent,
    TableSlots,
)
from recpoint.embeddings.parity.stripe_check import CONDENSED_BYTES
from recpoint.embeddings.remote.peer_wire import (
    differences_request,
    members_request,
    parity_rows_note,
    received_members,
    rows_note,
)
from recpoint.embeddings.remote.protection import Reach
from recpoint.embeddings.remote.tcp import TcpTransport, received
from recpoint.embeddings.remote.wire import DECODED, PARITY_ROWS, ROWS, Stream
from recpoint.errors import HomeError

__all__ = ["TcpPeer", "reach_with"]

T = TypeVar("T")


def reach_with(token: bytes, *, timeout_seconds: float = 60.0) -> Reach:
    """Return what makes calls to another server that knows a token.

    Args:
        token: what both servers know.
        timeout_seconds: how long a call may take.
    """

    def reach(host: str, port: int, incarnation: int, row_bytes: Mapping[str, int]) -> Peer:
        transport = TcpTransport((host, port), token, timeout_seconds=timeout_seconds)
        return TcpPeer(transport, incarnation, row_bytes)

    return reach


class TcpPeer(Peer):
    """Calls one incarnation of another server.

    Args:
        transport: to that server. `close` closes it.
        incarnation: of that server.
        row_bytes: for each table the bytes of a coded row.
    """

    def __init__(
        self, transport: TcpTransport, incarnation: int, row_bytes: Mapping[str, int]
    ) -> None:
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
            return self._transport.call(ask)
        except HomeError as error:
            if self._is_closed:
                raise OutOfStep("the other server is lost") from error
            raise

    def close(self) -> None:
        """Close the connections, also those of calls that are under way: they raise OutOfStep."""
        self._is_closed = True
        self._transport.close()
