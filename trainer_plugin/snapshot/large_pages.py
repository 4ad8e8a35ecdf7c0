"""Moves large tables to large pages, which save the look-up of the page for each row that is read.

The rows that a snapshot gathers lie far apart. In a table of gigabytes, nearly each of them lies on
another page of 4 KiB, which the processor must look up in memory. Pages of 2 MiB are so few that
the processor keeps them in its cache. Contents, addresses and the table's memory stay the same.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

__all__ = ["SMALLEST_BYTES", "advise", "policy"]

_log = logging.getLogger("recpoint")

#: Smaller tables are not moved: the processor can cache the addresses of their pages.
SMALLEST_BYTES = 32 << 20

_PAGE_BYTES = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1; not in Python's mmap module
_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def advise(tensors: Iterable[Tensor], *, smallest_bytes: int = SMALLEST_BYTES) -> int:
    """Have the memory of large CPU tensors moved to large pages, if the system offers them.

    Takes about the time of a copy of the tensors. Nothing changes if the administrator has turned
    large pages off (`never`), on systems other than Linux, or for shared memory.

    Args:
        tensors: tensors of any dtype, on any device.
        smallest_bytes: smaller tensors are not moved.

    Returns:
        Number of bytes that were moved.
    """
    if not _offered():
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for tensor in tensors:
        if not tensor.is_cpu or tensor.nbytes < smallest_bytes or tensor.is_shared():
            continue
        if not tensor.is_contiguous():
            continue
        # Only whole pages inside the tensor: memory around it belongs to other objects.
        first = -(-tensor.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // _PAGE_BYTES * _PAGE_BYTES
        if end <= first or madvise(first, end - first, mmap.MADV_HUGEPAGE) != 0:
            continue
        # The advice applies to future pages, but the table's pages exist already, so collapse them.
        # If the kernel cannot collapse or has no free large pages, its background thread moves them
        # later.
        if madvise(first, end - first, _COLLAPSE) == 0:
            moved += end - first
    if moved:
        _log.debug("%d bytes of tables are on large pages", moved)
    return moved


def policy() -> str:
    """Return the administrator's setting: always, madvise or never; "none" if there is none."""
    if sys.platform != "linux":
        return "none"
    try:
        text = _POLICY.read_text(encoding="ascii")
    except OSError:
        return "none"
    return text.partition("[")[2].partition("]")[0] or "none"


def _offered() -> bool:
    return policy() in ("always", "madvise")
