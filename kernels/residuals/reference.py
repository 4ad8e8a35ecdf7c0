"""Residuals with whole-matrix operations."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.residuals.shapes import MOST_ERROR, require_like

__all__ = ["subtract"]


def subtract(rows: Tensor, base: Tensor, most: float) -> Tensor:
    """Return `rows - base`, NaN in all of a row that is stored exactly: f32 [n, dim]."""
    require_like(rows, base)
    residuals = rows - base
    if not rows.numel():
        return residuals
    greatest = base.abs().amax(dim=1) + MOST_ERROR * residuals.abs().amax(dim=1)
    is_constant = (rows == rows[:, :1]).all(dim=1)
    residuals[is_constant | ~(greatest <= most)] = torch.nan
    return residuals
