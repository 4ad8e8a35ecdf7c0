"""First values of rows on a CPU, in one compiled pass."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.arguments import require_integers
from recpoint.kernels.first_values.shapes import require_columns
from recpoint.kernels.native import library

__all__ = ["uniform_values"]

_MASK = (1 << 64) - 1


def uniform_values(
    key: int,
    ids: Tensor,
    *,
    low: float,
    high: float,
    row_values: int,
    columns: range,
    dtype: torch.dtype,
) -> Tensor:
    """Return values from a uniform distribution: [n, columns], of the dtype, on the CPU.

    The call runs in the calling thread alone.

    Args:
        key: 0 to 2**64 - 1.
        ids: int64 [n], on the CPU: rows of the whole table, or any other numbers.
        low: the least value.
        high: values reach it only where the dtype rounds up to it.
        row_values: values in a row of the whole table.
        columns: the wanted ones of them, of step 1.
        dtype: a floating dtype of at most 64 bits.

    Raises:
        ValueError: ids of another form, or columns with steps.
    """
    require_integers("ids", ids)
    require_columns(columns)
    is_double = dtype == torch.float64
    computed = torch.float64 if is_double else torch.float32
    n = ids.shape[0]
    values = torch.empty(n, len(columns), dtype=computed, device="cpu")
    library.draw_uniform(
        key & _MASK, ids.data_ptr(), n, row_values, columns.start, len(columns),
        float(low), float(high - low), is_double, values.data_ptr(),
    )  # fmt: skip
    # To narrower dtypes than F32 by way of F32, as torch goes.
    return values if dtype == computed else values.to(dtype)
