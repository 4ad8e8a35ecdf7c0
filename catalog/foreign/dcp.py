"""Reads a directory that `torch.distributed.checkpoint` wrote, also of several ranks.

The pickled index `.metadata` names the chunks of each tensor. Each chunk is an archive of
`torch.save` in a part of a file, whose bytes are read where they lie: a chunk may be as large as a
whole table, and torch's own reader loads all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.foreign.contents import (
    ForeignCheckpoint,
    ForeignEntry,
    Scalar,
    StoredTensor,
    malformed,
)
from recpoint.catalog.foreign.inert_pickle import (
    MOST_PICKLE_BYTES,
    Unmade,
    UnreadableTensor,
    read_archive,
    unpickled,
)
from recpoint.catalog.foreign.torch_file import values_of
from recpoint.errors import MalformedObject

__all__ = ["METADATA_NAME", "DistributedCheckpoint"]

#: Name of the index of a checkpoint.
METADATA_NAME: Final = ".metadata"
#: Files of a checkpoint that are open at a time.
_OPEN_FILES: Final = 64
#: Most bytes of an object that is no tensor.
_MOST_OBJECT_BYTES: Final = 16 << 20


class _Place(NamedTuple):
    file: str
    first_byte: int
    size_bytes: int


class _Chunk(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: _Place


class DistributedCheckpoint(ForeignCheckpoint):
    """A directory that `torch.distributed.checkpoint.save` wrote.

    Args:
        path: the directory.

    Raises:
        MalformedObject: the index is damaged or names files that are not there, or the chunks of a
            tensor do not fill it.
    """

    form = "a checkpoint of torch.distributed.checkpoint"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, BinaryIO] = {}
        self._sizes: dict[str, int] = {}
        self._tensors: dict[_Place, StoredTensor] = {}
        self._chunks: dict[str, list[_Chunk]] = {}
        self.entries: dict[str, ForeignEntry] = {}
        self.scalars: dict[str, Scalar] = {}
        self.left_out: dict[str, str] = {}
        index_path = path / METADATA_NAME
        if index_path.stat().st_size > MOST_PICKLE_BYTES:
            raise malformed(
                index_path,
                found=f"{index_path.stat().st_size} bytes",
                expected=f"at most {MOST_PICKLE_BYTES}",
            )
        index = unpickled(index_path.read_bytes(), index_path)
        try:
            self._take(index)
        except BaseException as error:
            self.close()
            if isinstance(error, KeyError | TypeError | AttributeError | ValueError):
                if isinstance(error, MalformedObject):
                    raise
                raise malformed(
                    index_path,
                    found=f"another form: {error!r}"[:300],
                    expected="the index that torch.distributed.checkpoint writes",
                ) from error
            raise

    def _take(self, index: Any) -> None:
        places = {
            (key.state["fqn"], _tuple(key.state.get("offset"))): _Place(
                str(info.state["relative_path"]),
                int(info.state["offset"]),
                int(info.state["length"]),
            )
            for key, info in index.state["storage_data"].items()
        }
        transformed = {
            info.state["relative_path"]
            for info in index.state["storage_data"].values()
            if info.state.get("transform_descriptors")
        }
        if transformed:
            raise malformed(
                self.path / METADATA_NAME,
                found=f"files that were compressed or encrypted: {sorted(transformed)!r:.200}",
                expected="files as torch.distributed.checkpoint writes them without extensions",
            )
        for place in set(places.values()):
            self._check_place(place)
        for name, described in index.state["state_dict_metadata"].items():
            if described.class_name.endswith(".TensorStorageMetadata"):
                self._take_tensor(str(name), described.state, places)
            else:
                self._take_object(str(name), places[name, None])

    def _check_place(self, place: _Place) -> None:
        path = self.path / place.file
        if place.file not in self._sizes:
            if Path(place.file).is_absolute() or ".." in Path(place.file).parts:
                raise malformed(
                    self.path / METADATA_NAME,
                    found=f"the file {place.file!r:.200}",
                    expected="files within the directory",
                )
            try:
                self._sizes[place.file] = path.stat().st_size
            except OSError as error:
                raise malformed(
                    path, found=f"{error.strerror}", expected="a file that the index names"
                ) from error
        if place.first_byte < 0 or place.first_byte + place.size_bytes > self._sizes[place.file]:
            raise malformed(
                path,
                found=f"{self._sizes[place.file]} bytes",
                expected=f"{place.size_bytes} bytes from byte {place.first_byte} on",
            )

    def _take_tensor(
        self,
        name: str,
        described: Mapping[str, Any],
        places: Mapping[tuple[str, tuple[int, ...] | None], _Place],
    ) -> None:
        shape = _numbers(described["size"])
        dtype = described["properties"].state
        dtype = dtype[0] if isinstance(dtype, tuple) else dtype["dtype"]
        if not isinstance(dtype, torch.dtype):
            self.left_out[name] = "a tensor of an unknown dtype"
            return
        if dtype.is_complex or str(dtype).startswith("torch.q"):
            self.left_out[name] = f"a tensor of {dtype}"
            return
        chunks = []
        for chunk in described["chunks"]:
            offsets, sizes = _numbers(chunk.state["offsets"]), _numbers(chunk.state["sizes"])
            place = places.get((name, offsets)) or places[name, None]
            chunks.append(_Chunk(offsets, sizes, place))
        self._check_chunks(name, shape, chunks)
        self._chunks[name] = sorted(chunks)
        self.entries[name] = ForeignEntry(name, dtype, shape)

    def _check_chunks(self, name: str, shape: tuple[int, ...], chunks: list[_Chunk]) -> None:
        """Check that the chunks lie in the tensor, apart from each other, and fill it."""
        is_inside = all(
            len(chunk.offsets) == len(chunk.sizes) == len(shape)
            and all(
                0 <= offset and 0 <= size and offset + size <= whole
                for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)
            )
            for chunk in chunks
        )
        filled = sum(math.prod(chunk.sizes) for chunk in chunks)
        if is_inside and filled == math.prod(shape) and not _overlap(chunks):
            return
        raise malformed(
            self.path / METADATA_NAME,
            found=f"{name!r:.200} of shape {list(shape)} in {len(chunks)} chunks with {filled} "
            "elements",
            expected="chunks that fill each tensor once",
        )

    def _take_object(self, name: str, place: _Place) -> None:
        if place.size_bytes > _MOST_OBJECT_BYTES:
            self.left_out[name] = f"an object of {place.size_bytes} bytes"
            return
        try:
            value = read_archive(
                self._open(place.file), self.path / place.file, place.first_byte, place.size_bytes
            )
        except MalformedObject as error:  # a planner of the user may write objects in any form
            self.left_out[name] = f"an object that cannot be read: {error.found}"
            return
        for inner, leaf in values_of(value, self.path / place.file):
            full_name = f"{name}.{inner}" if inner else name
            if isinstance(leaf, Scalar) and not isinstance(leaf, bool):
                self.scalars[full_name] = leaf
            elif isinstance(leaf, Unmade):
                self.left_out[full_name] = f"an object of {leaf.class_name}"
            elif isinstance(leaf, UnreadableTensor):
                self.left_out[full_name] = leaf.description

    def _open(self, name: str) -> BinaryIO:
        if name not in self._files:
            if len(self._files) >= _OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            self._files[name] = (self.path / name).open("rb", buffering=0)
        return self._files[name]

    def _tensor(self, name: str, chunk: _Chunk) -> StoredTensor:
        """Return where the elements of a chunk lie."""
        place = chunk.place
        if place not in self._tensors:
            path = self.path / place.file
            value = read_archive(self._open(place.file), path, place.first_byte, place.size_bytes)
            if (
                not isinstance(value, StoredTensor)
                or value.shape != chunk.sizes
                or value.dtype != self.entries[name].dtype
            ):
                found = type(value).__name__
                if isinstance(value, StoredTensor):
                    found = f"{value.dtype} {list(value.shape)}"
                elif isinstance(value, UnreadableTensor):
                    found = value.description
                raise malformed(
                    path,
                    found=f"{found} at byte {place.first_byte}, a chunk of {name!r:.200}",
                    expected=f"{self.entries[name].dtype} {list(chunk.sizes)}, as the index says",
                )
            self._tensors[place] = value
        return self._tensors[place]

    def read_into(self, name: str, rows: range, target: Tensor) -> None:
        """See `ForeignCheckpoint.read_into`."""
        if not self.entries[name].shape:
            (chunk,) = self._chunks[name]
            self._tensor(name, chunk).read_into(self._open(chunk.place.file), rows, target)
            return
        for chunk, first, last in self._chunks_of(name, rows):
            box = (
                slice(first - rows.start, last - rows.start),
                *(
                    slice(offset, offset + size)
                    for offset, size in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)
                ),
            )
            own_rows = range(first - chunk.offsets[0], last - chunk.offsets[0])
            file = self._open(chunk.place.file)
            self._tensor(name, chunk).read_into(file, own_rows, target[box])

    def _chunks_of(self, name: str, rows: range) -> Iterator[tuple[_Chunk, int, int]]:
        """Yield the chunks that hold rows of a tensor: chunk, first row, row after the last one."""
        for chunk in self._chunks[name]:
            first = max(rows.start, chunk.offsets[0])
            last = min(rows.stop, chunk.offsets[0] + chunk.sizes[0])
            if first < last and 0 not in chunk.sizes:
                yield chunk, first, last

    def check_rows(self, name: str, rows: range, count: int) -> None:
        """See `ForeignCheckpoint.check_rows`. Reads the directory of each archive."""
        if not self.entries[name].shape:
            (chunk,) = self._chunks[name]
            self._tensor(name, chunk).check_rows(1)
            return
        for chunk, first, last in self._chunks_of(name, rows):
            self._tensor(name, chunk).check_rows(min(count, last - first))

    def close(self) -> None:
        """See `ForeignCheckpoint.close`."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def _overlap(chunks: list[_Chunk]) -> bool:
    """Whether two chunks have an element in common."""
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    starts = torch.tensor([chunk.offsets for chunk in filled], dtype=torch.int64, device="cpu")
    ends = starts + torch.tensor([chunk.sizes for chunk in filled], dtype=torch.int64, device="cpu")
    return any(
        bool(
            ((starts[place] < ends[place + 1 :]) & (starts[place + 1 :] < ends[place])).all(1).any()
        )
        for place in range(len(filled) - 1)
    )


def _tuple(size: Any) -> tuple[int, ...] | None:
    return None if size is None else _numbers(size)


def _numbers(size: Any) -> tuple[int, ...]:
    return tuple(map(int, size))
