"""Keeps the memory into which a server receives requests, and bounds what it keeps.

New pages cost about as much as receiving bytes into them, so memory is used again. A connection
has memory only while it receives and answers a request. Idle connections share what is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

__all__ = ["MOST_KEPT_BYTES", "ReceiveBuffers"]

#: Of one server, for all its idle connections together.
MOST_KEPT_BYTES: Final = 64 << 20


class ReceiveBuffers:
    """Lends memory for one request at a time.

    Args:
        most_kept_bytes: memory that nobody uses and that is kept for later requests.

    Attributes:
        lent_bytes: memory of requests that are being received or answered.
        kept_bytes: memory that is kept for later requests, at most `most_kept_bytes`.
    """

    def __init__(self, most_kept_bytes: int = MOST_KEPT_BYTES) -> None:
        self._most_kept_bytes = most_kept_bytes
        self._lock = threading.Lock()
        self._kept: list[Tensor] = []
        self.lent_bytes = 0
        self.kept_bytes = 0

    @contextmanager
    def lent(self, size_bytes: int) -> Iterator[Tensor]:
        """Lend memory until the end of the block: uint8 [size_bytes], with any values.

        Nothing may use it after the block.
        """
        buffer = self._taken(size_bytes)
        try:
            yield buffer[:size_bytes]
        finally:
            self._give_back(buffer)

    def _taken(self, size_bytes: int) -> Tensor:
        with self._lock:
            fitting = [
                index
                for index, kept_buffer in enumerate(self._kept)
                if len(kept_buffer) >= size_bytes
            ]
            if size_bytes and fitting:
                smallest = min(fitting, key=lambda index: len(self._kept[index]))
                buffer = self._kept.pop(smallest)
                self.kept_bytes -= len(buffer)
                self.lent_bytes += len(buffer)
                return buffer
        buffer = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        with self._lock:
            self.lent_bytes += size_bytes
        return buffer

    def _give_back(self, buffer: Tensor) -> None:
        with self._lock:
            self.lent_bytes -= len(buffer)
            if not 0 < len(buffer) <= self._most_kept_bytes:
                return
            # The newest is kept: requests of one training grow, and then have one size.
            while self.kept_bytes + len(buffer) > self._most_kept_bytes:
                self.kept_bytes -= len(self._kept.pop(0))
            self._kept.append(buffer)
            self.kept_bytes += len(buffer)
