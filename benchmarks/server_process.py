"""Runs embedding servers for several homes in one process on a node of a network.

The process is forked from one that has imported torch, so it starts in an instant, as those of
`recpoint.embeddings.servers` do.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch

from recpoint.embeddings.parity.peers import Differences, Members, Peer, Sent, TableSlots
from recpoint.embeddings.server.protection import Reach
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.tcp import TcpServer
from recpoint.embeddings.server.tcp_peer import reach_with

__all__ = ["ServerSettings", "enter_network", "serve"]

#: Of setns(2).
_NETWORK_NAMESPACE = 0x40000000


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What the process is told.

    Attributes:
        network: path of its network namespace; None: that of the machine.
        host: IPv4 address at which it listens.
        ports: one for each home; 0: the system chooses one.
        token: what servers and trainers know.
        delay_seconds: added to each call of another server.
    """

    network: str | None
    host: str
    ports: tuple[int, ...]
    token: bytes = field(repr=False)
    delay_seconds: float


def serve(settings: ServerSettings, pipe: Connection) -> None:
    """Serve until the other side of the connection is closed.

    Sends the ports. Then answers anything that comes with the rows of all differences so far.
    """
    torch.set_num_threads(1)
    if settings.network is not None:
        enter_network(settings.network)
    reach = _late(reach_with(settings.token), settings.delay_seconds)
    servers: list[EmbeddingServer] = []
    with ExitStack() as stack, suppress(EOFError):
        ports = []
        for port in settings.ports:
            server = EmbeddingServer(name=f"embedding server on {settings.host}", reach=reach)
            servers.append(server)
            stack.callback(server.end)
            listening = TcpServer(server, settings.token, host=settings.host, port=port)
            ports.append(stack.enter_context(listening).address[1])
        pipe.send(ports)
        while True:
            pipe.recv()
            members = [server.member(server.hello().incarnation) for server in servers]
            pipe.send(sum(member.other_servers.difference_rows for member in members))


def enter_network(network: str) -> None:
    """Move this thread, and threads that it starts, to a network namespace."""
    namespace = os.open(network, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _NETWORK_NAMESPACE) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {network}")
    finally:
        os.close(namespace)


class _LatePeer(Peer):
    """Waits before each call of another server, as a longer cable would have it wait."""

    def __init__(self, peer: Peer, seconds: float) -> None:
        self._to, self._seconds = peer, seconds

    def _wait(self) -> Peer:
        time.sleep(self._seconds)
        return self._to

    def differences(self, messages: Sequence[tuple[Sent, Differences]]) -> None:
        self._wait().differences(messages)

    def rows(
        self, wanted: Sequence[TableSlots], *, recover: bool, is_condensed: bool = False
    ) -> Members:
        return self._wait().rows(wanted, recover=recover, is_condensed=is_condensed)

    def parity_rows(
        self,
        wanted: Sequence[TableSlots],
        at: Mapping[int, tuple[int, int]],
        *,
        is_condensed: bool = False,
    ) -> Members:
        return self._wait().parity_rows(wanted, at, is_condensed=is_condensed)

    def decoded(self, wanted: Sequence[TableSlots], lost: int) -> Members:
        return self._wait().decoded(wanted, lost)

    @property
    def is_unreached(self) -> bool:
        return self._to.is_unreached

    def close(self) -> None:
        self._to.close()


def _late(reach: Reach, seconds: float) -> Reach:
    def reach_later(host: str, port: int, incarnation: int, row_bytes: Mapping[str, int]) -> Peer:
        return _LatePeer(reach(host, port, incarnation, row_bytes), seconds)

    return reach_later if seconds else reach
