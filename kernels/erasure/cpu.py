"""Erasure coding on a CPU: one pass over all members, with sums and doublings in registers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from torch import Tensor

from recpoint.kernels.erasure.field import MOST_DATA
from recpoint.kernels.erasure.shapes import (
    require_coefficients,
    require_differences,
    require_members,
)
from recpoint.kernels.native import library, team_size

__all__ = ["apply", "combine", "difference", "encode"]


def difference(old: Tensor, new: Tensor, out: Tensor) -> None:
    """out = old XOR new."""
    combine((old, new), (1, 1), out)


def apply(parity: Tensor, slots: Tensor, differences: Tensor, positions: Tensor | None) -> None:
    """parity[slots[i]] += g^positions[i] · differences[i]; nothing if an index is out of range."""
    require_differences(parity, slots, differences, positions)
    _check("slots", slots, parity.shape[0])
    if positions is not None:
        _check("positions", positions, MOST_DATA)
    n, row_bytes = differences.shape
    if n and row_bytes:
        library.apply_differences(
            parity.data_ptr(),
            slots.data_ptr(),
            differences.data_ptr(),
            0 if positions is None else positions.data_ptr(),
            row_bytes,
            n,
            min(n, team_size(3 * differences.nbytes)),
        )


def combine(members: Sequence[Tensor], coefficients: Sequence[int], out: Tensor) -> None:
    """out = the sum of coefficient · member."""
    require_members(members, (out,))
    require_coefficients(members, coefficients)
    addresses, factors = _addresses(members), array("B", coefficients)
    library.combine_members(
        addresses.buffer_info()[0],
        factors.buffer_info()[0],
        len(members),
        out.data_ptr(),
        out.nbytes,
        team_size((len(members) + 1) * out.nbytes),
    )


def encode(data: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """P, or P and Q, of the data members."""
    require_members(data, outs, most=MOST_DATA)
    if len(outs) == 1:
        combine(data, [1] * len(data), outs[0])
        return
    p, q = outs
    addresses = _addresses(data)
    library.encode_members(
        addresses.buffer_info()[0],
        len(data),
        p.data_ptr(),
        q.data_ptr(),
        p.nbytes,
        team_size((len(data) + 2) * p.nbytes),
    )


def _addresses(members: Sequence[Tensor]) -> array[int]:
    """What the kernels read addresses from. The caller keeps it until they have returned."""
    return array("Q", [member.data_ptr() for member in members])


def _check(name: str, listed: Tensor, limit: int) -> None:
    wrong = library.first_outside(listed.data_ptr(), listed.numel(), limit)
    if wrong >= 0:
        raise IndexError(f"{name}: {int(listed[wrong])}, expected 0 <= value < {limit}")
