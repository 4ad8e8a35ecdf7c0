"""A slot: a file in the staging area that is mapped into memory and used repeatedly.

New pages cost more than the copy into them, so a slot is reserved and populated once. All its space
is reserved before a byte is written through the mapping: if the disk is full, a write to a mapped
page without a block raises no error but sends SIGBUS, which kills the process.

A trainer writes slots, and so does an embedding server that stages its own rows.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path
from typing import NamedTuple

import crc32c
import torch
from torch import Tensor

from recpoint.catalog.staging import owned
from recpoint.catalog.store import durable
from recpoint.errors import StagingError, StagingFull
from recpoint.format.dtypes import Dtype, array_bytes, torch_dtype
from recpoint.format.job import Segment
from recpoint.kernels import dirty_rows

__all__ = [
    "ALIGNMENT_BYTES",
    "Placed",
    "Slot",
    "array_view",
    "digest_segments",
    "place_behind",
]

_log = logging.getLogger("recpoint")

#: Segments start at multiples of this (format §7).
ALIGNMENT_BYTES = 64


def array_view(data: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a view of `data`, uint8 [n], as the array of `dtype` and `shape` at byte `offset`."""
    count = 1
    for size in shape:
        count *= size
    length = count * dtype.itemsize
    return data[offset : offset + length].view(dtype).view(shape)


class Slot:
    """One slot file. The training thread writes it, then the background thread reads it."""

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
        """Reserve, map and populate `size_bytes` of disk space; quick if they exist already.

        Args:
            size_bytes: the bytes that must be there. To extend them later maps all of them anew.

        Raises:
            StagingFull: there is no room; the space reserved earlier is kept.
            StagingRefused: the file or a directory above it does not belong to this user alone.
            StagingError: the file cannot be created, extended or mapped.
        """
        size_bytes = max(size_bytes, 1)
        try:
            if not self.is_there():
                self._open()
            if self._data is None or self._data.numel() < size_bytes:
                self._extend(size_bytes)
        except OSError as error:
            raise self._error(error, size_bytes) from error

    def grow(self, size_bytes: int) -> None:
        """Extend the space to `size_bytes` in all; what was written since `reserve` stays.

        Raises:
            StagingFull: there is no room; the space reserved earlier is kept.
            StagingError: the file cannot be extended or mapped; or another file is at its path, and
                would lack what was written.
        """
        if self._data is not None and self._data.numel() >= size_bytes:
            return
        try:
            if not self.is_there():
                raise StagingError(
                    str(self.path),
                    found="another file, or no file, at this path",
                    expected="the slot into which the snapshot was being copied",
                    next_step="find out what removes files from the staging area; the next "
                    "checkpoint also holds these rows",
                )
            self._extend(size_bytes)
        except OSError as error:
            raise self._error(error, size_bytes) from error

    def sync(self) -> None:
        """Make what was written durable.

        Raises:
            OSError: it may not be durable.
        """
        if self._descriptor is None:
            raise ValueError(f"{self.path}: nothing is reserved")
        # Once only (see `durable`): after a failed fsync, a second one may report success.
        durable.fsync_file(self._descriptor)

    def close(self) -> None:
        """Release file and mapping; the file stays for the next trainer. Never raises."""
        self._data = None
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.close(descriptor)
            except OSError as error:
                # NFS reports failed writes here. The file is closed all the same, and staged data
                # was synced before its job was written.
                _log.warning("%s: %s when it was closed", self.path, error.strerror or error)

    def is_there(self) -> bool:
        """Whether the path still names the mapped file, and the file is as long as the mapping."""
        if self._descriptor is None:
            return False
        mapped = 0 if self._data is None else self._data.numel()
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return status.st_ino == self._inode and status.st_size >= mapped

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
        size_before = os.fstat(self._descriptor).st_size
        durable.step(f"reserve {self.path.name}")
        try:
            os.posix_fallocate(self._descriptor, 0, size_bytes)
        except OSError:
            # A partial reservation is useless and would keep the disk full.
            os.ftruncate(self._descriptor, size_before)
            raise
        mapping = mmap.mmap(
            self._descriptor,
            size_bytes,
            flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0),
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
        # The tensor holds the only reference to the mapping, so both end together.
        self._data = torch.frombuffer(mapping, dtype=torch.uint8)

    def _error(self, error: OSError, size_bytes: int) -> StagingError:
        kind = StagingFull if error.errno in durable.NO_ROOM else StagingError
        return kind(
            str(self.path),
            found=error.strerror or str(error),
            expected=f"room for {size_bytes} bytes",
            next_step="free space there, or set a larger directory: staging= or RECPOINT_STAGING",
        )


class Placed(NamedTuple):
    """The place of an array in the slot: a job's segment without its digest.

    Attributes:
        name: name of the segment (format §7).
        dtype: dtype of the array.
        shape: shape of the array.
        offset: first byte in the slot.
        size_bytes: number of bytes.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        """The first byte behind the array."""
        return self.offset + self.size_bytes

    def view(self, data: Tensor) -> Tensor:
        """Return the array as a view of the slot's bytes, uint8 [n]."""
        return array_view(data, self.offset, torch_dtype(self.dtype), self.shape)

    def room(self, data: Tensor) -> dirty_rows.Room:
        """Return the array's bytes in the slot in the form that a kernel takes.

        Raises:
            ValueError: the slot ends before the array does.
        """
        if self.end > data.numel():
            raise ValueError(
                f"{self.name}: found a slot of {data.numel()} bytes, expected {self.end}"
            )
        return dirty_rows.Room(data.data_ptr() + self.offset, self.size_bytes, data)


def place_behind(name: str, dtype: Dtype, shape: tuple[int, ...], end: int) -> Placed:
    """Return the first aligned place for an array at or after byte `end`."""
    offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    size = array_bytes(dtype, shape)
    return Placed(name=name, dtype=dtype, shape=shape, offset=offset, size_bytes=size)


def digest_segments(slot: Slot, placed: tuple[Placed, ...]) -> tuple[Segment, ...]:
    """Return the arrays in a slot as its job lists them, each with the digest of its bytes."""
    data = slot.data.numpy()
    return tuple(
        Segment(
            name=spot.name,
            dtype=spot.dtype,
            shape=spot.shape,
            offset=spot.offset,
            bytes=spot.size_bytes,
            crc32c=crc32c.crc32c(data[spot.offset : spot.end].data),
        )
        for spot in placed
    )
