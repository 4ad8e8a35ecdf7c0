"""One version of a served model: what a request sees, whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn

from recpoint.embeddings.served_tables import ServedTable
from recpoint.errors import UnknownRow, UnknownTable
from recpoint.format.records import CheckpointRef

__all__ = ["Version"]

_MOST_NAMES: Final = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Version:
    """A checkpoint in memory: tables and dense layers of one step.

    It is good inside the `with` block of `Follower.reading` that gave it, and must not be written
    to; after that, its memory is used for a later version.

    Attributes:
        checkpoint: which one.
        committed_ms: when it was committed, in milliseconds since the Unix epoch, by the agent's
            clock.
        served_ms: when it was first served, by this host's clock.
        model: the model of the follower, if it has one, in evaluation mode.
        tables: by name.
        dense: parameters and buffers but for the tables, by name; on the CPU.
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
        """Rows `ids` [...] of a table: [..., dim] of the table's dtype, in new memory.

        Raises:
            UnknownTable: there is no such table, or it is not followed; a KeyError.
            UnknownRow: an id is out of range, in memory of the CPU; an IndexError.
            TypeError: ids that are no integers.
        """
        there = self.tables.get(table)
        if there is None:
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
            return there.lookup(ids)
        except IndexError:
            outside = ids[(ids < 0) | (ids >= there.rows)]
            if not outside.numel():
                raise
            raise UnknownRow(
                f"table {table!r}",
                found=f"row {int(outside[0])} among {ids.numel()} ids",
                expected=f"rows 0 … {there.rows - 1}, of {there.rows} at step {self.step}",
                next_step="look up rows that the table has; ids that came into use later need a "
                "larger table in training",
            ) from None

    def __call__(self, *inputs: object) -> object:
        """What the model makes of `inputs`, without gradients."""
        if self.model is None:
            raise TypeError("the follower was made without a model")
        import torch

        with torch.no_grad():
            return self.model(*inputs)
