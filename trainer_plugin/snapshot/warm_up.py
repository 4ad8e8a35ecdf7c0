"""Compiles the GPU kernels of a cut before training, so that no stall waits for the compiler.

Triton compiles a kernel when it is first launched, which takes a second or so. The kernels that
serve many tables have a version for each power of two of entries (`kernels.descriptors`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from recpoint.interrupts import came_from_handler
from recpoint.kernels import dirty_bitmap, row_gather
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable

__all__ = ["compile_kernels", "compile_of_device"]

_log = logging.getLogger("recpoint")

#: Up to this many entries share one version (`descriptors`).
_FEWEST: Final = 32
#: Row states that optimizers may create in their first step; Adam creates two.
_MOST_NEW_STATES: Final = 2
#: Words of bitmaps to merge. Triton makes other versions of a count of 1 and of multiples of 16.
_WORDS: Final = (1, 16, 17)


class _Bitmaps(Protocol):
    """The functions of `kernels.dirty_bitmap` that a cut calls."""

    mark_many: Callable[..., None]
    collect_many: Callable[..., list[Tensor]]
    merge: Callable[..., None]


class _Gathers(Protocol):
    """The functions of `kernels.row_gather` that a cut calls."""

    gather: Callable[..., None]
    gather_many: Callable[..., None]


def compile_kernels(tables: Sequence[LiveTable]) -> None:
    """Compile the kernels that cuts of these tables launch; does nothing for tables on the CPU.

    An error is logged and not raised: the first cut compiles what is missing.
    """
    by_device: dict[torch.device, list[LiveTable]] = {}
    for live in tables:
        if live.table is not None and live.weight.is_cuda:
            by_device.setdefault(live.weight.device, []).append(live)
    for device, of_device in by_device.items():
        arrays = sum(1 + (len(live.row_states) or _MOST_NEW_STATES) for live in of_device)
        try:
            compile_of_device(device, tables=len(of_device), arrays=arrays)
        except Exception as error:
            # A compiler fails on a full disk, for instance, and the job can train all the same.
            if came_from_handler(error):
                raise
            _log.warning(
                "kernels for %s could not be compiled before training (%s); the first checkpoints "
                "compile them, and training waits longer for these",
                device,
                error,
            )


def compile_of_device(
    device: torch.device,
    *,
    tables: int,
    arrays: int,
    bitmaps: _Bitmaps = dirty_bitmap,
    gathers: _Gathers = row_gather,
) -> None:
    """Launch each version of the kernels once, with one row of a table that nobody uses.

    Args:
        device: the device.
        tables: the most tables that a cut collects rows of there.
        arrays: the most arrays, values and row states, that it gathers there.
        bitmaps, gathers: the kernels.
    """
    marks = torch.zeros(1, dtype=torch.int32, device=device)
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    row = torch.zeros((1, 4), dtype=torch.float32, device=device)
    out = torch.empty_like(row)
    for count in _counts(tables):
        bitmaps.mark_many([marks] * count, [ids] * count, rows=[1] * count)
        bitmaps.collect_many([marks] * count, rows=[1] * count)
    for count in _counts(arrays):
        gathers.gather_many([row] * count, [ids] * count, [out] * count)
    gathers.gather(row, ids, out)
    for words in _WORDS:
        merged = torch.zeros(words, dtype=torch.int32, device=device)
        bitmaps.merge(merged, torch.zeros_like(merged))


def _counts(most: int) -> Iterator[int]:
    """Yield a number of entries of each version that serves up to `most` entries."""
    count = 1
    while count <= most:
        yield count
        count = max(_FEWEST, 2 * (count - 1)) + 1
