"""Marking the rows that a step of an optimizer changed, of all its tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recpoint.kernels import dirty_bitmap
from recpoint.trainer_plugin.interrupts import came_from_handler
from recpoint.trainer_plugin.tracking import Tracker

__all__ = ["after_steps", "mark_together"]

_INT64 = torch.int64


def after_steps(trackers: Sequence[Tracker]) -> list[tuple[Tracker, Tensor]]:
    """`after_step` of several tables; for `mark_together`, what it returned that is to be marked.

    What a step of sparse gradients on the CPU does to a table is written out: this runs after work
    that has filled the caches with other things, and what counts is how little is touched.
    """
    found = []
    for tracker in trackers:
        try:
            if tracker.quick is not None:
                weight, mark, bitmap, rows = tracker.quick
                gradient, version = weight.grad, weight._version
                if gradient is not None and version - tracker.version == 1 and gradient.is_sparse:
                    ids = gradient._indices()
                    # A weight that went to another device, or a gradient of another form, is left
                    # to after_step(). So are ids out of range: nothing was marked then.
                    if ids.dtype is _INT64 and ids.is_cpu and ids.is_contiguous():
                        if mark(bitmap, ids.data_ptr(), ids.numel(), 1, rows) < 0:
                            tracker.version = version
                            tracker.changes += 1
                            continue
            left = tracker.after_step()
        except Exception as error:
            tracker.give_up(error)
            if came_from_handler(error):
                raise
            continue  # it must not stop training
        if left is not None:
            found.append((tracker, left))
    return found


def mark_together(found: Sequence[tuple[Tracker, Tensor]]) -> None:
    """Mark what `Tracker.after_step` returned for several tables: a launch for each GPU."""
    by_device: dict[torch.device, list[tuple[Tracker, Tensor]]] = {}
    for tracker, ids in found:
        by_device.setdefault(tracker.bitmap.device, []).append((tracker, ids))
    for marks in by_device.values():
        try:
            # The allocator keeps the memory of ids for the stream that the launch is in.
            dirty_bitmap.mark_many(
                [tracker.bitmap for tracker, _ in marks],
                [ids for _, ids in marks],
                rows=[tracker.rows for tracker, _ in marks],
            )
        except Exception as error:
            for tracker, _ in marks:
                tracker.give_up(error)
            if came_from_handler(error):
                raise
