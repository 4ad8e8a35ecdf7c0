"""A TCP proxy that breaks connections in chosen ways, between a client and a real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass

from tests.polling import PATIENCE_SECONDS

__all__ = ["Break", "FaultProxy"]

_EXPECTS = b"expect: 100-continue\r\n"
_CANNED = {
    200: ("OK", "InternalError"),  # S3 may answer so: the status went out before the work was done
    400: ("Bad Request", "InvalidRequest"),
    403: ("Forbidden", "AccessDenied"),
    405: ("Method Not Allowed", "MethodNotAllowed"),
    409: ("Conflict", "OperationAborted"),
    501: ("Not Implemented", "NotImplemented"),
    503: ("Service Unavailable", "SlowDown"),
}


@dataclass(frozen=True, kw_only=True)
class Break:
    """What is done to a request whose first line contains `match`.

    Attributes:
        match: part of the request line, for instance `PUT` or `GET /bucket/key`.
        after: so many requests that match are let through first.
        times: so many requests are struck then; None: all.
        latency_seconds: the request is held back so long.
        reset_after_bytes: the connection is reset after so many bytes of the answer.
        lose_reply: the request reaches the server and is answered; the client gets a reset.
        flip_body_byte: this byte of the answer's body has a bit flipped.
        cut_body_after: the body ends here, with a clean close.
        status: answer this instead of asking the server.
        silent: neither forward nor answer, and keep the connection: a black hole.
        unread: the same, and the request's body is not even read.
        reset_upload_after: the connection is reset after so many bytes of the request's body.
    """

    match: str = ""
    after: int = 0
    times: int | None = None
    latency_seconds: float = 0.0
    reset_after_bytes: int | None = None
    lose_reply: bool = False
    flip_body_byte: int | None = None
    cut_body_after: int | None = None
    status: int | None = None
    silent: bool = False
    unread: bool = False
    reset_upload_after: int | None = None


class FaultProxy:
    """Listens on a free port of 127.0.0.1 and forwards to `upstream_port`, in its own thread.

    `plan` may be replaced at any time; the first break that matches a request is applied.
    `requests` collects the request lines.
    """

    def __init__(self, upstream_port: int) -> None:
        self.plan: list[Break] = []
        self.requests: list[str] = []
        self.port = 0
        self._upstream_port = upstream_port
        self._struck: dict[Break, int] = {}
        self._loop = asyncio.new_event_loop()
        # A loop refers weakly to tasks: what both sides of a connection have let go of would be
        # collected while it waits.
        self._clients: set[asyncio.Task[None]] = set()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        assert self._listening.wait(PATIENCE_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(PATIENCE_SECONDS)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        # The limit is that of `readuntil` for a request's or an answer's head.
        server = await asyncio.start_server(self._client, "127.0.0.1", 0, limit=1 << 20)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._stop.wait()
        server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: asyncio.StreamWriter | None = None
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)
        try:
            answers, upstream = await asyncio.open_connection(
                "127.0.0.1", self._upstream_port, limit=1 << 20
            )
            while await self._exchange(reader, writer, answers, upstream):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one side is gone, or the proxy is closed: so is this connection
        finally:
            for side in (writer, upstream):
                if side is not None:
                    side.close()
                    with contextlib.suppress(OSError):
                        await side.wait_closed()

    def _break_for(self, line: str) -> Break:
        self.requests.append(line)
        for planned in self.plan:
            struck = self._struck.get(planned, 0)
            last = None if planned.times is None else planned.after + planned.times
            if planned.match in line and (last is None or struck < last):
                self._struck[planned] = struck + 1
                if struck >= planned.after:
                    return planned
        return Break()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
        upstream: asyncio.StreamWriter,
    ) -> bool:
        """One request and its answer; whether the connection can take another."""
        head = await reader.readuntil(b"\r\n\r\n")
        line = head.split(b"\r\n", 1)[0].decode("latin-1")
        done = self._break_for(line)
        if done.unread:
            await self._stop.wait()
        if _EXPECTS in head.lower():  # the client sends no body before that
            at = head.lower().index(_EXPECTS)
            head = head[:at] + head[at + len(_EXPECTS) :]
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if done.reset_upload_after is not None:
            await reader.readexactly(min(done.reset_upload_after, _length(head)))
            writer.transport.abort()
            return False
        body = await _body(reader, head)
        await asyncio.sleep(done.latency_seconds)
        if done.silent:
            await reader.read()  # until the client gives up
            return False
        if done.status is not None:
            writer.write(_canned(done.status, bodiless=line.startswith("HEAD ")))
            await writer.drain()
            return True
        upstream.write(head + body)
        await upstream.drain()
        answer_head = await answers.readuntil(b"\r\n\r\n")
        bodiless = line.startswith("HEAD ") or answer_head.split(b" ", 2)[1] in (b"204", b"304")
        answer = bytearray(b"" if bodiless else await _body(answers, answer_head))
        if done.lose_reply:
            writer.transport.abort()
            return False
        if done.flip_body_byte is not None and len(answer) > done.flip_body_byte:
            answer[done.flip_body_byte] ^= 1
        sent = answer_head + bytes(answer)
        if done.reset_after_bytes is not None:
            writer.write(sent[: done.reset_after_bytes])
            await writer.drain()
            writer.transport.abort()
            return False
        if done.cut_body_after is not None:
            writer.write(answer_head + bytes(answer[: done.cut_body_after]))
            await writer.drain()
            return False
        writer.write(sent)
        await writer.drain()
        return True


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return int(value)
    return 0


async def _body(sender: asyncio.StreamReader, head: bytes) -> bytes:
    if b"transfer-encoding: chunked" not in head.lower():
        return await sender.readexactly(_length(head))
    raw = b""
    while True:  # passed on as it came, chunk heads included
        size = await sender.readuntil(b"\r\n")
        chunk = await sender.readexactly(int(size.split(b";")[0], 16) + 2)
        raw += size + chunk
        if int(size.split(b";")[0], 16) == 0:
            return raw


def _canned(status: int, *, bodiless: bool) -> bytes:
    words, code = _CANNED[status]
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>canned</Message></Error>"
    head = f"HTTP/1.1 {status} {words}\r\nContent-Type: application/xml\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{'' if bodiless else body}".encode()
