"""Refuses tensors that a restore could not write, before a checkpoint holds them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._C._autograd import CreationMeta, _get_creation_meta
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from recpoint.catalog.restore.in_place import shares_memory
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.tables import is_piece

__all__ = ["refuse_unwritable"]


class _Unwritable(NamedTuple):
    """Why a tensor cannot be written, and what would be right; see `RecpointError`."""

    found: str
    expected: str
    next_step: str


_LAZY = _Unwritable(
    "a tensor without a shape, of a lazy module",
    "a tensor with a shape",
    "run one batch through the model before you build the Checkpointer",
)
_INFERENCE = _Unwritable(
    "a tensor made under torch.inference_mode(), which cannot be restored in place, and whose "
    "changes torch does not count",
    "a tensor made outside torch.inference_mode()",
    "build the model and its optimizers outside torch.inference_mode(), or replace the tensor by a "
    "clone that is made outside it",
)
_NESTED = _Unwritable(
    "a nested tensor, which cannot be stored",
    "a dense or sparse COO tensor",
    "keep its values and offsets in two tensors",
)
_OVERLAP = _Unwritable(
    "a tensor whose elements share memory (expand()), which load_state_dict() cannot write",
    "elements with memory of their own",
    "replace the tensor by its clone()",
)
_ONE_OF_SEVERAL_VIEWS = _Unwritable(
    "one of several views that one call returned (unbind(), split()), of a tensor that requires "
    "gradients; torch refuses its use after a restore has written it",
    "a tensor of its own, or a view without gradients",
    "replace the tensor by its detach().clone()",
)
_READ_ONLY = _Unwritable(
    "a tensor in read-only memory, such as a file that numpy has mapped; a restore could not write "
    "into it",
    "a tensor in memory that can be written",
    "replace the tensor by its clone()",
)


def refuse_unwritable(named: Mapping[str, Tensor], extras: Mapping[str, object]) -> None:
    """Refuse tensors that a restore could not write in place.

    Elements of `named` may share memory: `catalog.restore.in_place` writes them. Elements in a
    module among the extras may not, because torch's `load_state_dict()` writes that module.

    Args:
        named: a name for messages -> the tensor.
        extras: the given extras, by name.

    Raises:
        SettingsError: a tensor cannot be written; the message names it.
    """
    read_only = _ReadOnlyMemory()
    in_extras = {
        f"extras[{extra_name!r}], {name!r}": tensor
        for extra_name, extra in extras.items()
        if isinstance(extra, nn.Module)
        for name, tensor in (*extra.named_parameters(), *extra.named_buffers())
    }
    for subject, tensor in {**named, **in_extras}.items():
        fault = _fault(tensor, read_only)
        if fault is None and subject in in_extras and shares_memory(tensor):
            fault = _OVERLAP
        if fault is not None:
            raise SettingsError(
                subject,
                found=fault.found,
                expected=fault.expected,
                next_step=fault.next_step,
            )


def _fault(tensor: Tensor, read_only: _ReadOnlyMemory) -> _Unwritable | None:
    if isinstance(tensor, UninitializedBuffer | UninitializedParameter):
        return _LAZY
    if tensor.is_inference():
        return _INFERENCE
    if tensor.is_nested:
        return _NESTED
    if tensor.requires_grad and tensor._is_view():
        if _get_creation_meta(tensor) == CreationMeta.MULTI_OUTPUT_NODE:
            return _ONE_OF_SEVERAL_VIEWS
    if not is_piece(tensor) and tensor.layout is torch.strided and tensor.is_cpu:
        if tensor.numel() and read_only.holds(tensor.data_ptr()):
            return _READ_ONLY
    return None


class _ReadOnlyMemory:
    """Knows which memory of this process cannot be written; writing there would end the process."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        try:
            lines = Path("/proc/self/maps").read_text().splitlines()
        except OSError:
            return  # without /proc no memory is taken for read-only
        for line in lines:
            addresses, permissions = line.split(maxsplit=2)[:2]
            if "w" not in permissions:
                start, end = addresses.split("-")
                self._starts.append(int(start, 16))
                self._ends.append(int(end, 16))

    def holds(self, address: int) -> bool:
        """Whether the address lies in read-only memory."""
        place = bisect_right(self._starts, address) - 1
        return place >= 0 and address < self._ends[place]
