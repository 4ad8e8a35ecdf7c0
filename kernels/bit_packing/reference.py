"""Bit packing with one big integer a row: bit k of the integer is bit k of the row."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.bit_packing.widths import packed_width, require_codes, require_packed

__all__ = ["pack", "unpack"]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes u8 [n, dim] into u8 [n, packed_width(dim, bits)]."""
    require_codes(codes, bits)
    n, dim = codes.shape
    width = packed_width(dim, bits)
    packed = torch.zeros(n, width, dtype=torch.uint8, device="cpu")
    for i, row in enumerate(codes.tolist()):
        string = sum((code % 2**bits) << k * bits for k, code in enumerate(row))
        packed[i] = torch.tensor(
            list(string.to_bytes(width, "little")), dtype=torch.uint8, device="cpu"
        )
    return packed


def unpack(packed: Tensor, *, dim: int, bits: int) -> Tensor:
    """The codes u8 [n, dim]."""
    require_packed(packed, dim, bits)
    codes = torch.zeros(packed.shape[0], dim, dtype=torch.uint8, device="cpu")
    for i, row in enumerate(packed.tolist()):
        string = int.from_bytes(bytes(row), "little")
        values = [(string >> k * bits) % 2**bits for k in range(dim)]
        codes[i] = torch.tensor(values, dtype=torch.uint8, device="cpu")
    return codes
