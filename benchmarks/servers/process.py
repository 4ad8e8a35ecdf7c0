"""Runs one process of the benchmark: `python -m benchmarks.servers.process MODULE`.

The module is one of this package that has a function `process`. The process ends with its parent,
also where it waits for another one.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from importlib import import_module

#: Of prctl(2): the signal that the kernel sends when the parent has ended.
_SET_PARENT_DEATH_SIGNAL = 1

if __name__ == "__main__":
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    import_module(f"benchmarks.servers.{sys.argv[1]}").process()
