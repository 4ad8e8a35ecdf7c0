"""Computes the first values of rows from a rule that a chunk names (format §3.9)."""

from __future__ import annotations

import math
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

import numpy as np
from pydantic import StringConstraints, model_validator

from recpoint.format.dtypes import array_bytes, torch_dtype
from recpoint.format.manifest import TableSpec
from recpoint.format.records import HexFloat, Part

if TYPE_CHECKING:  # the command line reads records without torch
    import torch
    from torch import Tensor

__all__ = ["FirstValueRule", "Words", "mixed", "most_first_rows", "uniform_values"]

#: Most bytes of the rows that a reader computes from one chunk.
_MOST_BYTES: Final = 32 << 20

#: Values computed at once: few enough to fit the caches.
_PASS_VALUES: Final = 1 << 15

Words = np.ndarray[Any, np.dtype[np.uint64]]


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
        first, row_values = 0, spec.dim
        if spec.columns is not None:
            first, row_values = spec.columns.first, spec.columns.of
        return uniform_values(
            int(self.key, 16),
            ids,
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

    Args:
        key: 0 to 2**64 - 1.
        ids: int64 [n], on the CPU: rows of the whole table.
        low, high: the ends.
        row_values: values in a row of the whole table.
        columns: the wanted ones of them, of step 1.
        dtype: dtype of the table.

    The hash is SplitMix64 (Steele et al., OOPSLA 2014); its upper 24 bits give the value.
    """
    import torch

    values = torch.empty(len(ids), len(columns), dtype=dtype, device="cpu")
    seed = _hash_of(key)
    offsets: Words = np.arange(columns.start + 1, columns.stop + 1, dtype=np.uint64) + seed
    first_words: Words = ids.numpy().astype(np.uint64) * np.uint64(row_values)
    rows_each = max(1, _PASS_VALUES // max(1, len(columns)))
    for first in range(0, len(ids), rows_each):
        part = slice(first, first + rows_each)
        words = mixed(np.add(first_words[part, None], offsets)) >> np.uint64(40)
        # Below 2^24, which 64 bits with a sign hold too: those become floats faster.
        unit = words.view(np.int64) * 2.0**-24
        computed = torch.from_numpy(low + unit * (high - low))
        # To narrower dtypes than F32 by way of F32, as torch goes.
        values[part] = computed if dtype == torch.float64 else computed.to(torch.float32)
    return values


@lru_cache
def _hash_of(key: int) -> Words:
    return mixed(np.array([key], np.uint64))


def mixed(words: Words) -> Words:
    """Return the SplitMix64 hash of each word: uint64 of the same shape."""
    words = words * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(31))
