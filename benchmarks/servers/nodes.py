"""Runs embedding servers on nodes of a network.

`recpoint.embeddings.servers` starts servers that listen on this machine only, and those of a Ray
cluster need Ray. These listen on the address of their node, and otherwise do the same.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor

from recpoint.embeddings.parity.peers import Differences, Members, Peer, Sent
from recpoint.embeddings.remote.protection import Reach
from recpoint.embeddings.remote.server import EmbeddingServer
from recpoint.embeddings.remote.tcp import TcpServer
from recpoint.embeddings.remote.tcp_peer import reach_with

__all__ = [
    "Place",
    "Servers",
    "ThisMachine",
    "cpu_seconds",
    "cpu_seconds_by_pid",
    "process",
    "program",
]

_END_SECONDS = 10.0
_LOOK_SECONDS = 0.02


class Place(Protocol):
    """Where processes run: a node of a network, or this machine."""

    @property
    def address(self) -> str:
        """IPv4 address for the others."""

    def inside(self, *command: str) -> list[str]:
        """Returns a command that runs another one there, as the same process."""


class ThisMachine:
    """The machine itself, without a network."""

    address = "127.0.0.1"

    def inside(self, *command: str) -> list[str]:
        """Returns the command."""
        return list(command)


def program(module: str) -> list[str]:
    """Returns the command of a process that runs `process` of a module of this package."""
    return [sys.executable, "-m", "benchmarks.servers.process", module]


def cpu_seconds(processes: Sequence[subprocess.Popen[bytes]]) -> float:
    """Returns the processor seconds that processes have used so far."""
    return sum(cpu_seconds_by_pid(processes).values())


def cpu_seconds_by_pid(processes: Sequence[subprocess.Popen[bytes]]) -> dict[int, float]:
    """Returns the same of each process that lives, by its process id."""
    found = {}
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(one.pid).cpu_times()
            found[one.pid] = float(times.user + times.system)
    return found


class Servers:
    """Embedding servers for several homes, in one process at each place.

    As a context manager, they end at the end of the block. They also end with this process.

    Args:
        places: where they run; a home has one server at each.
        homes: number of homes.
        delay_seconds: added to each call from one server to another.
        is_revived: start a process that has ended again, empty and at the same ports, as Ray does.

    Attributes:
        processes: one at each place.
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
        token = secrets.token_bytes(32).hex()
        self._places = places
        self._settings = {"token": token, "delay_seconds": delay_seconds}
        self._ports = [[0] * homes for _ in places]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._is_over = threading.Event()
        self._watch: threading.Thread | None = None
        try:
            for number in range(len(places)):
                self.processes.append(self._started(number))
            for number in range(len(places)):
                self._learn_ports(number)
        except BaseException:
            self.close()
            raise
        hosts = [place.address for place in places]
        self.access: list[dict[str, Any]] = [
            {"addresses": list(zip(hosts, of_home, strict=True)), "token": token}
            for of_home in zip(*self._ports, strict=True)
        ]
        if is_revived:
            self._watch = threading.Thread(target=self._revive_all, daemon=True)
            self._watch.start()

    def _started(self, number: int) -> subprocess.Popen[bytes]:
        place = self._places[number]
        started = subprocess.Popen(
            place.inside(*program("nodes")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        told = {**self._settings, "host": place.address, "ports": self._ports[number]}
        _tell(started, told)
        return started

    def _learn_ports(self, number: int) -> None:
        self._ports[number] = _answer(self.processes[number])

    def _revive_all(self) -> None:
        while not self._is_over.wait(_LOOK_SECONDS):
            for number, process in enumerate(self.processes):
                if process.poll() is not None:
                    _close_pipes(process)
                    self.processes[number] = self._started(number)
                    self._learn_ports(number)

    def difference_rows(self) -> int:
        """Returns how many rows of differences the servers have sent each other so far."""
        for process in self.processes:
            _tell(process, "difference rows")
        return sum(_answer(process) for process in self.processes)

    def close(self) -> None:
        """Ends them. A second call does nothing."""
        self._is_over.set()
        if self._watch is not None:
            self._watch.join()
        with ExitStack() as stack:
            while self.processes:
                stack.callback(_end, self.processes.pop())

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tell(process: subprocess.Popen[bytes], what: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what).encode() + b"\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    said = process.stdout.readline()
    if not said:
        raise RuntimeError(f"a server ended with {process.wait()}")
    return json.loads(said)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    _close_pipes(process)
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _LatePeer(Peer):
    """Waits before each call of another server, as a longer cable would have it wait."""

    def __init__(self, to: Peer, seconds: float) -> None:
        self._to, self._seconds = to, seconds

    def _wait(self) -> Peer:
        time.sleep(self._seconds)
        return self._to

    def differences(self, sent: Sent, given: Differences) -> None:
        self._wait().differences(sent, given)

    def rows(self, table: str, slots: Tensor, *, recover: bool) -> Members:
        return self._wait().rows(table, slots, recover=recover)

    def parity_rows(self, table: str, slots: Tensor, at: Mapping[int, tuple[int, int]]) -> Members:
        return self._wait().parity_rows(table, slots, at)

    def close(self) -> None:
        self._to.close()


def _late(reach: Reach, seconds: float) -> Reach:
    def reach_later(host: str, port: int, incarnation: int, row_bytes: Mapping[str, int]) -> Peer:
        return _LatePeer(reach(host, port, incarnation, row_bytes), seconds)

    return reach_later if seconds else reach


def process() -> None:
    """Runs servers for several homes, until the other side wants no more."""
    torch.set_num_threads(1)
    settings = json.loads(sys.stdin.readline())
    token, host = bytes.fromhex(settings["token"]), settings["host"]
    reach = _late(reach_with(token), settings["delay_seconds"])
    servers: list[EmbeddingServer] = []
    with ExitStack() as stack:
        ports = []
        for port in settings["ports"]:
            server = EmbeddingServer(name=f"embedding server on {host}", reach=reach)
            servers.append(server)
            stack.callback(server.end)
            listening = stack.enter_context(TcpServer(server, token, host=host, port=port))
            ports.append(listening.address[1])
        print(json.dumps(ports), flush=True)
        for _ in sys.stdin:  # until the other side wants no more, or has ended
            members = [server.member(server.hello().incarnation) for server in servers]
            print(json.dumps(sum(one.difference_rows for one in members)), flush=True)
