"""Turns nested Python values into one JSON document and numbered tensors (format §3.4).

`state_values.unflatten` is the inverse of `flatten`, except that three containers come back as
plain ones: OrderedDict and defaultdict as dict, torch.Size as tuple.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from recpoint.errors import SettingsError
from recpoint.format.state_values import (
    MAX_TREE_BYTES,
    MAX_TREE_DEPTH,
    NUMPY_NAMES,
    TORCH_NAMES,
    array_bits,
    booleans,
    shape_expected,
    sparse_fault,
    tensor_bits,
    unflatten,
)
from recpoint.format.untrusted_json import MAX_VALUES, brief, measure

__all__ = ["flatten", "unflatten"]

_DICTS = (dict, OrderedDict, defaultdict)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_STORABLE = (
    "None, bool, int, float, str, bytes, list, tuple, dict, a torch tensor (dense or sparse COO) "
    "or a numpy array or scalar"
)


def flatten(value: object, *, path: str = "state") -> tuple[bytes, list[torch.Tensor]]:
    """Take a value apart for storing.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict (keys str, int or bool), torch
            tensors and numpy arrays and scalars, nested. Instances of subclasses are refused,
            because only their base's part would come back.
        path: what to call `value` in errors.

    Returns:
        The tree as JSON, and the tensors that it numbers. They are detached, on any device, with
        any strides, and share memory with the tensors in `value` where possible: copy them before
        training goes on.

    Raises:
        SettingsError: a value cannot be stored exactly; `subject` is its path, for instance
            `state["reader"]["sampler"]`.
    """
    writer = _Writer()
    try:
        text = _ENCODER.encode(writer.node(value, 0)).encode()
    except _RefusedValue as error:
        raise _refusal(path, error) from None
    # Training waits, so values are counted only if the text is long enough for too many of them.
    values = measure(text, MAX_TREE_DEPTH)[1] if len(text) > MAX_VALUES else 0
    if len(text) > MAX_TREE_BYTES or values > MAX_VALUES:
        raise SettingsError(
            path,
            found=f"{values} values outside tensors, {len(text)} bytes as JSON",
            expected=f"at most {MAX_VALUES} and {MAX_TREE_BYTES}",
            next_step="keep long sequences in a torch tensor or a numpy array",
        )
    return text, writer.tensors


_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))


class _RefusedValue(Exception):
    """A value cannot be stored; `keys` is the path to it, innermost key first."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found, expected)
        self.found = found
        self.expected = expected
        self.keys: list[object] = []


def _refusal(path: str, error: _RefusedValue) -> SettingsError:
    for key in reversed(error.keys):
        text = json.dumps(key) if type(key) is str else brief(key)
        path = f"{path}[{text[:80]}]"
    return SettingsError(
        path,
        found=error.found,
        expected=error.expected,
        next_step="leave it out of the state, or convert it in state_dict() and load_state_dict()",
    )


class _Writer:
    """Makes nodes of values.

    Training waits, so the path of a value is not kept: a refusal collects it on the way back up.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def node(self, value: Any, depth: int) -> Any:
        """Return the node of `value`, below `depth` levels of JSON."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return _integer(value)
        if kind is str:
            return _text(value)
        # A node adds at most 4 levels before its children. A cycle ends here as well.
        if depth + 4 > MAX_TREE_DEPTH:
            raise _RefusedValue(f"more than {MAX_TREE_DEPTH} levels as JSON", "flatter state")
        if kind is float:
            return {"float": value.hex()}
        if kind in _DICTS:
            return {"dict": self._items(value, depth + 3)}
        if kind is list or kind is tuple or kind is torch.Size:
            return {"list" if kind is list else "tuple": self._elements(value, depth + 2)}
        if kind is bytes:
            return {"bytes": self._number(_bytes_tensor(value))}
        if kind in _TENSORS:
            return self._tensor(value.detach())
        if kind is np.ndarray:
            return self._array(value)
        if isinstance(value, np.generic):
            return {"scalar": value.tobytes().hex(), "dtype": _numpy_name(value.dtype)}
        raise _RefusedValue(f"a {kind.__module__}.{kind.__qualname__}", _STORABLE)

    def _elements(self, value: Sequence[Any], depth: int) -> list[Any]:
        nodes: list[Any] = []
        try:
            for item in value:
                # Integers take a shortcut, because samplers keep long lists of them.
                nodes.append(_integer(item) if type(item) is int else self.node(item, depth))
        except _RefusedValue as error:
            error.keys.append(len(nodes))
            raise
        return nodes

    def _items(self, value: Mapping[Any, Any], depth: int) -> list[list[Any]]:
        nodes: list[list[Any]] = []
        key: Any = None
        try:
            for key in value:
                if type(key) is str:
                    nodes.append([_text(key), self.node(value[key], depth)])
                elif type(key) is int or type(key) is bool:
                    nodes.append([_integer(key), self.node(value[key], depth)])
                else:
                    break
            else:
                return nodes
        except _RefusedValue as error:
            error.keys.append(key)
            raise
        raise _RefusedValue(f"a key of type {type(key).__qualname__}", "str, int or bool as keys")

    def _number(self, tensor: torch.Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _tensor(self, value: torch.Tensor) -> dict[str, Any]:
        name = TORCH_NAMES.get(value.dtype)
        if name is None:
            raise _RefusedValue(
                f"a tensor of {value.dtype}", f"one of {', '.join(TORCH_NAMES.values())}"
            )
        sparse = value.layout is torch.sparse_coo
        if expected := shape_expected(value.shape, sparse=sparse):
            raise _RefusedValue(f"a tensor of shape {list(value.shape)}", expected)
        if sparse:
            return {"sparse_coo": self._sparse(value)}
        if value.layout is not torch.strided or value.is_nested or value.is_meta:
            fault = f"a tensor of layout {value.layout} on {value.device}"
            raise _RefusedValue(fault, "dense or sparse COO tensors with data")
        # A lazily negated view holds the bits of the values before the negation.
        bits = tensor_bits(value.resolve_neg() if value.is_neg() else value, name)
        bits = booleans(bits) if name == "BOOL" else bits
        return {"tensor": self._number(bits), "shape": list(value.shape), "dtype": name}

    def _sparse(self, value: torch.Tensor) -> dict[str, Any]:
        # indices() and values() refuse an uncoalesced tensor; the methods with underscore do not.
        indices, values = value._indices(), value._values()
        fault = sparse_fault(
            indices, values, tuple(value.shape), coalesced=(coalesced := value.is_coalesced())
        )
        if fault:
            raise _RefusedValue(*fault)
        return {
            "indices": self._tensor(indices),
            "values": self._tensor(values),
            "shape": list(value.shape),
            "coalesced": coalesced,
        }

    def _array(self, value: np.ndarray[Any, Any]) -> dict[str, Any]:
        name = _numpy_name(value.dtype)
        shape = list(value.shape)
        if expected := shape_expected(shape):
            raise _RefusedValue(f"an array of shape {shape}", expected)
        bits = array_bits(value, name)
        bits = booleans(bits) if name == "BOOL" else bits
        return {"ndarray": self._number(bits), "shape": shape, "dtype": name}


def _integer(value: int) -> Any:
    # Beyond 64 bits, JSON parsers differ and decimal text is slow to read.
    return value if -(2**63) <= value < 2**63 else {"int": hex(value)}


def _text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            refused = _RefusedValue(
                "a string with half a surrogate pair", "strings that UTF-8 can hold"
            )
            raise refused from None
    return value


def _bytes_tensor(value: bytes) -> torch.Tensor:
    # Copied, because torch warns about memory that is not writable.
    return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else _no_bytes()


def _no_bytes() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def _numpy_name(dtype: np.dtype[Any]) -> str:
    name = NUMPY_NAMES.get(dtype.str)
    if name is None:
        raise _RefusedValue(f"numpy {dtype}", f"one of {', '.join(NUMPY_NAMES.values())}")
    return name
