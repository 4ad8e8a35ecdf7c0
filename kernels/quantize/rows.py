"""Rows straight from a table to packed codes: gather, quantize and pack as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.kernels import row_gather
from recpoint.kernels.arguments import unsupported_device
from recpoint.kernels.quantize import cpu
from recpoint.kernels.quantize.method import ASYMMETRIC, Method
from recpoint.kernels.quantize.shapes import PackedRows, require_table, room_for_packed

__all__ = ["ExactRows", "exact_rows", "exact_rows_many", "quantize_rows"]

#: Rows a CPU works on at once: few enough to stay in its caches.
_PASS_BYTES: Final = 1 << 20


class ExactRows(NamedTuple):
    """positions int64 [m], ascending; values [m, dim] of the table's dtype."""

    positions: Tensor
    values: Tensor


def quantize_rows(
    table: Tensor,
    ids: Tensor | None,
    bits: int,
    method: Method = ASYMMETRIC,
    *,
    half_parameters: bool = False,
) -> PackedRows:
    """`quantize_packed` of the rows of a table, without a copy of them; the same bytes.

    On a GPU that is one launch, and what is left to bring to the host is the packed rows.

    Args:
        table: f32, f16 or bf16 [R, dim], contiguous.
        ids: int64 [n], each 0 <= id < R, in any order; None: all rows.
        bits: one of `BITS`.
        method: how scale and offset are found.
        half_parameters: as for `quantize`.

    On a GPU an id out of range is not reported; its row comes back `exact`, with codes zero.

    Raises:
        IndexError: on a CPU, an id is out of range.
        ValueError: shapes, dtypes or devices do not fit.
    """
    require_table(table, ids, bits)
    if table.is_cpu:
        return _on_cpu(table, ids, bits, method, half_parameters)
    if table.is_cuda:
        from recpoint.kernels.quantize import triton

        with torch.cuda.device_of(table):  # Triton launches on the current device
            return triton.quantize_rows(table, ids, bits, method, half_parameters=half_parameters)
    raise unsupported_device("table", table)


def exact_rows(table: Tensor, ids: Tensor | None, exact: Tensor) -> ExactRows:
    """The rows that `quantize_rows` with the same table and ids could not quantize, as they are.

    Nearly always there are none. Waits for the table's device, to know how many.

    Args:
        exact: bool [n], the flags it returned.
    """
    positions = torch.nonzero(exact).flatten()
    values = torch.empty(positions.numel(), table.shape[1], dtype=table.dtype, device=table.device)
    row_gather.gather(table, positions if ids is None else ids[positions], values)
    return ExactRows(positions, values)


def exact_rows_many(
    tables: Sequence[Tensor], ids: Sequence[Tensor | None], exact: Sequence[Tensor]
) -> list[ExactRows]:
    """`exact_rows` of many tables: waits once for each device on which there are none at all."""
    has_exact = {
        device: bool(torch.cat([flags for flags in exact if flags.device == device]).any())
        for device in {flags.device for flags in exact}
    }
    return [
        exact_rows(table, chosen, flags) if has_exact[flags.device] else _no_rows(table)
        for table, chosen, flags in zip(tables, ids, exact, strict=True)
    ]


def _no_rows(table: Tensor) -> ExactRows:
    positions = torch.empty(0, dtype=torch.int64, device=table.device)
    return ExactRows(positions, table.new_empty(0, table.shape[1]))


def _on_cpu(
    table: Tensor, ids: Tensor | None, bits: int, method: Method, half_parameters: bool
) -> PackedRows:
    n = table.shape[0] if ids is None else ids.numel()
    dim = table.shape[1]
    packed_rows = room_for_packed(n, dim, bits)
    rows_each = max(1, _PASS_BYTES // (4 * dim))
    buffer = torch.empty(min(rows_each, n), dim, dtype=table.dtype, device="cpu")
    for start in range(0, n, rows_each):
        stop = min(start + rows_each, n)
        if ids is None:
            rows = table[start:stop]
        else:
            rows = buffer[: stop - start]
            row_gather.gather(table, ids[start:stop], rows)
        parts = cpu.quantize_packed(
            rows.to(torch.float32), bits, method, half_parameters=half_parameters
        )
        for whole, part in zip(packed_rows, parts, strict=True):
            whole[start:stop] = part
    return packed_rows
