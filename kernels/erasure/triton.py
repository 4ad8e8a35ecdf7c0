"""Erasure coding on a GPU: sums and doublings of four elements in each word.

Rows are read in units of 16 bytes if their bytes and addresses are multiples of that, else of 4,
else of single bytes. Doubling treats the bytes of a word separately, so it is the same for all.
"""

# Triton reads the kernels' source; annotations other than constexpr would mean something to it.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from recpoint.kernels.erasure.field import MOST_DATA, coefficient
from recpoint.kernels.erasure.shapes import (
    require_coefficients,
    require_differences,
    require_members,
)

__all__ = ["apply", "combine", "difference", "encode"]

#: Words or bytes of the result that a program computes.
_BLOCK: Final = 1024
#: Words of a parity row that a program adds to at once.
_ROW_BLOCK: Final = 256
#: Places within a row are counted in 32 bits.
_LONGEST_ROW_BYTES: Final = 1 << 30


@triton.jit
def _doubled(words):
    """Each byte times x. The shift moves no bit into the next byte, and 0x1D · 1 fits a byte."""
    return ((words & 0x7F7F7F7F) << 1) ^ (((words >> 7) & 0x01010101) * 0x1D)


@triton.jit
def _place(address, at, UNIT: tl.constexpr):
    """Where the words or bytes `at` lie. Knowing that 16 divides the address gives wide loads."""
    if UNIT == 1:
        place = address.to(tl.pointer_type(tl.uint8)) + at
    elif UNIT == 4:
        place = address.to(tl.pointer_type(tl.int32)) + at
    else:
        place = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16) + at
    return place


@triton.jit
def _get(address, at, inside, UNIT: tl.constexpr):
    return tl.load(_place(address, at, UNIT), mask=inside, other=0).to(tl.int32)


@triton.jit
def _put(address, at, words, inside, UNIT: tl.constexpr):
    if UNIT == 1:
        words = words.to(tl.uint8)
    tl.store(_place(address, at, UNIT), words, mask=inside)


@triton.jit
def _block(units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """The words or bytes of this program, and which of them are there."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if UNIT == 16:
        inside = at < units.to(tl.int64) * 4
    else:
        inside = at < units
    return at, inside


@triton.jit(do_not_specialize=["units", "members"])
def _exclusive_or(table, members, out, units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    at, inside = _block(units, UNIT, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for k in range(members):
        total ^= _get(tl.load(table + k), at, inside, UNIT)
    _put(out, at, total, inside, UNIT)


@triton.jit
def _selected(words, factor, BIT: tl.constexpr):
    """The words if the factor has the bit, else zeros."""
    return words & -((factor >> BIT) & 1)


@triton.jit(do_not_specialize=["units", "members"])
def _combine(table, members, out, units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """A sum for each bit of the coefficients, over the members that have it; Horner at the end."""
    at, inside = _block(units, UNIT, BLOCK)
    sum_0 = tl.zeros([BLOCK], tl.int32)
    sum_1 = tl.zeros([BLOCK], tl.int32)
    sum_2 = tl.zeros([BLOCK], tl.int32)
    sum_3 = tl.zeros([BLOCK], tl.int32)
    sum_4 = tl.zeros([BLOCK], tl.int32)
    sum_5 = tl.zeros([BLOCK], tl.int32)
    sum_6 = tl.zeros([BLOCK], tl.int32)
    sum_7 = tl.zeros([BLOCK], tl.int32)
    for k in range(members):
        words = _get(tl.load(table + k), at, inside, UNIT)
        factor = tl.load(table + members + k).to(tl.int32)
        sum_0 ^= _selected(words, factor, 0)
        sum_1 ^= _selected(words, factor, 1)
        sum_2 ^= _selected(words, factor, 2)
        sum_3 ^= _selected(words, factor, 3)
        sum_4 ^= _selected(words, factor, 4)
        sum_5 ^= _selected(words, factor, 5)
        sum_6 ^= _selected(words, factor, 6)
        sum_7 ^= _selected(words, factor, 7)
    total = _doubled(_doubled(_doubled(sum_7) ^ sum_6) ^ sum_5) ^ sum_4
    total = _doubled(_doubled(_doubled(_doubled(total) ^ sum_3) ^ sum_2) ^ sum_1) ^ sum_0
    _put(out, at, total, inside, UNIT)


@triton.jit(do_not_specialize=["units", "members"])
def _encode(table, members, p, q, units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """P and Q in one pass, from the last member to the first."""
    at, inside = _block(units, UNIT, BLOCK)
    in_p = tl.zeros([BLOCK], tl.int32)
    in_q = tl.zeros([BLOCK], tl.int32)
    for k in range(members):
        words = _get(tl.load(table + members - 1 - k), at, inside, UNIT)
        in_p ^= words
        in_q = _doubled(in_q) ^ words
    _put(p, at, in_p, inside, UNIT)
    _put(q, at, in_q, inside, UNIT)


@triton.jit
def _product(words, factor):
    """factor · words, by Horner's rule over the factor's bits."""
    total = _selected(words, factor, 7)
    for step in tl.static_range(1, 8):
        total = _doubled(total) ^ _selected(words, factor, 7 - step)
    return total


@triton.jit(do_not_specialize=["rows", "row_bytes"])
def _apply(
    parity, slots, differences, positions, factors, rows, row_bytes,
    HAS_POSITIONS: tl.constexpr, IN_WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add one block of words of one difference. Others may add to the same words: hence atomics.

    A row that begins or ends inside a word adds zeros to the rest of the word. Words lie at
    addresses divisible by 4, so such a word is on the page of the row's own bytes.
    """
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i)
    valid = (slot >= 0) & (slot < rows)
    factor = 1
    if HAS_POSITIONS:
        position = tl.load(positions + i)
        known = (position >= 0) & (position < 255)
        valid = valid & known
        factor = tl.load(factors + tl.where(known, position, 0)).to(tl.int32)
    row = parity.to(tl.int64) + tl.where(valid, slot, 0) * row_bytes
    given = differences.to(tl.int64) + i * row_bytes
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if IN_WORDS:
        touched = valid & (word * 4 < row_bytes)
        words = _get(given, word, touched, 4)
    else:
        shift = (row & 3).to(tl.int32)
        row -= shift
        touched = valid & (word * 4 < shift + row_bytes)
        words = tl.zeros([BLOCK], tl.int32)
        for k in tl.static_range(4):
            byte = word * 4 + k - shift
            own = touched & (byte >= 0) & (byte < row_bytes)
            words |= _get(given, byte, own, 1) << (8 * k)
    if HAS_POSITIONS:
        words = _product(words, factor)
    tl.atomic_xor(_place(row, word, 4), words, mask=touched, sem="relaxed")


def difference(old: Tensor, new: Tensor, out: Tensor) -> None:
    """out = old XOR new."""
    combine((old, new), (1, 1), out)


def apply(parity: Tensor, slots: Tensor, differences: Tensor, positions: Tensor | None) -> None:
    """parity[slots[i]] += g^positions[i] · differences[i]; indices out of range are passed over."""
    require_differences(parity, slots, differences, positions)
    n, row_bytes = differences.shape
    if row_bytes > _LONGEST_ROW_BYTES:
        raise ValueError(f"parity: {row_bytes} bytes a row, expected at most {_LONGEST_ROW_BYTES}")
    if n == 0 or row_bytes == 0:
        return
    powers = [1] if positions is None else [coefficient(k) for k in range(MOST_DATA)]
    # A row touches at most so many words, wherever it begins.
    grid = (n, triton.cdiv(row_bytes + 3, 4 * _ROW_BLOCK))
    _apply[grid](
        parity.data_ptr(), slots, differences.data_ptr(), slots if positions is None else positions,
        _on_device(powers, parity.device), parity.shape[0], row_bytes,
        HAS_POSITIONS=positions is not None, IN_WORDS=_unit(row_bytes, parity, differences) > 1,
        BLOCK=_ROW_BLOCK,
    )  # fmt: skip


def combine(members: Sequence[Tensor], coefficients: Sequence[int], out: Tensor) -> None:
    """out = the sum of coefficient · member."""
    require_members(members, (out,))
    require_coefficients(members, coefficients)
    if out.numel():
        kernel = _exclusive_or if all(c == 1 for c in coefficients) else _combine
        table = _on_device([*(m.data_ptr() for m in members), *coefficients], out.device)
        unit = _unit(out.nbytes, *members, out)
        kernel[_grid(out.nbytes, unit)](
            table, len(members), out.data_ptr(), out.nbytes // unit, UNIT=unit, BLOCK=_BLOCK
        )


def encode(data: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """P, or P and Q, of the data members."""
    require_members(data, outs, most=MOST_DATA)
    if len(outs) == 1:
        combine(data, [1] * len(data), outs[0])
        return
    p, q = outs
    if p.numel():
        table = _on_device([m.data_ptr() for m in data], p.device)
        unit = _unit(p.nbytes, *data, p, q)
        _encode[_grid(p.nbytes, unit)](
            table, len(data), p.data_ptr(), q.data_ptr(), p.nbytes // unit, UNIT=unit, BLOCK=_BLOCK
        )


def _unit(nbytes: int, *tensors: Tensor) -> int:
    """The largest unit that so many bytes, and the tensors' addresses, are multiples of."""
    for unit in (16, 4):
        if nbytes % unit == 0 and all(tensor.data_ptr() % unit == 0 for tensor in tensors):
            return unit
    return 1


def _grid(nbytes: int, unit: int) -> tuple[int]:
    """The programs for so many bytes. Each takes _BLOCK words, or bytes for a unit of 1."""
    return (triton.cdiv(nbytes, _BLOCK if unit == 1 else 4 * _BLOCK),)


def _on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The numbers, int64, on the device. The copy waits for nothing (compare `descriptors.plan`).

    Raises:
        RuntimeError: the stream is being captured. A replay would read the addresses of now.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "erasure coding cannot be part of a CUDA graph; call it outside the capture"
        )
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
    return host.to(device, non_blocking=True)
