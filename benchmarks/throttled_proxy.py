"""A TCP proxy that limits what clients send: each connection, and all of them together."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

__all__ = ["ThrottledProxy"]

_READ_BYTES = 32 << 10


class ThrottledProxy:
    """Listens on a free port of 127.0.0.1 and forwards to a server there, in its own thread.

    Use it as a context manager. Answers are not limited.

    Args:
        upstream_port: the server's port.
        each: bytes a second that a connection may send.
        total: bytes a second that all connections may send together.

    Attributes:
        port: where it listens; 0 before it is entered.
    """

    def __init__(self, upstream_port: int, *, each: float, total: float) -> None:
        self.port = 0
        self._upstream_port = upstream_port
        self._each, self._total = each, total
        self._free_at = 0.0  # when the bytes that were let through so far have passed
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ThrottledProxy:
        self._thread.start()
        self._listening.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        listener = socket.socket()
        # Accepted connections inherit it: what lies in a buffer was not limited.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * _READ_BYTES)
        listener.bind(("127.0.0.1", 0))
        server = await asyncio.start_server(self._client, sock=listener, limit=_READ_BYTES)
        self.port = listener.getsockname()[1]
        self._listening.set()
        await self._stop.wait()
        server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(self._limited(reader, upstream), self._free(answers, writer))
        for side in (writer, upstream):
            side.close()

    async def _limited(self, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter) -> None:
        own_free_at = 0.0
        while data := await reader.read(_READ_BYTES):
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + len(data) / self._total
            own_free_at = max(own_free_at, now) + len(data) / self._each
            await asyncio.sleep(max(self._free_at, own_free_at) - now)
            upstream.write(data)
            await upstream.drain()
        upstream.write_eof()

    async def _free(self, answers: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await answers.read(1 << 20):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
