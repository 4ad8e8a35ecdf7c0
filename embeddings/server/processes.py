"""Starts embedding servers as processes of this machine, and starts them again.

With several ranks, rank 0 starts the servers, and the others get addresses and token through the
process group. Only rank 0 starts a server again, at the same port, so that the others find it.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.home.ranks import rank_and_count
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.protected_home import made_home
from recpoint.embeddings.server.rank_agreement import (
    found_by_first_rank,
    require_parity_of_first_rank,
)
from recpoint.embeddings.server.tcp import TcpTransport
from recpoint.embeddings.server.transport import Transport
from recpoint.errors import HomeError, ServerLost, SettingsError
from recpoint.interrupts import held

__all__ = ["ServerProcesses", "servers"]

_MOST_SERVERS: Final = 64
#: The first server of a trainer waits until a process has imported torch.
_START_SECONDS: Final = 120.0
#: After this, a process that does not end by itself is killed: nobody needs its rows any more.
_END_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.1


def servers(
    count: int,
    *,
    parity: Parity | None = None,
    directory: str | os.PathLike[str] | None = None,
    timeout_seconds: float = 60.0,
) -> Home:
    """Make a home in embedding servers: processes of this machine that share the rows.

        home = recpoint.embeddings.servers(count=4)
        model = recpoint.embeddings.cached(model, home, capacity_rows=4_000_000)

    The servers end when the home is closed, or with this process. They listen on 127.0.0.1 only,
    and answer only callers that know a token, which this call draws at random.

    If a server is lost, and there is no `parity`, the next batch raises ServerLost, which names the
    server. Then restore the newest checkpoint (`Checkpointer.restore`): this starts the lost server
    again and gives all servers their rows. `recpoint.Options(rewinds=...)` does so by itself. With
    `parity`, training goes on: another process takes the server's place, and its rows are computed
    from those of the others.

        home = recpoint.embeddings.servers(count=5, parity=recpoint.Parity(data=4))

    With several ranks on this machine (an initialized `torch.distributed` process group), call it
    on all ranks together. Rank 0 starts the servers, and starts a lost server again. The other
    ranks use the same servers.

    Args:
        count: number of servers.
        parity: how many of them may be lost at a time without a return to a checkpoint, and how
            many rows share parity: it takes `parity.parity / parity.data` more memory. None: none.
        directory: on a local disk: each server keeps its rows in files of a directory there. None:
            they stay in memory.
        timeout_seconds: how long a call to a server may take before the server counts as lost. With
            parity, a server that answers no greeting for half of that time counts as lost, and a
            call is made again for twice that time and a minute.

    Raises:
        SettingsError: a number that cannot work, or another `parity` than on rank 0.
        HomeError: a server does not start, or a rank is on another machine.
        RankLost: another rank does not call it.
    """
    if type(count) is not int or not 1 <= count <= _MOST_SERVERS:
        raise _refused("count", f"{count!r:.100}", f"1 to {_MOST_SERVERS}")
    if not timeout_seconds > 0:
        raise _refused("timeout_seconds", f"{timeout_seconds!r:.100}", "more than 0")
    if parity is not None:
        parity.require_servers(count)
    home_directory = None if directory is None else Path(directory).absolute()
    homes: list[Home] = []

    def start() -> dict[str, object]:
        home, processes = _started(count, parity, home_directory, timeout_seconds)
        homes.append(home)
        return {
            "host": socket.gethostname(),
            "token": processes.token.hex(),
            "ports": processes.ports,
            "owner": home.owner,
            "parity": parity and asdict(parity),
        }

    try:
        found_servers = found_by_first_rank(start, timeout_seconds=_START_SECONDS + timeout_seconds)
    except BaseException:
        for home in homes:
            home.close()
        raise
    return homes[0] if homes else _joined(found_servers, parity, timeout_seconds)


class _Forker:
    """The process that forks servers; see `process.py`. A trainer has one, until it ends itself.

    Raises:
        OSError: the system starts no process.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "recpoint.embeddings.server.process", str(self._owner)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            # Ctrl-C at a terminal is for the trainer, which may want to take a checkpoint.
            start_new_session=True,
        )
        atexit.register(self.end)

    def is_alive(self) -> bool:
        """Return whether it can be asked; if not, nothing is left of it."""
        if self._process.poll() is None:
            return True
        self.end()
        return False

    def ask(self, settings: Mapping[str, object]) -> dict[str, Any]:
        """Ask for a server; return the answer: its "pid" and "port", or an "error".

        If anything is raised, no server is left.
        """
        try:
            _opened(self._process.stdin).write(json.dumps(settings).encode() + b"\n")
            answer: dict[str, Any] = json.loads(self._line(time.monotonic() + _START_SECONDS))
        except (ValueError, BrokenPipeError):
            self.end()
            return {"error": f"an end with exit status {self._process.returncode}"}
        except TimeoutError as error:
            self.end()
            return {"error": f"no port: {error}"}
        except BaseException:
            self.end()
            raise
        return answer

    def _line(self, deadline: float) -> bytes:
        out = _opened(self._process.stdout)
        line = b""
        ready = select.poll()  # takes any file descriptor, unlike `select`
        ready.register(out, select.POLLIN)
        while not line.endswith(b"\n"):
            if not ready.poll(1_000 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"nothing in {_START_SECONDS:g} s")
            read = os.read(out.fileno(), 4_096)
            if not read:
                return b""
            line += read
        return line

    def end(self) -> None:
        """End it, and a server that nobody has heard of. Other servers go on."""
        if self._owner != os.getpid() or _opened(self._process.stdout).closed:
            return
        atexit.unregister(self.end)
        try:
            unheard, _ = self._process.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            unheard, _ = self._process.communicate()
        for line in unheard.splitlines():
            with suppress(ValueError, KeyError, ProcessLookupError):
                os.kill(json.loads(line)["pid"], signal.SIGKILL)


#: By the pid of the trainer: a process that was forked from this one does not use that of this one.
_forkers: Final[dict[int, _Forker]] = {}
#: Held from a question to what is done with the answer.
_asking: Final = threading.Lock()


def _forked(settings: Mapping[str, object]) -> dict[str, Any]:
    """Ask this process's forker, or a new one if there is none; see `_Forker`."""
    forker = _forkers.get(os.getpid())
    if forker is not None and forker.is_alive():
        answer = forker.ask(settings)
        if "pid" in answer or forker.is_alive():
            return answer
    forker = _forkers[os.getpid()] = _Forker()
    return forker.ask(settings)


class _Server:
    """The process of one server, which listens.

    Args:
        number: of the server.
        count: number of servers.
        token: what callers know.
        directory: of all servers; None: rows stay in memory.
        timeout_seconds: see `servers`.
        port: where it listens, if nobody else does. 0: the system chooses.

    Attributes:
        port: where it listens.

    Raises:
        HomeError: it does not start.
    """

    def __init__(
        self,
        number: int,
        count: int,
        token: bytes,
        directory: Path | None,
        *,
        timeout_seconds: float,
        port: int = 0,
    ) -> None:
        self._title = f"embedding server {number + 1} of {count}"
        self._token = token
        settings = {
            "name": self._title,
            "token": token.hex(),
            "directory": None if directory is None else str(directory / f"server-{number + 1}"),
            "port": port,
            "timeout_seconds": timeout_seconds,
        }
        with held(), _asking:  # no signal's handler leaves a server behind that nobody knows
            try:
                answer = _forked(settings)
                if "pid" in answer:
                    self._process = _opened_process(answer["pid"])
            except OSError as error:
                raise self._failed(f"no new process, and the system says: {error}") from error
        if "pid" not in answer:
            raise self._failed(answer["error"])
        self._pid, self.port = int(answer["pid"]), int(answer["port"])
        self._is_gone = False

    def _failed(self, found: str) -> HomeError:
        return HomeError(
            self._title,
            found=found,
            expected="a process that starts",
            next_step=f"run `{sys.executable} -c 'import recpoint.embeddings'`, and look at the "
            "memory and at the number of processes of this machine",
        )

    def transport(self, timeout_seconds: float) -> TcpTransport:
        """Return a transport to it."""
        name = f"{self._title} (pid {self._pid}, 127.0.0.1:{self.port})"
        address = ("127.0.0.1", self.port)
        return TcpTransport(address, self._token, name=name, timeout_seconds=timeout_seconds)

    def ask_to_end(self) -> None:
        """Ask it to end, and do not wait for that; `kill` waits."""
        self._signal(signal.SIGTERM)

    def kill(self, after_seconds: float = 0.0) -> None:
        """Wait for its end, and kill it if it has not ended by then.

        Args:
            after_seconds: how long to wait.
        """
        if self._is_gone:
            return
        if not self._has_ended(1_000 * after_seconds):
            self._signal(signal.SIGKILL)
            self._has_ended(None)
        self._is_gone = True
        os.close(self._process)

    def _has_ended(self, milliseconds: float | None) -> bool:
        ended = select.poll()
        ended.register(self._process, select.POLLIN)
        return bool(ended.poll(milliseconds))

    def _signal(self, number: signal.Signals) -> None:
        if not self._is_gone:
            with suppress(ProcessLookupError):  # it has ended
                signal.pidfd_send_signal(self._process, number)


class ServerProcesses:
    """The processes of all servers.

    Args:
        count: number of servers.
        directory: see `servers`.
        timeout_seconds: see `servers`.

    Attributes:
        token: what the servers and their trainers know.

    Raises:
        HomeError: a server does not start; none is left.
    """

    def __init__(self, count: int, directory: Path | None, timeout_seconds: float) -> None:
        if directory is not None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.token = secrets.token_bytes(32)
        self._timeout_seconds = timeout_seconds
        self._directory = directory
        self._owned_by = os.getpid()
        self._count = count
        self._all: list[_Server] = []
        self._has_ended = False
        # Held while processes are started or ended. The home may be given up, which ends them, in
        # the middle of a start, and even in the same thread.
        self._lock = threading.RLock()
        try:
            for number in range(count):
                self._all.append(self._started(number))
        except BaseException:
            for server in self._all:
                server.kill()
            raise

    @property
    def ports(self) -> tuple[int, ...]:
        """Where the servers listen, in their order."""
        return tuple(server.port for server in self._all)

    def transports(self) -> list[Transport]:
        """Return a new transport to each server."""
        return [server.transport(self._timeout_seconds) for server in self._all]

    def _started(self, number: int, port: int = 0) -> _Server:
        return _Server(
            number,
            self._count,
            self.token,
            self._directory,
            timeout_seconds=self._timeout_seconds,
            port=port,
        )

    def start_again(self, number: int) -> Transport:
        """Start a server again, at its port if nobody has taken that; return a transport to it.

        Raises:
            HomeError: no process starts, or all were ended.
        """
        with self._lock:
            self._require_running(number)
            old = self._all[number]
            old.kill()
            new = self._started(number, old.port)
            try:
                self._require_running(number)
            except HomeError:
                new.kill()
                raise
            self._all[number] = new
            return new.transport(self._timeout_seconds)

    def _require_running(self, number: int) -> None:
        if self._has_ended:
            raise HomeError(
                f"embedding server {number + 1} of {self._count}",
                found="servers that were ended",
                expected="a home that is open",
                next_step="make a new home",
            )

    def end(self) -> None:
        """End all. A process that was forked from this one ends none of them."""
        if os.getpid() != self._owned_by:
            return
        with self._lock:
            self._has_ended = True
            for server in self._all:
                server.ask_to_end()
            for server in self._all:
                server.kill(_END_SECONDS)
            self._all.clear()


def _started(
    count: int, parity: Parity | None, directory: Path | None, timeout_seconds: float
) -> tuple[ServedHome, ServerProcesses]:
    processes = ServerProcesses(count, directory, timeout_seconds)
    try:
        home = made_home(
            processes.transports(),
            parity=parity,
            timeout_seconds=timeout_seconds,
            revive=processes.start_again,
            at_close=processes.end,
        )
    except BaseException:
        processes.end()
        raise
    weakref.finalize(home, processes.end)  # if nobody closes it
    return home, processes


def _joined(told: dict[str, Any], parity: Parity | None, timeout_seconds: float) -> ServedHome:
    """Use the servers that rank 0 has started."""
    host = socket.gethostname()
    if told["host"] != host:
        raise HomeError(
            "servers(...)",
            found=f"rank {rank_and_count()[0]} on {host}, rank 0 on {told['host']}",
            expected="servers that all ranks reach: they listen on one machine only",
            next_step="start all ranks on one machine",
        )
    require_parity_of_first_rank("servers", parity, told["parity"])
    ports, token = told["ports"], bytes.fromhex(told["token"])

    def transport(number: int) -> TcpTransport:
        port, count = ports[number], len(ports)
        return TcpTransport(
            ("127.0.0.1", port),
            token,
            name=f"embedding server {number + 1} of {count} (127.0.0.1:{port})",
            timeout_seconds=timeout_seconds,
        )

    def again(number: int) -> TcpTransport:
        # With parity, the home looks again itself, and between looks whether rank 0 has given up.
        # Rank 0 then waits for this rank, and starts no server before.
        if parity is None:
            return _until_it_answers(transport(number), timeout_seconds)
        return transport(number)

    return made_home(
        [transport(number) for number in range(len(ports))],
        parity=parity,
        timeout_seconds=timeout_seconds,
        owner=told["owner"],
        revive=again,
    )


def _until_it_answers(transport: TcpTransport, timeout_seconds: float) -> TcpTransport:
    """Wait until rank 0 has started a server again.

    Raises:
        ServerLost: it does not in time.
    """
    deadline = time.monotonic() + timeout_seconds + _START_SECONDS
    while True:
        try:
            transport.hello()
        except ServerLost:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_SECONDS)
        else:
            return transport


def _opened_process(pid: int) -> int:
    """Return a file descriptor that stands for a server that was just forked.

    If it has ended since then, the forker looks for that a second later. Until then, no other
    process has its number.
    """
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        raise


def _opened(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # each is subprocess.PIPE
    return pipe


def _refused(setting: str, found: str, expected: str) -> SettingsError:
    return SettingsError(
        f"servers({setting}=...)", found=found, expected=expected, next_step=f"change {setting}"
    )
