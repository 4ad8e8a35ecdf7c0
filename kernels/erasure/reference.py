"""Erasure coding of rows by the schoolbook: products bit by bit, differences one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recpoint.kernels.erasure.field import POLYNOMIAL, coefficient

__all__ = ["apply", "combine", "difference", "encode"]


def difference(old: Tensor, new: Tensor, out: Tensor) -> None:
    """out = old + new, which in this field is also new - old."""
    out.copy_(old ^ new)


def apply(parity: Tensor, slots: Tensor, differences: Tensor, positions: Tensor | None) -> None:
    """parity[slots[i]] += g^positions[i] · differences[i]; without positions, g^0."""
    places = [0] * len(slots) if positions is None else positions.tolist()
    for slot, place, row in zip(slots.tolist(), places, differences, strict=True):
        parity[slot] ^= _product(coefficient(place), row)


def combine(members: Sequence[Tensor], coefficients: Sequence[int], out: Tensor) -> None:
    """out = the sum of coefficient · member."""
    total = torch.zeros_like(out)
    for factor, member in zip(coefficients, members, strict=True):
        total ^= _product(factor, member)
    out.copy_(total)


def encode(data: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """outs[0] = P, the sum of the data; outs[1] = Q, the sum of g^k · data[k]."""
    factors = [[1] * len(data), [coefficient(k) for k in range(len(data))]]
    parities = [torch.empty_like(out) for out in outs]
    for row_factors, parity in zip(factors, parities, strict=False):
        combine(data, row_factors, parity)
    for parity, out in zip(parities, outs, strict=True):
        out.copy_(parity)


def _product(factor: int, rows: Tensor) -> Tensor:
    """factor · rows: for each bit of the factor that is set, x^bit · rows."""
    powers = rows.to(torch.int32)
    total = torch.zeros_like(powers)
    for bit in range(8):
        if factor >> bit & 1:
            total ^= powers
        powers = powers << 1
        powers = torch.where(powers >= 256, powers ^ POLYNOMIAL, powers)
    return total.to(torch.uint8)
