"""Is a process of the benchmark at a place of its network: a rank, or a server of torch RPC."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from multiprocessing.connection import Connection

from benchmarks.server_process import enter_network

__all__ = ["run_module"]

#: Of prctl(2): the signal that the kernel sends when the parent has ended.
_SET_PARENT_DEATH_SIGNAL = 1


def run_module(
    module: str, network: str | None, environment: Mapping[str, str], pipe: Connection
) -> None:
    """Run `process(told)` of a module of this package.

    The process ends with the one from which it was forked, even while it waits for another process.
    That one ends with the benchmark.

    Args:
        module: its name.
        network: path of a network namespace; None: that of the machine.
        environment: variables, besides those of the benchmark.
        pipe: the connection through which the orders come.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.setsid()  # Ctrl-C at a terminal is for the benchmark
    if network is not None:
        enter_network(network)
    os.environ.update(environment)
    import_module(f"benchmarks.servers.{module}").process(pipe)
