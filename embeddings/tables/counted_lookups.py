"""Counts the lookups of each row of a table that trained it, in one byte a row.

Optimizers such as SGD keep nothing that says which rows matter. The gradients of samples are nearly
independent, so the squared gradients of a row add up with its lookups
(docs/understanding/allocation.md). The counts are a row state of the table: they change where its
rows are marked, and are stored and restored with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels import lookup_counts

__all__ = ["LOOKUPS", "LookupCounts"]

#: Name of the row state. Optimizers have names of their own, without a dot.
LOOKUPS = "recpoint.lookups"


class LookupCounts:
    """The lookups of each row of one table on the CPU.

    Args:
        rows: number of rows of the table.

    Attributes:
        codes: u8 [rows], as `kernels.lookup_counts` has them.
        counted: number of lookups counted so far, also before a restart.
    """

    __slots__ = ("codes", "counted")

    def __init__(self, rows: int) -> None:
        self.codes = torch.zeros(rows, dtype=torch.uint8, device="cpu")
        self.counted = 0

    def add(self, ids: Tensor) -> None:
        """Count one lookup for each id.

        Args:
            ids: int32 or int64 of any shape.

        Raises:
            IndexError: an id is out of range; nothing is counted.
        """
        lookup_counts.count(self.codes, ids.cpu(), start=self.counted)
        self.counted += ids.numel()

    def add_gradient(self, gradient: Tensor) -> None:
        """Count the lookups that a gradient tells of.

        A sparse gradient names the row of each lookup. If it was added up, as DDP does with those
        of all ranks, each row counts once; so does each row of a dense one that is not all zeros.

        Args:
            gradient: [rows, dim], sparse in its rows, or dense.
        """
        if gradient.is_sparse:
            self.add(gradient._indices()[0])
        else:
            self.add((gradient != 0).any(dim=1).nonzero().flatten())

    def follow_growth(self, rows: int) -> None:
        """Go on with more rows; nobody has looked up the new ones."""
        codes = torch.zeros(rows, dtype=torch.uint8, device="cpu")
        codes[: len(self.codes)] = self.codes
        self.codes = codes
