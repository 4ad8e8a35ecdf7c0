"""Digests of rows in one compiled pass, without the GIL and in the calling thread alone.

Each row is a chain of multiplications. But rows are independent, so a processor works on several
rows at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.native import library
from recpoint.kernels.row_digest.shapes import require_digestible

__all__ = ["digest", "digest_each"]


def digest(rows: Tensor, ids: Tensor | int) -> int:
    """Sum of the rows' digests, modulo 2^64."""
    n, row_bytes = require_digestible(rows, ids)
    listed, first = (0, ids) if isinstance(ids, int) else (ids.data_ptr(), 0)
    return int(library.digest_rows(rows.data_ptr(), listed, first, row_bytes, n))


def digest_each(rows: Tensor, ids: Tensor) -> Tensor:
    """The digest of each row."""
    n, row_bytes = require_digestible(rows, ids)
    out = torch.empty(n, dtype=torch.int64, device="cpu")
    library.digest_each_row(rows.data_ptr(), ids.data_ptr(), row_bytes, n, out.data_ptr())
    return out
