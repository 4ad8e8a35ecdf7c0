"""Getting rows off a GPU: gathered on the device in the stall, drained to the host after it."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels import row_gather

__all__ = ["DeviceDrain", "spare_bytes"]

#: Size of a pinned bounce buffer, and of a piece when there is no spare device memory.
PIECE_BYTES = 32 << 20

#: So much is tried without asking the device what it has.
SMALL_BYTES = 64 << 10


class DeviceDrain:
    """Rows of one snapshot that are still on their device.

    `gather` and `release_training` run in the stall; `drain` runs in the background thread.
    """

    def __init__(self) -> None:
        self._gathers: list[tuple[Tensor, Tensor, Tensor]] = []
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._ready: dict[torch.device, torch.cuda.Event] = {}

    def gather(self, source: Tensor, ids: Tensor | None, out: Tensor) -> None:
        """Have rows of `source` (all of them when `ids` is None) arrive in `out`, on the host.

        With enough spare device memory they are copied on the device by `release_training`, those
        of all sources in one launch. Without, the rows go to the host piece by piece, and are there
        on return.
        """
        if out.nbytes == 0:
            return
        if out.nbytes <= SMALL_BYTES or out.nbytes <= spare_bytes(source.device):
            try:
                buffer = torch.empty(out.shape, dtype=out.dtype, device=source.device)
            except torch.OutOfMemoryError:
                pass  # spare, but in pieces that are too small: go the other way
            else:
                if ids is None:
                    buffer.copy_(source)
                else:
                    self._gathers.append((source, ids, buffer))
                self._waiting.append((buffer, out))
                return
        rows = max(1, PIECE_BYTES // max(1, out[0].nbytes))
        for start in range(0, out.shape[0], rows):
            part = out[start : start + rows]
            if ids is None:
                part.copy_(source[start : start + rows])
            else:
                piece = torch.empty(part.shape, dtype=out.dtype, device=source.device)
                row_gather.gather(source, ids[start : start + rows], piece)
                part.copy_(piece)

    def take(self, buffer: Tensor, out: Tensor) -> None:
        """Have `buffer`, contiguous and not written any more, arrive in `out`, on the host."""
        if out.nbytes:
            self._waiting.append((buffer, out))

    def release_training(self) -> None:
        """Gather, and mark on each device's current stream the point when all has been copied."""
        for device in {buffer.device for _, _, buffer in self._gathers}:
            chosen = [gather for gather in self._gathers if gather[2].device == device]
            row_gather.gather_many(*zip(*chosen, strict=True))
        self._gathers.clear()
        for buffer, _ in self._waiting:
            if buffer.device not in self._ready:
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(buffer.device))
                self._ready[buffer.device] = event

    def drain(self) -> None:
        """Bring everything to the host, on a stream of its own; buffers are given back."""
        if not self._waiting:
            return
        pinned = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu")
        for device, event in self._ready.items():
            stream = torch.cuda.Stream(device)
            stream.wait_event(event)
            for buffer, out in self._waiting:
                if buffer.device != device:
                    continue
                # The allocator must not hand the buffer to training while this stream reads it.
                buffer.record_stream(stream)
                _through(pinned, stream, _bytes(buffer), _bytes(out))
        self._waiting.clear()
        self._ready.clear()


def _through(pinned: Tensor, stream: torch.cuda.Stream, source: Tensor, out: Tensor) -> None:
    for start in range(0, source.numel(), pinned.numel()):
        piece = source[start : start + pinned.numel()]
        with torch.cuda.stream(stream):
            pinned[: piece.numel()].copy_(piece, non_blocking=True)
        stream.synchronize()
        out[start : start + piece.numel()].copy_(pinned[: piece.numel()])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def spare_bytes(device: torch.device) -> int:
    """Half of what the device has free, and what the allocator holds without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free // 2 + cached
