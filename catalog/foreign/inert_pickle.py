"""Reads pickles without importing or calling anything that they name.

`pickle` calls whatever a file asks for. Here a pickle can only get objects that this module makes:
plain containers, `StoredTensor` for tensors, and for any other class or function an `Unmade`, which
holds its name and does nothing. That is stricter than `torch.load(weights_only=True)`, and a tensor
costs no memory: only the place of its bytes is read.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import torch

from recpoint.catalog.foreign.contents import StoredTensor, malformed

__all__ = [
    "MOST_PICKLE_BYTES",
    "Unmade",
    "UnreadableTensor",
    "is_archive",
    "read_archive",
    "unpickled",
]

#: Most bytes of one pickle; tensors are not in it.
MOST_PICKLE_BYTES: Final = 256 << 20

#: What a file that `torch.save` wrote begins with: it is a ZIP archive.
_ZIP: Final = b"PK\x03\x04"
#: Bytes of a ZIP entry's header before its name.
_HEADER_BYTES: Final = 30


class Unmade:
    """Stands for an object of a class that is not made, or for the class itself.

    Attributes:
        class_name: module and name of the class or function.
        arguments, state: what it would have been made from.
    """

    class_name = ""

    def __new__(cls, *arguments: object, **_named: object) -> Unmade:
        """Note the arguments."""
        made = super().__new__(cls)
        made.arguments = arguments
        made.state = None
        return made

    arguments: tuple[object, ...]
    state: Any

    def __init__(self, *_arguments: object, **_named: object) -> None:
        pass

    def __call__(self, *arguments: object) -> Unmade:
        """Note that it would have been called."""
        return type(self)(*arguments)

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, _key: object, _value: object) -> None:
        pass

    def append(self, _value: object) -> None:
        """Take an element of a list of a class that is not made."""

    def extend(self, _values: object) -> None:
        """Take elements of a list of a class that is not made."""

    def add(self, _value: object) -> None:
        """Take an element of a set of a class that is not made."""


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        content: bytes,
        makers: Mapping[str, object],
        persistent: Callable[[Any], object] | None,
    ) -> None:
        super().__init__(io.BytesIO(content))
        self._makers = makers
        self._persistent = persistent
        self._classes: dict[str, type[Unmade]] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        full_name = f"{module_name}.{global_name}"
        if full_name in self._makers:
            return self._makers[full_name]
        if full_name not in self._classes:
            self._classes[full_name] = type("Unmade", (Unmade,), {"class_name": full_name})
        return self._classes[full_name]

    def persistent_load(self, pid: Any, /) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("a reference to something outside the pickle")
        return self._persistent(pid)


_DTYPES: Final = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_CONTAINERS: Final[dict[str, object]] = {
    "collections.OrderedDict": OrderedDict,
    "torch.Size": tuple,
    "builtins.set": set,
    "__builtin__.set": set,
    **_DTYPES,
}


def unpickled(
    content: bytes,
    path: Path,
    *,
    makers: Mapping[str, object] | None = None,
    persistent: Callable[[Any], object] | None = None,
) -> Any:
    """Return what a pickle holds, with an `Unmade` for each object of an unknown class.

    Args:
        content: the pickle.
        path: where it comes from, for messages.
        makers: full name of a class or function -> what is called in its place.
        persistent: returns the object of a persistent id; None: there are none.

    Raises:
        MalformedObject: it is not a pickle, or too large.
    """
    if len(content) > MOST_PICKLE_BYTES:
        raise malformed(
            path,
            found=f"a pickle of {len(content)} bytes",
            expected=f"at most {MOST_PICKLE_BYTES} bytes beside the tensors",
        )
    try:
        _require_small_memo(content)
        return _Unpickler(content, {**_CONTAINERS, **(makers or {})}, persistent).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        OverflowError,
        MemoryError,
    ) as error:
        raise malformed(
            path, found=f"a pickle that cannot be read: {error}"[:300], expected="a whole pickle"
        ) from error


#: The operations of a pickle that note an object under a number of its own choice.
_NOTES: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


def _require_small_memo(content: bytes) -> None:
    """Refuse a pickle that numbers its objects otherwise than one by one, and one that is cut off.

    Python's unpickler makes room for as many objects as the largest number says: one damaged byte
    of a small file can ask for 60 GB.

    Raises:
        ValueError: names the place.
    """
    noted = 0
    for operation, number, place in pickletools.genops(content):
        if operation.name in _NOTES:
            noted += 1
            # Picklers count from 0, or from 1.
            if not isinstance(number, int) or number > noted:
                raise ValueError(f"object {noted} is noted as number {number} at byte {place}")


class UnreadableTensor(NamedTuple):
    """Stands for a tensor, or its storage, whose values are not the bytes of a known dtype.

    Attributes:
        description: what it is, as a noun.
    """

    description: str


class _Storage(NamedTuple):
    first_byte: int
    size_bytes: int
    dtype: torch.dtype


_STORAGE_DTYPES: Final = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
} | {"torch.storage.UntypedStorage": torch.uint8}


def is_archive(head: bytes) -> bool:
    """Whether a file that begins with these bytes may be one that `torch.save` wrote."""
    return head.startswith(_ZIP)


class _Part(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: BinaryIO, first_byte: int, size_bytes: int) -> None:
        self._file, self._first, self._size = file, first_byte, size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("a place before the file")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)
        count = max(0, min(len(view), self._size - self._position))
        self._file.seek(self._first + self._position)
        content = self._file.read(count)
        view[: len(content)] = content
        self._position += len(content)
        return len(content)


def read_archive(file: BinaryIO, path: Path, first_byte: int, size_bytes: int) -> Any:
    """Return what `torch.save` wrote, with a `StoredTensor` for each tensor.

    Args:
        file: the file, open for reading.
        path: its path.
        first_byte: offset of the archive in the file.
        size_bytes: bytes of the archive.

    Raises:
        MalformedObject: it is not such an archive, or not whole; or a tensor does not lie in it.
    """
    try:
        with ZipFile(io.BufferedReader(_Part(file, first_byte, size_bytes))) as archive:
            return _Archive(archive, file, path, first_byte, size_bytes).load()
    except (
        BadZipFile,
        OSError,
        EOFError,
        NotImplementedError,
        RuntimeError,
        ValueError,
        OverflowError,
        KeyError,
        struct.error,
        zlib.error,
    ) as error:
        raise malformed(
            path,
            found=f"a ZIP archive that cannot be read: {error}"[:300],
            expected="a whole archive, as torch.save writes it",
        ) from error


class _Archive:
    def __init__(
        self, archive: ZipFile, file: BinaryIO, path: Path, first_byte: int, size_bytes: int
    ) -> None:
        self._archive, self._file, self._path = archive, file, path
        self._first, self._size = first_byte, size_bytes
        self._infos: dict[str, ZipInfo] = {}
        for info in archive.infolist():
            if info.filename in self._infos:
                raise BadZipFile(f"two entries {info.filename!r:.100}")
            self._infos[info.filename] = info

    def load(self) -> Any:
        pickles = [name for name in self._infos if name.split("/", 1)[1:] == ["data.pkl"]]
        if len(pickles) != 1:
            raise BadZipFile(f"{len(pickles)} entries data.pkl; an archive of torch.save has one")
        folder = pickles[0].removesuffix("data.pkl")
        byte_order = self._infos.get(f"{folder}byteorder")
        if byte_order is not None and self._archive.read(byte_order) != b"little":
            raise BadZipFile("tensors that are not in the little byte order")
        if self._infos[pickles[0]].file_size > MOST_PICKLE_BYTES:
            raise BadZipFile(f"a pickle of {self._infos[pickles[0]].file_size} bytes")

        def storage(reference: Any) -> _Storage | UnreadableTensor:
            return self._storage(folder, reference)

        makers = {
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_of_dtype,
            "torch._utils._rebuild_parameter": _first,
            "torch._utils._rebuild_parameter_with_state": _first,
            **_STORAGE_DTYPES,
        }
        content = self._archive.read(pickles[0])
        return unpickled(content, self._path, makers=makers, persistent=storage)

    def _storage(self, folder: str, reference: Any) -> _Storage | UnreadableTensor:
        kind, dtype, key, _location, count = reference
        if kind == "storage" and isinstance(dtype, type) and issubclass(dtype, Unmade):
            return UnreadableTensor(f"a tensor in a {dtype.class_name}")
        info = self._infos.get(f"{folder}data/{key}")
        if kind != "storage" or not isinstance(dtype, torch.dtype) or info is None:
            raise ValueError(f"a storage {str(key)[:50]!r} that the archive does not hold")
        size_bytes = dtype.itemsize * int(count)
        if info.compress_type != ZIP_STORED or info.file_size != size_bytes or size_bytes < 0:
            raise ValueError(
                f"a storage {str(key)[:50]!r} of {size_bytes} bytes, for which the archive holds "
                f"{info.file_size}"
            )
        # The lengths of name and extra field are those of the local header, which may differ from
        # the directory's.
        header_start = self._first + info.header_offset
        self._file.seek(header_start)
        header = self._file.read(_HEADER_BYTES)
        if len(header) < _HEADER_BYTES or not header.startswith(_ZIP):
            raise ValueError(f"no header of the storage {str(key)[:50]!r}")
        lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
        first_byte = header_start + _HEADER_BYTES + sum(lengths)
        if first_byte + size_bytes > self._first + self._size:
            raise ValueError(f"a storage {str(key)[:50]!r} that ends behind the archive")
        return _Storage(first_byte, size_bytes, dtype)

    def _tensor(
        self,
        storage: Any,
        first_element: int,
        shape: Any,
        strides: Any,
        _requires_grad: object = False,
        _hooks: object = None,
        metadata: object = None,
    ) -> StoredTensor | UnreadableTensor:
        dtype = storage.dtype if isinstance(storage, _Storage) else None
        return self._made(storage, dtype, first_element, shape, strides, metadata)

    def _tensor_of_dtype(
        self,
        storage: Any,
        first_element: int,
        shape: Any,
        strides: Any,
        _requires_grad: object,
        _hooks: object,
        dtype: torch.dtype,
        metadata: object = None,
    ) -> StoredTensor | UnreadableTensor:
        return self._made(storage, dtype, first_element, shape, strides, metadata)

    def _made(
        self,
        storage: Any,
        dtype: Any,
        first_element: Any,
        shape: Any,
        strides: Any,
        metadata: object,
    ) -> StoredTensor | UnreadableTensor:
        if isinstance(storage, UnreadableTensor):
            return storage
        if metadata:  # such as {"neg": True}: its values are the negated bytes
            return UnreadableTensor(f"a tensor whose values are changed by {metadata!r:.80}")
        if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
            raise ValueError("a tensor without a storage")
        tensor = StoredTensor(
            self._path,
            storage.first_byte,
            storage.size_bytes,
            dtype,
            tuple(map(int, shape)),
            tuple(map(int, strides)),
            int(first_element),
        )
        tensor.check("a tensor")
        return tensor


def _first(tensor: object, *_more: object) -> object:
    return tensor
