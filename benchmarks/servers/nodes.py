"""Runs embedding servers on nodes of a network.

`recpoint.embeddings.servers` starts servers that listen on this machine only, and those of a Ray
cluster need Ray. These listen on the address of their node, and otherwise do the same.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import psutil
import torch

from recpoint.embeddings.remote.server import EmbeddingServer
from recpoint.embeddings.remote.tcp import TcpServer

__all__ = ["Place", "Servers", "ThisMachine", "cpu_seconds", "process", "program"]

_END_SECONDS = 10.0


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
    times = [psutil.Process(one.pid).cpu_times() for one in processes]
    return float(sum(one.user + one.system for one in times))


class Servers:
    """Embedding servers for several homes, in one process at each place.

    As a context manager, they end at the end of the block. They also end with this process.

    Args:
        places: where they run; a home has one server at each.
        homes: number of homes.

    Attributes:
        processes: one at each place.
        access: for each home what a trainer needs to reach its servers: addresses and token.

    Raises:
        RuntimeError: a server does not start.
    """

    def __init__(self, places: Sequence[Place], homes: int) -> None:
        token = secrets.token_bytes(32).hex()
        self.processes: list[subprocess.Popen[bytes]] = []
        ports: list[list[int]] = []
        try:
            for place in places:
                started = subprocess.Popen(
                    place.inside(*program("nodes")),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
                self.processes.append(started)
                assert started.stdin is not None
                told = {"host": place.address, "token": token, "homes": homes}
                started.stdin.write(json.dumps(told).encode() + b"\n")
                started.stdin.flush()
            for process in self.processes:
                assert process.stdout is not None
                said = process.stdout.readline()
                if not said:
                    raise RuntimeError(f"a server ended with {process.wait()}")
                ports.append(json.loads(said))
        except BaseException:
            self.close()
            raise
        hosts = [place.address for place in places]
        self.access: list[dict[str, Any]] = [
            {"addresses": list(zip(hosts, of_home, strict=True)), "token": token}
            for of_home in zip(*ports, strict=True)
        ]

    def close(self) -> None:
        """Ends them. A second call does nothing."""
        with ExitStack() as stack:
            while self.processes:
                stack.callback(_end, self.processes.pop())

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def process() -> None:
    """Runs servers for several homes, until the other side wants no more."""
    torch.set_num_threads(1)
    settings = json.loads(sys.stdin.readline())
    token, host = bytes.fromhex(settings["token"]), settings["host"]
    with ExitStack() as stack:
        ports = []
        for _ in range(settings["homes"]):
            server = EmbeddingServer(name=f"embedding server on {host}")
            stack.callback(server.end)
            ports.append(stack.enter_context(TcpServer(server, token, host=host)).address[1])
        print(json.dumps(ports), flush=True)
        sys.stdin.read()  # until the other side wants no more, or has ended
