"""Packing of small codes into whole bytes, row by row (format §3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.arguments import unsupported_device
from recpoint.kernels.bit_packing import cpu
from recpoint.kernels.bit_packing.widths import BITS, packed_width

__all__ = ["BITS", "pack", "packed_width", "unpack"]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes u8 [n, dim], each < 2^bits, into u8 [n, packed_width(dim, bits)].

    Higher bits of a code are dropped.

    Raises:
        ValueError: bits is not one of `BITS`, or codes is not a contiguous u8 matrix.
    """
    if codes.is_cpu:
        return cpu.pack(codes, bits)
    if codes.is_cuda:
        from recpoint.kernels.bit_packing import triton

        with torch.cuda.device_of(codes):  # Triton launches on the current device
            return triton.pack(codes, bits)
    raise unsupported_device("codes", codes)


def unpack(packed: Tensor, *, dim: int, bits: int) -> Tensor:
    """The codes u8 [n, dim] of packed u8 [n, packed_width(dim, bits)]; the last byte's spare bits
    are ignored.

    Raises:
        ValueError: bits is not one of `BITS`, or packed does not have that width.
    """
    if packed.is_cpu:
        return cpu.unpack(packed, dim=dim, bits=bits)
    if packed.is_cuda:
        from recpoint.kernels.bit_packing import triton

        with torch.cuda.device_of(packed):  # Triton launches on the current device
            return triton.unpack(packed, dim=dim, bits=bits)
    raise unsupported_device("packed", packed)
