"""Prints where `make test` has the tests write: memory, where there is plenty, else nothing.

What they write, some 6 GB, stays until all have passed. A container's `/dev/shm` is often 64 MB,
and one that runs no programs is of no use to tests that make some.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

_IN_MEMORY: Final = Path("/dev/shm")
_NEEDED_BYTES: Final = 10_000_000_000
#: Beside them there are the processes of all workers.
_NEEDED_MEMORY_BYTES: Final = 2 * _NEEDED_BYTES


def main() -> None:
    """Print the directory."""
    if (
        os.access(_IN_MEMORY, os.W_OK | os.X_OK)
        and _is_roomy(_IN_MEMORY)
        and _memory_bytes() > _NEEDED_MEMORY_BYTES
    ):
        print(_IN_MEMORY)


def _is_roomy(directory: Path) -> bool:
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    return free > _NEEDED_BYTES and not found.f_flag & os.ST_NOEXEC


def _memory_bytes() -> int:
    """What is available without swapping, and no more than a container may use; 0: not known."""
    available = _found("/proc/meminfo", r"^MemAvailable:\s+(\d+) kB$") * 1024
    limit = _found("/sys/fs/cgroup/memory.max", r"^(\d+)$")
    return min(available, limit) if limit else available


def _found(file: str, pattern: str) -> int:
    try:
        said = Path(file).read_text(encoding="ascii")
    except OSError:
        return 0
    number = re.search(pattern, said, re.MULTILINE)
    return int(number[1]) if number else 0


if __name__ == "__main__":
    main()
