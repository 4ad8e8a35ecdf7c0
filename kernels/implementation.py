"""Tells people and records which implementation of a kernel runs for a tensor here, and why.

A kernel chooses only by the device of its tensors, so the answer is known before it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Final, NamedTuple

import torch

from recpoint.kernels.native import COMPILER, instruction_set

__all__ = [
    "KERNELS",
    "Implementation",
    "implementations",
    "on_cpu",
    "on_devices",
]

KERNELS: Final = (
    "allocation",
    "bit_packing",
    "copy_ahead",
    "dirty_bitmap",
    "dirty_rows",
    "erasure",
    "first_values",
    "key_map",
    "key_order",
    "key_sketch",
    "lookup_counts",
    "moments",
    "quantize",
    "residuals",
    "row_blocks",
    "row_digest",
    "row_gather",
    "row_map",
    "row_set",
    "slot_map",
)

#: The kernels that have no version for a GPU, and the reason.
_ON_CPU_ONLY: Final = {
    "allocation": "the agent chooses widths, in host memory",
    "copy_ahead": "rows on a GPU are gathered there in the stall",
    "dirty_rows": "rows on a GPU go through dirty_bitmap and row_gather",
    "erasure": "records of rows and their parity are held in host memory",
    "first_values": "values of new rows are computed in host memory",
    "key_map": "keys are looked up in host memory",
    "key_order": "uses of keys are counted in host memory",
    "key_sketch": "keys are counted in host memory",
    "lookup_counts": "lookups are counted beside tables in host memory",
    "moments": "row states are coded and decoded in host memory",
    "residuals": "the agent subtracts rows, in host memory",
    "row_blocks": "files are read into host memory",
    "row_digest": "rows are digested where they are staged or decoded, in host memory",
    "row_map": "places of rows in files are looked up in host memory",
    "row_set": "ids are coded where they are stored or read, in host memory",
    "slot_map": "ids are read ahead in host memory",
}


class Implementation(NamedTuple):
    """`name` runs for tensors on `device`. None: nothing runs, and such a tensor is refused."""

    kernel: str
    device: str
    name: str | None
    why: str


def implementations() -> list[Implementation]:
    """The implementation of each kernel here, for tensors on a CPU and on a CUDA device."""
    name, reason = _on_cuda()
    found_kinds: list[Implementation] = []
    for kernel in KERNELS:
        found_kinds.append(
            Implementation(kernel, "cpu", "native", f"{on_cpu()}, compiled by {COMPILER}")
        )
        if kernel in _ON_CPU_ONLY:
            found_kinds.append(Implementation(kernel, "cuda", None, _ON_CPU_ONLY[kernel]))
        else:
            found_kinds.append(Implementation(kernel, "cuda", name, reason))
    return found_kinds


def on_cpu() -> str:
    """Describe what runs on this CPU, in some 30 characters: threads and instruction set."""
    threads = torch.get_num_threads()
    plural = "" if threads == 1 else "s"
    return f"native, {threads} thread{plural}, {instruction_set()}"


def on_devices(kinds: Iterable[str]) -> str:
    """Describe what runs on devices of these kinds, "cpu" and "cuda"; "" for none."""
    names = [on_cpu() if kind == "cpu" else _on_cuda()[1] for kind in sorted(kinds)]
    return "; ".join(names)


def _on_cuda() -> tuple[str | None, str]:
    if not torch.cuda.is_available():
        return None, "no CUDA device"
    if find_spec("triton") is None:
        return None, "triton is not installed"
    import triton

    return "triton", f"triton {triton.__version__}, {torch.cuda.get_device_name()}"
