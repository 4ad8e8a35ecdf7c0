"""Runs a server's part in parity: its calls to the other servers, and its recovery.

`parity/member.py` is what is run. This module gives it connections and threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, TypeVar

from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.parity.member import StripeMember
from recpoint.embeddings.parity.peers import Peer
from recpoint.embeddings.parity.stripes import Parity, stripes_of

__all__ = ["Protection", "Reach"]

T = TypeVar("T")

#: More than there are calls at a time. Threads are started when they are needed. If there were too
#: few, servers could wait for each other's threads for ever.
_MOST_THREADS: Final = 4_096

#: Makes what calls a server: host, port, its incarnation, and the bytes of rows of each table.
Reach = Callable[[str, int, int, Mapping[str, int]], Peer]


class Protection:
    """A server's part in parity.

    Args:
        number: of this server.
        incarnation: of this server.
        home: holds its rows and parity rows.
        parity: the form of a stripe.
        hosts: for each server the name of its host.
        peers: number, incarnation, host and port of each other server that lives.
        reach: makes what calls another server.
        name: what errors and logs call this server.

    Attributes:
        member: the rows and parity rows.
        has_given_up: whether more servers are lost than parity makes up for. Trainers ask for it.
    """

    def __init__(
        self,
        *,
        number: int,
        incarnation: int,
        home: Home,
        parity: Parity,
        hosts: Sequence[str],
        peers: Sequence[tuple[int, int, str, int]],
        reach: Reach,
        name: str,
    ) -> None:
        self._parity = parity
        self._hosts = tuple(hosts)
        self._reach = reach
        self._name = name
        self._row_bytes: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="recpoint-peers")
        self._is_over = threading.Event()
        self._recovery_thread: threading.Thread | None = None
        self.has_given_up = False
        self.member = StripeMember(
            number,
            incarnation,
            home,
            {
                server: (peer_incarnation, self._peer(host, port, peer_incarnation))
                for server, peer_incarnation, host, port in peers
            },
            together=self._together,
        )

    def join(self, server: int, incarnation: int, host: str, port: int) -> None:
        """Begin to exchange messages with a server."""
        self.member.other_servers.join(server, incarnation, self._peer(host, port, incarnation))

    def _peer(self, host: str, port: int, incarnation: int) -> Peer:
        return self._reach(host, port, incarnation, self._row_bytes)

    def add_table(
        self, table: str, rows: int, record_bytes: int, *, generation: int, is_lost: bool
    ) -> None:
        """Protect a table, whose rows the home holds already.

        Args:
            table: name of the table.
            rows: rows of the table on all servers.
            record_bytes: bytes of a row.
            generation: how often the other servers have cleared the table.
            is_lost: whether this server has to recover the table's rows.

        Raises:
            OutOfStep: see `StripeMember.add_table`.
        """
        stripes = stripes_of(table, rows=rows, parity=self._parity, hosts=self._hosts)
        self._row_bytes[table] = record_bytes + 1
        self.member.add_table(table, stripes, record_bytes, generation=generation, is_lost=is_lost)

    def open(self) -> None:
        """Answer trainers from now on, and recover what is lost. Again, it does nothing."""
        if not self.member.is_open:
            thread = threading.Thread(
                target=self.member.recovery.recover_all,
                args=(self._is_over, self._name),
                name="recpoint-recovery",
                daemon=True,
            )
            thread.start()  # raises if the process can have no more threads
            self._recovery_thread = thread
            self.member.is_open = True

    def end(self) -> None:
        """End the recovery, and close the connections. The home stays as it is."""
        self._is_over.set()
        self.member.other_servers.close()
        if (
            self._recovery_thread is not None
            and self._recovery_thread is not threading.current_thread()
        ):
            self._recovery_thread.join(timeout=5.0)
        self._threads.shutdown(wait=False)

    def _together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        if not calls:
            return []
        later_calls = [self._threads.submit(call) for call in calls[1:]]
        try:
            first_result = calls[0]()
        finally:
            wait(later_calls)
        return [first_result, *(call.result() for call in later_calls)]
