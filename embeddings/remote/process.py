"""Runs one embedding server, as `python -m recpoint.embeddings.remote.process`.

`processes.py` starts such processes, some before it knows what for. The settings come through stdin
as one line of JSON, so that the token is in no list of processes. The port goes back through
stdout. The process ends when another line comes, when stdin ends, or when its parent is gone, also
after SIGKILL.
"""

from __future__ import annotations

import errno
import json
import os
import select
from typing import Any, Final

import torch

from recpoint.embeddings.remote.server import EmbeddingServer
from recpoint.embeddings.remote.tcp import TcpServer
from recpoint.embeddings.remote.tcp_peer import reach_with
from recpoint.errors import HomeError

__all__ = ["main"]

#: A child of the parent may hold stdin open after the parent's end, so that is looked at, too.
_LOOK_SECONDS: Final = 1.0


def main() -> None:
    """Serve until the parent wants no more."""
    stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115  # open until the end
    parent = os.getppid()
    while not select.select([stdin], [], [], _LOOK_SECONDS)[0]:
        if os.getppid() != parent:
            return  # nobody will say any more which server this is
    line = stdin.readline()
    if not line:
        return
    settings: dict[str, Any] = json.loads(line)
    torch.set_num_threads(1)
    try:
        token = bytes.fromhex(settings["token"])
        server = EmbeddingServer(
            directory=settings["directory"],
            name=settings["name"],
            reach=reach_with(token, timeout_seconds=settings["timeout_seconds"]),
        )
        listening = _listening(server, token, settings["port"])
    except (HomeError, OSError) as error:
        _tell({"error": str(error)})
        raise SystemExit(1) from error
    _tell({"port": listening.address[1]})
    while os.getppid() == settings["parent"]:
        if select.select([stdin], [], [], _LOOK_SECONDS)[0]:
            break
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


def _tell(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
