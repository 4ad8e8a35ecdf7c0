"""Prints the directory where `make test` lets tests write: in memory if there is plenty, else none.

The files of a passed test are removed after it; those of all tests together take some 10 GB. A
container's `/dev/shm` often has only 64 MB. A directory mounted noexec does not do, because tests
write programs and run them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

_IN_MEMORY: Final = Path("/dev/shm")
_NEEDED_BYTES: Final = 10_000_000_000
#: The processes of all workers need memory besides the files.
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
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    return free > _NEEDED_BYTES and not status.f_flag & os.ST_NOEXEC


def _memory_bytes() -> int:
    """Return the memory available without swapping, within a container's limit; 0: unknown."""
    available = _found("/proc/meminfo", r"^MemAvailable:\s+(\d+) kB$") * 1024
    limit = _found("/sys/fs/cgroup/memory.max", r"^(\d+)$")
    return min(available, limit) if limit else available


def _found(file: str, pattern: str) -> int:
    try:
        content = Path(file).read_text(encoding="ascii")
    except OSError:
        return 0
    number = re.search(pattern, content, re.MULTILINE)
    return int(number[1]) if number else 0


if __name__ == "__main__":
    main()
