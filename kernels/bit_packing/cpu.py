"""Bit packing on a CPU: 8 codes fill exactly `bits` bytes; only the end of a row is odd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recpoint.kernels.bit_packing.widths import packed_width, require_codes, require_packed
from recpoint.kernels.bit_packing.words import pack_codes, unpack_codes
from recpoint.kernels.intrinsics import compiled, copy_row
from recpoint.kernels.threads import over_rows

__all__ = ["pack", "pack_row", "unpack", "unpack_row"]


@compiled(nogil=True)
def pack_row(codes: Any, packed: Any, at: int, dim: int, bits: int) -> None:
    """Pack codes[:dim] into packed[at: …]; both are contiguous arrays of u8."""
    if bits == 8:
        copy_row(packed.ctypes.data + at, codes.ctypes.data, dim)
    else:
        pack_codes(codes.ctypes.data, packed.ctypes.data + at, dim, bits)


@compiled(nogil=True)
def unpack_row(packed: Any, at: int, codes: Any, to: int, dim: int, bits: int) -> None:
    """Unpack packed[at: …] into codes[to : to + dim]; both are contiguous arrays of u8."""
    if bits == 8:
        copy_row(codes.ctypes.data + to, packed.ctypes.data + at, dim)
    else:
        unpack_codes(packed.ctypes.data + at, codes.ctypes.data + to, dim, bits)


@compiled(nogil=True)
def _pack(codes: int, packed: int, dim: int, width: int, bits: int, rows: int) -> None:
    if bits == 8:
        copy_row(packed, codes, rows * dim)
    elif dim * bits % 8 == 0:
        # No row has an odd end: together they are one.
        pack_codes(codes, packed, rows * dim, bits)
    else:
        for i in range(rows):
            pack_codes(codes + i * dim, packed + i * width, dim, bits)


@compiled(nogil=True)
def _unpack(packed: int, codes: int, dim: int, width: int, bits: int, rows: int) -> None:
    if bits == 8:
        copy_row(codes, packed, rows * dim)
    elif dim * bits % 8 == 0:
        unpack_codes(packed, codes, rows * dim, bits)
    else:
        for i in range(rows):
            unpack_codes(packed + i * width, codes + i * dim, dim, bits)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes u8 [n, dim] into u8 [n, packed_width(dim, bits)]."""
    require_codes(codes, bits)
    n, dim = codes.shape
    width = packed_width(dim, bits)
    packed = torch.empty(n, width, dtype=torch.uint8, device="cpu")
    addresses = codes.data_ptr(), packed.data_ptr()

    def part(start: int, stop: int) -> None:
        source, to = addresses
        _pack(source + start * dim, to + start * width, dim, width, bits, stop - start)

    over_rows(part, n, row_bytes=dim + width)
    return packed


def unpack(packed: Tensor, *, dim: int, bits: int) -> Tensor:
    """The codes u8 [n, dim]."""
    require_packed(packed, dim, bits)
    n, width = packed.shape
    codes = torch.empty(n, dim, dtype=torch.uint8, device="cpu")
    addresses = packed.data_ptr(), codes.data_ptr()

    def part(start: int, stop: int) -> None:
        source, to = addresses
        _unpack(source + start * width, to + start * dim, dim, width, bits, stop - start)

    over_rows(part, n, row_bytes=dim + width)
    return codes
