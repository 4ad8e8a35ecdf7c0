"""Runs the ranks of a training in one process: they exchange bytes on a simulated network.

Each thread of a rank crosses numbered boundaries: before each message that it sends, after each
exchange, before and after each call to an embedding server. At any of them a rank may die with all
its threads, a thread of it may fail, or a server may be replaced by an empty one.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from torch import Tensor

from recpoint.embeddings.home.channel import Channel
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.errors import RankLost, ServerLost
from tests.simulated_network import PassedOn

__all__ = ["Fault", "Killed", "Network", "Servers", "Thread"]

T = TypeVar("T")

#: Far longer than any of these trainings takes.
_PATIENCE_SECONDS: Final = 30.0
_LONGEST_PAUSE_SECONDS: Final = 0.003


class Killed(BaseException):
    """Ends what a rank was doing when it was killed."""


class Thread(NamedTuple):
    """What crosses boundaries: the user of one channel, or the caller of one server.

    Attributes:
        rank: its rank.
        name: name of the channel, or of the server.
    """

    rank: int
    name: str


class Fault(NamedTuple):
    """What happens when a thread crosses a boundary.

    Attributes:
        thread: the thread.
        number: of its boundary, from 1 on.
        act: "kill" the rank, have the thread "fail" with an error, or number of the server that is
            replaced.
    """

    thread: Thread
    number: int
    act: str | int


class _Port(NamedTuple):
    """One end of a channel: its name, how many of that name the rank opened before, the rank."""

    name: str
    opened: int
    rank: int


@dataclass
class Servers:
    """Embedding servers in this process. A call may come twice, and again at any later time.

    Attributes:
        now: the servers.
    """

    count: int
    seed: int
    repeats: float
    now: list[EmbeddingServer] = field(init=False)

    def __post_init__(self) -> None:
        self.now = [EmbeddingServer() for _ in range(self.count)]
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()
        self._late: list[Callable[[], object]] = []

    def replace(self, number: int) -> None:
        """Have an empty server in place of one that is killed."""
        self.now[number] = EmbeddingServer()

    def deliver(self, name: str, call: Callable[[], T]) -> T:
        """Bring a call to its server, perhaps twice, and perhaps others that are late."""
        with self._lock:
            is_sent_twice = self._random.random() < self.repeats
            comes_late = name != "fetch" and self._random.random() < self.repeats
            late = []
            while self._late and self._random.random() < 0.3:
                late.append(self._late.pop(self._random.randrange(len(self._late))))
            if comes_late:
                self._late.append(call)
        for deliver in late:
            try:
                deliver()
            except Exception:  # noqa: BLE001, S110  # nobody reads this answer
                pass
        if is_sent_twice:
            call()
        return call()


class Network:
    """The network of one start of a training.

    Args:
        count: number of ranks.
        servers: the embedding servers.
        faults: what happens.
        loses_sent: what a rank has sent and nobody has received is lost when it dies.
        slow: threads that pause at each boundary.
        seed: decides on the lengths of pauses.

    Attributes:
        crossed: how many boundaries each thread has crossed.
        dead: ranks that have ended, in this order.
        happened: the faults that have happened.
    """

    def __init__(
        self,
        count: int,
        servers: Servers,
        *,
        faults: Collection[Fault] = (),
        loses_sent: bool = False,
        slow: Collection[Thread] = (),
        seed: int = 0,
    ) -> None:
        self.count = count
        self.servers = servers
        self.crossed: Counter[Thread] = Counter()
        self.dead: list[int] = []
        self.happened: list[Fault] = []
        self._faults = {(fault.thread, fault.number): fault.act for fault in faults}
        self._loses_sent = loses_sent
        self._slow = frozenset(slow)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        # A port's own, because a message would wake all waiting threads of all ranks otherwise.
        self._hears: defaultdict[_Port, threading.Condition] = defaultdict(
            lambda: threading.Condition(self._lock)
        )
        self._opened: Counter[Thread] = Counter()
        self._closed: set[_Port] = set()
        self._mail: defaultdict[tuple[_Port, int], deque[Tensor]] = defaultdict(deque)

    def channel(self, rank: int, name: str) -> Channel:
        """Open a channel."""
        with self._lock:
            thread = Thread(rank, name)
            port = _Port(name, self._opened[thread], rank)
            self._opened[thread] += 1
        return _SimulatedChannel(self, port)

    def transport(self, rank: int, number: int) -> PassedOn:
        """Return what calls a server for a rank: the one that is there now."""
        return _Line(self, Thread(rank, f"server {number}"), number)

    def cross(self, thread: Thread) -> None:
        """Cross a boundary.

        Raises:
            Killed: the rank is dead, or dies here.
            MemoryError: the thread fails here.
        """
        with self._lock:
            self.require_alive(thread.rank)
            self.crossed[thread] += 1
            act = self._faults.get((thread, self.crossed[thread]))
            if act is not None:
                self.happened.append(Fault(thread, self.crossed[thread], act))
            pause = self._random.random() * _LONGEST_PAUSE_SECONDS if thread in self._slow else 0.0
        if pause:
            time.sleep(pause)
        if act == "kill":
            self.end(thread.rank, is_killed=True)
            self.require_alive(thread.rank)
        if act == "fail":
            raise MemoryError("a thread fails")
        if isinstance(act, int):
            self.servers.replace(act)

    def require_alive(self, rank: int) -> None:
        """Raise `Killed` if the rank has ended."""
        if rank in self.dead:
            raise Killed

    def end(self, rank: int, *, is_killed: bool = False) -> None:
        """End a rank with all its threads: none of them does anything any more."""
        with self._lock:
            if rank in self.dead:
                return
            self.dead.append(rank)
            if is_killed and self._loses_sent:
                for (port, _), mail in self._mail.items():
                    if port.rank == rank:
                        mail.clear()
            for hears in self._hears.values():
                hears.notify_all()

    def close(self, port: _Port) -> None:
        with self._lock:
            if port.rank not in self.dead:
                self._closed.add(port)
                for rank in range(self.count):
                    self._hears[port._replace(rank=rank)].notify_all()

    def send(self, port: _Port, target: int, sent: Tensor) -> None:
        with self._lock:
            self.require_alive(port.rank)
            if port in self._closed:
                raise _lost(port, target)
            self._mail[port, target].append(sent)  # which nobody reads, if the other has left
            self._hears[port._replace(rank=target)].notify_all()

    def receive(self, port: _Port, source: int) -> Tensor:
        """Wait for what the source has sent.

        Raises:
            RankLost: it has left, or is dead.
            Killed: this rank is dead.
        """
        source_port = port._replace(rank=source)
        mail = self._mail[source_port, port.rank]
        deadline = time.monotonic() + _PATIENCE_SECONDS
        with self._lock:
            while True:
                self.require_alive(port.rank)
                if mail:
                    return mail.popleft()
                if self._is_left(source_port):
                    raise _lost(port, source)
                seconds_left = deadline - time.monotonic()
                assert seconds_left > 0, f"{port} hears nothing from rank {source}, which is there"
                self._hears[port].wait(seconds_left)

    def _is_left(self, port: _Port) -> bool:
        return port in self._closed or port.rank in self.dead


def _lost(port: _Port, source_rank: int) -> RankLost:
    return RankLost(
        f"rank {port.rank}",
        found=f"no {port.name} of {source_rank}",
        expected="some",
        next_step="none",
    )


class _SimulatedChannel(Channel):
    """Brings messages in the order in which they were sent, until an end of it is closed."""

    def __init__(self, network: Network, port: _Port) -> None:
        self.rank, self.count = port.rank, network.count
        self._network, self._port = network, port

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        thread = Thread(self.rank, self._port.name)
        for rank, part in enumerate(parts):
            self._network.cross(thread)
            if rank != self.rank:
                self._network.send(self._port, rank, part.clone())
        received = []
        for rank, size in enumerate(sizes):
            part = (
                parts[rank].clone()
                if rank == self.rank
                else self._network.receive(self._port, rank)
            )
            assert len(part) == size, (self._port, rank, len(part), size)
            received.append(part)
        self._network.cross(thread)
        return received

    def close(self) -> None:
        self._network.close(self._port)


class _Line(PassedOn):
    """Calls one server, until that is replaced."""

    def __init__(self, network: Network, thread: Thread, number: int) -> None:
        super().__init__(network.servers.now[number])
        self._network, self._thread, self._number = network, thread, number

    def deliver(self, name: str, call: Callable[[], T]) -> T:
        self._network.cross(self._thread)
        self._require_there()
        answer = self._network.servers.deliver(name, call)
        self._network.cross(self._thread)
        self._require_there()
        return answer

    def _require_there(self) -> None:
        if self._network.servers.now[self._number] is not self.server:
            raise ServerLost(
                f"server {self._number}",
                found="no answer",
                expected="an answer",
                next_step="restore",
            )

    def close(self) -> None:
        """Nothing is open; the server goes on."""
