"""Starts embedding servers with parity in this process, and damages their memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.protected_home import protected_home
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.tcp import TcpServer, TcpTransport
from recpoint.embeddings.server.tcp_peer import reach_with
from recpoint.testing.homes import ids_of

_TOKEN = b"of this test"


@contextmanager
def protected(count: int, form: Parity) -> Iterator[tuple[list[EmbeddingServer], ServedHome]]:
    with ExitStack() as stack:
        servers = [EmbeddingServer(reach=reach_with(_TOKEN)) for _ in range(count)]
        for server in servers:
            stack.callback(server.end)
        listening = [stack.enter_context(TcpServer(server, _TOKEN)) for server in servers]
        transports = [TcpTransport(server.address, _TOKEN) for server in listening]
        yield servers, stack.enter_context(protected_home(transports, parity=form))


def flip_bit(
    servers: list[EmbeddingServer], home: ServedHome, table: str, row: int, *, byte: int
) -> int:
    """Change a bit of a stored row, as damaged memory does: its server does not notice.

    Returns:
        The number of the server.
    """
    served = home._tables.get(table)
    split = served.placement.split(ids_of([row]))
    ((number, slots),) = [(server, slots) for server, (_, slots) in enumerate(split) if len(slots)]
    record = torch.zeros(1, served.form.record_bytes, dtype=torch.uint8)
    rows = servers[number]._home
    assert rows.fetch(table, slots, record).all()
    record[0, byte] ^= 64
    rows.write_back(table, slots, record, batch=0)
    return number
