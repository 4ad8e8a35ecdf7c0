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

__all__ = ["CONDENSED_BYTES", "Verdict", "condensed", "verdicts"]

CONDENSED_BYTES: Final = 8


class Verdict(IntEnum):
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
    found = np.zeros((count, CONDENSED_BYTES), dtype=np.uint8)
    array = rows.numpy()
    if whole:
        words = np.ascontiguousarray(array[:, :whole]).view(np.uint64)
        found = np.bitwise_xor.reduce(words, axis=1, keepdims=True).view(np.uint8)
    found[:, : size - whole] ^= array[:, whole:]
    return torch.from_numpy(found)


def verdicts(members: Sequence[Tensor], data: int) -> Tensor:
    """Compare members of stripes, all of which are there.

    Args:
        members: of each number, data members first: uint8 [n, 8], as `condensed` returns them.
        data: number of data members.

    Returns:
        `Verdict`s, uint8 [n]. With two parity members, one damaged member is named, unless more
        than one is damaged.
    """
    expected = erasure.encode(members[:data], len(members) - data)
    off = [one ^ members[data + number] for number, one in enumerate(expected)]
    is_off = [(one != 0).any(1) for one in off]
    found = torch.full_like(is_off[0], int(Verdict.FITS), dtype=torch.uint8)
    found[torch.stack(is_off).any(0)] = Verdict.DIFFERS
    if len(off) == 2:
        p_is_off, q_is_off = is_off
        found[p_is_off & ~q_is_off] = Verdict.DAMAGED + data
        found[q_is_off & ~p_is_off] = Verdict.DAMAGED + data + 1
        both = (p_is_off & q_is_off).nonzero().view(-1)
        for member in range(data if len(both) else 0):
            # What would be wrong with Q if this member alone had what is wrong with P.
            would = torch.zeros(len(both), CONDENSED_BYTES, dtype=torch.uint8, device="cpu")
            positions = torch.full_like(both, member)
            at = torch.arange(len(both), dtype=torch.int64, device="cpu")
            erasure.apply(would, at, off[0][both], positions)
            found[both[(would == off[1][both]).all(1)]] = Verdict.DAMAGED + member
    return found
