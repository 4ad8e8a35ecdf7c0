"""Forks embedding servers, as `python -m recpoint.embeddings.server.process PID`.

`processes.py` starts one such process for the trainer with that PID. It imports torch once. Then a
server starts in milliseconds, and shares the memory of what is imported. The settings of a server
come through stdin as one line of JSON, so that the token is in no list of processes. One line of
JSON answers through stdout: the server's pid and port, or an error.

The process ends when stdin ends. A server ends at SIGTERM. It does not need the process that has
forked it. Both end when the trainer is gone, also after SIGKILL.

A server that was stopped cannot end by itself. So the process leaves a reaper behind, which waits
for the end of the trainer, and a few seconds later kills the servers that are left.
"""

from __future__ import annotations

import errno
import gc
import json
import math
import multiprocessing
import os
import select
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.tcp import TcpServer
from recpoint.embeddings.server.tcp_peer import reach_with
from recpoint.errors import HomeError

__all__ = ["main"]

#: How long a server that has ended stays a zombie.
_LOOK_SECONDS: Final = 1.0
#: After this, a server that does not end by itself is killed: its trainer is gone.
_END_SECONDS: Final = 5.0


def main() -> None:
    """Fork servers until the trainer wants no more."""
    trainer = os.pidfd_open(int(sys.argv[1]))
    if os.getppid() != int(sys.argv[1]):
        return  # another process may have the number now
    torch.set_num_threads(1)
    answers = os.dup(1)
    os.dup2(2, 1)  # what a server prints is no answer
    gc.freeze()  # a collection in a server then copies no memory that servers share
    servers: dict[int, int] = {}  # pid -> file descriptor, which stands for no later process
    while True:
        ready, _, _ = select.select([sys.stdin, trainer], [], [], _LOOK_SECONDS)
        living = {child.pid for child in multiprocessing.active_children()}  # reaps the others
        for pid in [pid for pid in servers if pid not in living]:
            os.close(servers.pop(pid))
        if sys.stdin in ready:
            line = sys.stdin.buffer.readline()  # the trainer sends one, and waits for the answer
            if not line:
                break
            answer = _fork(json.loads(line), trainer, answers)
            if isinstance(new_pid := answer.get("pid"), int):
                servers[new_pid] = os.pidfd_open(new_pid)
            os.write(answers, json.dumps(answer).encode() + b"\n")
        elif ready:  # a child of the trainer may hold stdin open after the trainer's end
            break
    if servers and os.fork() == 0:
        os.close(answers)  # so that it closes when this process ends
        _reap(trainer, list(servers.values()))
    os._exit(0)  # without a wait for the servers


def _reap(trainer: int, servers: list[int]) -> None:
    """Wait until the servers have ended; kill those that outlive the trainer by seconds.

    Args:
        trainer: file descriptor of the trainer's process.
        servers: those of the servers' processes.
    """
    os.setsid()  # no signal for the trainer's terminal
    deadline = math.inf
    while servers:
        waited = [*servers] if deadline < math.inf else [trainer, *servers]
        seconds_left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select(waited, [], [], seconds_left)
        servers = [server for server in servers if server not in ready]
        if trainer in ready:
            deadline = time.monotonic() + _END_SECONDS
        elif not ready:
            for server in servers:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(server, signal.SIGKILL)
            return


def _fork(settings: dict[str, Any], trainer: int, answers: int) -> dict[str, object]:
    """Fork a server; return what to answer."""
    fork = multiprocessing.get_context("fork")
    own_end, child_end = fork.Pipe(duplex=False)
    with own_end:
        with child_end:
            process = fork.Process(target=_serve, args=(settings, child_end, trainer, answers))
            process.start()
        try:
            answer: dict[str, object] = own_end.recv()
        except EOFError:
            process.join()
            return {"error": f"an end with exit status {process.exitcode}"}
    return answer


def _serve(settings: dict[str, Any], answer: Connection, trainer: int, answers: int) -> None:
    """Be a server until SIGTERM, or until the trainer is gone."""
    os.close(answers)  # so that it closes when the process that forks servers ends
    wake, is_woken = os.pipe()
    os.set_blocking(is_woken, False)
    signal.set_wakeup_fd(is_woken)
    signal.signal(signal.SIGTERM, lambda *_: None)  # it wakes the wait below
    try:
        token = bytes.fromhex(settings["token"])
        server = EmbeddingServer(
            directory=settings["directory"],
            name=settings["name"],
            reach=reach_with(token, timeout_seconds=settings["timeout_seconds"]),
        )
        listening = _listening(server, token, settings["port"])
    except (HomeError, OSError) as error:
        answer.send({"error": str(error)})
        return
    answer.send({"pid": os.getpid(), "port": listening.address[1]})
    answer.close()
    select.select([wake, trainer], [], [])
    listening.close()
    server.end()


def _listening(server: EmbeddingServer, token: bytes, port: int) -> TcpServer:
    try:
        return TcpServer(server, token, port=port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not port:
            raise
        # Another program has taken the port that the server had before. Trainers that know only the
        # old port raise ServerLost, which names it.
        return TcpServer(server, token)


if __name__ == "__main__":
    main()
