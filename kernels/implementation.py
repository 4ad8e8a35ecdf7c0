"""Which implementation of a kernel runs for a tensor here, and why: for people and for records.

A kernel chooses by the device of its tensors and by nothing else, so this can be told ahead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Final, NamedTuple

import llvmlite.binding as llvm
import numba
import torch

__all__ = [
    "KERNELS",
    "Implementation",
    "implementations",
    "on_cpu",
    "on_devices",
    "vector_extension",
]

KERNELS: Final = (
    "bit_packing",
    "dirty_bitmap",
    "dirty_rows",
    "quantize",
    "row_digest",
    "row_gather",
    "row_set",
)

#: Kernels without a version for a GPU, and why.
_ON_CPU_ONLY: Final = {
    "dirty_rows": "rows on a GPU go through dirty_bitmap and row_gather",
    "row_digest": "rows are digested where they are staged or decoded, in host memory",
}

#: Widest first.
_VECTOR_EXTENSIONS = ("avx512f", "avx2", "avx", "sse2", "sve", "neon")


class Implementation(NamedTuple):
    """`name` runs for tensors on `device`; None: nothing does, such a tensor is refused."""

    kernel: str
    device: str
    name: str | None
    why: str


def implementations() -> list[Implementation]:
    """What runs here for each kernel, for tensors on a CPU and on a CUDA device."""
    name, why = _on_cuda()
    found: list[Implementation] = []
    for kernel in KERNELS:
        found.append(Implementation(kernel, "cpu", "numba", on_cpu()))
        if kernel in _ON_CPU_ONLY:
            found.append(Implementation(kernel, "cuda", None, _ON_CPU_ONLY[kernel]))
        else:
            found.append(Implementation(kernel, "cuda", name, why))
    return found


def on_cpu() -> str:
    """What runs on this CPU, in some 30 characters: compiler, threads, vector extension."""
    threads = torch.get_num_threads()
    plural = "" if threads == 1 else "s"
    return f"numba {numba.__version__}, {threads} thread{plural}, {vector_extension()}"


def on_devices(kinds: Iterable[str]) -> str:
    """What runs on devices of these kinds, "cpu" and "cuda"; "" for none."""
    found = [on_cpu() if kind == "cpu" else _on_cuda()[1] for kind in sorted(kinds)]
    return "; ".join(found)


def vector_extension() -> str:
    """The widest vector instructions that numba compiles for here; "" if none are known."""
    chosen = os.environ.get("NUMBA_CPU_NAME") or os.environ.get("NUMBA_CPU_FEATURES")
    if chosen:  # numba compiles for that then, whatever this CPU has
        return f"{chosen[:40]} as set"
    try:
        features = llvm.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know how to ask on this system
        return ""
    return next((name for name in _VECTOR_EXTENSIONS if features.get(name)), "")


def _on_cuda() -> tuple[str | None, str]:
    if not torch.cuda.is_available():
        return None, "no CUDA device"
    if find_spec("triton") is None:
        return None, "triton is not installed"
    import triton

    return "triton", f"triton {triton.__version__}, {torch.cuda.get_device_name()}"
