"""Ends copies of a table's memory before torch gives the memory back.

torch moves a tensor that is handed to another process for the first time: `share_memory_()`, and a
queue of `torch.multiprocessing`. Its old memory is gone then, and a thread that reads it ends the
process. The training thread finds moved tables only after each batch (`window_marks.py`).

torch keeps a lock for each storage that is being moved, and whoever moves it, too, enters that lock
first. So an entry of `MovedMemory` there is told of each move before it begins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage

__all__ = ["MovedMemory"]


class MovedMemory:
    """Tells of moves of memory until it is closed.

    `UntypedStorage.resize_` moves memory, too, and is not told of.

    Args:
        tensors: on the CPU.
        before_move: called before memory of a tensor moves, in the thread that moves it, maybe
            several times. It may call `close`.
    """

    def __init__(self, tensors: Sequence[Tensor], before_move: Callable[[], None]) -> None:
        self._before_move = before_move
        # torch names a storage by its address, which is another's once the storage is gone.
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        with torch.storage._share_memory_lock:
            moves = _moves()
            for storage in self._storages:
                entry = moves.setdefault(_address(storage), _BeforeMoves())
                if isinstance(entry, _BeforeMoves):  # else another thread moves it already
                    entry.calls.append(before_move)

    def close(self) -> None:
        """Tell of no move any more."""
        storages, self._storages = self._storages, []
        with torch.storage._share_memory_lock:
            moves = _moves()
            for storage in storages:
                entry = moves.get(_address(storage))
                if isinstance(entry, _BeforeMoves) and self._before_move in entry.calls:
                    entry.calls.remove(self._before_move)
                    if not entry.calls:
                        del moves[_address(storage)]


class _BeforeMoves:
    """Stands where torch has the lock of a storage that another thread moves.

    Attributes:
        calls: made when the lock is entered.
    """

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self._process = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() == self._process:  # a fork has no thread that reads
            for call in list(self.calls):
                call()

    def __exit__(self, *_: object) -> None:
        pass


def _moves() -> MutableMapping[int, Any]:
    return cast(MutableMapping[int, Any], torch.storage._share_memory_map)


def _address(storage: UntypedStorage) -> int:
    return int(storage._cdata)
