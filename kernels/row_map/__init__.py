"""A map from row ids to places, which grows with the rows in it. On CPUs only."""

from __future__ import annotations

from recpoint.kernels.row_map import cpu

__all__ = ["RowMap"]

RowMap = cpu.RowMap
