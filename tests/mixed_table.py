"""A table whose rows are stored in all widths, and what a restore finds of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recpoint.catalog.persist import row_widths
from recpoint.format.job import Allocation
from recpoint.kernels import quantize
from recpoint.kernels.allocation import EXACT, reference
from recpoint.kernels.quantize import Method
from recpoint.kernels.quantize import reference as quantization
from tests.catalog_builder import Table

__all__ = [
    "FITTED",
    "LEVELED",
    "PRICE",
    "SCALE",
    "a_chunk_for_each_width",
    "decoded",
    "mixed_table",
    "widths_of",
]

PRICE, SCALE = 2.0**-10, 0.5
#: How rows with a price are quantized: whole ones, and residuals.
FITTED = Method(name="refit", bins=0, refits=2)
LEVELED = Method(name="level", refits=2)


def a_chunk_for_each_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the agent make chunks of few rows, too, instead of storing these in more bits."""
    monkeypatch.setattr(row_widths, "_CHUNK_COST_BYTES", 0)


def mixed_table(
    rows: int = 400,
    dim: int = 6,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    price: float = PRICE,
    state_dtype: torch.dtype = torch.float32,
    element_wise: bool = True,
    state_bits: int | None = None,
) -> Table:
    """Rows of importances of many orders of magnitude, some of rows that no code can store."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, dim, generator=generator).to(dtype)
    values[rows // 5 :: 29, 1] = float("nan")
    values[rows // 7 :: 31] += 1000  # binary16 has no such offsets
    exponents = torch.rand(rows, generator=generator) * 9 - 3
    squares = 10**exponents
    if element_wise:
        squares = squares[:, None] * (0.5 + torch.rand(rows, dim, generator=generator))
    squares[rows // 3] = 0.0
    squares[rows // 2] = float("inf")
    steps = torch.randint(0, 9, (rows,), generator=generator)
    return Table(
        "items",
        values,
        (steps, squares.to(state_dtype)),
        bits=8,
        quantizer="auto",
        state_bits=16 if state_bits == 16 else None,
        allocation=Allocation(price=price.hex(), state=1, scale=SCALE.hex()),
    )


def widths_of(table: Table) -> Tensor:
    """The width of each row, by the definition (format §7): u8 [rows]."""
    assert table.allocation is not None
    initial = table.allocation.initial
    squares = table.states[table.allocation.state].double().reshape(table.rows, -1)
    squares = squares - (0.0 if initial is None else float.fromhex(initial))
    means = torch.where(squares < 0, 0.0, squares).mean(dim=1)
    importance = (means * float.fromhex(table.allocation.scale)).float()
    return reference.allocate(
        table.values.float(),
        importance,
        float.fromhex(table.allocation.price),
        exact_bits=8 * table.values.element_size(),
    )


def decoded(values: Tensor, widths: Tensor, method: Method = FITTED) -> Tensor:
    """What a restore finds of rows that are stored in these widths: of the dtype of `values`."""
    decoded_rows = values.clone()
    for width in widths.unique().tolist():
        if width == EXACT:
            continue
        of_width = widths == width
        codes, scale, offset, exact, _ = quantization.quantize(
            values[of_width].float(), width, method, half_parameters=True
        )
        assert not exact.any()
        decoded_rows[of_width] = quantize.dequantize(codes, scale, offset).to(values.dtype)
    return decoded_rows
