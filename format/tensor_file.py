"""Writes and reads safetensors files as bytes, with the header apart from the body (format §3).

The `safetensors` library can read these files, and this module can read the library's files. The
library is not used here, because it needs all arrays of a file at once, and the agent streams
bodies from the staging area.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from recpoint.errors import MalformedObject
from recpoint.format.dtypes import DTYPES, Dtype, array_bytes, dtype_name, item_bytes, torch_dtype
from recpoint.format.untrusted_json import brief, parse_json

__all__ = [
    "MAX_HEADER_BYTES",
    "Buffer",
    "Section",
    "file_header",
    "parse_file",
    "section_tensor",
    "tensor_section",
]

#: Bound of the JSON header with its padding; about 10,000 sections fit.
MAX_HEADER_BYTES = 1 << 20

_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 8
_METADATA = "__metadata__"
_NAME = re.compile(r"[a-z0-9_.]{1,64}\Z")

Buffer: TypeAlias = bytes | bytearray | memoryview | np.ndarray[Any, Any]


class Section(NamedTuple):
    """One named array of a file; `data` is C-contiguous and holds exactly its bytes."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    data: Buffer

    @property
    def nbytes(self) -> int:
        """Length of the data in bytes."""
        return memoryview(self.data_view).nbytes

    @property
    def data_view(self) -> bytes | bytearray | memoryview:
        """The data as an object that can be used wherever bytes can."""
        return self.data.data if isinstance(self.data, np.ndarray) else self.data


def file_header(metadata: dict[str, str], sections: Sequence[Section]) -> bytes:
    """Return the bytes of a file before its body: the sections' data, in order, without gaps.

    The header's length is a multiple of 8. A section's data starts at a multiple of its item size
    if sections of wider items come first; readers copy sections that are not aligned.

    Raises:
        ValueError: a reader would refuse a name, shape or length, or there are too many sections.
    """
    fields: dict[str, Any] = {_METADATA: metadata}
    end = 0
    for section in sections:
        if not _NAME.match(section.name):
            raise ValueError(f"section name {section.name!r} is not of the form [a-z0-9_.]{{1,64}}")
        if section.name in fields:
            raise ValueError(f"two sections are named {section.name!r}")
        begin, end = end, end + array_bytes(section.dtype, section.shape)
        if section.nbytes != end - begin:
            raise ValueError(
                f"section {section.name!r} has {section.nbytes} bytes; "
                f"{section.dtype} {list(section.shape)} needs {end - begin}"
            )
        fields[section.name] = {
            "dtype": section.dtype,
            "shape": list(section.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes; at most {MAX_HEADER_BYTES} are read")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def parse_file(
    data: bytes | bytearray | memoryview, *, name: str, next_step: str
) -> tuple[dict[str, str], dict[str, Section]]:
    """Take a whole file apart without copying its body.

    Returns:
        Its metadata, and its sections in the order of the body; their data are views of `data`.

    Raises:
        MalformedObject: the data is no safetensors file, or its arrays have gaps, overlaps or
            lengths that differ from their dtypes and shapes.
    """

    def malformed(found: str, expected: str) -> MalformedObject:
        return MalformedObject(name, found=found, expected=expected, next_step=next_step)

    if len(data) < _LENGTH_BYTES:
        raise malformed(f"{len(data)} bytes", f"at least {_LENGTH_BYTES}")
    view = memoryview(data).toreadonly()
    header_bytes = int.from_bytes(view[:_LENGTH_BYTES], "little")
    if header_bytes > min(MAX_HEADER_BYTES, len(data) - _LENGTH_BYTES):
        raise malformed(
            f"a header of {header_bytes} bytes in an object of {len(data)}",
            f"a header inside the object, of at most {MAX_HEADER_BYTES} bytes",
        )
    body = view[_LENGTH_BYTES + header_bytes :]
    header = parse_json(
        bytes(view[_LENGTH_BYTES : _LENGTH_BYTES + header_bytes]),
        name=name,
        next_step=next_step,
        max_bytes=MAX_HEADER_BYTES,
        max_fields=MAX_HEADER_BYTES,
    )
    if not isinstance(header, dict):
        raise malformed(f"a header that is {brief(header)}", "an object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
        raise malformed(f"{_METADATA} = {brief(metadata)}", "an object of strings")

    arrays = [(*_array(key, fields, malformed), key) for key, fields in header.items()]
    arrays.sort(key=lambda array: array[:2])
    sections: dict[str, Section] = {}
    end = 0
    for begin, stop, dtype, shape, key in arrays:
        if begin != end:
            raise malformed(
                f"{brief(key)} at byte {brief(begin)}",
                f"byte {brief(end)}: arrays have no gap or overlap",
            )
        if stop > len(body):
            raise malformed(
                f"{brief(key)} up to byte {brief(stop)}", f"at most {len(body)}, the body's end"
            )
        sections[key] = Section(key, dtype, shape, body[begin:stop])
        end = stop
    if end != len(body):
        raise malformed(f"a body of {len(body)} bytes", f"{end}, the end of the last array")
    return metadata, sections


def _array(key: str, fields: Any, malformed: Any) -> tuple[int, int, Dtype, tuple[int, ...]]:
    """Return (begin, end, dtype, shape) of an array in the header, checked against each other."""
    field = brief(key)
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise malformed(f"{field} = {brief(fields)}", "an object of dtype, shape, data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPES:
        raise malformed(f"dtype {brief(dtype)} of {field}", f"one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise malformed(f"shape {brief(shape)} of {field}", "a list of integers")
    try:
        size_bytes = array_bytes(dtype, tuple(shape))
    except ValueError as error:
        raise malformed(f"the shape of {field}", f"a possible one ({str(error)[:120]})") from error
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(offset) is int for offset in offsets)
        or not 0 <= offsets[0] <= offsets[1]
    ):
        raise malformed(f"data_offsets {brief(offsets)} of {field}", "two ascending integers")
    if offsets[1] - offsets[0] != size_bytes:
        raise malformed(
            f"{brief(offsets[1] - offsets[0])} bytes for {field}",
            f"{size_bytes} for {dtype} of {len(shape)} dimensions",
        )
    return offsets[0], offsets[1], dtype, tuple(shape)


def tensor_section(name: str, tensor: torch.Tensor) -> Section:
    """Return a section of the tensor; share memory with a contiguous tensor on the CPU.

    Raises:
        ValueError: the format does not have the tensor's dtype.
    """
    dtype = dtype_name(tensor.dtype)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return Section(name, dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy())


def section_tensor(section: Section) -> torch.Tensor:
    """Return the section as a CPU tensor; share memory with it if the data is aligned.

    Callers MUST NOT write to the tensor; copy it first. Other code relies on this memory not to
    change, and it may be mapped read-only.
    """
    dtype = torch_dtype(section.dtype)
    if section.nbytes == 0:
        return torch.empty(section.shape, dtype=dtype, device="cpu")
    data = np.frombuffer(section.data, np.uint8)
    if data.ctypes.data % item_bytes(section.dtype):
        data = data.copy()
    elif not data.flags.writeable:
        # torch has no read-only tensors, and warns when it makes a tensor of read-only memory. The
        # docstring forbids writing, so numpy's interface can claim that the memory is writable.
        data = np.asarray(_SaidWriteable(data))
    return torch.from_numpy(data).view(dtype).reshape(section.shape)


class _SaidWriteable:
    """Claims, through numpy's array interface, that one-dimensional memory is writable."""

    def __init__(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        # numpy keeps this object as the base of its array, so the memory stays alive.
        self._data = data
        self.__array_interface__ = {**data.__array_interface__, "data": (data.ctypes.data, False)}
