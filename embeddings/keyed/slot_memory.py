"""Says where the rows of a keyed table's slots lie: in the module's weight, or in a cache.

`SlotMemory` writes rows and their entries in an optimizer's row states, and says where a lookup
reads them. `PlainMemory` has all slots in the weight; `cache/cached_keys.py` has those in use.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import Parameter

from recpoint.embeddings.home.channel import Channel, GlooChannel
from recpoint.embeddings.home.ranks import rank_and_count

__all__ = ["LookupRows", "PlainMemory", "SlotMemory"]

#: The longest time that a rank may be behind the others in a lookup.
_WAIT_SECONDS: Final = 600.0

#: The process group of the training, and the channel in it; one for all tables, because all ranks
#: look them up in the same order.
_opened: list[tuple[Any, Channel]] = []


class LookupRows(NamedTuple):
    """Where one lookup reads its rows.

    Attributes:
        places: positions in `weight`: of the shape, dtype and device of what was looked up.
        weight: [n, dim]; its gradient goes to the table's parameter, if it is trained.
        padding: the position that has no gradient and is left out of bags; None: there is none.
    """

    places: Tensor
    weight: Tensor
    padding: int | None

    def copied(self) -> LookupRows:
        """Return places in a copy of the rows, in which place 0 is that of keys without a row."""
        places = torch.arange(1, self.places.numel() + 1, device=self.places.device)
        places = places.view(self.places.shape)
        if self.padding is not None:
            places = places.masked_fill(self.places == self.padding, 0)
        copies = self.weight.index_select(0, self.places.reshape(-1))
        return LookupRows(places, torch.cat([copies.new_zeros(1, copies.shape[1]), copies]), 0)


class SlotMemory(Protocol):
    """The rows of a table's slots, and their entries in row states.

    No write counts as a change of the weight: autograd has to find it unchanged if a lookup between
    a forward and its backward pass gives slots to other keys.

    A memory that cannot take another weight refuses it.
    """

    @property
    def weight(self) -> Parameter:
        """The module's parameter."""

    @weight.setter
    def weight(self, weight: Parameter) -> None: ...

    @property
    def zero_row(self) -> int:
        """Position in the weight of row 0, once it is there."""

    @property
    def is_whole(self) -> bool:
        """Whether the weight has the rows of all slots."""

    @property
    def ranks(self) -> int:
        """Number of ranks that give the same slots to the same keys."""

    def gather(self, own_part: Tensor) -> list[Tensor]:
        """Send bytes to all these ranks, uint8 [n], and return those of each. Collective.

        Raises:
            RanksDiffer: a rank does something else.
            RankLost: a rank does not answer.
        """

    def put(self, slots: Tensor, values: Tensor) -> None:
        """Write the values of rows: [n, dim] for slots, int64 [n]."""

    def empty(self, slots: Tensor) -> None:
        """Write zeros into slots, int64 [n]; a slot may come several times."""

    def drop_gradients(self, slots: Tensor) -> None:
        """Take the rows of slots, int64 [n], out of a gradient that an earlier step has applied.

        A loop that does not set the gradient to zero before the lookups of the next step would else
        add the gradient of the key that had a slot to that of the key that has it now.
        """

    def begin_entry(self, slots: Tensor, state: Tensor, value: float) -> None:
        """Give slots, int64 [n], their first entry in a row state of the weight."""

    def lookup_rows(self, weight: Tensor, slots: Tensor, *, trains: bool) -> LookupRows:
        """Return where a lookup reads slots.

        Args:
            weight: the module's weight.
            slots: int64, any shape, on the CPU; 0: the key has none.
            trains: the weight gets a gradient. If not, its rows may leave at any time.
        """

    def rows(self, slots: Tensor) -> Tensor:
        """Return a copy of the rows of slots, int64 [n] on the CPU: [n, dim]."""


class PlainMemory:
    """The rows of all slots, in the module's weight.

    Args:
        weight: [slots + 1, dim].
    """

    zero_row = 0
    is_whole = True

    def __init__(self, weight: Parameter) -> None:
        self.weight = weight

    @property
    def ranks(self) -> int:
        """Number of ranks of the training, each of which has all rows."""
        return rank_and_count()[1]

    def gather(self, own_part: Tensor) -> list[Tensor]:
        """Send bytes to all ranks of the training; see `SlotMemory`."""
        return _channel().gather(own_part)

    def put(self, slots: Tensor, values: Tensor) -> None:
        """Write the values of rows; see `SlotMemory`."""
        weight = self.weight.data
        if not weight.is_cpu:
            slots, values = slots.to(weight.device), values.to(weight.device)
        weight.index_copy_(0, slots, values)

    def empty(self, slots: Tensor) -> None:
        """Write zeros into slots; see `SlotMemory`."""
        weight = self.weight.data
        weight.index_fill_(0, slots.to(weight.device), 0)

    def drop_gradients(self, slots: Tensor) -> None:
        """Take rows out of the gradient; see `SlotMemory`."""
        gradient = self.weight.grad
        if gradient is None:
            return
        with torch.no_grad():
            if not gradient.is_sparse:
                gradient.index_fill_(0, slots.to(gradient.device), 0)
                return
            entries = torch.isin(gradient._indices()[0], slots.to(gradient.device))
            gradient._values().masked_fill_(entries[:, None], 0)

    def begin_entry(self, slots: Tensor, state: Tensor, value: float) -> None:
        """Write first entries; see `SlotMemory`."""
        state.index_fill_(0, slots.to(state.device), value)

    def lookup_rows(self, weight: Tensor, slots: Tensor, *, trains: bool) -> LookupRows:
        """Return the slots themselves; see `SlotMemory`."""
        return LookupRows(slots, weight if trains else weight.detach(), 0)

    def rows(self, slots: Tensor) -> Tensor:
        """Return a copy of rows, on the weight's device; see `SlotMemory`."""
        weight = self.weight.detach()
        return weight.index_select(0, slots.to(weight.device))


def _channel() -> Channel:
    group = dist.group.WORLD
    if not _opened or _opened[0][0] is not group:
        _opened[:] = [(group, GlooChannel("keys of a lookup", wait_seconds=_WAIT_SECONDS))]
    return _opened[0][1]
