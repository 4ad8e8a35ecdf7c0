"""One version of a served model: what a request sees, whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from recpoint.format.records import CheckpointRef
from recpoint.serving.tables import ServedTable

__all__ = ["Version"]


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
            KeyError: there is no such table, or it is not followed.
            IndexError: an id is out of range.
        """
        return self.tables[table].lookup(ids)

    def __call__(self, *inputs: object) -> object:
        """What the model makes of `inputs`, without gradients."""
        if self.model is None:
            raise TypeError("the follower was made without a model")
        import torch

        with torch.no_grad():
            return self.model(*inputs)
