"""Large pages for large tables: a row costs one step to memory, not one more to find its page.

The rows that a snapshot gathers lie far apart. In a table of gigabytes nearly each of them is on a
page of 4 KiB of its own that the processor has to look up; pages of 2 MiB are few enough to be
known. Contents, addresses and the memory that a table takes stay as they are.
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

#: Tables below this are left alone: the processor knows their pages.
SMALLEST_BYTES = 32 << 20

_PAGE_BYTES = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1; not in Python's mmap module
_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def advise(tensors: Iterable[Tensor], *, smallest_bytes: int = SMALLEST_BYTES) -> int:
    """Have the memory of large CPU tensors moved to large pages where the system offers them.

    Takes about the time of a copy of the tensors. Nothing changes where the administrator has
    turned large pages off (`never`), on other systems than Linux, or for memory that is shared.

    Args:
        tensors: of any dtype and device.
        smallest_bytes: tensors below this are left alone.

    Returns:
        Bytes that were moved.
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
        # Whole pages inside the tensor only: what lies around it belongs to others.
        first = -(-tensor.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // _PAGE_BYTES * _PAGE_BYTES
        if end <= first or madvise(first, end - first, mmap.MADV_HUGEPAGE) != 0:
            continue
        # Advice alone is for pages to come, and the table's are there. A kernel without collapse,
        # or without free large pages, leaves the rest to its own background thread.
        if madvise(first, end - first, _COLLAPSE) == 0:
            moved += end - first
    if moved:
        _log.debug("%d bytes of tables are on large pages", moved)
    return moved


def policy() -> str:
    """What the administrator has chosen: always, madvise or never; "none" where there is nothing
    to choose.
    """
    if sys.platform != "linux":
        return "none"
    try:
        text = _POLICY.read_text(encoding="ascii")
    except OSError:
        return "none"
    return text.partition("[")[2].partition("]")[0] or "none"


def _offered() -> bool:
    return policy() in ("always", "madvise")
