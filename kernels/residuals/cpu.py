"""Residuals in one compiled pass, without the GIL; rows are split over threads."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.native import library, team_size
from recpoint.kernels.residuals.shapes import MOST_ERROR, require_like

__all__ = ["subtract"]


def subtract(rows: Tensor, base: Tensor, most: float) -> Tensor:
    """Return `rows - base`, NaN in all of a row that is stored exactly: f32 [n, dim]."""
    require_like(rows, base)
    n, dim = rows.shape
    residuals = torch.empty(n, dim, dtype=torch.float32, device="cpu")
    if dim:
        library.subtract_base(
            rows.data_ptr(), base.data_ptr(), residuals.data_ptr(), dim, MOST_ERROR, most, n,
            team_size(3 * rows.nbytes),
        )  # fmt: skip
    return residuals
