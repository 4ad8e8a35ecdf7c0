"""Describes what a checkpoint of another tool holds, and reads rows of it in pieces."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, NamedTuple, Self

import torch
from torch import Tensor

from recpoint.errors import MalformedObject

__all__ = [
    "PIECE_BYTES",
    "ForeignCheckpoint",
    "ForeignEntry",
    "Scalar",
    "StoredTensor",
    "malformed",
]

Scalar = int | float | str


#: Most bytes that are read at a time, unless one row is larger.
PIECE_BYTES: Final = 16 << 20

#: Most bytes of a window that is read for rows whose elements do not lie one after another.
_WINDOW_BYTES: Final = 64 << 20


class ForeignEntry(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        name: its keys from the outermost one, joined by dots.
        dtype: its dtype.
        shape: its shape.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, that is, of one entry of the first dimension."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return self.dtype.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def malformed(path: Path, *, found: str, expected: str) -> MalformedObject:
    """Return the error of a file that is not what its form says."""
    return MalformedObject(
        str(path),
        found=found,
        expected=expected,
        next_step="copy or save the checkpoint again; recpoint import PATH lists what it holds",
    )


class StoredTensor(NamedTuple):
    """A tensor whose elements lie in a file, in the layout of a torch storage.

    Attributes:
        path: the file.
        first_byte: offset in the file of the storage's first byte.
        storage_bytes: bytes of the storage; all of them lie in the file.
        dtype: dtype of the elements.
        shape: its shape.
        strides: elements from one index to the next, a number a dimension.
        first_element: elements of the storage before the tensor's first one.
    """

    path: Path
    first_byte: int
    storage_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first_element: int

    def check(self, name: str) -> None:
        """Check that all elements lie in the storage.

        Raises:
            MalformedObject: some do not.
        """
        numbers = (*self.shape, *self.strides, self.first_element)
        fits = len(self.shape) == len(self.strides) and all(number >= 0 for number in numbers)
        if fits and self._end(self.shape) * self.dtype.itemsize <= self.storage_bytes:
            return
        raise malformed(
            self.path,
            found=f"{name!r} of shape {list(self.shape)} and strides {list(self.strides)} from "
            f"element {self.first_element} on, of {self.dtype}",
            expected=f"a tensor within the {self.storage_bytes} bytes of its storage",
        )

    def _end(self, shape: Sequence[int]) -> int:
        """Return the elements of the storage up to the last one of a tensor of this shape."""
        if 0 in shape:
            return 0
        places = zip(shape, self.strides, strict=True)
        return self.first_element + 1 + sum((size - 1) * stride for size, stride in places)

    def read(self, file: BinaryIO, rows: range) -> Tensor:
        """Return some rows, [len(rows), …]; of a tensor without dimensions, the whole tensor.

        Args:
            file: the file, open for reading.
            rows: rows that the tensor has, in steps of 1.

        Raises:
            MalformedObject: the file has become shorter, or the rows lie too far apart.
        """
        self.check_rows(len(rows))
        shape = (len(rows), *self.shape[1:]) if self.shape else ()
        start = self.first_element + (rows.start * self.strides[0] if self.shape else 0)
        count = max(0, self._end(shape) - self.first_element)
        elements = read_bytes(
            file,
            self.path,
            self.first_byte + start * self.dtype.itemsize,
            count * self.dtype.itemsize,
        ).view(self.dtype)
        return elements.as_strided(shape, self.strides) if count else elements.reshape(shape)

    def check_rows(self, count: int) -> None:
        """Check that so many rows can be read at once.

        Raises:
            MalformedObject: they lie too far apart.
        """
        shape = (count, *self.shape[1:]) if self.shape else ()
        size_bytes = max(0, self._end(shape) - self.first_element) * self.dtype.itemsize
        own_bytes = self.dtype.itemsize * math.prod(shape)
        if size_bytes > max(own_bytes, _WINDOW_BYTES):
            raise malformed(
                self.path,
                found=f"a tensor of shape {list(self.shape)} with strides {list(self.strides)}",
                expected="rows that lie one after another (tensor.contiguous())",
            )

    def read_into(self, file: BinaryIO, rows: range, target: Tensor) -> None:
        """Read some rows into `target`, [len(rows), …], of any dtype, device and strides.

        Rows that lie one after another go straight from the file into memory that can take them.
        """
        row_elements = math.prod(self.shape[1:])
        fits = target.is_cpu and target.is_contiguous() and target.dtype is self.dtype
        if not (fits and self.shape and _contiguous(self.shape) == self.strides):
            target.copy_(self.read(file, rows))
            return
        start = self.first_element + rows.start * row_elements
        offset = self.first_byte + start * self.dtype.itemsize
        # Its bytes as they lie: not every dtype can be shown to numpy.
        _fill(file, self.path, offset, target.view(-1).view(torch.uint8))


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


def read_bytes(file: BinaryIO, path: Path, offset: int, size_bytes: int) -> Tensor:
    """Return bytes of a file, uint8 [size_bytes].

    Raises:
        MalformedObject: the file is shorter.
    """
    content = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
    _fill(file, path, offset, content)
    return content


def _fill(file: BinaryIO, path: Path, offset: int, content: Tensor) -> None:
    """Fill `content`, uint8 [n] on the CPU, with bytes of a file from `offset` on."""
    size_bytes = content.numel()
    if not size_bytes:
        return
    view = content.numpy().data
    file.seek(offset)
    filled = 0
    while filled < size_bytes:
        count = file.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            raise malformed(
                path,
                found=f"an end at byte {offset + filled}",
                expected=f"{size_bytes} bytes from byte {offset} on",
            )
        filled += count


def _piece_rows(entry: ForeignEntry) -> int:
    return max(1, PIECE_BYTES // max(1, entry.row_bytes))


class ForeignCheckpoint(ABC):
    """A checkpoint of another tool, open for reading.

    Attributes:
        form: what it is, as a noun: "a torch.save file".
        path: where it lies.
        entries: its tensors, by name, in its order.
        scalars: its other values that are numbers or texts, by name, such as step counts.
        left_out: name of each value that cannot be read -> what it is.
    """

    form: str
    path: Path
    entries: Mapping[str, ForeignEntry]
    scalars: Mapping[str, Scalar]
    left_out: Mapping[str, str]

    @abstractmethod
    def read_into(self, name: str, rows: range, target: Tensor) -> None:
        """Read rows of an entry into a tensor, with memory for all of them beside it.

        Args:
            name: name of the entry.
            rows: rows that it has, in steps of 1; of a tensor without dimensions, range(1).
            target: [len(rows), …] in the shape of the entry's rows, of any dtype, device and
                strides; of a tensor without dimensions, one without dimensions.

        Raises:
            MalformedObject: the file is not what its form says.
        """

    @abstractmethod
    def check_rows(self, name: str, rows: range, count: int) -> None:
        """Check that rows of an entry can be read, as far as no elements have to be read for it.

        Args:
            name: name of the entry.
            rows: rows that it has, in steps of 1; of a tensor without dimensions, range(1).
            count: most rows that are read at a time.

        Raises:
            MalformedObject: the rows lie too far apart, or the file is not what its form says.
        """

    @abstractmethod
    def close(self) -> None:
        """Close what is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def read(self, name: str, rows: range) -> Tensor:
        """Return rows of an entry, [len(rows), …], on the CPU; see `read_into`."""
        entry = self.entries[name]
        shape = (len(rows), *entry.shape[1:]) if entry.shape else ()
        target = torch.empty(shape, dtype=entry.dtype, device="cpu")
        self.read_into(name, rows, target)
        return target

    def pieces(self, name: str, rows: range | None = None) -> Iterator[range]:
        """Divide rows of an entry into pieces of at most `PIECE_BYTES`, and at least one row.

        Args:
            name: name of the entry, which has at least one dimension.
            rows: the rows; None: all.
        """
        entry = self.entries[name]
        wanted_rows = range(entry.shape[0]) if rows is None else rows
        count = _piece_rows(entry)
        for first in range(wanted_rows.start, wanted_rows.stop, count):
            yield range(first, min(first + count, wanted_rows.stop))

    def check(self, name: str, rows: range | None = None, *, in_pieces: bool = True) -> None:
        """Check that an entry can be read; see `check_rows`.

        Args:
            name: name of the entry.
            rows: the rows; None: all.
            in_pieces: it is read as `pieces` divides it; False: at once.
        """
        entry = self.entries[name]
        if rows is None:
            rows = range(entry.shape[0]) if entry.shape else range(1)
        count = min(len(rows), _piece_rows(entry)) if in_pieces else len(rows)
        self.check_rows(name, rows, count)

    def whole(self, name: str) -> Tensor:
        """Return an entry, which should be small."""
        entry = self.entries[name]
        return self.read(name, range(entry.shape[0]) if entry.shape else range(1))
