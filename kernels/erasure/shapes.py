"""Which arguments fit each other, checked before a kernel gets their addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.erasure.field import MOST_DATA

__all__ = ["MOST_MEMBERS", "require_coefficients", "require_differences", "require_members"]

#: 255 data members, P and Q. The same as MOST_MEMBERS of native.cpp.
MOST_MEMBERS = MOST_DATA + 2


def require_members(
    members: Sequence[Tensor], outs: Sequence[Tensor], *, most: int = MOST_MEMBERS
) -> None:
    """Check that members and outputs are contiguous u8 [n, row_bytes], alike and on the CPU.

    Raises:
        ValueError: names what does not fit.
    """
    if not 1 <= len(members) <= most:
        raise ValueError(f"members: {len(members)}, expected 1 to {most}")
    first = members[0]
    _require_on_cpu("members", first)
    shape, device = first.shape, first.device
    for name, tensors in (("members", members), ("out", outs)):
        for tensor in tensors:
            # A message has a few rows at times, so what is right is passed over quickly.
            if (
                tensor.dtype is torch.uint8
                and len(shape) == 2
                and tensor.shape == shape
                and tensor.is_contiguous()
                and tensor.device == device
            ):
                continue
            require(name, tensor, torch.uint8, 2)
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)} on {tensor.device}, expected"
                f" {tuple(shape)} on {device} as the first member"
            )


def _require_on_cpu(name: str, tensor: Tensor) -> None:
    if not tensor.is_cpu:
        raise ValueError(f"{name}: device {tensor.device}, expected cpu")


def require_coefficients(members: Sequence[Tensor], coefficients: Sequence[int]) -> None:
    """Check that there is an element of the field for each member.

    Raises:
        ValueError: names what does not fit.
    """
    if len(coefficients) != len(members):
        raise ValueError(f"coefficients: {len(coefficients)} for {len(members)} members")
    if not 0 <= min(coefficients) <= max(coefficients) <= 255:
        wrong = next(value for value in coefficients if not 0 <= value <= 255)
        raise ValueError(f"coefficients: {wrong}, expected 0 to 255")


def require_differences(
    parity: Tensor, slots: Tensor, differences: Tensor, positions: Tensor | None
) -> None:
    """Check parity u8 [R, row_bytes], differences u8 [n, row_bytes], slots and positions int64 [n].

    Raises:
        ValueError: names what does not fit.
    """
    _require_on_cpu("parity", parity)
    require("parity", parity, torch.uint8, 2)
    require("differences", differences, torch.uint8, 2)
    if differences.shape[1] != parity.shape[1]:
        raise ValueError(
            f"differences: {differences.shape[1]} bytes a row, expected {parity.shape[1]} as parity"
        )
    lists = {"slots": slots} if positions is None else {"slots": slots, "positions": positions}
    for name, listed in lists.items():
        require(name, listed, torch.int64, 1)
        if listed.numel() != differences.shape[0]:
            raise ValueError(f"{name}: {listed.numel()} for {differences.shape[0]} differences")
    for name, tensor in {"differences": differences, **lists}.items():
        if tensor.device != parity.device:
            raise ValueError(f"{name}: on {tensor.device}, expected {parity.device} as parity")
