"""Bit packing on a GPU: each output byte, and each code, is put together on its own."""

# Triton reads the kernels' source; annotations other than constexpr would mean something to it.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recpoint.kernels.bit_packing.widths import packed_width, require_codes, require_packed

__all__ = ["pack", "unpack"]

_BLOCK = 1024


@triton.jit
def _pack(codes, packed, total, dim, width, BITS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = index // width
    bit = (index % width) * 8  # the byte's first bit in its row
    first = bit // BITS
    byte = tl.zeros([BLOCK], tl.int32)
    # Eight bits that begin anywhere in a code touch at most 1 + ceil(7 / BITS) codes; where BITS
    # divides 8, a byte begins with a code.
    for j in tl.static_range(8 // BITS if 8 % BITS == 0 else 1 + (6 + BITS) // BITS):
        k = first + j
        code = tl.load(codes + row * dim + k, mask=(index < total) & (k < dim), other=0)
        code = code.to(tl.int32) & ((1 << BITS) - 1)
        shift = (k * BITS - bit).to(tl.int32)
        shifted = code << tl.maximum(shift, 0)
        right = code >> tl.maximum(-shift, 0)
        byte |= tl.where(shift >= 0, shifted, right) & 255
    tl.store(packed + index, byte.to(tl.uint8), mask=index < total)


@triton.jit
def _unpack(packed, codes, total, dim, width, BITS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = index // dim
    bit = (index % dim) * BITS
    byte = bit // 8
    valid = index < total
    low = tl.load(packed + row * width + byte, mask=valid, other=0).to(tl.int32)
    high = tl.load(packed + row * width + byte + 1, mask=valid & (byte + 1 < width), other=0)
    code = ((low | (high.to(tl.int32) << 8)) >> (bit % 8).to(tl.int32)) & ((1 << BITS) - 1)
    tl.store(codes + index, code.to(tl.uint8), mask=valid)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes u8 [n, dim] into u8 [n, packed_width(dim, bits)]."""
    require_codes(codes, bits)
    n, dim = codes.shape
    width = packed_width(dim, bits)
    packed = torch.empty(n, width, dtype=torch.uint8, device=codes.device)
    total = packed.numel()
    if total:
        grid = (triton.cdiv(total, _BLOCK),)
        _pack[grid](codes, packed, total, dim, width, BITS=bits, BLOCK=_BLOCK)
    return packed


def unpack(packed: Tensor, *, dim: int, bits: int) -> Tensor:
    """The codes u8 [n, dim]."""
    require_packed(packed, dim, bits)
    n, width = packed.shape
    codes = torch.empty(n, dim, dtype=torch.uint8, device=packed.device)
    total = codes.numel()
    if total:
        grid = (triton.cdiv(total, _BLOCK),)
        _unpack[grid](packed, codes, total, dim, width, BITS=bits, BLOCK=_BLOCK)
    return codes
