"""State trees: nested Python values as one JSON document and numbered tensors (format §3.4).

`flatten` and `state_values.unflatten` are each other's inverse, up to three containers that come
back as plain ones: OrderedDict and defaultdict as dict, torch.Size as tuple.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from recpoint.errors import SettingsError
from recpoint.format.dtypes import MAX_DIMS
from recpoint.format.state_values import (
    MAX_TREE_BYTES,
    MAX_TREE_DEPTH,
    NUMPY_NAMES,
    TORCH_NAMES,
    array_bits,
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
            tensors and numpy arrays and scalars, nested. Types are exact: of a subclass only the
            base's part would come back, so it is refused.
        path: what to call `value` in errors.

    Returns:
        The tree as JSON, and the tensors that it numbers. They are detached and share the memory
        of those in `value` wherever that is possible, any device, any strides: copy them before
        training goes on.

    Raises:
        SettingsError: something that cannot be stored exactly; `subject` is its path, for instance
            `state["reader"]["sampler"]`.
    """
    writer = _Writer()
    root = _Path(None, path)
    text = json.dumps(
        writer.node(value, root, 0), ensure_ascii=False, separators=(",", ":")
    ).encode()
    values = measure(text, MAX_TREE_DEPTH)[1]
    if len(text) > MAX_TREE_BYTES or values > MAX_VALUES:
        raise SettingsError(
            path,
            found=f"{values} values outside tensors, {len(text)} bytes as JSON",
            expected=f"at most {MAX_VALUES} and {MAX_TREE_BYTES}",
            next_step="keep long sequences in a torch tensor or a numpy array",
        )
    return text, writer.tensors


class _Path(NamedTuple):
    """Where in the value we are; text is made of it only for an error."""

    parent: _Path | None
    key: object

    def __str__(self) -> str:
        if self.parent is None:
            return str(self.key)
        key = json.dumps(self.key) if type(self.key) is str else brief(self.key)
        return f"{self.parent}[{key[:80]}]"


class _Writer:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def node(self, value: Any, path: _Path, depth: int) -> Any:
        """The node of `value`, below `depth` levels of JSON."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return _integer(value)
        if kind is str:
            return _text(value, path)
        # No node is deeper than 4 levels before its children; a cycle ends here as well.
        if depth + 4 > MAX_TREE_DEPTH:
            _refuse(path, f"more than {MAX_TREE_DEPTH} levels as JSON", "flatter state")
        if kind is float:
            return {"float": value.hex()}
        if kind is list or kind is tuple or kind is torch.Size:
            # Integers apart: samplers keep long lists of them, and the training loop waits.
            items = [
                _integer(item)
                if type(item) is int
                else self.node(item, _Path(path, index), depth + 2)
                for index, item in enumerate(value)
            ]
            return {"list" if kind is list else "tuple": items}
        if kind in _DICTS:
            return {"dict": [self._item(key, value[key], path, depth + 3) for key in value]}
        if kind is bytes:
            return {"bytes": self._number(_bytes_tensor(value))}
        if kind in _TENSORS:
            return self._tensor(value.detach(), path)
        if kind is np.ndarray:
            return self._array(value, path)
        if isinstance(value, np.generic):
            return {"scalar": value.tobytes().hex(), "dtype": _numpy_name(value.dtype, path)}
        _refuse(path, f"a {kind.__module__}.{kind.__qualname__}", _STORABLE)

    def _item(self, key: Any, value: Any, path: _Path, depth: int) -> list[Any]:
        here = _Path(path, key)
        if type(key) is str:
            return [_text(key, here), self.node(value, here, depth)]
        if type(key) is int or type(key) is bool:
            return [_integer(key), self.node(value, here, depth)]
        _refuse(path, f"a key of type {type(key).__qualname__}", "str, int or bool as keys")

    def _number(self, tensor: torch.Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _tensor(self, value: torch.Tensor, path: _Path) -> dict[str, Any]:
        name = TORCH_NAMES.get(value.dtype)
        if name is None:
            _refuse(path, f"a tensor of {value.dtype}", f"one of {', '.join(TORCH_NAMES.values())}")
        if value.ndim > MAX_DIMS:
            _refuse(path, f"a tensor of {value.ndim} dimensions", f"at most {MAX_DIMS}")
        if value.layout is torch.sparse_coo:
            # _indices and _values: the methods without underscore refuse an uncoalesced tensor.
            return {
                "sparse_coo": {
                    "indices": self._tensor(value._indices(), path),
                    "values": self._tensor(value._values(), path),
                    "shape": list(value.shape),
                    "coalesced": value.is_coalesced(),
                }
            }
        if value.layout is not torch.strided or value.is_nested or value.device.type == "meta":
            found = f"a tensor of layout {value.layout} on {value.device}"
            _refuse(path, found, "dense or sparse COO tensors with data")
        # A view that is negated lazily holds the bits of the values before they are negated.
        bits = tensor_bits(value.resolve_neg(), name)
        return {"tensor": self._number(bits), "shape": list(value.shape), "dtype": name}

    def _array(self, value: np.ndarray[Any, Any], path: _Path) -> dict[str, Any]:
        name = _numpy_name(value.dtype, path)
        shape = list(value.shape)
        if len(shape) > MAX_DIMS:
            _refuse(path, f"an array of {len(shape)} dimensions", f"at most {MAX_DIMS}")
        return {"ndarray": self._number(array_bits(value, name)), "shape": shape, "dtype": name}


def _integer(value: int) -> Any:
    # Beyond 64 bits JSON parsers differ, and decimal text gets slow to read.
    return value if -(2**63) <= value < 2**63 else {"int": hex(value)}


def _text(value: str, path: _Path) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            _refuse(path, "a string with half a surrogate pair", "strings that UTF-8 can hold")
    return value


def _bytes_tensor(value: bytes) -> torch.Tensor:
    # A copy: torch warns about memory that is not writable.
    return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else _no_bytes()


def _no_bytes() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _numpy_name(dtype: np.dtype[Any], path: _Path) -> str:
    name = NUMPY_NAMES.get(dtype.str)
    if name is None:
        _refuse(path, f"numpy {dtype}", f"one of {', '.join(NUMPY_NAMES.values())}")
    return name


def _refuse(path: _Path, found: str, expected: str) -> NoReturn:
    raise SettingsError(
        str(path),
        found=found,
        expected=expected,
        next_step="leave it out of the state, or convert it in state_dict() and load_state_dict()",
    )
