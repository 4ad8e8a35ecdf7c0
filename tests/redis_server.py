"""A real Redis server of the test's own."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recpoint.testing.seaweed import free_ports
from tests.polling import until

__all__ = ["RedisServer", "redis_server"]


class RedisServer:
    """A server on a free port of the loopback.

    Args:
        program: its path.
        directory: where it writes.
        options: of its command line.

    Attributes:
        url: of its database 0.
    """

    def __init__(self, program: str, directory: Path, options: tuple[str, ...]) -> None:
        self._port = free_ports(1)
        self._log = directory / "redis.log"
        self._directory = directory
        address = ("--port", str(self._port), "--bind", "127.0.0.1", "--save", "")
        self._command = [program, *address, *options]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._start()

    def command(self, *words: str) -> bytes:
        """Send a command, and return the first part of its answer."""
        parts = [b"*%d\r\n" % len(words)]
        parts += [b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words]
        with socket.create_connection(("127.0.0.1", self._port), timeout=10) as connection:
            connection.sendall(b"".join(parts))
            return connection.recv(1 << 16)

    def restart(self) -> None:
        """Kill the server with SIGKILL, and start it again in the same directory."""
        self.kill()
        self._start()

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._directory, stdout=log, stderr=subprocess.STDOUT
            )
        until(self._answers)

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            return self.command("PING").startswith(b"+PONG")
        except OSError:
            return False


@contextmanager
def redis_server(directory: Path, *options: str) -> Iterator[RedisServer]:
    """Run a server until the block ends; skips the test where none is installed.

    Args:
        directory: where it writes its log, and its rows if an option says so.
        options: further options of its command line.
    """
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("needs redis-server or valkey-server (Debian: redis-server)")
    server = RedisServer(program, directory, options)
    try:
        yield server
    finally:
        server.kill()
