"""Codes of second moments, with whole-matrix operations on the bits of the values (format §3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.moments.grid import (
    BASE_SHIFT,
    LARGEST,
    LEAST_SHIFT,
    MOST_SHIFT,
    MOST_STEPS,
    CodedMoments,
    require_codes,
    require_moments,
    require_places,
)

__all__ = ["decode", "decode_rows", "encode"]


def encode(rows: Tensor) -> CodedMoments:
    """Code each row on the finest grid that reaches from its least to its greatest value."""
    require_moments(rows)
    n, m = rows.shape
    pattern = rows.view(torch.int32).long() & 0xFFFFFFFF
    refused = (pattern > LARGEST).any(dim=1)
    pattern = torch.where(refused[:, None], 0, pattern)
    is_zero = pattern == 0
    if m == 0:
        codes = torch.zeros(n, 0, dtype=torch.uint8, device="cpu")
        return CodedMoments(codes, torch.zeros(n, dtype=torch.int16, device="cpu"), refused)
    greatest = pattern.amax(dim=1)
    least = torch.where(is_zero, LARGEST, pattern).amin(dim=1)
    least = torch.where(greatest == 0, 0, least)
    shift = torch.full_like(least, MOST_SHIFT)
    for finer in reversed(range(LEAST_SHIFT, MOST_SHIFT)):
        steps = _nearest(greatest, finer) - (_base(least, finer) >> finer)
        shift = torch.where(steps <= MOST_STEPS, finer, shift)
    shift = torch.where(greatest == 0, LEAST_SHIFT, shift)
    base = _base(least, shift)
    nearest = _nearest(pattern, shift[:, None]).clamp(min=1)
    codes = torch.where(is_zero, 0, 1 + nearest - (base >> shift)[:, None])
    grids = (base >> BASE_SHIFT) | (shift - LEAST_SHIFT) << 12
    return CodedMoments(codes.to(torch.uint8), _signed(grids), refused)


def decode(codes: Tensor, grids: Tensor) -> Tensor:
    """Return the values of codes: f32 [n, m]."""
    require_codes(codes, grids)
    fields = grids.long() & 0xFFFF
    base, shift = (fields & 0xFFF) << BASE_SHIFT, LEAST_SHIFT + (fields >> 12)
    pattern = base[:, None] + ((codes.long() - 1) << shift[:, None])
    pattern = torch.where(codes == 0, 0, pattern.clamp(max=LARGEST))
    return pattern.to(torch.int32).view(torch.float32)


def decode_rows(
    codes: Tensor, grids: Tensor, table: Tensor, ids: Tensor | None, *, positions: Tensor | None
) -> None:
    """Write the values of chosen rows to their places in a table."""
    require_codes(codes, grids)
    count = require_places(codes, table, ids, positions)
    rows = decode(codes, grids)
    table[slice(count) if ids is None else ids] = rows if positions is None else rows[positions]


def _nearest(pattern: Tensor, shift: Tensor | int) -> Tensor:
    """Return the multiple of a step that is next to each pattern; of two, the greater."""
    return (pattern + _step(pattern, shift - 1)) >> shift


def _step(like: Tensor, shift: Tensor | int) -> Tensor:
    return torch.ones_like(like) << shift


def _base(least: Tensor, shift: Tensor | int) -> Tensor:
    """Return the base of a grid: the least value's bits, rounded down to a multiple."""
    multiple = torch.as_tensor(shift, device="cpu").clamp(min=BASE_SHIFT)
    return (least >> multiple) << multiple


def _signed(fields: Tensor) -> Tensor:
    """Return 16 bits as a signed integer of the same bits."""
    return torch.where(fields >= 1 << 15, fields - (1 << 16), fields).to(torch.int16)
