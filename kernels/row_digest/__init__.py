"""One number for a set of rows, whatever their order: what was staged is what was stored.

On CPUs only: rows are digested where they lie in host memory, in the staging area and in chunks.
"""

from __future__ import annotations

from torch import Tensor

from recpoint.kernels.row_digest import cpu

__all__ = ["digest", "digest_each"]


def digest(rows: Tensor, ids: Tensor | int) -> int:
    """The sum, modulo 2^64, of a digest of each row's id and bytes (format §3.6).

    Sets of rows without a common id add up: digest(a) + digest(b) is that of both together. It
    finds damage and rows in the wrong place, not forgery.

    Args:
        rows: [n, *e] of any dtype, contiguous, on the CPU. An e of 0 digests the ids alone.
        ids: int64 [n], in any order; or the id of the first of n consecutive rows.

    Raises:
        ValueError: rows or ids are of another shape or dtype, or elsewhere.
    """
    return cpu.digest(rows, ids)


def digest_each(rows: Tensor, ids: Tensor) -> Tensor:
    """The digest of each row: int64 [n], the bits of what `digest` adds up.

    Args:
        rows: as for `digest`.
        ids: int64 [n].

    Raises:
        ValueError: as for `digest`.
    """
    return cpu.digest_each(rows, ids)
