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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, NoReturn, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from recpoint.embeddings.home.contract import TableRows
from recpoint.embeddings.parity.peers import OutOfStep
from recpoint.embeddings.server.peer_wire import answer_peer
from recpoint.embeddings.server.receive_buffers import ReceiveBuffers
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.stream import (
    CHECK,
    COMMAND,
    DECODED,
    DIFFERENCES,
    FETCH,
    FETCH_FROZEN,
    HELLO,
    PARITY_ROWS,
    ROWS,
    SEAL,
    STAGE,
    STAGE_NEW,
    WRITE,
    Answer,
    Malformed,
    Part,
    Piece,
    Request,
    Stream,
    TokenRefused,
    error_of,
    parse,
    prove_client,
    prove_server,
    text_of,
    text_of_error,
)
from recpoint.embeddings.server.transport import Greeting, Transport, Value
from recpoint.errors import HomeError, ServerLost
from recpoint.kernels import row_gather

__all__ = ["TcpServer", "TcpTransport", "received"]

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

    def hello(self, *, within_seconds: float | None = None) -> Greeting:
        """See `Transport`."""

        def ask(stream: Stream) -> Greeting:
            stream.send(Request(kind=HELLO).pieces)
            said = parse(received(stream).text)
            host = said.get("host")
            unreached = said.get("unreached")
            numbers = [said.get(key) for key in ("incarnation", "pid", "owner")]
            numbers += unreached if isinstance(unreached, list) else [None]
            if not isinstance(host, str) or not all(type(number) is int for number in numbers):
                raise Malformed("a greeting that is none")
            incarnation, pid, owner, *others = (int(str(number)) for number in numbers)
            return Greeting(
                incarnation=incarnation, host=host, pid=pid, owner=owner, unreached=tuple(others)
            )

        return self.call(ask, within_seconds=within_seconds)

    def command(
        self, name: str, arguments: Mapping[str, Value], *, incarnation: int
    ) -> Mapping[str, Value]:
        """See `Transport`."""
        text = text_of({"name": name, "arguments": dict(arguments)})

        def ask(stream: Stream) -> Mapping[str, Value]:
            stream.send(Request(kind=COMMAND, text=text, incarnation=incarnation).pieces)
            said = parse(received(stream).text)
            return {key: one for key, one in said.items() if isinstance(one, int | str | None)}

        return self.call(ask)

    def fetch(
        self, wanted: Sequence[TableRows], *, incarnation: int, frozen: int | None = None
    ) -> list[Tensor]:
        """See `Transport`. Only records that are there come over the network."""
        request = Request(
            kind=FETCH if frozen is None else FETCH_FROZEN,
            text=_names_of(wanted),
            parts=_parts_of(wanted),
            incarnation=incarnation,
            number=frozen or 0,
        )
        counts = [part.rows for part in request.parts]

        def ask(stream: Stream) -> list[Tensor]:
            stream.send([*request.pieces, *(one.ids for one in wanted)])
            answer = received(stream, most=sum(counts))
            # What is there is proved before records are written: rows that are not stay untouched.
            if answer.count == sum(counts):
                for one in wanted:
                    stream.receive_into(one.records)
                return [torch.ones(count, dtype=torch.bool, device="cpu") for count in counts]
            bits = np.frombuffer(stream.receive(-(-sum(counts) // 8)), dtype=np.uint8)
            has = torch.from_numpy(np.unpackbits(bits, count=sum(counts))).view(torch.bool)
            stream.require_mac()
            if int(has.sum()) != answer.count:
                raise Malformed("another number of records than was announced")
            found = list(has.split(counts))
            for one, has_row in zip(wanted, found, strict=True):
                _receive_records(stream, one.records, has_row.nonzero().view(-1))
            return found

        return self.call(ask)

    def write_back(
        self, changed: Sequence[TableRows], *, incarnation: int, trainer: int, batch: int
    ) -> None:
        """See `Transport`."""
        request = Request(
            kind=WRITE,
            text=_names_of(changed),
            parts=_parts_of(changed),
            incarnation=incarnation,
            number=trainer,
            batch=batch,
        )
        slots, records = [one.ids for one in changed], [one.records for one in changed]

        def ask(stream: Stream) -> None:
            stream.send([*request.pieces, *slots, *records])
            received(stream)

        self.call(ask)

    def check(self, table: str, slots: Tensor, *, incarnation: int) -> Tensor:
        """See `Transport`."""
        request = Request(
            kind=CHECK,
            text=text_of({"tables": [table]}),
            parts=[Part(1, len(slots))],
            incarnation=incarnation,
        )

        def ask(stream: Stream) -> Tensor:
            stream.send([*request.pieces, slots])
            if received(stream, most=len(slots)).count != len(slots):
                raise Malformed("another number of verdicts than of stripes")
            found = torch.empty(len(slots), dtype=torch.uint8, device="cpu")
            stream.receive_into(found)
            return found

        return self.call(ask)

    def stage(
        self,
        frozen: int,
        slots: Tensor,
        records: Tensor | None = None,
        *,
        incarnation: int,
        first: int = 0,
    ) -> Tensor:
        """See `Transport`."""
        request = Request(
            kind=STAGE if records is None else STAGE_NEW,
            parts=[Part(1 if records is None else records.shape[1], len(slots))],
            incarnation=incarnation,
            number=frozen,
            batch=first,
        )
        sent = (slots,) if records is None else (slots, records)

        def ask(stream: Stream) -> Tensor:
            stream.send([*request.pieces, *sent])
            if received(stream, most=len(slots)).count != len(slots):
                raise Malformed("an answer for another number of rows")
            found = torch.empty(len(slots), dtype=torch.bool, device="cpu")
            stream.receive_into(found)
            return found

        return self.call(ask)

    def close(self) -> None:
        """Close the connections. Calls under way raise ServerLost, and later ones HomeError."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            in_use = list(self._in_use)
        for stream in [*idle, *in_use]:
            stream.close()

    def call(self, ask: Callable[[Stream], T], *, within_seconds: float | None = None) -> T:
        """Send a request on a connection and receive its answer, as `ask` does; again if need be.

        If this process was stopped meanwhile, its time is over and the server may be well. Then
        the call is made once more, and has its whole time.

        Args:
            ask: sends and receives.
            within_seconds: the longest time for the call; None: that of the transport.

        Raises:
            ServerLost, HomeError, ValueError, OutOfStep: the server's error, or there is no server.
        """
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
            except _Refused as refused:
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
                what = (
                    "a process that does not know the token of this training, or a server that "
                    "listens at another address"
                )
                if isinstance(error, Malformed):
                    what = f"something that is no embedding server of this version: {error}"
                self._raise_lost(what, error)
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
        left = max(0.001, deadline - time.monotonic())
        stream = Stream(socket.create_connection(self.address, timeout=left))
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


class _Refused(Exception):
    """The server answers with an error; the connection is as good as before."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def received(stream: Stream, *, most: int = 0) -> Answer:
    """Receive the head of an answer with at most `most` records.

    Raises:
        Exception: the answer is an error, for `TcpTransport.call` to raise.
    """
    answer = Answer.receive(stream, most=most)
    if answer.is_error:
        stream.require_mac()
        raise _Refused(error_of(answer.text))
    return answer


def _names_of(rows: Sequence[TableRows]) -> bytes:
    return text_of({"tables": [one.table for one in rows]})


def _parts_of(rows: Sequence[TableRows]) -> list[Part]:
    return [Part(one.records.shape[1], len(one.ids)) for one in rows]


def _receive_records(stream: Stream, out: Tensor, there: Tensor) -> None:
    """Receive records into these places of `out`."""
    if len(there) == len(out):
        stream.receive_into(out)
        return
    records = torch.empty(len(there), out.shape[1], dtype=torch.uint8, device="cpu")
    stream.receive_into(records)
    all_of_them = torch.arange(len(there), dtype=torch.int64, device="cpu")
    row_gather.move(records, all_of_them, out, there)


class TcpServer:
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
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(where, family=family, backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="recpoint-accept", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

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
        size_bytes = sum(part.rows * (8 + part.record_bytes) for part in request.parts)
        with self._buffers.lent(size_bytes) as memory:
            self._answer(request, _rows_in(memory, request.parts))

    def _answer(self, request: Request, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        stream = self._stream
        for slots, _ in rows:
            stream.receive_into(slots)
        if request.kind in (WRITE, DIFFERENCES, STAGE_NEW):
            for _, records in rows:
                stream.receive_into(records)
        stream.require_mac()
        try:
            pieces = self._pieces(request, rows)
        except (HomeError, ValueError, OutOfStep) as error:
            pieces = Answer(is_error=True, text=text_of_error(error)).pieces
        except (
            OSError,
            MemoryError,
            RuntimeError,
            LookupError,
            TypeError,
            AssertionError,
        ) as error:
            _LOG.exception("an embedding server cannot answer")
            told = HomeError(
                "an embedding server",
                found=f"{type(error).__name__}: {error}",
                expected="an answer",
                next_step="look at the server's log",
            )
            pieces = Answer(is_error=True, text=text_of_error(told)).pieces
        stream.deadline = time.monotonic() + _REST_SECONDS
        stream.send(pieces)

    def _pieces(self, request: Request, rows: Sequence[tuple[Tensor, Tensor]]) -> list[Piece]:
        if request.kind == HELLO:
            return Answer(text=text_of(vars(self._server.hello()))).pieces
        if request.kind == COMMAND:
            said = parse(request.text)
            name, arguments = said.get("name"), said.get("arguments")
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise Malformed("a command without name or arguments")
            answer = self._server.command(name, arguments, incarnation=request.incarnation)
            return Answer(text=text_of(answer)).pieces
        if request.kind in (DIFFERENCES, ROWS, PARITY_ROWS, DECODED):
            return answer_peer(self._server, request, rows)
        if request.kind in (STAGE, STAGE_NEW):
            if len(rows) != 1:
                raise Malformed("rows to stage of another number of tables than one")
            ((slots, records),) = rows
            staged = self._server.stage(
                request.number,
                slots.clone(),
                records.clone() if request.kind == STAGE_NEW else None,
                incarnation=request.incarnation,
                first=request.batch,
            )
            return [*Answer(count=len(staged)).pieces, staged]
        of_tables = _of_tables(request, rows)
        if request.kind == CHECK:
            if len(of_tables) != 1:
                raise Malformed("a check of another number of tables than one")
            (asked,) = of_tables
            told = self._server.check(
                asked.table, asked.ids.clone(), incarnation=request.incarnation
            )
            return [*Answer(count=len(told)).pieces, told]
        if request.kind == WRITE:
            self._server.write_back(
                of_tables,
                incarnation=request.incarnation,
                trainer=request.number,
                batch=request.batch,
            )
            return Answer().pieces
        found = self._server.fetch(
            of_tables,
            incarnation=request.incarnation,
            frozen=request.number if request.kind == FETCH_FROZEN else None,
        )
        has = torch.cat(found)
        count = int(has.sum())
        if count == len(has):
            return [*Answer(count=count).pieces, *(records for _, records in rows)]
        bits = np.packbits(has.numpy()).tobytes()
        there = [
            _those(records, has_row.nonzero().view(-1))
            for (_, records), has_row in zip(rows, found, strict=True)
        ]
        return [*Answer(count=count).pieces, bits, SEAL, *there]


def _rows_in(memory: Tensor, parts: Sequence[Part]) -> list[tuple[Tensor, Tensor]]:
    """Return for each part int64 [count] and uint8 [count, record_bytes], which lie in `memory`."""
    counts = [part.rows for part in parts]
    sizes = [part.rows * part.record_bytes for part in parts]
    slots_bytes = 8 * sum(counts)  # slots come first, where an int64 may be
    slots = memory[:slots_bytes].view(torch.int64).split(counts)
    records = memory[slots_bytes:].split(sizes)
    return [
        (part_slots, part_records.view(part.rows, part.record_bytes))
        for part_slots, part_records, part in zip(slots, records, parts, strict=True)
    ]


def _of_tables(request: Request, rows: Sequence[tuple[Tensor, Tensor]]) -> list[TableRows]:
    names = parse(request.text).get("tables")
    if not isinstance(names, list) or not all(type(name) is str for name in names):
        raise Malformed("rows without names of tables")
    if len(names) != len(rows):
        raise Malformed("another number of names than of tables")
    return [TableRows(name, *one) for name, one in zip(names, rows, strict=True)]


def _those(records: Tensor, chosen: Tensor) -> Tensor:
    found = torch.empty(len(chosen), records.shape[1], dtype=torch.uint8, device="cpu")
    row_gather.gather(records, chosen, found)
    return found
