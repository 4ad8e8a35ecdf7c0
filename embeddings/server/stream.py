"""Defines the bytes that `TcpTransport` and `TcpServer` exchange, and reads and writes them.

A connection begins with a proof, in both directions, that the other side knows the token (HMAC of
fresh random numbers, so nothing that was overheard can be used again). The proof names the address
at which the server listens. So a process that has taken the port of a server that has ended cannot
have another server prove for it. Records are not encrypted. Then each request has one answer:

    request: header, forms of rows, message, MAC, slots (int64) of all rows, and their records
             if the message sends some, MAC
    reply:   header, answer, MAC, and the tensors of the reply, MAC; or, if records of the
             caller are filled, a bit for each slot, a MAC, and the records that are there, MAC

A MAC (Poly1305) is of all bytes since the one before it in its direction. Each has a key of its
own, from both random numbers, the token, the direction and the MAC's number. So bytes that were
changed, left out, sent again or taken from another connection end the connection.

A form says how many slots there are, and the bytes of a record. If all records are there, a reply
leaves their bits out. Bools travel as bits.

All numbers are little-endian. Messages and answers are JSON (`messages.py`), and so are errors.
Nothing is ever unpickled. Each side checks lengths before it makes room for what they announce.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305
from pydantic import ValidationError
from torch import Tensor

from recpoint.embeddings.parity.peers import OutOfStep
from recpoint.embeddings.server.transport import (
    MOST_PARTS,
    MOST_REQUEST_BYTES,
    Message,
    RecordUse,
    Reply,
    RowMessage,
    SlotRows,
)
from recpoint.errors import HomeError, RecpointError, ServerLost
from recpoint.format.records import Part
from recpoint.kernels import row_gather

__all__ = [
    "SEAL",
    "Malformed",
    "Piece",
    "Refused",
    "ReplyHead",
    "Request",
    "RowsForm",
    "Stream",
    "TokenRefused",
    "error_of",
    "error_pieces",
    "prove_client",
    "prove_server",
    "receive_reply",
    "reply_pieces",
    "request_pieces",
]

AnswerT = TypeVar("AnswerT", bound=Part)

_GREETING_NAME: Final = b"recpoint embedding server "
_GREETING: Final = _GREETING_NAME + b"7\n"
_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 16
#: Bytes that are received together while fewer are wanted.
_AHEAD_BYTES: Final = 4 << 10
_REFUSED: Final = bytes(hashlib.sha256().digest_size)
#: Magic, what is done with records, bytes of the text, number of forms.
_REQUEST: Final = struct.Struct("<4sB3xII")
#: Bytes of a record, number of slots.
_FORM: Final = struct.Struct("<IQ")
#: Magic, whether it is an error, bytes of the text, number of records or bytes.
_REPLY: Final = struct.Struct("<4s?3xIQ")
_REQUEST_MAGIC: Final = b"rpeq"
_REPLY_MAGIC: Final = b"rpea"
_RECORD_USES: Final = frozenset(RecordUse)
#: Of a message or an answer. Names of tables are bounded, and so are the rows beside a message.
_MOST_TEXT_BYTES: Final = 1 << 20
#: Characters of one part of an error.
_MOST_ERROR_CHARACTERS: Final = 4_000

assert sys.byteorder == "little"  # tensors are sent as they lie in memory


class Malformed(Exception):
    """The other side sent what no request or answer looks like. The connection is of no use."""


class TokenRefused(Exception):
    """The other side does not know the token."""


class Refused(Exception):
    """The server answers with an error; the connection is as good as before."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


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
        self._memory = memoryview(bytearray(_AHEAD_BYTES))
        self._ahead = self._memory[:0]
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
        received = bytearray(size_bytes)
        self._receive_into(memoryview(received), self._received)
        return bytes(received)

    def receive_into(self, memory: Tensor) -> None:
        """Receive the bytes of a contiguous tensor."""
        self._receive_into(_bytes_of(memory), self._received)

    def _receive_into(self, view: memoryview, macs: _Macs | None) -> None:
        while len(view):
            if self._ahead or len(view) < _AHEAD_BYTES:
                # Heads, texts and MACs come together, and are received together.
                if not self._ahead:
                    self._ahead = self._memory[: self._received_into(self._memory)]
                count = min(len(view), len(self._ahead))
                view[:count] = self._ahead[:count]
                self._ahead = self._ahead[count:]
            else:
                count = self._received_into(view)
            if macs is not None:
                macs.update(view[:count])
            view = view[count:]

    def _received_into(self, view: memoryview) -> int:
        """Wait for bytes, and receive some; return how many."""
        self._wait()
        count = self._socket.recv_into(view)
        if not count:
            raise EOFError("the other side has closed the connection")
        return count

    def _wait(self) -> None:
        seconds_left = None if self.deadline is None else self.deadline - time.monotonic()
        if seconds_left is not None and seconds_left <= 0:
            raise TimeoutError("no time left")
        self._socket.settimeout(seconds_left)

    def has_bytes(self) -> bool:
        """Whether bytes, or the end of the connection, have come and were not received."""
        if self._ahead:
            return True
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
    server_nonce = stream.receive(_NONCE_BYTES)
    client_nonce = secrets.token_bytes(_NONCE_BYTES)
    secret = _Secret(
        token, server or stream.other_address, of_server=server_nonce, of_client=client_nonce
    )
    stream.send([client_nonce, secret.digest(b"client proof")])
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
    server_nonce = secrets.token_bytes(_NONCE_BYTES)
    stream.send([_GREETING, server_nonce])
    client_nonce = stream.receive(_NONCE_BYTES)
    proof = stream.receive(len(_REFUSED))
    secret = _Secret(token, stream.own_address, of_server=server_nonce, of_client=client_nonce)
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


class RowsForm(NamedTuple):
    """What a request has of one `SlotRows`: bytes of a record, and number of slots."""

    record_bytes: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request without its slots and records.

    Attributes:
        text: the message as JSON.
        records: what the call does with records.
        forms: one for each `SlotRows` of the message. If there are no records, their bytes are
            those of a row of the reply.
    """

    text: bytes
    records: RecordUse = RecordUse.NONE
    forms: Sequence[RowsForm] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of the slots, and of the records if there are any."""
        form_bytes = [
            form.rows * (8 + (form.record_bytes if self.records else 0)) for form in self.forms
        ]
        return sum(form_bytes)

    @property
    def pieces(self) -> list[Piece]:
        """The bytes to send."""
        header = _REQUEST.pack(_REQUEST_MAGIC, self.records, len(self.text), len(self.forms))
        forms = [_FORM.pack(*form) for form in self.forms]
        return [b"".join([header, *forms, self.text]), SEAL]

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
        magic, records, text_bytes, count = _REQUEST.unpack(header)
        if (
            magic != _REQUEST_MAGIC
            or records not in _RECORD_USES
            or text_bytes > _MOST_TEXT_BYTES
            or count > MOST_PARTS
        ):
            raise Malformed("no request of a trainer")
        forms = [RowsForm(*form) for form in _FORM.iter_unpack(stream.receive(count * _FORM.size))]
        if (records != RecordUse.NONE and not all(form.record_bytes for form in forms)) or sum(
            form.rows * (8 + form.record_bytes) for form in forms
        ) > MOST_REQUEST_BYTES:
            raise Malformed("no request of a trainer")
        text = stream.receive(text_bytes)
        stream.require_mac()
        return Request(text=text, records=RecordUse(records), forms=forms)


def request_pieces(message: Message[Any], rows: Sequence[SlotRows]) -> list[Piece]:
    """Return what to send for a message and the rows beside it."""
    text = message.model_dump_json().encode()
    if not isinstance(message, RowMessage):
        return Request(text=text).pieces
    forms = [
        RowsForm(
            message.row_bytes if row_part.records is None else row_part.records.shape[1],
            row_part.slots.numel(),
        )
        for row_part in rows
    ]
    request = Request(text=text, records=message.records, forms=forms)
    pieces: list[Piece] = [*request.pieces, *(row_part.slots for row_part in rows)]
    if message.records is RecordUse.SENT:
        pieces += [row_part.records for row_part in rows if row_part.records is not None]
    return pieces


def reply_pieces(message: Message[Any], rows: Sequence[SlotRows], reply: Reply[Any]) -> list[Piece]:
    """Return what to send for a reply to a message, whose rows were these."""
    text = reply.answer.model_dump_json().encode()
    if not isinstance(message, RowMessage):
        return ReplyHead(text=text).pieces
    if message.records is not RecordUse.FILLED:
        tensors = [_on_wire(tensor) for tensor in reply.tensors]
        size_bytes = sum(len(_bytes_of(tensor)) for tensor in tensors)
        return [*ReplyHead(text=text, count=size_bytes).pieces, *tensors]
    count = sum(int(np.count_nonzero(has_row.numpy())) for has_row in reply.tensors)
    records = [row_part.records for row_part in rows if row_part.records is not None]
    head = ReplyHead(text=text, count=count).pieces
    if count == sum(has_row.numel() for has_row in reply.tensors):
        return [*head, *records]
    present = [
        _chosen(part, has_row.nonzero().view(-1))
        for part, has_row in zip(records, reply.tensors, strict=True)
    ]
    return [*head, _on_wire(torch.cat(list(reply.tensors))), SEAL, *present]


def receive_reply(
    stream: Stream, message: Message[AnswerT], rows: Sequence[SlotRows]
) -> Reply[AnswerT]:
    """Receive the reply to a message; the caller then requires a MAC.

    Raises:
        Refused: the server answers with an error.
        Malformed: it is no reply to this message.
    """
    room = message.room(rows) if isinstance(message, RowMessage) else []
    is_filled = isinstance(message, RowMessage) and message.records is RecordUse.FILLED
    counts = [row_part.slots.numel() for row_part in rows]
    room_bytes = sum(_wire_bytes(tensor) for tensor in room)
    head = ReplyHead.receive(stream, most=sum(counts) if is_filled else room_bytes)
    if head.is_error:
        stream.require_mac()
        raise Refused(error_of(head.text))
    try:
        answer = cast(AnswerT, message.answer_type().model_validate_json(head.text))
    except ValidationError as error:
        raise Malformed("an answer of another form") from error
    if is_filled:
        return Reply(answer, _receive_records(stream, head.count, rows))
    if head.count != room_bytes:
        raise Malformed("an answer for another number of rows")
    return Reply(answer, [_received(stream, tensor) for tensor in room])


def _receive_records(stream: Stream, present: int, rows: Sequence[SlotRows]) -> list[Tensor]:
    """Receive the records that a server has; return for each part bool [n], whether it has it."""
    counts = [row_part.slots.numel() for row_part in rows]
    outs = [row_part.records for row_part in rows if row_part.records is not None]
    # Which rows are there is proved before records are written: other rows stay untouched.
    if present == sum(counts):
        for out in outs:
            stream.receive_into(out)
        return [torch.ones(count, dtype=torch.bool, device="cpu") for count in counts]
    is_present = _received_bools(stream, sum(counts))
    stream.require_mac()
    if int(is_present.sum()) != present:
        raise Malformed("another number of records than was announced")
    of_parts = list(is_present.split(counts))
    for out, has_row in zip(outs, of_parts, strict=True):
        positions = has_row.nonzero().view(-1)
        if len(positions) == len(out):
            stream.receive_into(out)
            continue
        records = torch.empty(len(positions), out.shape[1], dtype=torch.uint8, device="cpu")
        stream.receive_into(records)
        all_of_them = torch.arange(len(positions), dtype=torch.int64, device="cpu")
        row_gather.move(records, all_of_them, out, positions)
    return of_parts


@dataclass(frozen=True, kw_only=True)
class ReplyHead:
    """The header of a reply, and its text.

    Attributes:
        is_error: the text is an error.
        text: the answer as JSON.
        count: number of records that follow, or bytes of the tensors.
    """

    is_error: bool = False
    text: bytes = b""
    count: int = 0

    @property
    def pieces(self) -> list[Piece]:
        """The bytes to send."""
        header = _REPLY.pack(_REPLY_MAGIC, self.is_error, len(self.text), self.count)
        return [header + self.text, SEAL]

    @staticmethod
    def receive(stream: Stream, *, most: int) -> ReplyHead:
        """Receive the head of a reply with a count of at most `most`.

        Raises:
            Malformed: it is none, or it is larger than asked for.
        """
        magic, is_error, text_bytes, count = _REPLY.unpack(stream.receive(_REPLY.size))
        if magic != _REPLY_MAGIC or text_bytes > _MOST_TEXT_BYTES or count > most:
            raise Malformed("no answer of an embedding server")
        text = stream.receive(text_bytes)
        stream.require_mac()
        return ReplyHead(is_error=is_error, text=text, count=count)


class _ErrorNote(Part):
    """An error: its kind, and what it says."""

    kind: Literal["ServerLost", "HomeError", "OutOfStep", "ValueError"]
    says: tuple[str, ...]


def error_pieces(error: Exception) -> list[Piece]:
    """Return what to send for an error."""
    kind: Literal["ServerLost", "HomeError", "OutOfStep", "ValueError"]
    if isinstance(error, RecpointError):
        kind = "ServerLost" if isinstance(error, ServerLost) else "HomeError"
        says = [error.subject, error.found, error.expected, error.next_step]
    else:
        kind = "OutOfStep" if isinstance(error, OutOfStep) else "ValueError"
        says = [str(error)]
    note = _ErrorNote(kind=kind, says=tuple(part[:_MOST_ERROR_CHARACTERS] for part in says))
    return ReplyHead(is_error=True, text=note.model_dump_json().encode()).pieces


def error_of(text: bytes) -> Exception:
    """Return the error that `error_pieces` was given, as far as a caller can tell.

    Raises:
        Malformed: it is none.
    """
    try:
        note = _ErrorNote.model_validate_json(text)
    except ValidationError as error:
        raise Malformed("an error of no kind") from error
    if note.kind in ("ValueError", "OutOfStep") and len(note.says) == 1:
        return OutOfStep(note.says[0]) if note.kind == "OutOfStep" else ValueError(note.says[0])
    if note.kind not in ("HomeError", "ServerLost") or len(note.says) != 4:
        raise Malformed("an error without parts")
    subject, actual, expected, next_step = note.says
    error_class = ServerLost if note.kind == "ServerLost" else HomeError
    return error_class(subject, found=actual, expected=expected, next_step=next_step)


def _wire_bytes(tensor: Tensor) -> int:
    return -(-tensor.numel() // 8) if tensor.dtype == torch.bool else tensor.nbytes


def _on_wire(tensor: Tensor) -> bytes | Tensor:
    """Return a tensor as it travels: bools as bits."""
    return np.packbits(tensor.numpy()).tobytes() if tensor.dtype == torch.bool else tensor


def _received(stream: Stream, room: Tensor) -> Tensor:
    if room.dtype == torch.bool:
        return _received_bools(stream, len(room))
    stream.receive_into(room)
    return room


def _received_bools(stream: Stream, count: int) -> Tensor:
    bits = np.frombuffer(stream.receive(-(-count // 8)), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(bits, count=count)).view(torch.bool)


def _chosen(records: Tensor, positions: Tensor) -> Tensor:
    chosen = torch.empty(len(positions), records.shape[1], dtype=torch.uint8, device="cpu")
    row_gather.gather(records, positions, chosen)
    return chosen


def _bytes_of(part: bytes | Tensor) -> memoryview:
    if isinstance(part, Tensor):
        if not part.numel():
            return memoryview(b"")
        array: Any = part.numpy()  # a buffer, which its type hides
        return memoryview(array).cast("B")
    return memoryview(part)
