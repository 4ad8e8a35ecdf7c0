"""Results of quantization, and what its arguments must have in common."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.bit_packing.widths import packed_width, require_bits, require_packed

__all__ = [
    "PackedRows",
    "Quantized",
    "require_parameters",
    "require_places",
    "require_rows",
    "require_table",
    "room_for_packed",
]


class Quantized(NamedTuple):
    """Codes u8 [n, dim]; scale and offset f32 [n]; exact and wide bool [n].

    exact: the row cannot be quantized and has to be kept as it is. wide: its parameters do not fit
    binary16, though that was asked for.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor
    exact: Tensor
    wide: Tensor


class PackedRows(NamedTuple):
    """Packed codes u8 [n, packed_width(dim, bits)]; the others as in `Quantized`."""

    packed: Tensor
    scale: Tensor
    offset: Tensor
    exact: Tensor
    wide: Tensor


def room_for_packed(n: int, dim: int, code_bits: int) -> PackedRows:
    """Memory on the CPU for `n` packed rows; its content is undefined."""
    return PackedRows(
        torch.empty(n, packed_width(dim, code_bits), dtype=torch.uint8, device="cpu"),
        torch.empty(n, dtype=torch.float32, device="cpu"),
        torch.empty(n, dtype=torch.float32, device="cpu"),
        torch.empty(n, dtype=torch.bool, device="cpu"),
        torch.empty(n, dtype=torch.bool, device="cpu"),
    )


def require_rows(rows: Tensor, bits: int) -> None:
    """Refuse what is not a contiguous f32 matrix with at least one column, or a wrong width."""
    require_bits(bits)
    require("rows", rows, torch.float32, 2)
    if rows.shape[1] < 1:
        raise ValueError("rows: dim 0, expected 1 or more")


def require_table(table: Tensor, ids: Tensor | None, bits: int) -> None:
    """Refuse a table that is not a contiguous matrix of f32, f16 or bf16, ids that are not int64
    [n] beside it, or a wrong width."""
    require_bits(bits)
    if table.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"table: dtype {table.dtype}, expected float32, float16 or bfloat16")
    require("table", table, table.dtype, 2)
    if table.shape[1] < 1:
        raise ValueError("table: dim 0, expected 1 or more")
    if ids is not None:
        require("ids", ids, torch.int64, 1)
        if ids.device != table.device:
            raise ValueError(f"ids: on {ids.device}, expected {table.device} as the table")


def require_parameters(n: int, device: torch.device, scale: Tensor, offset: Tensor) -> None:
    """Refuse row parameters that are not f32 [n] on `device`."""
    for name, parameter in (("scale", scale), ("offset", offset)):
        require(name, parameter, torch.float32, 1)
        if parameter.shape[0] != n or parameter.device != device:
            raise ValueError(
                f"{name}: {parameter.shape[0]} on {parameter.device}, expected {n} on {device}"
            )


def require_places(
    packed: Tensor, table: Tensor, ids: Tensor | None, bits: int, positions: Tensor | None
) -> None:
    """Refuse codes, a table, positions among the codes and places in the table that do not fit.

    Raises:
        IndexError: a position or an id is out of range.
        ValueError: names what does not fit.
    """
    require("table", table, torch.float32, 2)
    require_packed(packed, table.shape[1], bits)
    if not (table.is_cpu and packed.is_cpu):
        raise ValueError(f"table on {table.device}, packed on {packed.device}, expected cpu")
    n = packed.shape[0] if positions is None else positions.numel()
    for name, indices, limit in (
        ("positions", positions, packed.shape[0]),
        ("ids", ids, len(table)),
    ):
        if indices is None:
            continue
        require(name, indices, torch.int64, 1)
        if not indices.is_cpu:
            raise ValueError(f"{name}: device {indices.device}, expected cpu")
        if indices.numel() != n:
            raise ValueError(f"{name}: {indices.numel()}, expected one for each of {n} rows")
        if n and (int(indices.min()) < 0 or int(indices.max()) >= limit):
            raise IndexError(
                f"{name}: {int(indices.min())} … {int(indices.max())}, below {limit} expected"
            )
    if ids is None and n > len(table):
        raise ValueError(f"table: {len(table)} rows, expected {n} or more")
