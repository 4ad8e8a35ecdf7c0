"""Turns a state tree, a JSON document and numbered tensors, back into values (format §3.4)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn, cast

import numpy as np
import torch

from recpoint.errors import MalformedObject
from recpoint.format.dtypes import MAX_DIMS, Dtype, array_bytes, item_bytes, torch_dtype
from recpoint.format.untrusted_json import brief, parse_json

__all__ = [
    "MAX_TREE_BYTES",
    "MAX_TREE_DEPTH",
    "NUMPY_NAMES",
    "TORCH_NAMES",
    "array_bits",
    "booleans",
    "shape_expected",
    "sparse_fault",
    "tensor_bits",
    "unflatten",
    "unflatten_keys",
]

MAX_TREE_BYTES = 64 << 20
MAX_TREE_DEPTH = 100

#: Names of dtypes in a tree. Unsigned integers wider than 8 bits have no stored dtype: their bits
#: are stored as signed integers of the same width.
TORCH_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
}
NUMPY_NAMES: dict[str, str] = {
    "<f8": "F64",
    "<f4": "F32",
    "<f2": "F16",
    "<i8": "I64",
    "<i4": "I32",
    "<i2": "I16",
    "|i1": "I8",
    "|u1": "U8",
    "|b1": "BOOL",
    "<u8": "U64",
    "<u4": "U32",
    "<u2": "U16",
}
_TORCH_DTYPES = {name: dtype for dtype, name in TORCH_NAMES.items()}
_NUMPY_DTYPES = {name: np.dtype(text) for text, name in NUMPY_NAMES.items()}
_BITS_OF: dict[str, Dtype] = {"U64": "I64", "U32": "I32", "U16": "I16"}

#: The dimensions of a shape multiply to less than 2 to this power, a dimension of 0 counted as 1.
#: Nothing of a sparse tensor's size is allocated, so torch's own bound is enough for it.
_MAX_ELEMENTS_LOG2 = 60
_MAX_SPARSE_ELEMENTS_LOG2 = 63

_NEXT_STEP = "recpoint check URL --level full"

_HEX_INTEGER = re.compile(r"-?0x[0-9a-f]+\Z")
_HEX_BYTES = re.compile(r"(?:[0-9a-f]{2}){1,8}\Z")


def unflatten(
    tree_json: bytes,
    tensors: Sequence[torch.Tensor],
    *,
    name: str = "state tree",
) -> Any:
    """Return the value that `state_tree.flatten` took apart.

    Args:
        tree_json: the tree.
        tensors: the numbered tensors, of any shape with the right number of elements; the tree
            must name each of them once.
        name: what to call the tree in errors.

    Returns:
        The value. Its tensors and arrays have their own memory; arrays are on the CPU.

    Raises:
        MalformedObject: `flatten` cannot have made this tree and these tensors.
    """
    tree = _parsed(tree_json, name)
    reader = _Reader(dict(enumerate(tensors)), name)
    value = reader.value(tree)
    reader.finish()
    return value


def unflatten_keys(
    tree_json: bytes,
    tensors: Mapping[int, torch.Tensor],
    keys: Collection[str],
    *,
    name: str = "state tree",
) -> dict[str, Any] | None:
    """Return the values under some keys of a tree that is a dict; {} if it is no dict.

    Args:
        tree_json: the tree.
        tensors: some of its tensors by number, as for `unflatten`.
        keys: the wanted keys; keys that the tree does not have are left out.
        name: what to call the tree in errors.

    Returns:
        The values by key; None if they name a tensor that is not in `tensors`.

    Raises:
        MalformedObject: as `unflatten`, for the values under `keys` only.
    """
    tree = _parsed(tree_json, name)
    items = tree.get("dict") if isinstance(tree, dict) else None
    keyed_nodes = [
        item
        for item in (items if isinstance(items, list) else ())
        if isinstance(item, list) and item and isinstance(item[0], str) and item[0] in keys
    ]
    try:
        reader = _Reader(tensors, name, partial=True)
        state: dict[str, Any] = reader.value({"dict": keyed_nodes})
    except _NotGiven:
        return None
    return state


def _parsed(tree_json: bytes, name: str) -> Any:
    return parse_json(
        tree_json,
        name=name,
        next_step=_NEXT_STEP,
        max_bytes=MAX_TREE_BYTES,
        max_depth=MAX_TREE_DEPTH,
    )


def shape_expected(shape: Sequence[int], *, sparse: bool = False) -> str:
    """Return what a shape in a tree must be (format §3.4), in words; empty if it is so."""
    if len(shape) > MAX_DIMS:
        return f"at most {MAX_DIMS} dimensions"
    exponent = _MAX_SPARSE_ELEMENTS_LOG2 if sparse else _MAX_ELEMENTS_LOG2
    elements = 1
    for size in shape:
        # The other dimensions of an empty array count too, because its strides must be computable.
        elements *= max(size, 1)
        if size < 0 or elements >= 2**exponent:
            return f"dimensions from 0 that multiply to less than 2^{exponent}, 0 counted as 1"
    return ""


def sparse_fault(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], *, coalesced: bool
) -> tuple[str, str] | None:
    """Find a defect in the parts of a sparse COO tensor.

    The tensor is made without torch's own checks. So bounds and order are checked here: torch would
    read and write wherever wrong indices point.

    Args:
        indices: int64 [sparse dimensions, entries].
        values: any dtype [entries, dense dimensions ...].
        shape: the shape of the whole tensor.
        coalesced: whether the tensor claims that its entries ascend.

    Returns:
        (found, expected) of the defect, for an error; None if there is none.
    """
    sparse_dims, count = indices.shape
    if values.shape != (count, *shape[sparse_dims:]) or sparse_dims > len(shape):
        fault = f"sparse indices {list(indices.shape)} and values {list(values.shape)}"
        return fault, f"indices and values of a tensor of shape {list(shape)}"
    bounds = torch.tensor(shape[:sparse_dims], dtype=torch.int64, device="cpu").reshape(-1, 1)
    index_values = indices.cpu()
    if bool(((index_values < 0) | (index_values >= bounds)).any()):
        return "sparse indices out of bounds", f"within {list(shape)}"
    if coalesced and not _ascends(index_values):
        return "sparse indices that repeat or descend", "ascending indices, as coalesced promises"
    return None


def tensor_bits(value: torch.Tensor, name: str) -> torch.Tensor:
    """Return `value` viewed as the dtype in which its bits are stored."""
    dtype = torch_dtype(_stored_dtype(name))
    return value if value.dtype == dtype else value.view(dtype)


def booleans(bits: torch.Tensor) -> torch.Tensor:
    """Return `bits`, of dtype bool, with the bytes 0 and 1 only, as a chunk needs (format §3).

    Unwritten memory or a view of other data can hold other bytes; they count as true. On a device
    the bytes are always rewritten, because training would have to wait for a look at them.
    """
    raw = bits.view(torch.uint8)
    clean = bits.is_cpu and (raw.numel() == 0 or int(raw.max()) <= 1)
    return bits if clean else raw.ne(0)


def array_bits(value: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    """Return `value` as a 1-D tensor of the dtype of its stored bits; share memory if it can."""
    # torch refuses negative strides and warns about memory that is not writable.
    flat = np.require(value, requirements=("C", "A", "W")).reshape(-1)
    return torch.from_numpy(flat.view(_NUMPY_DTYPES[_stored_dtype(name)]))


def _stored_dtype(name: str) -> Dtype:
    return _BITS_OF.get(name) or cast(Dtype, name)


class _NotGiven(Exception):
    """The tree names a tensor that was not given."""


class _Reader:
    def __init__(
        self,
        tensors: Mapping[int, torch.Tensor],
        name: str,
        *,
        partial: bool = False,
    ) -> None:
        self._tensors: dict[int, torch.Tensor | None] = dict(tensors)
        self._partial = partial
        self._name = name

    def finish(self) -> None:
        unused = sum(tensor is not None for tensor in self._tensors.values())
        if unused:
            self._refuse(f"{unused} tensors that the tree does not name", "each of them named once")

    def value(self, node: Any) -> Any:
        if not isinstance(node, dict):
            if isinstance(node, list):
                self._refuse("a bare list", "a node")
            return node
        match node:
            case {"float": str(text), **rest} if not rest:
                return self._float(text)
            case {"int": str(text), **rest} if not rest:
                return self._integer(text)
            case {"list": list(items), **rest} if not rest:
                return [self.value(item) for item in items]
            case {"tuple": list(items), **rest} if not rest:
                return tuple([self.value(item) for item in items])
            case {"dict": list(items), **rest} if not rest:
                return self._dict(items)
            case {"bytes": index, **rest} if not rest:
                tensor = self._take(index, "U8", None)
                return tensor.cpu().numpy().tobytes()
            case {"tensor": index, "shape": shape, "dtype": str(dtype), **rest} if not rest:
                return self._tensor(index, shape, dtype)
            case {"ndarray": index, "shape": shape, "dtype": str(dtype), **rest} if not rest:
                return self._array(index, shape, dtype)
            case {"scalar": str(text), "dtype": str(dtype), **rest} if not rest:
                return self._scalar(text, dtype)
            case {"sparse_coo": dict(fields), **rest} if not rest:
                return self._sparse(fields)
        self._refuse(f"an object with {', '.join(map(brief, list(node)[:4]))}", "a node")

    def _float(self, text: str) -> float:
        if text in ("nan", "inf", "-inf"):
            return float(text)
        try:
            value = float.fromhex(text[:40])
        except (ValueError, OverflowError):
            value = None
        if value is None or value.hex() != text:
            self._refuse(f"the float {brief(text)}", "the text of float.hex()")
        return value

    def _integer(self, text: str) -> int:
        if not _HEX_INTEGER.match(text):
            self._refuse(f"the integer {brief(text)}", "the text of hex()")
        return int(text, 16)

    def _dict(self, items: list[Any]) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for item in items:
            if not isinstance(item, list) or len(item) != 2:
                self._refuse(f"{brief(item)} in a dict", "[key, node]")
            key, node = item
            if isinstance(key, dict):
                match key:
                    case {"int": str(text), **rest} if not rest:
                        key = self._integer(text)
            if not isinstance(key, str | int):
                self._refuse(f"the key {brief(key)}", "a string, an integer or a boolean")
            if key in result:
                self._refuse(f"the key {brief(key)} twice", "each key once")
            result[key] = self.value(node)
        return result

    def _tensor(self, index: Any, shape: Any, dtype: str) -> torch.Tensor:
        if dtype not in _TORCH_DTYPES:
            self._refuse(f"dtype {brief(dtype)}", f"one of {', '.join(_TORCH_DTYPES)}")
        sizes = self._shape(shape)
        return self._take(index, dtype, sizes).clone().reshape(sizes).view(_TORCH_DTYPES[dtype])

    def _array(self, index: Any, shape: Any, dtype: str) -> np.ndarray[Any, Any]:
        if dtype not in _NUMPY_DTYPES:
            self._refuse(f"dtype {brief(dtype)}", f"one of {', '.join(_NUMPY_DTYPES)}")
        sizes = self._shape(shape)
        array = self._take(index, dtype, sizes).cpu().numpy().copy()
        return array.reshape(-1).view(_NUMPY_DTYPES[dtype]).reshape(sizes)

    def _scalar(self, text: str, dtype: str) -> Any:
        numpy_dtype = _NUMPY_DTYPES.get(dtype)
        if (
            numpy_dtype is None
            or not _HEX_BYTES.match(text)
            or len(text) != 2 * numpy_dtype.itemsize
        ):
            self._refuse(f"the scalar {brief(text)} of {brief(dtype)}", "its bytes in hexadecimal")
        if dtype == "BOOL" and text not in ("00", "01"):
            self._refuse(f"the scalar {brief(text)} of BOOL", "00 or 01")
        return np.frombuffer(bytes.fromhex(text), numpy_dtype)[0]

    def _sparse(self, fields: dict[str, Any]) -> torch.Tensor:
        if fields.keys() != {"indices", "values", "shape", "coalesced"}:
            self._refuse("sparse_coo", "indices, values, shape and coalesced")
        indices, values = self.value(fields["indices"]), self.value(fields["values"])
        shape, coalesced = self._shape(fields["shape"], sparse=True), fields["coalesced"]
        if (
            not isinstance(indices, torch.Tensor)
            or not isinstance(values, torch.Tensor)
            or indices.layout is not torch.strided
            or values.layout is not torch.strided
            or type(coalesced) is not bool
        ):
            self._refuse("sparse_coo", "dense tensors and a boolean")
        if indices.dtype != torch.int64 or indices.ndim != 2 or values.ndim < 1:
            self._refuse(f"sparse indices of {indices.dtype}, {indices.ndim}-D", "int64, 2-D")
        if fault := sparse_fault(indices, values, shape, coalesced=coalesced):
            self._refuse(*fault)
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=coalesced, check_invariants=False, device="cpu"
        )

    def _shape(self, shape: Any, *, sparse: bool = False) -> tuple[int, ...]:
        if not isinstance(shape, list) or not all(type(size) is int for size in shape):
            self._refuse(f"shape {brief(shape)}", "a list of integers")
        if expected := shape_expected(shape, sparse=sparse):
            self._refuse(f"shape {brief(shape)}", expected)
        return tuple(shape)

    def _take(self, index: Any, dtype: str, shape: tuple[int, ...] | None) -> torch.Tensor:
        """Return tensor `index` after checking that it fits and was not named before."""
        if type(index) is int and self._partial and index not in self._tensors:
            raise _NotGiven
        if type(index) is not int or index not in self._tensors:
            self._refuse(f"tensor {brief(index)}", f"one of {len(self._tensors)}")
        tensor = self._tensors[index]
        if tensor is None:
            self._refuse(f"tensor {index} named twice", "each tensor named once")
        stored = _stored_dtype(dtype)
        size_bytes = tensor.numel() if shape is None else array_bytes(stored, shape)
        if tensor.dtype != torch_dtype(stored) or tensor.numel() * item_bytes(stored) != size_bytes:
            self._refuse(
                f"tensor {index}: {tensor.numel()} of {tensor.dtype}",
                f"{size_bytes // item_bytes(stored)} of {stored}",
            )
        self._tensors[index] = None
        return tensor

    def _refuse(self, found: str, expected: str) -> NoReturn:
        raise MalformedObject(self._name, found=found, expected=expected, next_step=_NEXT_STEP)


def _ascends(indices: torch.Tensor) -> bool:
    """Say whether the columns of int64 [dimensions, entries] ascend strictly, first row first."""
    lower, upper = indices[:, :-1], indices[:, 1:]
    decided = torch.zeros(lower.shape[1], dtype=torch.bool, device="cpu")
    for low, high in zip(lower, upper, strict=True):
        if bool((~decided & (low > high)).any()):
            return False
        decided |= low < high
    return bool(decided.all())
