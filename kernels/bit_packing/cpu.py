"""Bit packing on a CPU. A group of 8 codes fills exactly `bits` bytes; only a row's end is odd."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from recpoint.kernels.bit_packing.widths import packed_width, require_codes, require_packed
from recpoint.kernels.intrinsics import compiled, pointer
from recpoint.kernels.threads import over_rows

__all__ = ["pack", "pack_row", "unpack", "unpack_row"]


@compiled(nogil=True)
def pack_row(codes: Any, packed: Any, at: int, dim: int, bits: int) -> None:
    """Pack codes[:dim] into packed[at: …]."""
    if bits == 8:
        for k in range(dim):
            packed[at + k] = codes[k]
    elif bits == 4:
        for b in range(dim // 2):
            packed[at + b] = np.uint8((codes[2 * b] & 15) | ((codes[2 * b + 1] & 15) << 4))
        if dim % 2:
            packed[at + dim // 2] = np.uint8(codes[dim - 1] & 15)
    elif bits == 2:
        for b in range(dim // 4):
            packed[at + b] = np.uint8(
                (codes[4 * b] & 3)
                | ((codes[4 * b + 1] & 3) << 2)
                | ((codes[4 * b + 2] & 3) << 4)
                | ((codes[4 * b + 3] & 3) << 6)
            )
        if dim % 4:
            last = 0
            for k in range(dim % 4):
                last |= (codes[dim // 4 * 4 + k] & 3) << (2 * k)
            packed[at + dim // 4] = np.uint8(last)
    else:
        for g in range((dim + 7) // 8):
            string = np.int64(0)
            for k in range(min(8, dim - 8 * g)):
                string |= np.int64(codes[8 * g + k] & 7) << (3 * k)
            for b in range(min(3, (3 * dim + 7) // 8 - 3 * g)):
                packed[at + 3 * g + b] = np.uint8((string >> (8 * b)) & 255)


@compiled(nogil=True)
def unpack_row(packed: Any, at: int, codes: Any, to: int, dim: int, bits: int) -> None:
    """Unpack packed[at: …] into codes[to : to + dim]."""
    if bits == 8:
        for k in range(dim):
            codes[to + k] = packed[at + k]
    elif bits == 4:
        for b in range(dim // 2):
            byte = packed[at + b]
            codes[to + 2 * b] = np.uint8(byte & 15)
            codes[to + 2 * b + 1] = np.uint8(byte >> 4)
        if dim % 2:
            codes[to + dim - 1] = np.uint8(packed[at + dim // 2] & 15)
    elif bits == 2:
        for b in range(dim // 4):
            byte = packed[at + b]
            for k in range(4):
                codes[to + 4 * b + k] = np.uint8((byte >> (2 * k)) & 3)
        for k in range(dim % 4):
            codes[to + dim // 4 * 4 + k] = np.uint8((packed[at + dim // 4] >> (2 * k)) & 3)
    else:
        for g in range((dim + 7) // 8):
            string = np.int64(0)
            for b in range(min(3, (3 * dim + 7) // 8 - 3 * g)):
                string |= np.int64(packed[at + 3 * g + b]) << (8 * b)
            for k in range(min(8, dim - 8 * g)):
                codes[to + 8 * g + k] = np.uint8((string >> (3 * k)) & 7)


@compiled(nogil=True)
def _pack(codes: int, packed: int, dim: int, width: int, bits: int, start: int, stop: int) -> None:
    source = carray(pointer(codes), stop * dim, np.uint8)
    to = carray(pointer(packed), stop * width, np.uint8)
    for i in range(start, stop):
        pack_row(source[i * dim : (i + 1) * dim], to, i * width, dim, bits)


@compiled(nogil=True)
def _unpack(
    packed: int, codes: int, dim: int, width: int, bits: int, start: int, stop: int
) -> None:
    source = carray(pointer(packed), stop * width, np.uint8)
    to = carray(pointer(codes), stop * dim, np.uint8)
    for i in range(start, stop):
        unpack_row(source, i * width, to, i * dim, dim, bits)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes u8 [n, dim] into u8 [n, packed_width(dim, bits)]."""
    require_codes(codes, bits)
    n, dim = codes.shape
    width = packed_width(dim, bits)
    packed = torch.empty(n, width, dtype=torch.uint8)
    addresses = codes.data_ptr(), packed.data_ptr()

    def part(start: int, stop: int) -> None:
        _pack(*addresses, dim, width, bits, start, stop)

    over_rows(part, n, row_bytes=dim + width)
    return packed


def unpack(packed: Tensor, *, dim: int, bits: int) -> Tensor:
    """The codes u8 [n, dim]."""
    require_packed(packed, dim, bits)
    n, width = packed.shape
    codes = torch.empty(n, dim, dtype=torch.uint8)
    addresses = packed.data_ptr(), codes.data_ptr()

    def part(start: int, stop: int) -> None:
        _unpack(*addresses, dim, width, bits, start, stop)

    over_rows(part, n, row_bytes=dim + width)
    return codes
