"""A device on the host whose copies arrive late, and of rows as they were at any time since.

A GPU runs what it is given whenever it gets to it, each stream by itself. So a copy may read a row
as it was when the device last had nothing to do, as it is when the copy arrives, as it was at any
time between, or torn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recpoint.trainer_plugin.snapshot.device_copies import DeviceCopies, PendingCopy

__all__ = ["LateCopies"]


class LateCopies:
    """Copies of another device, later.

    Args:
        device: makes the copies.
        draw: chooses what happens when.
        arrives: the probability that a copy arrives when it is looked for.
        tables: returns the arrays of all tables, whose earlier contents copies may read.

    Attributes:
        piece_bytes: that of the other device.
        called: what was called, in order.
        under_way: number of copies that have not arrived.
    """

    def __init__(
        self,
        device: DeviceCopies,
        draw: random.Random,
        *,
        arrives: float,
        tables: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        self.piece_bytes = device.piece_bytes
        self.arrives = arrives
        self.called: list[str] = []
        self.under_way = 0
        self._device, self._draw, self._tables = device, draw, tables
        self._contents: list[list[tuple[int, Tensor]]] = []

    def note_contents(self) -> None:
        """Keep the tables as they are now; copies may read them until the device is idle."""
        arrays = [tensor.detach().view(-1).view(torch.uint8) for tensor in self._tables()]
        self._contents.append([(array.data_ptr(), array.clone()) for array in arrays])

    def buffer(self, size_bytes: int) -> Tensor:
        """Return memory to copy to, poisoned."""
        self.called.append("buffer")
        return self._device.buffer(size_bytes).fill_(0x5A)

    def follow_training(self) -> None:
        """Take note."""
        self.called.append("follow training")

    def copy(self, sources: Sequence[Tensor], outs: Sequence[Tensor]) -> PendingCopy:
        """Begin to copy."""
        self.called.append("copy")
        self.under_way += 1
        return _Late(self, lambda: self._copy(sources, outs))

    def _copy(self, sources: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        self.under_way -= 1
        for source, out in zip(sources, outs, strict=True):
            self._device.copy([source], [out]).wait()
            torn_at = self._draw.randrange(out.numel() + 1)
            for part in (slice(0, torn_at), slice(torn_at, out.numel())):
                for start, content in self._draw.choice(self._contents or [[]]):
                    first = source.data_ptr() - start
                    if 0 <= first < content.numel() and self._draw.random() < 0.8:
                        out[part] = content[first : first + out.numel()][part]

    def gather(self, source: Tensor, ids: Tensor, out: Tensor) -> None:
        """Copy rows."""
        self.called.append("gather")
        assert self.under_way == 0
        self._device.gather(source, ids, out)

    def wait_for_all(self) -> None:
        """Wait: no copy reads earlier contents from now on."""
        self.called.append("wait for all")
        self._contents.clear()
        self.note_contents()

    def has_arrived(self) -> bool:
        """Whether a copy that is looked for has arrived by now."""
        return self._draw.random() < self.arrives


class _Late:
    """A copy that is made when it is found to have arrived."""

    def __init__(self, device: LateCopies, copy: Callable[[], None]) -> None:
        self._device = device
        self._copy: Callable[[], None] | None = copy

    def is_there(self) -> bool:
        if self._copy is not None and self._device.has_arrived():
            self.wait()
        return self._copy is None

    def wait(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy()
