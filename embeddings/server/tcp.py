"""Calls an embedding server over TCP.

A `TcpServer` has one thread for each connection, and answers one request of a connection at a time.
A `TcpTransport` opens a connection for each thread that calls, and keeps it for the next call. Both
sides know a token. See `stream.py` for the bytes.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeVar

import torch
from torch import Tensor

from recpoint.closing import Closing
from recpoint.embeddings.parity.peers import OutOfStep
from recpoint.embeddings.server.all_messages import parsed
from recpoint.embeddings.server.receive_buffers import ReceiveBuffers
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.stream import (
    Malformed,
    Piece,
    Refused,
    Request,
    Stream,
    TokenRefused,
    error_pieces,
    prove_client,
    prove_server,
    receive_reply,
    reply_pieces,
    request_pieces,
)
from recpoint.embeddings.server.transport import (
    Message,
    RecordUse,
    Reply,
    RowMessage,
    SlotRows,
    Transport,
)
from recpoint.errors import HomeError, ServerLost
from recpoint.format.records import Part

__all__ = ["TcpServer", "TcpTransport"]

AnswerT = TypeVar("AnswerT", bound=Part)
T = TypeVar("T")

_LOG: Final = logging.getLogger("recpoint")
#: How long a client may take to prove that it knows the token.
_PROOF_SECONDS: Final = 2.0
#: How long the rest of a request, or the reading of an answer, may take.
_REST_SECONDS: Final = 60.0
#: Of trainers, and of other servers.
_MOST_CONNECTIONS: Final = 256
#: Connections whose client has not proved yet that it knows the token.
_MOST_UNPROVEN: Final = 32
#: Connections that a transport keeps.
_MOST_IDLE: Final = 8
#: A wait that ends later than this after its time was over shows that the process was stopped.
_LATE_SECONDS: Final = 1.0
_FIRST_PAUSE_SECONDS: Final = 0.01
_LONGEST_PAUSE_SECONDS: Final = 0.5


class TcpTransport(Transport):
    """Calls a server over TCP.

    A call whose connection breaks is made again, on a new connection, until its time is over. If
    nothing listens at the address, the server has ended, and the call fails at once.

    Args:
        address: host and port.
        token: what both sides know.
        name: what errors call the server; None: by its address.
        timeout_seconds: how long a call may take.

    Attributes:
        address: host and port.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: bytes,
        *,
        name: str | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        self.address = self.listens_at = address
        self._token = token
        self._name = name or f"the embedding server at {_text_of(address)}"
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._idle: list[Stream] = []
        self._in_use: set[Stream] = set()
        self._is_closed = False

    def call(
        self,
        message: Message[AnswerT],
        rows: Sequence[SlotRows] = (),
        *,
        within_seconds: float | None = None,
    ) -> Reply[AnswerT]:
        """See `Transport`. Only records that the server has come over the network.

        If this process was stopped meanwhile, the call's time is over and the server may be well.
        Then the call is made once more, and has its whole time.
        """
        pieces = request_pieces(message, rows)

        def ask(stream: Stream) -> Reply[AnswerT]:
            stream.send(pieces)
            return receive_reply(stream, message, rows)

        return self._exchange(ask, within_seconds)

    def close(self) -> None:
        """Close the connections. Calls under way raise ServerLost, and later ones HomeError."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            in_use = list(self._in_use)
        for stream in [*idle, *in_use]:
            stream.close()

    def _exchange(self, ask: Callable[[Stream], T], within_seconds: float | None) -> T:
        """Call `ask` with a connection; again, with a new one, if the connection breaks."""
        seconds = self._timeout_seconds if within_seconds is None else within_seconds
        deadline = time.monotonic() + seconds
        pause = _FIRST_PAUSE_SECONDS
        was_late = False
        while True:
            stream = None
            try:
                stream = self._taken(deadline)
                stream.deadline = deadline
                answer = ask(stream)
                stream.require_mac()
            except Refused as refused:
                if stream is not None:
                    self._give_back(stream)
                raise refused.error from None
            except TimeoutError as error:
                is_late = _is_late(deadline, stream)
                self._drop(stream)
                if was_late or not is_late:
                    self._raise_lost(f"no answer in {seconds:g} s", error)
                was_late, deadline = True, time.monotonic() + seconds
            except ConnectionRefusedError as error:
                self._raise_lost("no process that listens there: it has ended", error)
            except (Malformed, TokenRefused) as error:
                self._drop(stream)
                reason = (
                    "a process that does not know the token of this training, or a server that "
                    "listens at another address"
                )
                if isinstance(error, Malformed):
                    reason = f"something that is no embedding server of this version: {error}"
                self._raise_lost(reason, error)
            except (OSError, EOFError) as error:
                # The server has closed the connection, or has ended. The call may have been done.
                self._drop(stream)
                self._drop_idle()
                if not was_late and _is_late(deadline, None):
                    was_late, deadline = True, time.monotonic() + seconds
                if time.monotonic() + pause >= deadline:
                    self._raise_lost(f"a connection that breaks ({error})", error)
                time.sleep(pause)
                if self._is_closed:
                    self._raise_lost("a call that close() has ended", error)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            except BaseException:
                self._drop(stream)  # the rest of an answer may still come
                raise
            else:
                self._give_back(stream)
                return answer

    def _taken(self, deadline: float) -> Stream:
        """Return a connection that nobody uses, or a new one."""
        with self._lock:
            if self._is_closed:
                raise HomeError(
                    self._name,
                    found="a call after close()",
                    expected="no call after close()",
                    next_step="make a new transport",
                )
            if self._idle:
                stream = self._idle.pop()
                self._in_use.add(stream)
                return stream
        seconds_left = max(0.001, deadline - time.monotonic())
        stream = Stream(socket.create_connection(self.address, timeout=seconds_left))
        with self._lock:
            self._in_use.add(stream)
        try:
            if self._is_closed:  # meanwhile
                raise EOFError
            stream.deadline = deadline
            # Another address than the server's is one that passes bytes on to it.
            is_direct = self.listens_at == self.address
            prove_client(stream, self._token, server=None if is_direct else self.listens_at)
        except BaseException:
            self._drop(stream)
            raise
        return stream

    def _give_back(self, stream: Stream) -> None:
        with self._lock:
            self._in_use.discard(stream)
            if not self._is_closed and len(self._idle) < _MOST_IDLE:
                self._idle.append(stream)
                return
        stream.close()

    def _drop(self, stream: Stream | None) -> None:
        if stream is not None:
            with self._lock:
                self._in_use.discard(stream)
            stream.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()

    def _raise_lost(self, found: str, error: Exception) -> NoReturn:
        raise ServerLost(
            self._name,
            found=found,
            expected="an embedding server that answers",
            next_step="look at the server's log; then restore the last checkpoint, which starts "
            "servers of this machine again",
        ) from error


def _text_of(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_late(deadline: float, stream: Stream | None) -> bool:
    """Whether this process was stopped while it waited: it wakes late, or bytes have come."""
    has_bytes = stream is not None and stream.has_bytes()
    return has_bytes or time.monotonic() > deadline + _LATE_SECONDS


class TcpServer(Closing):
    """Answers calls to a server that come over TCP, until it is closed.

    As a context manager, it is closed at the end of the block. The server itself goes on.

    Args:
        server: what answers.
        token: what both sides know; not empty.
        host: address to listen at, of IPv4 or IPv6.
        port: 0: the system chooses one.
        most_connections: connections whose client has proved that it knows the token. When another
            trainer connects, the server closes the connection that has been idle longest. If none
            is idle, it closes the new one. Either caller connects again. Clients that have proved
            nothing take none of these places. When another of them connects, the server closes the
            oldest of them.

    Attributes:
        address: host and port.
        buffers: memory into which requests are received.

    Raises:
        OSError: the system refuses the address.
    """

    def __init__(
        self,
        server: EmbeddingServer,
        token: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        most_connections: int = _MOST_CONNECTIONS,
    ) -> None:
        if not token:
            raise ValueError("token: empty, expected bytes that nobody can guess")
        self._server = server
        self._token = token
        self._most = most_connections
        self._lock = threading.Lock()
        self._open: dict[Stream, threading.Thread] = {}
        self._unproven: dict[Stream, None] = {}  # the oldest first
        self._proven: set[Stream] = set()
        self._idle: dict[Stream, None] = {}  # proven, no request has come; the longest idle first
        self.buffers = ReceiveBuffers()
        self._is_closing = threading.Event()
        # Resolved first, because the family of the socket follows from the address: IPv4 or IPv6.
        family, _, _, _, socket_address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(socket_address, family=family, backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="recpoint-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections, and wait for what they do. A second call does nothing."""
        self._is_closing.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        except OSError:
            pass  # closed before
        self._listener.close()
        self._thread.join()
        with self._lock:
            still_open = dict(self._open)
        for stream, thread in still_open.items():
            stream.close()
            thread.join()

    def _accept(self) -> None:
        while not self._is_closing.is_set():
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closing.wait(0.1):
                    _LOG.warning("an embedding server cannot accept a connection: %s", error)
                continue
            try:
                stream = Stream(connected)
            except OSError:  # it is gone already
                connected.close()
                continue
            thread = threading.Thread(
                target=self._answer_all, args=(stream,), name="recpoint-answer", daemon=True
            )
            with self._lock:
                if len(self._unproven) >= _MOST_UNPROVEN:
                    # A trainer proves in milliseconds, so the oldest is the least likely one. Its
                    # thread ends; a trainer connects again.
                    oldest = next(iter(self._unproven))
                    del self._unproven[oldest]
                    oldest.close()
                self._unproven[stream] = None
                self._open[stream] = thread
            try:
                thread.start()
            except RuntimeError as error:  # the process can have no more threads
                _LOG.warning("an embedding server cannot answer a connection: %s", error)
                stream.close()
                self._forget(stream)

    def _answer_all(self, stream: Stream) -> None:
        try:
            stream.deadline = time.monotonic() + _PROOF_SECONDS
            prove_server(stream, self._token)
            if not self._is_admitted(stream):
                return
            answering = _Answering(self._server, stream, self.buffers)
            while True:
                with self._idling(stream):
                    answering.wait()
                answering.answer()
        except TokenRefused:
            _LOG.warning("an embedding server refused a connection: another token or address")
        except Malformed as error:
            _LOG.warning("an embedding server closes a connection: found %s", error)
        except (OSError, EOFError):
            pass  # the trainer has closed the connection, or is gone
        finally:
            stream.close()
            self._forget(stream)

    def _is_admitted(self, stream: Stream) -> bool:
        """Give a connection that has proved the token one of the places; return whether it has one.

        It is idle at once, so a later one may take its place.
        """
        with self._lock:
            if stream not in self._unproven:  # a further one has closed it meanwhile
                return False
            del self._unproven[stream]
            if len(self._proven) >= self._most:
                if not self._idle:
                    return False
                # Its thread ends. If a request is just coming, the trainer makes it again.
                longest_idle = next(iter(self._idle))
                del self._idle[longest_idle]
                self._proven.discard(longest_idle)
                longest_idle.close()
            self._proven.add(stream)
            self._idle[stream] = None
            return True

    def _forget(self, stream: Stream) -> None:
        with self._lock:
            self._unproven.pop(stream, None)
            self._proven.discard(stream)
            self._idle.pop(stream, None)
            del self._open[stream]

    @contextmanager
    def _idling(self, stream: Stream) -> Iterator[None]:
        with self._lock:
            if stream in self._proven:  # else another one has taken its place
                self._idle[stream] = None
        try:
            yield
        finally:
            with self._lock:
                self._idle.pop(stream, None)


class _Answering:
    """Answers the requests of one connection."""

    def __init__(self, server: EmbeddingServer, stream: Stream, buffers: ReceiveBuffers) -> None:
        self._server = server
        self._stream = stream
        self._buffers = buffers
        self._header = b""

    def wait(self) -> None:
        """Wait for a request."""
        self._stream.deadline = None  # a trainer may have nothing to ask for hours
        self._header = Request.header_from(self._stream)

    def answer(self) -> None:
        """Receive the rest of the request, and answer it."""
        stream = self._stream
        stream.deadline = time.monotonic() + _REST_SECONDS
        request = Request.receive(self._header, stream)
        with self._buffers.lent(request.size_bytes) as memory:
            self._answer(request, _rows_in(memory, request))

    def _answer(self, request: Request, rows: Sequence[SlotRows]) -> None:
        stream = self._stream
        for row_part in rows:
            stream.receive_into(row_part.slots)
        if request.records is RecordUse.SENT:
            for row_part in rows:
                assert row_part.records is not None
                stream.receive_into(row_part.records)
        stream.require_mac()
        try:
            pieces = self._pieces(request, rows)
        except (HomeError, ValueError, OutOfStep) as error:
            pieces = error_pieces(error)
        except (
            OSError,
            MemoryError,
            RuntimeError,
            LookupError,
            TypeError,
            AssertionError,
        ) as error:
            _LOG.exception("an embedding server cannot answer")
            pieces = error_pieces(
                HomeError(
                    "an embedding server",
                    found=f"{type(error).__name__}: {error}",
                    expected="an answer",
                    next_step="look at the server's log",
                )
            )
        stream.deadline = time.monotonic() + _REST_SECONDS
        stream.send(pieces)

    def _pieces(self, request: Request, rows: Sequence[SlotRows]) -> list[Piece]:
        message: Message[Any] = parsed(request.text)
        if isinstance(message, RowMessage):
            if message.records is not request.records or (
                message.records is RecordUse.NONE
                and any(form.record_bytes != message.row_bytes for form in request.forms)
            ):
                raise ValueError(f"{message.kind}: rows of another form than the message has")
        if request.records is RecordUse.NONE:
            # Their memory is lent to other requests afterwards.
            rows = [SlotRows(row_part.slots.clone()) for row_part in rows]
        return reply_pieces(message, rows, self._server.call(message, rows))


def _rows_in(memory: Tensor, request: Request) -> list[SlotRows]:
    """Return the rows of a request, which lie in `memory`."""
    counts = [form.rows for form in request.forms]
    slots_bytes = 8 * sum(counts)  # slots come first, where an int64 may be
    slots = memory[:slots_bytes].view(torch.int64).split(counts)
    if request.records is RecordUse.NONE:
        return [SlotRows(part) for part in slots]
    sizes = [form.rows * form.record_bytes for form in request.forms]
    records = memory[slots_bytes:].split(sizes)
    return [
        SlotRows(part_slots, part_records.view(form.rows, form.record_bytes))
        for part_slots, part_records, form in zip(slots, records, request.forms, strict=True)
    ]
