"""Tells whether the members of stripes fit each other, from eight bytes of each member.

XOR of rows and multiplication in GF(2^8) go byte by byte. So the eight bytes that `condensed` makes
of rows have the parity of these rows, condensed: servers need not exchange whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import numpy as np
import torch
from torch import Tensor

from recpoint.kernels import erasure

__all__ = ["CONDENSED_BYTES", "StripeVerdict", "condensed", "verdicts"]

CONDENSED_BYTES: Final = 8


class StripeVerdict(IntEnum):
    """What a check says of a stripe, as a byte. `DAMAGED + m`: only member m does not fit.

    Members are numbered as in `kernels.erasure`: data members, then P and Q.
    """

    UNKNOWN = 0
    """A member is lost, and not recovered yet."""
    FITS = 1
    DIFFERS = 2
    """A member does not fit; nothing tells which one."""
    DAMAGED = 3


def condensed(rows: Tensor) -> Tensor:
    """Return the XOR of each row's words of eight bytes: uint8 [n, 8].

    A changed bit of a row changes it, and so do any changes within eight bytes in a row.

    Args:
        rows: uint8 [n, row_bytes], contiguous, on the CPU. The last word is filled up with zeros.
    """
    count, size = rows.shape
    whole = size - size % CONDENSED_BYTES
    sums = np.zeros((count, CONDENSED_BYTES), dtype=np.uint8)
    array = rows.numpy()
    if whole:
        words = np.ascontiguousarray(array[:, :whole]).view(np.uint64)
        sums = np.bitwise_xor.reduce(words, axis=1, keepdims=True).view(np.uint8)
    sums[:, : size - whole] ^= array[:, whole:]
    return torch.from_numpy(sums)


def verdicts(members: Sequence[Tensor], data: int) -> Tensor:
    """Compare members of stripes, all of which are there.

    Args:
        members: of each number, data members first: uint8 [n, 8], as `condensed` returns them.
        data: number of data members.

    Returns:
        `StripeVerdict`s, uint8 [n]. With two parity members, one damaged member is named, unless
        more than one is damaged.
    """
    expected = erasure.encode(members[:data], len(members) - data)
    off = [parity ^ members[data + number] for number, parity in enumerate(expected)]
    is_off = [(difference != 0).any(1) for difference in off]
    verdict_bytes = torch.full_like(is_off[0], int(StripeVerdict.FITS), dtype=torch.uint8)
    verdict_bytes[torch.stack(is_off).any(0)] = StripeVerdict.DIFFERS
    if len(off) == 2:
        p_is_off, q_is_off = is_off
        verdict_bytes[p_is_off & ~q_is_off] = StripeVerdict.DAMAGED + data
        verdict_bytes[q_is_off & ~p_is_off] = StripeVerdict.DAMAGED + data + 1
        both_off = (p_is_off & q_is_off).nonzero().view(-1)
        for member in range(data if len(both_off) else 0):
            # What would be wrong with Q if this member alone had what is wrong with P.
            expected_q = torch.zeros(
                len(both_off), CONDENSED_BYTES, dtype=torch.uint8, device="cpu"
            )
            positions = torch.full_like(both_off, member)
            rows = torch.arange(len(both_off), dtype=torch.int64, device="cpu")
            erasure.apply(expected_q, rows, off[0][both_off], positions)
            verdict_bytes[both_off[(expected_q == off[1][both_off]).all(1)]] = (
                StripeVerdict.DAMAGED + member
            )
    return verdict_bytes
