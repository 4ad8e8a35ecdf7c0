"""Runs embedding servers on nodes of a network.

`recpoint.embeddings.servers` starts servers that listen on this machine only, and those of a Ray
cluster need Ray. These listen on the address of their node, and otherwise do the same.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import psutil

from benchmarks.forked import Forked, forked
from benchmarks.server_process import ServerSettings, serve

__all__ = [
    "Place",
    "Servers",
    "ThisMachine",
    "cpu_seconds",
    "cpu_seconds_by_pid",
]

_END_SECONDS = 10.0
_LOOK_SECONDS = 0.02


class Place(Protocol):
    """Where processes run: a node of a network, or this machine."""

    @property
    def address(self) -> str:
        """IPv4 address for the others."""

    @property
    def network(self) -> str | None:
        """Path of the network namespace; None: that of the machine."""


class ThisMachine:
    """The machine itself, without a network."""

    address = "127.0.0.1"
    network = None


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor seconds that processes have used so far."""
    return sum(cpu_seconds_by_pid(pids).values())


def cpu_seconds_by_pid(pids: Iterable[int]) -> dict[int, float]:
    """Return the same of each process that lives."""
    seconds_by_pid = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            seconds_by_pid[pid] = float(times.user + times.system)
    return seconds_by_pid


class Servers:
    """Embedding servers for several homes, in one process at each place.

    As a context manager, they end at the end of the block. They also end with this process.

    Args:
        places: where they run; a home has one server at each.
        homes: number of homes.
        delay_seconds: added to each call from one server to another.
        is_revived: start a process that has ended again, empty and at the same ports, as Ray does.

    Attributes:
        access: for each home what a trainer needs to reach its servers: addresses and token.

    Raises:
        RuntimeError: a server does not start.
    """

    def __init__(
        self,
        places: Sequence[Place],
        homes: int,
        *,
        delay_seconds: float = 0.0,
        is_revived: bool = False,
    ) -> None:
        self._token = secrets.token_bytes(32)
        self._places = places
        self._delay_seconds = delay_seconds
        self._ports = [(0,) * homes for _ in places]
        self._all: list[Forked] = []
        self._is_over = threading.Event()
        self._watch: threading.Thread | None = None
        try:
            for number in range(len(places)):
                self._all.append(self._started(number))
            for number in range(len(places)):
                self._learn_ports(number)
        except BaseException:
            self.close()
            raise
        hosts = [place.address for place in places]
        self.access: list[dict[str, Any]] = [
            {"addresses": list(zip(hosts, of_home, strict=True)), "token": self._token.hex()}
            for of_home in zip(*self._ports, strict=True)
        ]
        if is_revived:
            self._watch = threading.Thread(target=self._revive_all, daemon=True)
            self._watch.start()

    def _started(self, number: int) -> Forked:
        place = self._places[number]
        settings = ServerSettings(
            network=place.network,
            host=place.address,
            ports=self._ports[number],
            token=self._token,
            delay_seconds=self._delay_seconds,
        )
        return forked(serve, settings)

    def _learn_ports(self, number: int) -> None:
        self._ports[number] = tuple(self._answer(number))

    def _answer(self, number: int) -> Any:
        process, pipe = self._all[number]
        try:
            return pipe.recv()
        except EOFError as error:
            process.join()
            raise RuntimeError(f"a server ended with {process.exitcode}") from error

    def _revive_all(self) -> None:
        while not self._is_over.wait(_LOOK_SECONDS):
            for number, (process, pipe) in enumerate(self._all):
                if not process.is_alive():
                    pipe.close()
                    self._all[number] = self._started(number)
                    self._learn_ports(number)

    @property
    def pids(self) -> list[int]:
        """Process ids, one at each place."""
        return [process.pid for process, _ in self._all if process.pid is not None]

    def difference_rows(self) -> int:
        """Return how many rows of differences the servers have sent each other so far."""
        for _, pipe in self._all:
            pipe.send(None)
        return sum(self._answer(number) for number in range(len(self._all)))

    def close(self) -> None:
        """End them. A second call does nothing."""
        self._is_over.set()
        if self._watch is not None:
            self._watch.join()
        with ExitStack() as stack:
            while self._all:
                stack.callback(self._all.pop().end, _END_SECONDS)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
