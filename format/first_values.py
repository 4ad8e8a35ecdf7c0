"""Computes the first values of rows from a rule that a chunk names (format §3.9)."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Annotated, Final, Literal, Self

from pydantic import StringConstraints, model_validator

from recpoint.format.dtypes import array_bytes, torch_dtype
from recpoint.format.manifest import TableSpec
from recpoint.format.records import HexFloat, Part

if TYPE_CHECKING:  # the command line reads records without torch
    from torch import Tensor

__all__ = ["FirstValueRule", "most_first_rows"]

#: Most bytes of the rows that a reader computes from one chunk.
_MOST_BYTES: Final = 32 << 20


class FirstValueRule(Part):
    """How rows began: each value from a uniform distribution, by a hash of key, row and column.

    Attributes:
        key: of the table and its seed: 16 hexadecimal digits.
        low, high: the values lie between them.
    """

    rule: Literal["uniform"] = "uniform"
    key: Annotated[str, StringConstraints(pattern=r"\A[0-9a-f]{16}\z")]
    low: HexFloat
    high: HexFloat

    @model_validator(mode="after")
    def _range(self) -> Self:
        low, high = float.fromhex(self.low), float.fromhex(self.high)
        if not (low < high and math.isfinite(high - low)):
            raise ValueError("the low value of a rule must be below its high one")
        return self

    @classmethod
    def uniform(cls, table: str, *, seed: int, low: float, high: float) -> Self | None:
        """Return the rule of a table; None if these are no numbers of the format.

        Args:
            table: the name that the values depend on.
            seed: 0 to 2**32 - 1.
            low, high: the ends.
        """
        if not (math.isfinite(low) and math.isfinite(high) and math.isfinite(high - low)):
            return None
        key = zlib.crc32(table.encode()) << 32 | seed
        return cls(key=f"{key:016x}", low=float(low).hex(), high=float(high).hex())

    def rows(self, spec: TableSpec, ids: Tensor, *, values: int | None = None) -> Tensor:
        """Return the first values of rows: [n, dim], of the table's dtype, on the CPU.

        Args:
            spec: the table, or a piece of it.
            ids: int64 [n], on the CPU.
            values: how many of the columns, from the first on; None: all.
        """
        from recpoint.kernels.first_values import uniform_values

        first, row_values = 0, spec.dim
        if spec.columns is not None:
            first, row_values = spec.columns.first, spec.columns.of
        return uniform_values(
            int(self.key, 16),
            ids.contiguous(),
            low=float.fromhex(self.low),
            high=float.fromhex(self.high),
            row_values=row_values,
            columns=range(first, first + (spec.dim if values is None else values)),
            dtype=torch_dtype(spec.dtype),
        )


def most_first_rows(spec: TableSpec) -> int:
    """Return how many rows a chunk of first values may have at most: a reader computes them all."""
    row_bytes = array_bytes(spec.dtype, (spec.dim,))
    row_bytes += sum(array_bytes(state.dtype, state.shape) for state in spec.row_states)
    return max(1, _MOST_BYTES // row_bytes)
