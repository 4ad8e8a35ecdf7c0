"""Forks processes of a benchmark from one that has imported torch.

An interpreter of its own would import torch for each process, and the compiler of torch for its
first optimizer: seconds of a processor that belong to no figure. The process from which they are
forked has one thread, and has computed nothing.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple

__all__ = ["Forked", "forked"]

_PRELOADED = ["benchmarks.preloaded"]


class Forked(NamedTuple):
    """A process, and the connection through which it is told what to do."""

    process: ForkServerProcess
    told: Connection

    def end(self, seconds: float) -> None:
        """Close the connection, wait for the end, and kill the process after so many seconds."""
        self.told.close()
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def forked(target: Callable[..., None], *arguments: Any) -> Forked:
    """Return a process that runs `target(*arguments, told)`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    own_end, their_end = context.Pipe()
    process = context.Process(target=target, args=(*arguments, their_end))
    process.start()
    their_end.close()
    return Forked(process, own_end)
