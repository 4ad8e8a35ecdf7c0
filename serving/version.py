"""One version of a run in memory, which requests look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from recpoint.errors import UnknownRow, UnknownTable
from recpoint.format.records import CheckpointRef
from recpoint.serving.keyed_table import ServedTable

__all__ = ["Version"]

_MOST_NAMES: Final = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Version:
    """A checkpoint in memory: tables and dense layers of one step.

    Use it only inside the `with` block of `Follower.reading` that gave it, and do not write to it.
    After the block, its memory is used for a later version.

    Attributes:
        checkpoint: the checkpoint.
        committed_ms: when it was committed, in milliseconds since the Unix epoch, by the agent's
            clock.
        served_ms: when it was first served, by this host's clock.
        model: the model of the follower, if it has one, in evaluation mode.
        tables: by name.
        dense: parameters and buffers except the tables, by name; on the CPU.
    """

    checkpoint: CheckpointRef
    committed_ms: int
    served_ms: int
    model: nn.Module | None
    tables: Mapping[str, ServedTable]
    dense: Mapping[str, Tensor]

    @property
    def step(self) -> int:
        """Batches trained."""
        return self.checkpoint.step

    def lookup(self, table: str, ids: Tensor) -> Tensor:
        """Return rows `ids` [...] of a table: [..., dim] of the table's dtype, in new memory.

        The ids of a keyed table are keys, which are any int64. A key that has no row gets row 0,
        which is zeros, as in the trainer's evaluation.

        Raises:
            UnknownTable: there is no such table, or it is not followed; a KeyError.
            UnknownRow: an id in CPU memory is out of range; an IndexError.
            TypeError: the ids are not integers.
        """
        served = self.tables.get(table)
        if served is None:
            names = sorted(self.tables)
            more = len(names) - _MOST_NAMES
            raise UnknownTable(
                f"table {table!r}",
                found=f"no such table at step {self.step}",
                expected=f"one of {', '.join(map(repr, names[:_MOST_NAMES]))}"
                + (f" and {more} more" if more > 0 else "")
                if names
                else "a table; none is followed",
                next_step="look up one of these; if it is in the checkpoint (recpoint show URL), "
                "name it in Follower(tables=...)",
            )
        try:
            return served.lookup(ids)
        except IndexError:
            outside = ids[(ids < 0) | (ids >= served.rows)]
            if not outside.numel():
                raise
            raise UnknownRow(
                f"table {table!r}",
                found=f"row {int(outside[0])} among {ids.numel()} ids",
                expected=f"rows 0 … {served.rows - 1}, of {served.rows} at step {self.step}",
                next_step="look up rows that the table has; ids that came into use later need a "
                "larger table in training",
            ) from None

    def __call__(self, *inputs: object) -> object:
        """Return the model's output for `inputs`, without gradients."""
        if self.model is None:
            raise TypeError("the follower was made without a model")
        with torch.no_grad():
            return self.model(*inputs)
