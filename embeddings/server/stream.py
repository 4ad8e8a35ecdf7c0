"""Defines the bytes that `TcpTransport` and `TcpServer` exchange, and reads and writes them.

A connection begins with a proof, in both directions, that the other side knows the token (HMAC of
fresh random numbers, so nothing that was overheard can be used again). The proof names the address
at which the server listens. So a process that has taken the port of a server that has ended cannot
have another server prove for it. Records are not encrypted. Then each request has one answer:

    request: header, parts, text, MAC, slots (int64) of all parts, and for a write, for
             differences or for new rows to stage their records, MAC
    answer:  header, text, MAC, and for a fetch a bit for each slot, a MAC, and the records that
             are there, MAC

A MAC (Poly1305) is of all bytes since the one before it in its direction. Each has a key of its
own, from both random numbers, the token, the direction and the MAC's number. So bytes that were
changed, left out, sent again or taken from another connection end the connection.

A part says how many slots there are, and the bytes of a record. It is about one table, and of
differences about one message, which may have several tables. A server that asks another one for
its rows gets a bit for each slot that is known, and all records. The answer to a check has a byte
for each slot, and so has the answer to a request to stage rows.

All numbers are little-endian. Texts are JSON: of a request the tables' names, a command, or what a
server asks of another one; of an answer what a call returns, or an error. Nothing is ever
unpickled. Each side checks lengths before it makes room for what they announce.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305
from torch import Tensor

from recpoint.embeddings.parity.peers import MOST_TABLES, OutOfStep
from recpoint.embeddings.server.server import MOST_REQUEST_BYTES
from recpoint.errors import HomeError, RecpointError, ServerLost

__all__ = [
    "CHECK",
    "COMMAND",
    "DECODED",
    "DIFFERENCES",
    "FETCH",
    "FETCH_FROZEN",
    "HELLO",
    "MOST_PARTS",
    "PARITY_ROWS",
    "ROWS",
    "SEAL",
    "STAGE",
    "STAGE_NEW",
    "WRITE",
    "Answer",
    "Malformed",
    "Part",
    "Piece",
    "Request",
    "Stream",
    "TokenRefused",
    "error_of",
    "parse",
    "prove_client",
    "prove_server",
    "text_of",
    "text_of_error",
]

HELLO: Final = 1
COMMAND: Final = 2
FETCH: Final = 3
FETCH_FROZEN: Final = 4
WRITE: Final = 5
DIFFERENCES: Final = 6
ROWS: Final = 7
PARITY_ROWS: Final = 8
DECODED: Final = 9
CHECK: Final = 10
STAGE: Final = 11
STAGE_NEW: Final = 12

#: Parts of one request.
MOST_PARTS: Final = MOST_TABLES

_GREETING_NAME: Final = b"recpoint embedding server "
_GREETING: Final = _GREETING_NAME + b"6\n"
_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 16
_REFUSED: Final = bytes(hashlib.sha256().digest_size)
#: Magic, kind, bytes of the text, number of parts, incarnation, and the number of the frozen
#: reader, or of trainer and batch.
_REQUEST: Final = struct.Struct("<4sB3xIIqqq")
#: Bytes of a record, number of slots.
_PART: Final = struct.Struct("<IQ")
#: Magic, whether it is an error, bytes of the text, number of records.
_ANSWER: Final = struct.Struct("<4s?3xIQ")
_REQUEST_MAGIC: Final = b"rpeq"
_ANSWER_MAGIC: Final = b"rpea"
#: Of a request or an answer. Names of tables are bounded, and so are the parts.
_MOST_TEXT_BYTES: Final = 1 << 20
#: Characters of one part of an error.
_MOST_ERROR_CHARACTERS: Final = 4_000

assert sys.byteorder == "little"  # tensors are sent as they lie in memory


class Malformed(Exception):
    """The other side sent what no request or answer looks like. The connection is of no use."""


class TokenRefused(Exception):
    """The other side does not know the token."""


class Seal:
    """Stands for a MAC among the pieces to send."""


SEAL: Final = Seal()
Piece: TypeAlias = bytes | Tensor | Seal


class _Macs:
    """Computes the MACs of one direction of a connection.

    Args:
        key: of this direction of this connection only.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0
        self._open = self._next()

    def _next(self) -> Poly1305:
        # Poly1305 is safe only if no two messages share a key.
        number = self._number.to_bytes(8, "little")
        return Poly1305(hashlib.blake2b(number, key=self._key, digest_size=32).digest())

    def update(self, view: memoryview) -> None:
        self._open.update(view)

    def close(self) -> bytes:
        """Return the MAC of all bytes since the last one."""
        mac = self._open.finalize()
        self._number += 1
        self._open = self._next()
        return mac


class Stream:
    """Sends and receives whole pieces on a socket. After the proof, MACs guard them.

    Attributes:
        deadline: `time.monotonic` until which sends and receives may take; None: for ever.

    Raises:
        TimeoutError: the deadline has passed.
        EOFError: the other side has closed the connection.
        OSError: the connection is broken.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Finds out, in hours, that the other machine is gone.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = connected
        self._sent: _Macs | None = None
        self._received: _Macs | None = None
        self.deadline: float | None = None

    @property
    def own_address(self) -> tuple[str, int]:
        """Host and port of this side, as numbers."""
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    @property
    def other_address(self) -> tuple[str, int]:
        """Host and port of the other side, as numbers."""
        host, port = self._socket.getpeername()[:2]
        return str(host), int(port)

    def guard(self, *, sent: bytes, received: bytes) -> None:
        """Have MACs guard all further bytes.

        Args:
            sent: key for what this side sends.
            received: key for what it receives.
        """
        self._sent, self._received = _Macs(sent), _Macs(received)

    def send(self, parts: Sequence[Piece]) -> None:
        """Send parts one after another, and a MAC; tensors are contiguous."""
        views = [view for view in self._guarded(parts) if len(view)]
        while views:
            self._wait()
            sent = self._socket.sendmsg(views)
            while sent:
                if sent < len(views[0]):
                    views[0] = views[0][sent:]
                    break
                sent -= len(views.pop(0))

    def _guarded(self, parts: Sequence[Piece]) -> Iterator[memoryview]:
        for part in [*parts, SEAL]:
            if not isinstance(part, Seal):
                view = _bytes_of(part)
                if self._sent is not None:
                    self._sent.update(view)
                yield view
            elif self._sent is not None:
                yield memoryview(self._sent.close())

    def require_mac(self) -> None:
        """Receive a MAC, and compare it with the bytes since the last one.

        Raises:
            Malformed: the other side has not sent these bytes.
        """
        if self._received is None:
            return
        mac = bytearray(_MAC_BYTES)
        self._receive_into(memoryview(mac), None)
        if not hmac.compare_digest(mac, self._received.close()):
            raise Malformed("bytes that do not fit their MAC")

    def receive(self, size_bytes: int) -> bytes:
        """Receive a few bytes."""
        found = bytearray(size_bytes)
        self._receive_into(memoryview(found), self._received)
        return bytes(found)

    def receive_into(self, memory: Tensor) -> None:
        """Receive the bytes of a contiguous tensor."""
        self._receive_into(_bytes_of(memory), self._received)

    def _receive_into(self, view: memoryview, macs: _Macs | None) -> None:
        while len(view):
            self._wait()
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError("the other side has closed the connection")
            if macs is not None:
                macs.update(view[:count])
            view = view[count:]

    def _wait(self) -> None:
        left = None if self.deadline is None else self.deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError("no time left")
        self._socket.settimeout(left)

    def has_bytes(self) -> bool:
        """Whether bytes, or the end of the connection, have come and were not received."""
        ready = select.poll()  # takes any file descriptor, unlike `select`
        try:
            ready.register(self._socket, select.POLLIN)
        except (OSError, ValueError):  # it is closed
            return False
        return bool(ready.poll(0))

    def close(self) -> None:
        """Close the socket; also wakes a thread that receives. A second call does nothing."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is not connected any more
        self._socket.close()


def prove_client(stream: Stream, token: bytes, *, server: tuple[str, int] | None = None) -> None:
    """Prove to a server that this side knows the token, and have it prove the same.

    Args:
        stream: a new connection. MACs guard it afterwards.
        token: what both sides know.
        server: host and port, as numbers, at which the server listens; None: as `stream` goes to.

    Raises:
        TokenRefused: one of them does not, or the server listens elsewhere.
        Malformed: no embedding server of this version answers.
    """
    greeting = stream.receive(len(_GREETING))
    if greeting != _GREETING:
        if greeting.startswith(_GREETING_NAME):
            raise Malformed(
                f"it speaks version {_version_of(greeting)} of the protocol, and this process "
                f"version {_version_of(_GREETING)}; install one version of recpoint on all hosts"
            )
        raise Malformed("no greeting of an embedding server")
    theirs = stream.receive(_NONCE_BYTES)
    own = secrets.token_bytes(_NONCE_BYTES)
    secret = _Secret(token, server or stream.other_address, of_server=theirs, of_client=own)
    stream.send([own, secret.digest(b"client proof")])
    answer = stream.receive(len(_REFUSED))
    if not hmac.compare_digest(answer, secret.digest(b"server proof")):
        raise TokenRefused
    stream.guard(sent=secret.digest(b"client key"), received=secret.digest(b"server key"))


def prove_server(stream: Stream, token: bytes) -> None:
    """Have a client prove that it knows the token, and prove the same.

    Args:
        stream: a new connection. MACs guard it afterwards.
        token: what both sides know.

    Raises:
        TokenRefused: the client does not, or it means a server that listens elsewhere.
    """
    own = secrets.token_bytes(_NONCE_BYTES)
    stream.send([_GREETING, own])
    theirs = stream.receive(_NONCE_BYTES)
    proof = stream.receive(len(_REFUSED))
    secret = _Secret(token, stream.own_address, of_server=own, of_client=theirs)
    if not hmac.compare_digest(proof, secret.digest(b"client proof")):
        stream.send([_REFUSED])
        raise TokenRefused
    stream.send([secret.digest(b"server proof")])
    stream.guard(sent=secret.digest(b"server key"), received=secret.digest(b"client key"))


def _version_of(greeting: bytes) -> str:
    return greeting.removeprefix(_GREETING_NAME).strip().decode("ascii", "replace")


class _Secret:
    """What only the two sides of one connection to one server can compute."""

    def __init__(
        self, token: bytes, server: tuple[str, int], *, of_server: bytes, of_client: bytes
    ) -> None:
        self._token = token
        host, port = server
        # Each field has one length, so no two connections have the same bytes.
        self._of_connection = (
            hashlib.sha256(f"{host} {port}".encode()).digest() + of_server + of_client
        )

    def digest(self, purpose: bytes) -> bytes:
        return hmac.digest(self._token, purpose.ljust(16, b"\0") + self._of_connection, "sha256")


class Part(NamedTuple):
    """What a request has of one table or message: bytes of a record, and number of slots."""

    record_bytes: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request without its slots and records.

    Attributes:
        kind: HELLO, COMMAND, FETCH, …
        text: JSON.
        parts: one for each table or message; none for HELLO and COMMAND.
        incarnation: of the server that is meant; 0 if unused, as the others are.
        number: of the frozen reader, or of the trainer.
        batch: of a write; of rows to stage, how many were named before.
    """

    kind: int
    text: bytes = b""
    parts: Sequence[Part] = ()
    incarnation: int = 0
    number: int = 0
    batch: int = 0

    @property
    def pieces(self) -> list[Piece]:
        """The bytes to send."""
        header = _REQUEST.pack(
            _REQUEST_MAGIC,
            self.kind,
            len(self.text),
            len(self.parts),
            self.incarnation,
            self.number,
            self.batch,
        )
        return [header, *(_PART.pack(*part) for part in self.parts), self.text, SEAL]

    @staticmethod
    def header_from(stream: Stream) -> bytes:
        """Receive a header, which says whether a request has come at all."""
        return stream.receive(_REQUEST.size)

    @staticmethod
    def receive(header: bytes, stream: Stream) -> Request:
        """Receive the rest of a request.

        Raises:
            Malformed: it is none, or it is larger than any may be.
        """
        magic, kind, text_bytes, count, *numbers = _REQUEST.unpack(header)
        if (
            magic != _REQUEST_MAGIC
            or not HELLO <= kind <= STAGE_NEW
            or text_bytes > _MOST_TEXT_BYTES
            or count > MOST_PARTS
            or (kind in (HELLO, COMMAND)) != (count == 0)
        ):
            raise Malformed("no request of a trainer")
        parts = [Part(*one) for one in _PART.iter_unpack(stream.receive(count * _PART.size))]
        if (
            not all(part.record_bytes for part in parts)
            or sum(part.rows * (8 + part.record_bytes) for part in parts) > MOST_REQUEST_BYTES
        ):
            raise Malformed("no request of a trainer")
        incarnation, number, batch = numbers
        text = stream.receive(text_bytes)
        stream.require_mac()
        return Request(
            kind=kind,
            text=text,
            parts=parts,
            incarnation=incarnation,
            number=number,
            batch=batch,
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The header of an answer, and its text.

    Attributes:
        is_error: the text is an error.
        text: JSON.
        count: number of records that follow.
    """

    is_error: bool = False
    text: bytes = b""
    count: int = 0

    @property
    def pieces(self) -> list[Piece]:
        """The bytes to send."""
        header = _ANSWER.pack(_ANSWER_MAGIC, self.is_error, len(self.text), self.count)
        return [header, self.text, SEAL]

    @staticmethod
    def receive(stream: Stream, *, most: int) -> Answer:
        """Receive an answer with at most `most` records.

        Raises:
            Malformed: it is none, or it is larger than asked for.
        """
        magic, is_error, text_bytes, count = _ANSWER.unpack(stream.receive(_ANSWER.size))
        if magic != _ANSWER_MAGIC or text_bytes > _MOST_TEXT_BYTES or count > most:
            raise Malformed("no answer of an embedding server")
        text = stream.receive(text_bytes)
        stream.require_mac()
        return Answer(is_error=is_error, text=text, count=count)


def text_of(values: Mapping[str, object]) -> bytes:
    """Return values as JSON."""
    return json.dumps(values, separators=(",", ":")).encode()


def parse(text: bytes) -> dict[str, object]:
    """Return the values of a JSON object.

    Raises:
        Malformed: it is none.
    """
    try:
        values = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise Malformed("text that is no JSON") from error
    if not isinstance(values, dict):
        raise Malformed("JSON that is no object")
    return values


def text_of_error(error: Exception) -> bytes:
    """Return an error as JSON."""
    if isinstance(error, RecpointError):
        kind = "ServerLost" if isinstance(error, ServerLost) else "HomeError"
        parts = [error.subject, error.found, error.expected, error.next_step]
    else:
        kind = "OutOfStep" if isinstance(error, OutOfStep) else "ValueError"
        parts = [str(error)]
    return text_of({"kind": kind, "parts": [part[:_MOST_ERROR_CHARACTERS] for part in parts]})


def error_of(text: bytes) -> Exception:
    """Return the error that `text_of_error` was given, as far as a caller can tell.

    Raises:
        Malformed: it is none.
    """
    values = parse(text)
    kind, parts = values.get("kind"), values.get("parts")
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise Malformed("an error without parts")
    if kind in ("ValueError", "OutOfStep") and len(parts) == 1:
        return OutOfStep(parts[0]) if kind == "OutOfStep" else ValueError(parts[0])
    if kind not in ("HomeError", "ServerLost") or len(parts) != 4:
        raise Malformed("an error of no kind")
    subject, found, expected, next_step = parts
    made = ServerLost if kind == "ServerLost" else HomeError
    return made(subject, found=found, expected=expected, next_step=next_step)


def _bytes_of(part: bytes | Tensor) -> memoryview:
    if isinstance(part, Tensor):
        if not part.numel():
            return memoryview(b"")
        array: Any = part.view(-1).view(torch.uint8).numpy()  # a buffer, which its type hides
        return memoryview(array)
    return memoryview(part)
