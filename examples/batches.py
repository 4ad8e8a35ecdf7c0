"""What every reader of the examples hands out, and what it promises to a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Batch", "Reader", "hash_rows", "mix64"]


class Batch(NamedTuple):
    """One batch of n samples."""

    dense: torch.Tensor  # F32 [n, dense_width]
    sparse: torch.Tensor  # I64 [n, columns]; column c holds rows of table c
    label: torch.Tensor  # F32 [n], 0 or 1


class Reader(Protocol):
    """An endless-looking loop over batches that can be left and re-entered between any two.

    `state_dict` taken between two batches, loaded into a new reader of the same data, makes that
    one go on with the very next batch. Nothing is read ahead, so no batch is ever in flight; a
    reader with workers also has `batches_until_checkpoint`, which tells it how far it may go.
    """

    #: Column name to rows of its table, in the order of `Batch.sparse`.
    tables: dict[str, int]
    dense_width: int

    @property
    def total_batches(self) -> int | None:
        """Batches in one pass; None when that is not known before the end."""

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, object]:
        """Where the reader stands, between two batches."""

    def load_state_dict(self, state: dict[str, object], /) -> None:
        """Go on right behind the batch that was the last one when `state` was taken."""


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64-bit integers whose output bits all depend on all input bits.

    Constants: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def hash_rows(values: npt.NDArray[np.uint64], *, column: int, rows: int) -> npt.NDArray[np.int64]:
    """Rows 0 … rows - 1 for the values of one column; two columns hash the same value apart."""
    salted = mix64(values ^ mix64(np.full(1, column, np.uint64)))
    return (salted % np.uint64(rows)).astype(np.int64)
