"""Eight codes at a time in the bytes of one u64, for CPU kernels; addresses of any alignment."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from recpoint.kernels.intrinsics import compiled

__all__ = ["pack_codes", "unpack_codes"]

_U64 = np.uint64


def _load(width: int) -> Any:
    """A function of an address: the `width`-bit word there, as a u64."""

    def load(typingctx: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = builder.inttoptr(arguments[0], ir.IntType(width).as_pointer())
            # An array of words would promise LLVM that they are aligned; rows may begin anywhere.
            word = builder.load(place, align=1)
            return word if width == 64 else builder.zext(word, ir.IntType(64))

        return types.uint64(types.intp), build

    return intrinsic(load)


def _store(width: int) -> Any:
    """A procedure of an address and a u64, whose low `width` bits it stores there."""

    def store(typingctx: Any, address: Any, word: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            cell = ir.IntType(width)
            place = builder.inttoptr(arguments[0], cell.as_pointer())
            low = arguments[1] if width == 64 else builder.trunc(arguments[1], cell)
            builder.store(low, place, align=1)
            return context.get_dummy_value()

        return types.void(types.intp, types.uint64), build

    return intrinsic(store)


_load8, _load16, _load32, _load64 = (_load(width) for width in (8, 16, 32, 64))
_store8, _store16, _store32, _store64 = (_store(width) for width in (8, 16, 32, 64))


@compiled(nogil=True)
def joined(word: np.uint64, bits: int) -> np.uint64:
    """Eight codes, one in each byte, as one string of 8 · bits bits; bits is 2, 3 or 4.

    Neighbours are moved together until all are: bytes to pairs, pairs to fours, fours to eight.
    """
    if bits == 2:
        word &= _U64(0x0303030303030303)
        word = (word | word >> _U64(6)) & _U64(0x000F000F000F000F)
        word = (word | word >> _U64(12)) & _U64(0x000000FF000000FF)
        return (word | word >> _U64(24)) & _U64(0xFFFF)
    if bits == 3:
        word &= _U64(0x0707070707070707)
        word = (word | word >> _U64(5)) & _U64(0x003F003F003F003F)
        word = (word | word >> _U64(10)) & _U64(0x00000FFF00000FFF)
        return (word | word >> _U64(20)) & _U64(0xFFFFFF)
    word &= _U64(0x0F0F0F0F0F0F0F0F)
    word = (word | word >> _U64(4)) & _U64(0x00FF00FF00FF00FF)
    word = (word | word >> _U64(8)) & _U64(0x0000FFFF0000FFFF)
    return (word | word >> _U64(16)) & _U64(0xFFFFFFFF)


@compiled(nogil=True)
def parted(word: np.uint64, bits: int) -> np.uint64:
    """Undo `joined`; bits of `word` above 8 · bits are ignored."""
    if bits == 2:
        word = (word | word << _U64(24)) & _U64(0x000000FF000000FF)
        word = (word | word << _U64(12)) & _U64(0x000F000F000F000F)
        return (word | word << _U64(6)) & _U64(0x0303030303030303)
    if bits == 3:
        word = (word | word << _U64(20)) & _U64(0x00000FFF00000FFF)
        word = (word | word << _U64(10)) & _U64(0x003F003F003F003F)
        return (word | word << _U64(5)) & _U64(0x0707070707070707)
    word = (word | word << _U64(16)) & _U64(0x0000FFFF0000FFFF)
    word = (word | word << _U64(8)) & _U64(0x00FF00FF00FF00FF)
    return (word | word << _U64(4)) & _U64(0x0F0F0F0F0F0F0F0F)


@compiled(nogil=True)
def pack_codes(codes: int, packed: int, n: int, bits: int) -> None:
    """Pack n codes at one address into ceil(n · bits / 8) bytes at another; bits is 2, 3 or 4."""
    words = n // 8
    if bits == 2:
        for i in range(words):
            _store16(packed + 2 * i, joined(_load64(codes + 8 * i), 2))
    elif bits == 3:
        for i in range(words):
            string = joined(_load64(codes + 8 * i), 3)
            _store16(packed + 3 * i, string)
            _store8(packed + 3 * i + 2, string >> _U64(16))
    else:
        for i in range(words):
            _store32(packed + 4 * i, joined(_load64(codes + 8 * i), 4))
    left = n % 8
    if left:
        word = _U64(0)
        for k in range(left):
            word |= _load8(codes + 8 * words + k) << _U64(8 * k)
        string = joined(word, bits)
        for b in range((left * bits + 7) // 8):
            _store8(packed + bits * words + b, string >> _U64(8 * b))


@compiled(nogil=True)
def unpack_codes(packed: int, codes: int, n: int, bits: int) -> None:
    """Undo `pack_codes`; the spare bits of the last byte are ignored."""
    words = n // 8
    if bits == 2:
        for i in range(words):
            _store64(codes + 8 * i, parted(_load16(packed + 2 * i), 2))
    elif bits == 3:
        for i in range(words):
            string = _load16(packed + 3 * i) | _load8(packed + 3 * i + 2) << _U64(16)
            _store64(codes + 8 * i, parted(string, 3))
    else:
        for i in range(words):
            _store64(codes + 8 * i, parted(_load32(packed + 4 * i), 4))
    left = n % 8
    if left:
        string = _U64(0)
        for b in range((left * bits + 7) // 8):
            string |= _load8(packed + bits * words + b) << _U64(8 * b)
        word = parted(string, bits)
        for k in range(left):
            _store8(codes + 8 * words + k, word >> _U64(8 * k))
