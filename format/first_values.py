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

#: Numbers of SplitMix64.
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
_TURNS: Final = tuple(
    (np.uint64(shift), np.uint64(factor))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
)
_LAST_SHIFT: Final = np.uint64(31)
#: Low bits of a hash that its value does not use.
_LEFT_OUT: Final = np.uint64(40)


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

    offsets = _offsets(key, columns)
    first_words: Words = ids.numpy().view(np.uint64) * np.uint64(row_values)
    rows_each = max(1, _PASS_VALUES // max(1, len(columns)))
    count = ids.shape[0]
    if count <= rows_each:  # as for the few new keys of a batch, which this must not keep waiting
        return _values(first_words, offsets, low, high, dtype)
    values = torch.empty(count, len(columns), dtype=dtype, device="cpu")
    for first in range(0, count, rows_each):
        part = slice(first, first + rows_each)
        values[part] = _values(first_words[part], offsets, low, high, dtype)
    return values


def _values(
    first_words: Words, offsets: Words, low: float, high: float, dtype: torch.dtype
) -> Tensor:
    """Return the values of rows: [n, columns]."""
    import torch

    words = mixed(first_words[:, None] + offsets)
    words >>= _LEFT_OUT
    # Below 2^24, which 64 bits with a sign hold too: those become floats faster.
    values = words.view(np.int64) * 2.0**-24
    values *= high - low
    values += low
    computed = torch.from_numpy(values)
    # To narrower dtypes than F32 by way of F32, as torch goes.
    return computed if dtype == torch.float64 else computed.to(torch.float32).to(dtype)


@lru_cache
def _offsets(key: int, columns: range) -> Words:
    """Return what is added to the first word of a row in each column."""
    numbers = np.arange(columns.start + 1, columns.stop + 1, dtype=np.uint64)
    return numbers + mixed(np.array([key], np.uint64))


def mixed(words: Words) -> Words:
    """Return the SplitMix64 hash of each word: uint64 of the same shape."""
    words = words * _FACTOR
    for shift, factor in _TURNS:
        words ^= words >> shift
        words *= factor
    words ^= words >> _LAST_SHIFT
    return words
