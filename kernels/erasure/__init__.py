"""Parity of rows: P and Q of a stripe, their updates by differences, and the lost members.

A stripe is `data` rows and one or two parity rows of the same length, and rows are bytes here. P is
the exclusive or of the data rows. Q is the sum of g^position times the row at that position, over
GF(2^8). Members are numbered: 0 … data - 1 are the data members, `data` is P, `data + 1` is Q.

Row i of each tensor belongs to stripe i. Results are exact, so they depend on no order.
On CPUs only: records of rows and their parity are held in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from recpoint.kernels.erasure import cpu
from recpoint.kernels.erasure.decoding import decoding_coefficients, parity_coefficients
from recpoint.kernels.erasure.field import MOST_DATA

__all__ = [
    "MOST_DATA",
    "apply",
    "combine",
    "decode",
    "decoding_coefficients",
    "difference",
    "encode",
    "parity_coefficients",
]


def difference(old: Tensor, new: Tensor, out: Tensor | None = None) -> Tensor:
    """old XOR new: what `apply` adds to a parity when a row changes.

    Differences of one row add up: difference(a, b) XOR difference(b, c) is difference(a, c).

    Args:
        old: u8 [n, row_bytes], contiguous.
        new: the same shape and device.
        out: for the result; it may be `old` or `new`, and overlaps nothing else. None: a new one.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or a tensor is not contiguous.
    """
    out = torch.empty_like(old) if out is None else out
    cpu.difference(old, new, out)
    return out


def apply(
    parity: Tensor, slots: Tensor, differences: Tensor, positions: Tensor | None = None
) -> None:
    """parity[slots[i]] XOR= g^positions[i] · differences[i]: bring P or Q up to date in place.

    Nothing else of the stripes is needed. Any number of differences may have the same slot.

    Args:
        parity: u8 [R, row_bytes], contiguous. During the call nobody else may write to it.
        slots: int64 [n], each 0 <= slot < R.
        differences: u8 [n, row_bytes], contiguous, not overlapping parity.
        positions: int64 [n], the positions of the data members that changed, each 0 <= position
            < 255: the rows of `parity` are Q. None: they are P.

    Raises:
        IndexError: a slot or a position is out of range; nothing was applied.
        ValueError: shapes, dtypes or devices do not fit, or a tensor is not contiguous.
    """
    cpu.apply(parity, slots, differences, positions)


def encode(
    data: Sequence[Tensor], parity: int, outs: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """The parities of stripes: [P] or [P, Q], in one pass over the data.

    A stripe with fewer rows has the parities of one that is filled up with zeros.

    Args:
        data: 1 to 255 members u8 [n, row_bytes], contiguous, in the order of their positions.
        parity: 1 or 2.
        outs: `parity` tensors for the results. One may be a member, and they overlap nothing else.
            None: new ones.

    Raises:
        ValueError: the parity is neither, or shapes, dtypes or devices do not fit, or a tensor is
            not contiguous.
    """
    if parity not in (1, 2):
        raise ValueError(f"parity: {parity}, expected 1 or 2")
    if not data:
        raise ValueError(f"data: no members, expected 1 to {MOST_DATA}")
    parities = [torch.empty_like(data[0]) for _ in range(parity)] if outs is None else list(outs)
    if len(parities) != parity:
        raise ValueError(f"outs: {len(parities)}, expected {parity} as the parity")
    cpu.encode(data, parities)
    return parities


def combine(
    members: Sequence[Tensor], coefficients: Sequence[int], out: Tensor | None = None
) -> Tensor:
    """The sum of coefficients[k] · members[k] over GF(2^8): a lost member, or a parity.

    With coefficients of 1 it is the exclusive or, at the speed of memory.

    Args:
        members: 1 to 257 tensors u8 [n, row_bytes], contiguous.
        coefficients: one for each member, 0 to 255.
        out: for the result; it may be a member, and overlaps nothing else. None: a new one.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, a tensor is not contiguous, or a
            coefficient is missing or no element of the field.
    """
    if not members:
        raise ValueError("members: none, expected one or more")
    out = torch.empty_like(members[0]) if out is None else out
    cpu.combine(members, coefficients, out)
    return out


def decode(survivors: Mapping[int, Tensor], data: int, lost: Iterable[int]) -> dict[int, Tensor]:
    """The lost members of stripes, from those that are left.

    Args:
        survivors: member -> its rows u8 [n, row_bytes], contiguous, one row for each stripe.
        data: the number of data members, 1 … 255.
        lost: the members that are wanted.

    Returns:
        For each lost member its rows, u8 [n, row_bytes].

    Raises:
        ValueError: the survivors do not determine the lost members, or a number or tensor does not
            fit (see `decoding_coefficients` and `combine`).
    """
    decoded = {}
    for member, combination in decoding_coefficients(data, lost, survivors).items():
        rows = [survivors[k] for k in combination]
        decoded[member] = combine(rows, list(combination.values()))
    return decoded
