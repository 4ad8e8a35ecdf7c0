"""Strikes at chosen file operations of a process: SIGKILL, a stop, or an error of the system.

The operations are intercepted in the C library (`io_faults.c`, compiled when it is first needed),
so that all systems are struck alike, whichever language writes their files. What strikes is real:
the signal is SIGKILL, and the error is one that a disk gives.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

__all__ = ["CHANGES", "DATA", "READS", "Cause", "IoFault", "arm", "compiled", "done", "set_clock"]

_SOURCE = Path(__file__).with_name("io_faults.c")
_VARIABLE = "RECPOINT_IO_FAULT"

#: Operations that change files; reads of them; writes of data into them.
CHANGES, READS, DATA = 1, 2, 4


class Cause(IntEnum):
    """What happens at the chosen operation."""

    COUNT = 0
    KILL_GROUP = 1
    KILL_SELF = 2
    STOP = 3
    FAIL = 4


@dataclass(frozen=True, kw_only=True)
class IoFault:
    """What strikes a process, and when.

    Attributes:
        cause: what happens.
        at: at which operation, from 1 on.
        kinds: which operations count: a sum of CHANGES, READS and DATA.
        below: the directory whose files count.
        only_children: the process itself is let alone; processes that it starts are struck.
        error: of the cause FAIL, the number of the error.
    """

    cause: Cause
    at: int = 0
    kinds: int = CHANGES
    below: Path
    only_children: bool = False
    error: int = errno.EIO


def compiled(folder: Path) -> Path | None:
    """Return the library to preload, compiled into `folder`; None if there is no compiler."""
    system = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    compiler = [system] if system else [sys.executable, "-m", "ziglang", "cc"]
    library = folder / "io_faults.so"
    command = [*compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl"]
    process = subprocess.run(command, capture_output=True, text=True)
    return library if process.returncode == 0 else None


def arm(fault: IoFault | None, *, clock_offset_seconds: int = 0) -> None:
    """Arm this process, into which the library is preloaded, and what it will start."""
    settings = "0:0:0:0"
    if fault is not None:
        settings = f"{fault.cause.value}:{fault.at}:{fault.kinds}:{fault.error}"
        if not fault.only_children:
            _library().io_faults_arm(
                fault.cause.value, fault.at, fault.kinds, fault.error, os.fsencode(fault.below)
            )
    below = "" if fault is None else fault.below
    os.environ[_VARIABLE] = f"{settings}:{clock_offset_seconds}:{below}"
    set_clock(clock_offset_seconds)


def set_clock(offset_seconds: int) -> None:
    """Set the wall clock of this process, relative to the true one."""
    clock = _library().io_faults_clock
    clock.argtypes = [ctypes.c_longlong]
    clock(offset_seconds)


def done() -> int:
    """Return how many operations this process has done since it was armed."""
    count = _library().io_faults_done
    count.restype = ctypes.c_long
    return int(count())


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
