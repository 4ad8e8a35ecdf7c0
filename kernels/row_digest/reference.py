"""Digests of rows, whole columns of words at a time (format §3.6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from recpoint.kernels.row_digest.shapes import FIRST, FOLD, LAST, MASK, require_digestible

__all__ = ["digest", "digest_each"]


def digest(rows: Tensor, ids: Tensor | int) -> int:
    """Sum of the rows' digests, modulo 2^64."""
    n, row_bytes = require_digestible(rows, ids)
    first = torch.arange(ids, ids + n, device="cpu") if isinstance(ids, int) else ids
    words = np.zeros((n, -(-row_bytes // 8) * 8), np.uint8)
    if row_bytes:
        words[:, :row_bytes] = rows.reshape(-1).view(torch.uint8).numpy().reshape(n, row_bytes)
    value = (first.numpy().view(np.uint64) + np.uint64(1)) * np.uint64(FIRST)
    for word in _columns(words):
        value = (value ^ word) * np.uint64(FOLD)
        value ^= value >> np.uint64(32)
    value = (value ^ (value >> np.uint64(29))) * np.uint64(LAST)
    value ^= value >> np.uint64(32)
    return int(sum(value.tolist())) & MASK


def digest_each(rows: Tensor, ids: Tensor) -> Tensor:
    """The digest of each row, one row at a time."""
    require_digestible(rows, ids)
    digests = [digest(rows[i : i + 1], ids[i : i + 1]) for i in range(len(ids))]
    return torch.from_numpy(np.array(digests, np.uint64).view(np.int64))


def _columns(words: np.ndarray[Any, Any]) -> Any:
    return words.view("<u8").T if words.size else []
