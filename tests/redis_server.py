"""A real Redis server of the test's own."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from recpoint.testing.seaweed import free_ports
from tests.polling import until

__all__ = ["RedisServer", "redis_server"]


@dataclass(frozen=True)
class RedisServer:
    """A server that runs.

    Attributes:
        url: of its database 0.
        process: the server.
    """

    url: str
    process: subprocess.Popen[bytes]


@contextmanager
def redis_server(directory: Path, *options: str) -> Iterator[RedisServer]:
    """Run a server on a free port of the loopback, without persistence, until the block ends."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("needs redis-server or valkey-server (Debian: redis-server)")
    port = free_ports(1)
    with open(directory / "redis.log", "wb") as log:
        process = subprocess.Popen(
            [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", *options],
            cwd=directory,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def answers() -> bool:
        assert process.poll() is None, (directory / "redis.log").read_text()
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return True
        except OSError:
            return False

    try:
        until(answers)
        yield RedisServer(f"redis://127.0.0.1:{port}/0", process)
    finally:
        process.kill()
        process.wait()
