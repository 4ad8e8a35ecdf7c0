"""Bit packing on a CPU: 8 codes fill exactly `bits` bytes, so only the end of a row is special."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.bit_packing.widths import packed_width, require_codes, require_packed
from recpoint.kernels.native import library, team_size

__all__ = ["pack", "unpack"]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes u8 [n, dim] into u8 [n, packed_width(dim, bits)]."""
    require_codes(codes, bits)
    n, dim = codes.shape
    packed = torch.empty(n, packed_width(dim, bits), dtype=torch.uint8, device="cpu")
    threads = team_size(codes.nbytes + packed.nbytes)
    library.pack(codes.data_ptr(), packed.data_ptr(), dim, bits, n, threads)
    return packed


def unpack(packed: Tensor, *, dim: int, bits: int) -> Tensor:
    """Unpack to codes u8 [n, dim]."""
    require_packed(packed, dim, bits)
    n = packed.shape[0]
    codes = torch.empty(n, dim, dtype=torch.uint8, device="cpu")
    threads = team_size(codes.nbytes + packed.nbytes)
    library.unpack(packed.data_ptr(), codes.data_ptr(), dim, bits, n, threads)
    return codes
