"""One local Prefect server, for whoever has configured none: so that there is a UI to look at.

It has its own directory and database, belongs to the user and outlives the agent that started it.
Nothing here imports Prefect, which takes seconds and reads its settings once and for all.
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

#: Given to every process that uses Prefect here.
OFFLINE = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}


#: What the server keeps, unless the user's environment says otherwise. A persist leaves some 100 KB
#: in its database, so that a trainer that checkpoints every 10 s leaves 1 GB a day. Artifacts go
#: with their flow run.
RETENTION = {
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": "P3D",
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P3D",
}

#: Leases of concurrency slots on disk. In memory, as by default, they are gone when the server is
#: killed, while its database counts the slots as taken: scheduled flows would wait for ever.
_LEASES = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
        "prefect.server.concurrency.lease_storage.filesystem"
    ),
}


class LocalServer(NamedTuple):
    """A server that was started here; `started` tells its process from later ones of its pid."""

    pid: int
    port: int
    started: str

    @property
    def url(self) -> str:
        """Its API's URL."""
        return f"http://127.0.0.1:{self.port}/api"


def server_directory() -> Path:
    """Where the server keeps its things: `prefect` in `RECPOINT_HOME`, else in `~/.recpoint`."""
    home = os.environ.get("RECPOINT_HOME")
    return (Path(home) if home else Path.home() / ".recpoint") / "prefect"


def without_key(url: str) -> str:
    """A URL without the user and password that it may have."""
    scheme, slashes, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"


def key_of(url: str) -> str | None:
    """The `user:password` that a URL has; None if it has none."""
    at = url.partition("://")[2].partition("/")[0].rpartition("@")
    return unquote(at[0]) if at[1] else None


def ui_url(api_url: str) -> str:
    """The page for people that belongs to an API; without the credential that its URL may have."""
    return without_key(api_url.removesuffix("/").removesuffix("/api"))


def is_healthy(api_url: str, *, timeout_seconds: float = 1.0) -> bool:
    """Whether the API answers in time; that it wants a key is an answer too."""
    try:
        # Which urllib would take for a port, unlike Prefect's own client, which sends it.
        url = f"{without_key(api_url).removesuffix('/')}/health"
        with urllib.request.urlopen(url, timeout=timeout_seconds) as answer:
            return int(answer.status) < 500
    except urllib.error.HTTPError as error:
        error.close()
        return error.code in (401, 403)
    except (OSError, ValueError, HTTPException):  # the last: whatever else listens there
        return False


def configured_url() -> str | None:
    """The API that the user has configured, in the environment, a profile or a file; None if none.

    Prefect itself is asked, in a process of its own: importing it here would fix its settings.
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
    """The local server, if its process is alive; it may still be starting."""
    try:
        fields = json.loads((server_directory() / "server.json").read_text(encoding="utf-8"))
        server = LocalServer(int(fields["pid"]), int(fields["port"]), str(fields["started"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return server if _start_time(server.pid) == server.started else None


def start_server() -> LocalServer:
    """Start the local server, unless it runs; returns at once, long before it answers.

    Raises:
        OSError: its directory cannot be written, or no process can be started.
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
            # Else its pages ask port 4200, whoever listens there.
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
                pass_fds=(claim.fileno(),),  # which holds the port's name as long as it lives
                # Its own group: it does not hear the signals meant for the agent, and can be
                # stopped with its child.
                start_new_session=True,
            )
        server = LocalServer(process.pid, port, _start_time(process.pid) or "")
        _started[process.pid] = process
        temporary = directory / "server.json.tmp"
        temporary.write_text(json.dumps(server._asdict()) + "\n", encoding="utf-8")
        temporary.replace(directory / "server.json")
        return server


def stop_server() -> bool:
    """Stop the local server and wait for its end; whether there was one."""
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


#: Servers that this process started. They are asked for now and then, so as not to stay zombies.
_started: dict[int, subprocess.Popen[bytes]] = {}


def _signal(server: LocalServer, number: signal.Signals) -> None:
    try:
        # Stopped processes do not hear the end coming.
        os.killpg(server.pid, signal.SIGCONT)
        os.killpg(server.pid, number)
    except ProcessLookupError:
        pass


def _start_time(pid: int) -> str | None:
    """When the process started, in a form that only that process has; None if it is not alive."""
    child = _started.get(pid)
    if child is not None and child.poll() is not None:
        _started.pop(pid, None)
        return None
    try:
        # The name may hold anything, also blanks and parentheses; what follows it does not.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except FileNotFoundError:
        return _start_time_elsewhere(pid) if not Path("/proc/self/stat").exists() else None
    except ProcessLookupError:
        return None
    # A child that ends is a zombie before its last thread has let go of the port: poll() tells.
    ended = child is None and fields[0] in (b"Z", b"X")
    return None if ended else fields[19].decode()


def _start_time_elsewhere(pid: int) -> str | None:
    answer = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or None


def _free_port(directory: Path) -> tuple[int, socket.socket]:
    """The port of last time, so that bookmarks stay good, or another one if it is taken; its claim.

    The first time it is `RECPOINT_SERVER_PORT`, or 4200.
    """
    try:
        before = int(json.loads((directory / "server.json").read_text(encoding="utf-8"))["port"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        before = int(os.environ.get("RECPOINT_SERVER_PORT") or 4200)
    # Then one near it, outside of what the system gives to connections; several may be looking.
    others = random.SystemRandom().sample(range(4201, 4300), 8)
    for port in (before, *others, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                found = int(probe.getsockname()[1])
                return found, _claim(found)
            except OSError:
                continue
    raise OSError("no free port on 127.0.0.1")


def _claim(port: int) -> socket.socket:
    """A socket that no other server of ours can have for this port while a process holds it.

    A server listens many seconds after its port was chosen; until then another one, of another
    home or user, would find the port free, and one of the two would be given the other's runs.

    Raises:
        OSError: somebody has it.
    """
    claim = socket.socket(socket.AF_UNIX)
    # An abstract name, of the same network as the port, and gone with the last process that has
    # it. Only Linux has such names: elsewhere the look at the port has to do.
    if sys.platform == "linux":
        try:
            claim.bind(f"\0recpoint-prefect-server-{port}")
        except OSError:
            claim.close()
            raise
    return claim


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Two agents that start at once start one server."""
    descriptor = os.open(directory / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
