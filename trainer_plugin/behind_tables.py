"""What comes behind the tables in a slot: the state, and room for the sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.format.job import StagedTable
from recpoint.trainer_plugin.device_drain import DeviceDrain
from recpoint.trainer_plugin.sample import Sample, live_rows
from recpoint.trainer_plugin.slot import Slot
from recpoint.trainer_plugin.snapshot import (
    SMALL_BYTES,
    Placed,
    TablePart,
    copy_state,
    full_bytes,
    place_state,
)

__all__ = ["BehindTables", "behind_tables"]


class BehindTables(NamedTuple):
    """What a slot holds besides the tables, and what the job says of both.

    Attributes:
        tree: the state tree.
        tensors: those that it numbers, the live ones.
        placed: where both go.
        end: of the state, behind which the sample comes.
        sample: sampled rows, copied, but not into the slot.
        tables: the tables as the job describes them.
        full_bytes: of a full, exact checkpoint.
    """

    tree: bytes
    tensors: list[Tensor]
    placed: tuple[Placed, ...]
    end: int
    sample: Sample
    tables: tuple[StagedTable, ...]
    full_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Where the sample, which is written later, will end."""
        return self.end + self.sample.size_bytes

    @property
    def is_small(self) -> bool:
        """Whether one thread is to write it."""
        return sum(tensor.nbytes for tensor in self.tensors) <= SMALL_BYTES

    def write(self, slot: Slot) -> None:
        """Copy it to its places, but for the sample; raises as `Slot.grow` does."""
        slot.grow(self.slot_bytes)
        copy_state(self.placed, slot.data, self.tree, self.tensors)


def behind_tables(
    parts: Sequence[TablePart],
    end: int,
    tree: bytes,
    tensors: list[Tensor],
    sample: Sample,
    device: DeviceDrain,
) -> BehindTables:
    """What comes behind tables that end at `end`; copies the sampled rows.

    Args:
        parts: the tables.
        end: in the slot, in bytes.
        tree: as `state_tree.flatten` returned it, with its tensors.
        sample: drawn, and not copied yet.
        device: takes charge of sampled rows that are on one.
    """
    placed, state_end = place_state(tree, tensors, end)
    with torch.no_grad():
        sample.copy([live_rows(part.values, part.row_states) for part in parts], device)
    return BehindTables(
        tree=tree,
        tensors=tensors,
        placed=placed,
        end=state_end,
        sample=sample,
        tables=tuple(part.staged for part in parts),
        full_bytes=full_bytes(parts, tree, tensors),
    )
