"""A slot: one file of the staging area, mapped into the training process and used again and again.

Fresh pages cost more than the copy into them, so a slot is reserved and populated once. All its
space is reserved before a byte is written through the mapping: on a full disk a write to a mapped
page that has no block is no error but a SIGBUS, which kills the trainer.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from recpoint.catalog.staging import owned
from recpoint.catalog.stores import durable
from recpoint.errors import StagingError, StagingFull

__all__ = ["ALIGNMENT_BYTES", "Slot", "array_view"]

_log = logging.getLogger("recpoint")

#: Segments start at multiples of this (format §7).
ALIGNMENT_BYTES = 64


def array_view(data: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The array of `dtype` and `shape` at byte `offset` of `data`, uint8 [n]; no copy."""
    count = 1
    for size in shape:
        count *= size
    length = count * dtype.itemsize
    return data[offset : offset + length].view(dtype).view(shape)


class Slot:
    """One slot file. Written by the training thread, then read by the background thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._inode = -1
        self._data: Tensor | None = None

    @property
    def data(self) -> Tensor:
        """The reserved bytes, uint8 [n]."""
        if self._data is None:
            raise ValueError(f"{self.path}: nothing is reserved")
        return self._data

    def reserve(self, size_bytes: int) -> None:
        """Have `size_bytes` of real space, mapped and populated; quick when it is there already.

        Raises:
            StagingFull: there is no room; what was reserved before still is.
            StagingRefused: the file, or a directory above it, is not this user's own.
            StagingError: the file cannot be created, extended or mapped.
        """
        size_bytes = max(size_bytes, 1)
        try:
            if not self._is_ours():
                self._open()
            if self._data is None or self._data.numel() < size_bytes:
                self._extend(size_bytes)
        except OSError as error:
            raise self._error(error, size_bytes) from error

    def grow(self, size_bytes: int) -> None:
        """Have `size_bytes` of space in all; what was written since `reserve` stays.

        Raises:
            StagingFull: there is no room; what was reserved before still is.
            StagingError: the file cannot be extended or mapped, or is not the reserved one any
                more: what was written would not be in it.
        """
        if self._data is not None and self._data.numel() >= size_bytes:
            return
        try:
            if not self._is_ours():
                raise StagingError(
                    str(self.path),
                    found="another file, or none, under that name",
                    expected="the slot that the snapshot was being copied into",
                    next_step="find out what removes files of the staging area; the next "
                    "checkpoint holds these rows too",
                )
            self._extend(size_bytes)
        except OSError as error:
            raise self._error(error, size_bytes) from error

    def sync(self) -> None:
        """Make what was written durable.

        Raises:
            OSError: it is not known to be.
        """
        if self._descriptor is None:
            raise ValueError(f"{self.path}: nothing is reserved")
        # Once only, see durable: after a failed fsync a second one may say success.
        durable.fsync_file(self._descriptor)

    def close(self) -> None:
        """Let go of file and mapping; the file stays for the next trainer. Never raises."""
        self._data = None
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.close(descriptor)
            except OSError as error:
                # As NFS reports what it could not write. It is closed nevertheless, and what was
                # staged has been synced before its job was written.
                _log.warning("%s: %s when it was closed", self.path, error.strerror or error)

    def _is_ours(self) -> bool:
        """Whether the file behind the mapping is still the one under the path, and as long."""
        if self._descriptor is None:
            return False
        mapped = 0 if self._data is None else self._data.numel()
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return there.st_ino == self._inode and there.st_size >= mapped

    def _open(self) -> None:
        self.close()
        area = self.path.parent.parent.parent  # <area>/<run>/slots/<name>
        owned.make_directory(area, self.path.parent)
        durable.step(f"open slot {self.path.name}")
        self._descriptor = owned.open_file(area, self.path, os.O_RDWR | os.O_CREAT)
        self._inode = os.fstat(self._descriptor).st_ino
        with owned.directory(area, self.path.parent) as above:
            durable.fsync_open_directory(above, self.path.parent.name)

    def _extend(self, size_bytes: int) -> None:
        assert self._descriptor is not None
        before = os.fstat(self._descriptor).st_size
        durable.step(f"reserve {self.path.name}")
        try:
            os.posix_fallocate(self._descriptor, 0, size_bytes)
        except OSError:
            # Half a reservation helps nobody and keeps the disk full.
            os.ftruncate(self._descriptor, before)
            raise
        mapping = mmap.mmap(
            self._descriptor,
            size_bytes,
            flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0),
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
        # The tensor keeps the mapping alive; there is no other reference to it.
        self._data = torch.frombuffer(mapping, dtype=torch.uint8)

    def _error(self, error: OSError, size_bytes: int) -> StagingError:
        kind = StagingFull if error.errno in durable.NO_ROOM else StagingError
        return kind(
            str(self.path),
            found=error.strerror or str(error),
            expected=f"room for {size_bytes} bytes",
            next_step="free space there, or give a larger directory: staging= or RECPOINT_STAGING",
        )
