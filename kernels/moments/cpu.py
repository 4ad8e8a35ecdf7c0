"""Codes of second moments in compiled passes, without the GIL; rows are split over threads."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.moments.grid import (
    CodedMoments,
    require_codes,
    require_moments,
    require_places,
)
from recpoint.kernels.native import library, team_size

__all__ = ["decode", "decode_rows", "encode"]


def encode(rows: Tensor) -> CodedMoments:
    """Code each row on a grid of its own."""
    require_moments(rows)
    n, m = rows.shape
    codes = torch.empty(n, m, dtype=torch.uint8, device="cpu")
    grids = torch.empty(n, dtype=torch.int16, device="cpu")
    refused = torch.empty(n, dtype=torch.bool, device="cpu")
    library.encode_moments(
        rows.data_ptr(), m, n, codes.data_ptr(), grids.data_ptr(), refused.data_ptr(),
        team_size(rows.nbytes + codes.nbytes),
    )  # fmt: skip
    return CodedMoments(codes, grids, refused)


def decode(codes: Tensor, grids: Tensor) -> Tensor:
    """Return the values of codes: f32 [n, m]."""
    require_codes(codes, grids)
    rows = torch.empty(codes.shape, dtype=torch.float32, device="cpu")
    _decode_into(codes, grids, rows, None, None, len(codes))
    return rows


def decode_rows(
    codes: Tensor, grids: Tensor, table: Tensor, ids: Tensor | None, *, positions: Tensor | None
) -> None:
    """Write the values of chosen rows to their places in a table."""
    require_codes(codes, grids)
    count = require_places(codes, table, ids, positions)
    _decode_into(codes, grids, table, ids, positions, count)


def _decode_into(
    codes: Tensor,
    grids: Tensor,
    table: Tensor,
    ids: Tensor | None,
    positions: Tensor | None,
    count: int,
) -> None:
    m = codes.shape[1]
    chosen = [0 if places is None else places.data_ptr() for places in (positions, ids)]
    library.decode_moments(
        codes.data_ptr(), grids.data_ptr(), table.data_ptr(), m, *chosen, count,
        team_size(5 * m * count),
    )  # fmt: skip
