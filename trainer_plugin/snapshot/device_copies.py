"""Copies bytes of a device to the host while training goes on: the few calls that a device takes.

`PieceCopier` says what is copied when, for any device. What differs between devices is here: how
memory on the host is had, how a copy is begun behind training's work, and how to wait.
`HostCopies` does this for tables in the host's memory, `CudaCopies` for those on a GPU.

All calls come from the training thread. CUDA refuses most calls of any other thread while a graph
is captured, and would end the capture with an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from recpoint.kernels import row_gather
from recpoint.trainer_plugin.snapshot.codes import PIECE_BYTES

__all__ = ["PendingCopy", "CudaCopies", "DeviceCopies", "HostCopies", "copies_of"]

#: The training thread itself copies these pieces, two in a batch at most.
_HOST_PIECE_BYTES = 4 << 20

#: No stream has a lower priority; CUDA gives higher ones by negative numbers.
_LOWEST_PRIORITY = 0


class PendingCopy(Protocol):
    """A copy that was begun."""

    def is_there(self) -> bool:
        """Whether the copy has ended; does not wait."""

    def wait(self) -> None:
        """Wait until the copy has ended."""


class DeviceCopies(Protocol):
    """Copies of the tables of one device. A copy may be made at any time until it has arrived.

    Attributes:
        piece_bytes: how many bytes are best copied at once.
    """

    piece_bytes: int

    def buffer(self, size_bytes: int) -> Tensor:
        """Return memory on the host to copy to: uint8 [size_bytes].

        Raises:
            RuntimeError: there is no such memory.
        """

    def follow_training(self) -> None:
        """Have later copies begin only after what the device has been given to do until now."""

    def copy(self, sources: Sequence[Tensor], outs: Sequence[Tensor]) -> PendingCopy:
        """Begin to copy; the caller keeps the tensors until it has arrived.

        Args:
            sources: uint8 [n] each, contiguous, on the device. Training may write to them.
            outs: for each source, a part of a `buffer` of its size.
        """

    def gather(self, source: Tensor, ids: Tensor, out: Tensor) -> None:
        """Copy rows, and wait until they are there; nothing else may use the device meanwhile.

        Args:
            source: uint8 [rows, n], contiguous, on the device.
            ids: int64 [k] on the host: rows of the source.
            out: uint8 [k, n], a part of a `buffer`.

        Raises:
            RuntimeError: the device has no memory for the rows.
        """

    def wait_for_all(self) -> None:
        """Wait until the device has done all that it has been given, on every stream."""


class _Arrived:
    """A copy that had ended when `copy` returned."""

    def is_there(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class HostCopies:
    """Copies tables in the host's memory, at once and on the calling thread.

    No other thread reads them: training may give their memory back between two batches.

    Args:
        piece_bytes: as in `DeviceCopies`.
    """

    def __init__(self, piece_bytes: int = _HOST_PIECE_BYTES) -> None:
        self.piece_bytes = piece_bytes

    def buffer(self, size_bytes: int) -> Tensor:
        """Return memory to copy to."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def follow_training(self) -> None:
        """Do nothing: what was called before has ended."""

    def copy(self, sources: Sequence[Tensor], outs: Sequence[Tensor]) -> PendingCopy:
        """Copy."""
        for source, out in zip(sources, outs, strict=True):
            out.copy_(source)
        return _Arrived()

    def gather(self, source: Tensor, ids: Tensor, out: Tensor) -> None:
        """Copy rows."""
        row_gather.gather(source, ids, out)

    def wait_for_all(self) -> None:
        """Do nothing: what was called before has ended."""


class CudaCopies:
    """Copies tables on a GPU, on a stream of its own with the lowest priority.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.piece_bytes = PIECE_BYTES
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=_LOWEST_PRIORITY)

    def buffer(self, size_bytes: int) -> Tensor:
        """Return pinned memory, so that a copy needs no other memory and no thread.

        Raises:
            RuntimeError: no memory could be pinned.
        """
        try:
            return pinned_memory(size_bytes)
        except RuntimeError as error:
            raise RuntimeError(
                f"{size_bytes} bytes of the host's memory could not be pinned ({error})"
            ) from error

    def follow_training(self) -> None:
        """Have later copies wait for an event on the stream that is current now."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(event)

    def copy(self, sources: Sequence[Tensor], outs: Sequence[Tensor]) -> PendingCopy:
        """Begin to copy on the own stream, and record when it has ended."""
        arrival = _CudaPendingCopy()
        with torch.cuda.stream(self._stream):
            for source, out in zip(sources, outs, strict=True):
                # If training frees the memory, nobody is given it before it is read.
                source.record_stream(self._stream)
                out.copy_(source, non_blocking=True)
            arrival.event.record(self._stream)
        return arrival

    def gather(self, source: Tensor, ids: Tensor, out: Tensor) -> None:
        """Copy rows through a piece of the device's memory, on the stream that is current."""
        rows = torch.empty(out.shape, dtype=out.dtype, device=self._device)
        row_gather.gather(source, ids.to(self._device), rows)
        out.copy_(rows)  # waits

    def wait_for_all(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)


class _CudaPendingCopy:
    """A copy on a stream, which has ended when its event has happened."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()

    def is_there(self) -> bool:
        has_happened: bool = self.event.query()
        return has_happened

    def wait(self) -> None:
        self.event.synchronize()


def pinned_memory(size_bytes: int) -> Tensor:
    """Return memory of the host that a GPU reads and writes by itself: uint8 [size_bytes].

    Raises:
        RuntimeError: no memory could be pinned.
    """
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")


def copies_of(device: torch.device) -> DeviceCopies:
    """Return the copies of a device.

    Raises:
        ValueError: nothing is known of devices of this type.
    """
    if device.type == "cpu":
        return HostCopies()
    if device.type == "cuda":
        return CudaCopies(device)
    raise ValueError(f"tables on {device}, expected cpu or cuda")
