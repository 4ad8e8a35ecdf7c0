"""Counts of lookups, one lookup after the other."""

from __future__ import annotations

from torch import Tensor

from recpoint.kernels.lookup_counts.steps import require_counts

__all__ = ["count"]

_BITS_64 = (1 << 64) - 1


def count(codes: Tensor, ids: Tensor, *, start: int) -> None:
    """Count one lookup of a row for each id that names it, in place."""
    require_counts(codes, ids, start)
    looked_up = ids.reshape(-1).tolist()
    for row in looked_up:
        if not 0 <= row < len(codes):
            raise IndexError(f"ids: {row}, expected 0 <= id < {len(codes)}")
    for number, row in enumerate(looked_up, start):
        code = int(codes[row])
        step = 1 << max(code // 8 - 1, 0)
        if code < 255 and _mixed(number) % step == 0:
            codes[row] = code + 1


def _mixed(number: int) -> int:
    """Return 64 bits that look drawn by chance: SplitMix64 (Steele, Lea, Flood, 2014)."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & _BITS_64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _BITS_64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _BITS_64
    return mixed ^ mixed >> 31
