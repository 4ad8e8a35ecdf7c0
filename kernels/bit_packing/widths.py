"""Widths of codes and of packed rows, and the checks that follow from them."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from recpoint.kernels.arguments import require

__all__ = ["BITS", "packed_width", "require_bits", "require_codes", "require_packed"]

#: The bit widths of the format.
BITS: Final = (2, 3, 4, 5, 6, 8)


def require_bits(bits: int) -> None:
    """Refuse a width the format does not have.

    Raises:
        ValueError: names the width.
    """
    if bits not in BITS:
        raise ValueError(f"bits: {bits}, expected one of {BITS}")


def packed_width(dim: int, bits: int) -> int:
    """Bytes of one packed row of `dim` codes."""
    require_bits(bits)
    return (dim * bits + 7) // 8


def require_codes(codes: Tensor, bits: int) -> None:
    """Refuse what is not a contiguous u8 matrix, or a width the format does not have."""
    require_bits(bits)
    require("codes", codes, torch.uint8, 2)


def require_packed(packed: Tensor, dim: int, bits: int) -> None:
    """Refuse what is not a contiguous u8 matrix of packed rows of `dim` codes."""
    require("packed", packed, torch.uint8, 2)
    if dim < 0 or packed.shape[1] != packed_width(dim, bits):
        raise ValueError(f"packed: {packed.shape[1]} bytes a row for {dim} codes of {bits} bits")
