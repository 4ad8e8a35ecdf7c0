"""Codes second moments in 8 bits a value: one logarithmic grid for each row (format §3.5).

On CPUs only: row states are coded where they are stored and decoded where chunks are read.
"""

from __future__ import annotations

from torch import Tensor

from recpoint.kernels.moments import cpu
from recpoint.kernels.moments.grid import CodedMoments

__all__ = ["CodedMoments", "decode", "decode_rows", "encode"]


def encode(rows: Tensor) -> CodedMoments:
    """Code each row of second moments on a grid of its own.

    Zero stays zero, and no other value becomes zero. Within a row the order of values stays. With
    the row's shift s, the error is at most 2^(s − 24) of a value, or 2^(s − 149) if that is larger.
    A row of decoded values is coded without an error.

    Args:
        rows: f32 [n, m], contiguous, on the CPU.

    Returns:
        The codes. A row with a value that is below zero (−0 too), above 2^127 or NaN is refused;
        its codes and its grid are 0.

    Raises:
        ValueError: the rows have another shape or dtype, or lie elsewhere.
    """
    return cpu.encode(rows)


def decode(codes: Tensor, grids: Tensor) -> Tensor:
    """Return the values of codes: f32 [n, m], each from 0 to 2^127, whatever the codes.

    Args:
        codes: u8 [n, m], contiguous, on the CPU.
        grids: i16 [n], contiguous, on the CPU.

    Raises:
        ValueError: codes or grids have another shape or dtype, or lie elsewhere.
    """
    return cpu.decode(codes, grids)


def decode_rows(
    codes: Tensor, grids: Tensor, table: Tensor, ids: Tensor | None, *, positions: Tensor | None
) -> None:
    """Write the values of chosen rows to their places in a table.

    Args:
        codes, grids: as for `decode`.
        table: f32 [R, m], contiguous, on the CPU.
        ids: the row of the table for each chosen row, int64 [k], below R; None: 0 … k − 1.
        positions: the chosen rows of the codes, int64 [k], below n; None: all.

    Raises:
        ValueError: a tensor has another shape or dtype, or lies elsewhere.
    """
    cpu.decode_rows(codes, grids, table, ids, positions=positions)
