"""A stream gives each piece the bytes that were sent for it, however they arrive."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from recpoint.embeddings.server.stream import _AHEAD_BYTES, SEAL, Malformed, Piece, Stream

_KEYS = {"sent": bytes(range(32)), "received": bytes(range(32, 64))}


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, Stream]]:
    """Return the sender's socket, and a stream that receives from it, each byte guarded."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver = Stream(listener.accept()[0])
    receiver.guard(sent=_KEYS["received"], received=_KEYS["sent"])
    receiver.deadline = None
    with sender:
        yield sender, receiver
    receiver.close()


def _sent_bytes(parts: list[Piece]) -> bytes:
    """Return what a guarded stream sends for these parts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stream = Stream(socket.create_connection(listener.getsockname()))
        receiver = listener.accept()[0]
    stream.guard(**_KEYS)

    def send() -> None:
        stream.send(parts)
        stream.close()

    sending = threading.Thread(target=send)
    sending.start()
    with receiver, receiver.makefile("rb") as file:
        received = file.read()
    sending.join()
    return received


@pytest.mark.parametrize("size_bytes", [1, _AHEAD_BYTES - 1, _AHEAD_BYTES, 3 * _AHEAD_BYTES + 5])
@pytest.mark.parametrize("cut_at", [1, 23, 24, 40, _AHEAD_BYTES, _AHEAD_BYTES + 41])
def test_pieces_are_the_same_wherever_their_bytes_are_cut(
    sockets: tuple[socket.socket, Stream], size_bytes: int, cut_at: int
) -> None:
    """The second message comes with the end of the first one."""
    sender, receiver = sockets
    records = torch.arange(size_bytes).to(torch.uint8)
    wire_bytes = _sent_bytes([b"h" * 24, SEAL, records, SEAL, b"second"])

    def send() -> None:
        sender.sendall(wire_bytes[:cut_at])
        sender.sendall(wire_bytes[cut_at:])

    sending = threading.Thread(target=send)
    sending.start()
    assert receiver.receive(24) == b"h" * 24
    receiver.require_mac()
    received = torch.zeros_like(records)
    receiver.receive_into(received)
    receiver.require_mac()
    assert torch.equal(received, records)
    assert receiver.receive(6) == b"second"
    receiver.require_mac()
    assert not receiver.has_bytes()
    sending.join()


def test_bytes_that_were_received_ahead_are_bytes_that_have_come(
    sockets: tuple[socket.socket, Stream],
) -> None:
    sender, receiver = sockets
    sender.sendall(b"ab")
    assert receiver.receive(1) == b"a"
    assert receiver.has_bytes()
    assert receiver.receive(1) == b"b"
    assert not receiver.has_bytes()


def test_bytes_that_were_received_ahead_are_guarded_too(
    sockets: tuple[socket.socket, Stream],
) -> None:
    sender, receiver = sockets
    wire_bytes = bytearray(_sent_bytes([b"first", SEAL, b"second"]))
    wire_bytes[-20] ^= 1  # of the second message
    sender.sendall(wire_bytes)
    assert receiver.receive(5) == b"first"
    receiver.require_mac()
    receiver.receive(6)
    with pytest.raises(Malformed):
        receiver.require_mac()


def test_the_end_of_a_connection_is_seen_behind_what_was_received_ahead(
    sockets: tuple[socket.socket, Stream],
) -> None:
    sender, receiver = sockets
    sender.sendall(b"abc")
    sender.shutdown(socket.SHUT_WR)
    assert receiver.receive(3) == b"abc"
    with pytest.raises(EOFError):
        receiver.receive(1)
