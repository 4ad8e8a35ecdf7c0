"""Says how much memory of a GPU a cut may take, so that training does not run out of memory.

A cut gathers rows in buffers on the device, which live until they are on the host. Meanwhile
training goes on. Between two batches much memory seems to be free, but the next step takes it
again: the allocator keeps the blocks of activations, and its peak says how much a step takes. So
buffers take only memory that is beyond the peak.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

__all__ = ["DeviceMemory", "MemoryReading", "of_this_process"]

#: Share of a device that stays free: the allocator's blocks do not fit together without gaps, and
#: the next batch may be larger than those before.
_MARGIN_SHARE: Final = 1 / 16


class MemoryReading(NamedTuple):
    """What is known of a device's memory, in bytes.

    Attributes:
        total_bytes: memory of the device.
        others_bytes: taken by other processes and by the driver.
        peak_bytes: the most that was in tensors of this process at one time.
    """

    total_bytes: int
    others_bytes: int
    peak_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> MemoryReading:
        """Read the memory of a CUDA device."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        own_bytes = torch.cuda.memory_reserved(device)
        return cls(
            total_bytes,
            max(0, total_bytes - free_bytes - own_bytes),
            torch.cuda.max_memory_allocated(device),
        )


class DeviceMemory:
    """Knows what buffers of cuts hold on each device, and what they may take in addition.

    Buffers count towards the peak, and nothing tells their share of it. So they take only half of
    the memory beyond the peak: otherwise the buffers of one full would leave no room for those of
    any later cut. May be called from any thread.

    Args:
        read: reads the memory of a device.
    """

    def __init__(self, read: Callable[[torch.device], MemoryReading] = MemoryReading.of) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._has_trained = False
        self._held_bytes: dict[torch.device, int] = {}
        self._peak_bytes: dict[torch.device, int] = {}

    def spare_bytes(self, device: torch.device) -> int:
        """Return the bytes that further buffers may take; 0 before `note_trained`."""
        reading = self._read(device)
        with self._lock:
            # A user may reset the allocator's peak, but a step takes as much as before.
            peak_bytes = max(self._peak_bytes.get(device, 0), reading.peak_bytes)
            self._peak_bytes[device] = peak_bytes
            if not self._has_trained:
                return 0  # nobody knows yet what a step takes
            margin_bytes = int(reading.total_bytes * _MARGIN_SHARE)
            beyond = reading.total_bytes - reading.others_bytes - peak_bytes - margin_bytes
            return max(0, beyond // 2 - self._held_bytes.get(device, 0))

    def note_trained(self) -> None:
        """Note that this process has trained a batch, so the peak has what a step takes."""
        self._has_trained = True

    def hold(self, device: torch.device, size_bytes: int) -> None:
        """Note that a buffer lives on the device until `release`."""
        with self._lock:
            self._held_bytes[device] = self._held_bytes.get(device, 0) + size_bytes

    def release(self, device: torch.device, size_bytes: int) -> None:
        """Note that a buffer is gone."""
        self.hold(device, -size_bytes)


_of_this_process: Final = DeviceMemory()


def of_this_process() -> DeviceMemory:
    """Return the memory that all cuts of this process share."""
    return _of_this_process
