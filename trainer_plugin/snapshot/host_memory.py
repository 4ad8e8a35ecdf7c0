"""Reads how much memory this process may use, and whether a file system keeps its files there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["HostMemory", "host_memory", "is_in_memory"]


_MEMINFO = Path("/proc/meminfo")
_CGROUPS_OF_PROCESS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_MOUNTS = Path("/proc/self/mountinfo")


class HostMemory(NamedTuple):
    """Memory of this host, or of this process's control groups if they allow less.

    Attributes:
        size_bytes: all of it.
        free_bytes: what can be taken without swapping; files that are only cached count as free.
    """

    size_bytes: int
    free_bytes: int


def host_memory() -> HostMemory | None:
    """Return the memory that this process may use; None: the system does not say."""
    meminfo = _read(_MEMINFO)
    size, free = (
        _number(r"^MemTotal:\s+(\d+) kB$", meminfo),
        _number(r"^MemAvailable:\s+(\d+) kB$", meminfo),
    )
    if size is None or free is None:
        return None
    memory = HostMemory(size * 1024, free * 1024)
    for directory in _control_groups():
        limited = _limited(directory)
        if limited is not None:
            memory = HostMemory(*map(min, memory, limited))
    return memory


def is_in_memory(path: Path) -> bool:
    """Whether `path`, which exists, is on a tmpfs. False too if the system does not say."""
    try:
        device = os.stat(path).st_dev
    except OSError:
        return False
    device_number = f"{os.major(device)}:{os.minor(device)}"
    for line in _read(_MOUNTS).splitlines():
        mount, _, kind = line.partition(" - ")
        if kind.startswith("tmpfs ") and mount.split(" ")[2:3] == [device_number]:
            return True
    return False


def _control_groups() -> Iterator[Path]:
    """Yield the directories of this process's control groups, version 1 and 2, and those above."""
    for line in _read(_CGROUPS_OF_PROCESS).splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        # A container may see paths of its host; then only the root is there, and is its own.
        group = root / path.lstrip("/")
        yield group
        yield from (above for above in group.parents if above.is_relative_to(root))


def _limited(directory: Path) -> HostMemory | None:
    """Return what a control group allows; None: it has no limit, or does not exist."""
    for most, now, cached in (
        ("memory.max", "memory.current", r"^inactive_file (\d+)$"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", r"^total_inactive_file (\d+)$"),
    ):
        size = _number(r"^(\d+)$", _read(directory / most))
        used_bytes = _number(r"^(\d+)$", _read(directory / now))
        if size is not None and used_bytes is not None:
            reclaimable = _number(cached, _read(directory / "memory.stat")) or 0
            return HostMemory(size, max(0, size - max(0, used_bytes - reclaimable)))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text, re.MULTILINE)
    return None if match is None else int(match[1])
