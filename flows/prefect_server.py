"""Starts and stops a local Prefect server, so that there is a UI if the user configured no server.

The server has its own directory and database, belongs to the user and outlives the agent that
started it. Nothing here imports Prefect: that takes seconds, and Prefect reads its settings only
once in a process.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

__all__ = [
    "RETENTION",
    "LocalServer",
    "configured_url",
    "is_healthy",
    "key_of",
    "running_server",
    "server_directory",
    "start_server",
    "stop_server",
    "ui_url",
    "without_key",
]

_STOP_SECONDS = 10.0
_ASK_SECONDS = 60.0

#: Settings of each process that uses Prefect here: send no usage data.
OFFLINE = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}


#: How long the server keeps its data, unless the user's environment sets another time. A persist
#: adds some 100 KB to the database, so a checkpoint every 10 s adds 1 GB a day. Artifacts are
#: deleted with their flow run.
RETENTION = {
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": "P3D",
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P3D",
}

#: Keep leases of concurrency slots on disk. The default is memory: if the server is killed, leases
#: are lost while its database counts the slots as taken, and scheduled flows would wait for ever.
_LEASES = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
        "prefect.server.concurrency.lease_storage.filesystem"
    ),
}


class LocalServer(NamedTuple):
    """A server that was started here; `started` tells it from later processes with its pid."""

    pid: int
    port: int
    started: str

    @property
    def url(self) -> str:
        """URL of the server's API."""
        return f"http://127.0.0.1:{self.port}/api"


def server_directory() -> Path:
    """Return the server's directory: `prefect` in `RECPOINT_HOME`, or else in `~/.recpoint`."""
    home = os.environ.get("RECPOINT_HOME")
    return (Path(home) if home else Path.home() / ".recpoint") / "prefect"


def without_key(url: str) -> str:
    """Return a URL without its user and password, if it has them."""
    scheme, slashes, address = url.partition("://")
    host, slash, path = address.partition("/")
    return f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"


def key_of(url: str) -> str | None:
    """Return the `user:password` of a URL; None if it has none."""
    credentials = url.partition("://")[2].partition("/")[0].rpartition("@")
    return unquote(credentials[0]) if credentials[1] else None


def ui_url(api_url: str) -> str:
    """Return the URL of the web UI that belongs to an API, without credentials."""
    return without_key(api_url.removesuffix("/").removesuffix("/api"))


def is_healthy(api_url: str, *, timeout_seconds: float = 1.0) -> bool:
    """Whether the API answers in time; a demand for credentials counts as an answer."""
    try:
        # Without the key, because urllib would take it for a part of host and port.
        url = f"{without_key(api_url).removesuffix('/')}/health"
        with urllib.request.urlopen(url, timeout=timeout_seconds) as answer:
            return int(answer.status) < 500
    except urllib.error.HTTPError as error:
        error.close()
        return error.code in (401, 403)
    except (OSError, ValueError, HTTPException):  # HTTPException: another program listens there
        return False


def configured_url() -> str | None:
    """Return the URL of the API configured in the environment, a profile or a file; None: none.

    Asks Prefect in a child process, because importing Prefect here would fix its settings.
    """
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    question = "from prefect.settings import PREFECT_API_URL as u; print(u.value() or '')"
    try:
        answer = subprocess.run(
            [sys.executable, "-c", question],
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            env={**os.environ, **OFFLINE},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    lines = answer.stdout.split()
    return lines[-1] if answer.returncode == 0 and lines else None


def running_server() -> LocalServer | None:
    """Return the local server if its process is alive (it may still be starting), else None."""
    try:
        fields = json.loads((server_directory() / "server.json").read_text(encoding="utf-8"))
        server = LocalServer(int(fields["pid"]), int(fields["port"]), str(fields["started"]))
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return server if _start_time(server.pid) == server.started else None


def start_server() -> LocalServer:
    """Start the local server, unless it runs; return at once, long before it answers.

    Raises:
        OSError: the server's directory cannot be written, or no process can be started.
    """
    directory = server_directory()
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _alone(directory):
        running = running_server()
        if running is not None:
            return running
        port, claim = _free_port(directory)
        environment = {
            **RETENTION,
            **_LEASES,
            **{name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"},
            **OFFLINE,
            "PREFECT_HOME": str(directory),
            # Without this setting, the web pages would use port 4200.
            "PREFECT_UI_API_URL": f"http://127.0.0.1:{port}/api",
        }
        with claim, (directory / "server.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "recpoint.flows.prefect_server_process"]
                + ["prefect", "server", "start"]
                + ["--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=directory,
                pass_fds=(claim.fileno(),),  # keeps the claim to the port while the server lives
                # Its own process group, so that signals to the agent do not reach it, and it can be
                # stopped together with its child.
                start_new_session=True,
            )
        server = LocalServer(process.pid, port, _start_time(process.pid) or "")
        _started[process.pid] = process
        temporary = directory / "server.json.tmp"
        temporary.write_text(json.dumps(server._asdict()) + "\n", encoding="utf-8")
        temporary.replace(directory / "server.json")
        return server


def stop_server() -> bool:
    """Stop the local server and wait for its end; return whether there was one."""
    directory = server_directory()
    if not directory.is_dir():
        return False
    with _alone(directory):
        server = running_server()
        if server is None:
            return False
        for number in (signal.SIGTERM, signal.SIGKILL):
            _signal(server, number)
            deadline = time.monotonic() + _STOP_SECONDS
            while _start_time(server.pid) == server.started and time.monotonic() < deadline:
                time.sleep(0.05)
        (directory / "server.json").unlink(missing_ok=True)
        return True


#: Servers that this process started. Polled now and then, so that they do not stay zombies.
_started: dict[int, subprocess.Popen[bytes]] = {}


def _signal(server: LocalServer, number: signal.Signals) -> None:
    try:
        # A stopped process would not receive SIGTERM.
        os.killpg(server.pid, signal.SIGCONT)
        os.killpg(server.pid, number)
    except ProcessLookupError:
        pass


def _start_time(pid: int) -> str | None:
    """Return a text with the process's start time, unique to it; None if it is not alive."""
    child = _started.get(pid)
    if child is not None and child.poll() is not None:
        _started.pop(pid, None)
        return None
    try:
        # The process name may contain blanks and parentheses; the fields after it do not.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except FileNotFoundError:
        return _start_time_elsewhere(pid) if not Path("/proc/self/stat").exists() else None
    except ProcessLookupError:
        return None
    # A child may be a zombie while its last thread still holds the port, so poll() decided above.
    ended = child is None and fields[0] in (b"Z", b"X")
    return None if ended else fields[19].decode()


def _start_time_elsewhere(pid: int) -> str | None:
    answer = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or None


def _free_port(directory: Path) -> tuple[int, socket.socket]:
    """Return a free port and its claim: the port of last time if free, so that bookmarks work.

    The first time, it is `RECPOINT_SERVER_PORT`, or 4200.
    """
    try:
        preferred_port = int(
            json.loads((directory / "server.json").read_text(encoding="utf-8"))["port"]
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        preferred_port = int(os.environ.get("RECPOINT_SERVER_PORT") or 4200)
    # Then a port near 4200, outside the range that the system gives to connections. Chosen at
    # random, because several servers may start at once.
    other_ports = random.SystemRandom().sample(range(4201, 4300), 8)
    for port in (preferred_port, *other_ports, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                free_port = int(probe.getsockname()[1])
                return free_port, _claim(free_port)
            except OSError:
                continue
    raise OSError("no free port on 127.0.0.1")


def _claim(port: int) -> socket.socket:
    """Return a socket that claims a port among recpoint's servers while a process holds it.

    A server listens only many seconds after its port was chosen. Until then a server of another
    home or user would find the port free, and one of the two would get the other's flow runs.

    Raises:
        OSError: another process has claimed the port.
    """
    claim = socket.socket(socket.AF_UNIX)
    # An abstract name belongs to the same network namespace as the port, and ends with the last
    # process that holds it. Only Linux has such names; elsewhere, checking the port must suffice.
    if sys.platform == "linux":
        try:
            claim.bind(f"\0recpoint-prefect-server-{port}")
        except OSError:
            claim.close()
            raise
    return claim


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold a lock, so that two agents that start at once start only one server."""
    descriptor = os.open(directory / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
