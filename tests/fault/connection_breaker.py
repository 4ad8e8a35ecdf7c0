"""A TCP proxy that loses connections: before a request arrives, or before its answer does."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Literal

__all__ = ["ConnectionBreaker"]


class ConnectionBreaker:
    """Forwards connections to a server, and breaks the one over which the n-th piece comes.

    Args:
        upstream_port: port of the server on 127.0.0.1.

    Attributes:
        port: where it listens.
        broken: connections broken so far.
    """

    def __init__(self, upstream_port: int) -> None:
        self._upstream = upstream_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.broken = 0
        self._lock = threading.Lock()
        self._pieces_left = 0
        self._loses: Literal["request", "answer"] = "answer"
        threading.Thread(target=self._accept, daemon=True).start()

    def break_at(self, piece: int, loses: Literal["request", "answer"]) -> None:
        """Break a connection at the n-th piece of a request from now on; 0: break none."""
        with self._lock:
            self._pieces_left, self._loses = piece, loses

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            with socket.create_connection(("127.0.0.1", self._upstream)) as server:
                back = threading.Thread(target=_pass_on, args=(server, client), daemon=True)
                back.start()
                while data := client.recv(1 << 16):
                    loses = self._strikes()
                    if loses != "request":
                        server.sendall(data)
                    if loses is not None:
                        client.shutdown(socket.SHUT_RDWR)  # before the answer can be passed on
                        return

    def _strikes(self) -> Literal["request", "answer"] | None:
        with self._lock:
            if not self._pieces_left:
                return None
            self._pieces_left -= 1
            if self._pieces_left:
                return None
            self.broken += 1
            return self._loses


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
