"""Names the dtypes of stored arrays and maps them to torch's dtypes (format §3)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch

__all__ = [
    "DTYPES",
    "FLOAT_DTYPES",
    "MAX_DIMS",
    "Dtype",
    "array_bytes",
    "dtype_name",
    "item_bytes",
    "torch_dtype",
]

#: The names that safetensors uses. Integers and floats are little-endian.
Dtype = Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]

DTYPES: tuple[Dtype, ...] = get_args(Dtype)

#: The dtypes of values of tables, and of row states that an allocation can go by (format §7).
FLOAT_DTYPES: tuple[Dtype, ...] = ("F64", "F32", "F16", "BF16")

#: An array with more dimensions is refused everywhere.
MAX_DIMS = 32

_ITEM_BYTES: dict[Dtype, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


def item_bytes(dtype: Dtype) -> int:
    """Return the bytes of one element."""
    return _ITEM_BYTES[dtype]


def array_bytes(dtype: Dtype, shape: tuple[int, ...]) -> int:
    """Return the bytes of an array in C order without gaps.

    Raises:
        ValueError: no array can have this shape: a negative size, more than `MAX_DIMS` dimensions,
            or 2^63 bytes or more.
    """
    if len(shape) > MAX_DIMS:
        raise ValueError(f"{len(shape)} dimensions; at most {MAX_DIMS} are possible")
    extent = item_bytes(dtype)
    for size in shape:
        if size < 0:
            raise ValueError(f"the dimension {size} is negative")
        # The other dimensions of an empty array count too, because its strides must be computable.
        extent *= max(size, 1)
        if extent >= 2**63:
            raise ValueError("the dimensions multiply to 2^63 bytes or more")
    return 0 if 0 in shape else extent


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Return the torch dtype of a stored dtype."""
    return _torch_dtypes()[dtype]


def dtype_name(dtype: torch.dtype) -> Dtype:
    """Return the stored dtype of a torch dtype.

    Raises:
        ValueError: the format has no such dtype.
    """
    for name, torch_dtype in _torch_dtypes().items():
        if torch_dtype == dtype:
            return name
    raise ValueError(f"{dtype} cannot be stored; known are {', '.join(DTYPES)}")


@cache
def _torch_dtypes() -> dict[Dtype, torch.dtype]:
    # Imported on first use: listing a run only reads manifests and should not wait for torch.
    import torch

    return {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
