"""Says what a keyed table shows of its slots, and how its row states are called.

A keyed table gives its rows, called slots, to keys: int64 of any value. Which key has a slot, and
what eviction knows of it, are exact row states of the slot (format §3.8). Row 0 is no slot: it
belongs to the keys that have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from recpoint.embeddings.tables.tables import Marker

__all__ = ["KeyCounts", "KeyedSlots", "slots_of"]


class KeyCounts(NamedTuple):
    """What has become of the keys that training looked up.

    Attributes:
        rows_used: keys that have a row now.
        inserted: keys that have got a row, each time that they did.
        evicted: keys that have lost their row, because another key needed it or it was too old.
        refused: keys that were not admitted, once for each lookup.
    """

    rows_used: int
    inserted: int
    evicted: int
    refused: int


@runtime_checkable
class KeyedSlots(Protocol):
    """The slots of one keyed table, of which nothing is a parameter or a buffer.

    Attributes:
        row_states: `keyed.key`, `keyed.last_use` and, where the rule of eviction counts uses,
            `keyed.uses`: int64 [rows], on the CPU, the same objects until the table grows.
        marker: is told of slots that are about to change: their key, last use, uses, row or
            entries in row states; None: nobody is.
        steps: the table's clock: steps of its optimizer so far.
        looked_up_step: the clock at the last lookup in training; -1: none since the start.
        inserted, evicted, refused: counts of keys since training began; see `state_dict`.
    """

    row_states: Mapping[str, Tensor]
    marker: Marker | None
    steps: int
    looked_up_step: int
    inserted: int
    evicted: int
    refused: int

    @property
    def rows_used(self) -> int:
        """Number of slots that keys have."""

    def counts_now(self) -> KeyCounts:
        """Return what the keys did so far, in any thread; a change may be half counted."""

    def refuse_optimizer(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Refuse an optimizer of which the first entries of a new key are not known.

        Args:
            optimizer: the optimizer.
            group: its parameter group that has the weight.

        Raises:
            SettingsError: it is such an optimizer.
        """

    def begin_states(self, optimizers: Sequence[Optimizer]) -> None:
        """Give slots whose key is new, or gone, the first entries in row states of optimizers.

        Entries are written in place, and so that torch counts no change of a row state, as rows
        are written: only steps of optimizers count. Without such slots nothing changes.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what is no row state, with live tensors.

        `settings` must be the same after a restore; `steps` is the clock of the table; `inserted`,
        `evicted` and `refused` are counts since training began; `admission` is what decides which
        keys get a slot.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, after `row_states` were written; rebuild the map."""

    def find(self, keys: Tensor) -> Tensor:
        """Return the slots of keys, int64 [n] from int64 [n]; 0: the key has none."""

    def delete(self, keys: Tensor) -> None:
        """Free the slots of keys, int64 [n]; keys without slot change nothing."""

    def leaving_order(self, row_states: Mapping[str, Tensor]) -> Tensor:
        """Return the slots that keys have, int64 [n], in the order in which they are evicted.

        Args:
            row_states: as the attribute, of any number of rows.
        """


def slots_of(module: nn.Module) -> KeyedSlots | None:
    """Return the slots of a keyed table's module; None: it is another module."""
    slots = getattr(module, "slots", None)
    return slots if isinstance(slots, KeyedSlots) else None
