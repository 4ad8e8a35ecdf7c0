"""Defines the batches and the reader interface of the examples, and hashes values to rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Batch", "Reader", "hash_keys", "hash_rows", "mix64"]


class Batch(NamedTuple):
    """One batch of n samples."""

    dense: torch.Tensor  # F32 [n, dense_width]
    sparse: torch.Tensor  # I64 [n, columns]; column c holds rows, or keys, of table c
    label: torch.Tensor  # F32 [n], 0 or 1


class Reader(Protocol):
    """An iterable over batches whose position can be saved and restored between any two batches.

    If `state_dict` is taken between two batches and loaded into a new reader of the same data, that
    reader continues with the very next batch. Nothing is read ahead, so no batch is ever in flight.
    A reader with workers also has `batches_until_checkpoint`, the number of batches it may read
    ahead.
    """

    #: Column name -> number of rows of its table, in the order of `Batch.sparse`.
    tables: dict[str, int]
    dense_width: int

    @property
    def total_batches(self) -> int | None:
        """Batches in one pass; None: not known before the end."""

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, object]:
        """Return the reader's position between two batches."""

    def load_state_dict(self, state: dict[str, object], /) -> None:
        """Continue after the last batch that was read before `state` was taken."""


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Map 64-bit integers one to one so that every output bit depends on all input bits.

    Constants: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def hash_rows(values: npt.NDArray[np.uint64], *, column: int, rows: int) -> npt.NDArray[np.int64]:
    """Hash values of one column to rows 0 … rows - 1; each column hashes differently."""
    salted = mix64(values ^ mix64(np.full(1, column, np.uint64)))
    return (salted % np.uint64(rows)).astype(np.int64)


def hash_keys(
    first: npt.NDArray[np.int64], second: npt.NDArray[np.int64], *, column: int
) -> npt.NDArray[np.int64]:
    """Hash pairs of keys to keys of 64 bits; each column hashes differently."""
    salted = mix64(first.view(np.uint64) ^ mix64(np.full(1, column, np.uint64)))
    return mix64(salted ^ second.view(np.uint64)).view(np.int64)
