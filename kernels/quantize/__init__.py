"""Quantization of embedding rows to codes with one scale and offset a row (format §3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.arguments import unsupported_device
from recpoint.kernels.quantize import cpu
from recpoint.kernels.quantize.method import ASYMMETRIC, SYMMETRIC, Method, default_method
from recpoint.kernels.quantize.rows import ExactRows, exact_rows, exact_rows_many, quantize_rows
from recpoint.kernels.quantize.shapes import PackedRows, Quantized

__all__ = [
    "ASYMMETRIC",
    "ExactRows",
    "Method",
    "PackedRows",
    "Quantized",
    "SYMMETRIC",
    "default_method",
    "dequantize",
    "dequantize_packed",
    "dequantize_rows",
    "exact_rows",
    "exact_rows_many",
    "quantize",
    "quantize_packed",
    "quantize_rows",
]


def quantize(
    rows: Tensor, bits: int, method: Method = ASYMMETRIC, *, half_parameters: bool = False
) -> Quantized:
    """Quantize f32 rows [n, dim], dim >= 1, to codes of `bits` bits.

    Rows that are not quantizable (format §3.2) come back with `exact` set and codes, scale and
    offset zero: their values have to be kept as they are.

    Args:
        rows: f32 [n, dim], contiguous.
        bits: one of `BITS`.
        method: how scale and offset are found.
        half_parameters: choose values of binary16 for scale and offset, and codes for those. Rows
            for which that would cost accuracy come back with `wide` set and parameters of binary32;
            which rows these are depends on the row and on bits, not on a search.

    Raises:
        ValueError: bits is not one of `BITS`, or rows is not a contiguous f32 matrix.
    """
    if rows.is_cpu:
        return cpu.quantize(rows, bits, method, half_parameters=half_parameters)
    if rows.is_cuda:
        from recpoint.kernels.quantize import triton

        with torch.cuda.device_of(rows):  # Triton launches on the current device
            return triton.quantize(rows, bits, method, half_parameters=half_parameters)
    raise unsupported_device("rows", rows)


def dequantize(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """f32 [n, dim]: code · scale + offset, rounded after each operation.

    Args:
        codes: u8 [n, dim].
        scale: f32 [n].
        offset: f32 [n].

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    if codes.is_cpu:
        return cpu.dequantize(codes, scale, offset)
    if codes.is_cuda:
        from recpoint.kernels.quantize import triton

        with torch.cuda.device_of(codes):  # Triton launches on the current device
            return triton.dequantize(codes, scale, offset)
    raise unsupported_device("codes", codes)


def quantize_packed(
    rows: Tensor, bits: int, method: Method = ASYMMETRIC, *, half_parameters: bool = False
) -> PackedRows:
    """`quantize` and `bit_packing.pack` in one pass over the rows; the same bytes."""
    if rows.is_cpu:
        return cpu.quantize_packed(rows, bits, method, half_parameters=half_parameters)
    if rows.is_cuda:
        from recpoint.kernels.quantize import triton

        with torch.cuda.device_of(rows):  # Triton launches on the current device
            return triton.quantize_packed(rows, bits, method, half_parameters=half_parameters)
    raise unsupported_device("rows", rows)


def dequantize_packed(
    packed: Tensor, scale: Tensor, offset: Tensor, *, dim: int, bits: int
) -> Tensor:
    """`bit_packing.unpack` and `dequantize` in one pass; the same values, f32 [n, dim]."""
    if packed.is_cpu:
        return cpu.dequantize_packed(packed, scale, offset, dim=dim, bits=bits)
    if packed.is_cuda:
        from recpoint.kernels.quantize import triton

        with torch.cuda.device_of(packed):  # Triton launches on the current device
            return triton.dequantize_packed(packed, scale, offset, dim=dim, bits=bits)
    raise unsupported_device("packed", packed)


def dequantize_rows(
    packed: Tensor,
    scale: Tensor,
    offset: Tensor,
    table: Tensor,
    ids: Tensor | None,
    *,
    bits: int,
    positions: Tensor | None = None,
) -> None:
    """`dequantize_packed` straight to where the rows belong; the same values. On the CPU only.

    Args:
        packed: u8 [n, packed_width(dim, bits)].
        scale: f32 [n].
        offset: f32 [n].
        table: f32 [R, dim], contiguous; written in place.
        ids: int64, without duplicates: the row of the table for each row that is decoded; None:
            its first rows.
        bits: one of `BITS`.
        positions: int64: which of the n rows to decode, in this order; None: all.

    Raises:
        IndexError: a position or an id is out of range; nothing was written.
        ValueError: shapes, dtypes or devices do not fit.
    """
    cpu.dequantize_rows(packed, scale, offset, table, ids, bits=bits, positions=positions)
