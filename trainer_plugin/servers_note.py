"""Says every second, for whoever looks at the run, how its embedding servers are (format §7).

Two threads do this. One writes what the home knows. The other asks the servers for their sizes,
which may take long while a server is lost. Neither is waited for in training.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

from recpoint.catalog.staging.trainer_note import BEAT_SECONDS
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.parity.peers import OutOfStep
from recpoint.errors import HomeError, ServerLost
from recpoint.format.servers import AllServers, ServerFacts
from recpoint.trainer_plugin.snapshot.staging import StagingArea

__all__ = ["ServersNote"]

_LOG: Final = logging.getLogger("recpoint")
#: The least time between two writes.
_WRITE_SECONDS: Final = 1.0
#: Between two questions to the servers.
_ASK_SECONDS: Final = 2.0
#: The end of training waits so long for a write.
_END_SECONDS: Final = 1.0


class ServersNote:
    """Writes how the servers of a home are when that has changed, and every five seconds.

    The threads go on as long as this object is referred to.

    Args:
        home: of the tables that are trained.
        area: the staging area of rank 0.
        generation: of this training.
        is_stalled: whether training waits for a checkpoint. Nothing is written then.
    """

    def __init__(
        self,
        home: Home,
        area: StagingArea,
        *,
        generation: int,
        is_stalled: Callable[[], bool],
    ) -> None:
        self._home = home
        self._area = area
        self._generation = generation
        self._is_stalled = is_stalled
        self._is_over = threading.Event()
        # By a server's number and process: its bytes in memory and on disk.
        self._bytes: dict[tuple[int, int], tuple[int, int]] = {}
        self._silent: frozenset[int] = frozenset()  # servers that the last questions found lost
        self._written: AllServers | None = None
        self._written_at = 0.0
        self._has_failed = False
        self._writer: threading.Thread | None = None

    def start(self) -> None:
        """Start the threads, unless the home has no servers. Never raises: training waits here."""
        try:
            if self._home.servers_now() is None:
                return
            self._writer = _started(self, ServersNote.write, _WRITE_SECONDS)
            _started(self, ServersNote.ask, _ASK_SECONDS)
        except Exception as error:  # such as "can't start new thread"
            self._failed(error)

    def end(self) -> None:
        """Write no more. What was written last stays, with its time."""
        self._is_over.set()
        if self._writer is not None and self._writer is not threading.current_thread():
            self._writer.join(_END_SECONDS)

    def write(self) -> None:
        """Write how the servers are, if that is due. Never raises; the first failure is logged."""
        try:
            servers = self._home.servers_now()
            if servers is None or self._is_stalled():
                return
            servers_now = tuple(
                self._with_answers(server, servers.parity) for server in servers.each
            )
            servers = servers.model_copy(update={"each": servers_now})
            now = time.monotonic()
            if servers == self._written and now < self._written_at + BEAT_SECONDS:
                return
            if self._is_over.is_set():
                return
            self._area.tell_servers(servers, generation=self._generation)
            self._written, self._written_at = servers, now
        except Exception as error:  # only what people are told depends on it
            self._failed(error)

    def ask(self) -> None:
        """Ask the servers for their sizes. Never raises; the first failure is logged."""
        bytes_by_server: dict[tuple[int, int], tuple[int, int]] = {}
        silent = set()
        try:
            servers = self._home.servers_now()
            for server in () if servers is None else servers.each:
                if server.state == "lost":
                    continue
                try:
                    bytes_by_server[server.number, server.pid] = self._home.server_bytes(
                        server.number - 1
                    )
                except ServerLost:
                    silent.add(server.number)
                except (HomeError, OutOfStep):
                    continue  # the home was closed, or a server is being replaced
        except Exception as error:  # Ray has errors of its own
            self._failed(error)
        self._bytes, self._silent = bytes_by_server, frozenset(silent)

    def _with_answers(self, server: ServerFacts, parity: int) -> ServerFacts:
        if server.state == "up" and not parity and server.number in self._silent:
            # With parity, the leader finds out.
            return server.model_copy(update={"state": "lost", "known_rows": 0})
        memory, disk = self._bytes.get((server.number, server.pid), (None, None))
        return server.model_copy(update={"memory_bytes": memory, "disk_bytes": disk})

    def _failed(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            _LOG.warning(
                "%s: how the embedding servers are could not be written, so pages do not show it: "
                "%s. Training goes on",
                self._area.staged_run,
                error,
            )


def _started(
    note: ServersNote, act: Callable[[ServersNote], None], seconds: float
) -> threading.Thread:
    """Start a thread that does something again and again, until the note has ended or is gone."""
    thread = threading.Thread(
        target=_repeat,
        args=(weakref.ref(note), note._is_over, act, seconds),
        name="recpoint-note",
        daemon=True,
    )
    thread.start()
    return thread


def _repeat(
    note: Callable[[], ServersNote | None],
    is_over: threading.Event,
    act: Callable[[ServersNote], None],
    seconds: float,
) -> None:
    while not is_over.wait(seconds):
        target = note()
        if target is None:
            return
        act(target)
        del target
