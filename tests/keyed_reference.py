"""A keyed table by a dict, which follows the rules of keyed tables in the plainest way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recpoint.catalog.restore.keyed_rows import KEY, LAST_USE
from recpoint.embeddings.tables.new_rows import first_entry
from recpoint.embeddings.tables.optimizers import row_states
from recpoint.embeddings.tables.tables import Marker

__all__ = ["DictEmbedding", "DictSlots"]


def first_row(key: int, dim: int) -> Tensor:
    """Return the first values of a key's row."""
    return torch.tensor([((key * 7 + column) % 11) / 11 - 0.5 for column in range(dim)])


class DictSlots:
    """Slots whose map is a dict; the least recently used key leaves first."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight
        rows = len(weight)
        self.row_states: Mapping[str, Tensor] = {
            KEY: torch.zeros(rows, dtype=torch.int64),
            LAST_USE: torch.full((rows,), -1),
        }
        self.marker: Marker | None = None
        self.settings = {"evict": "least recent"}
        self.map: dict[int, int] = {}
        self.pending: set[int] = set()
        self.steps = self.inserted = self.evicted = self.refused = 0

    @property
    def rows_used(self) -> int:
        """See `KeyedSlots`."""
        return len(self.map)

    def look_up(self, keys: Tensor) -> None:
        """Do what a lookup in training does."""
        unique_keys = sorted(set(keys.flatten().tolist()))
        new_keys = [key for key in unique_keys if key not in self.map]
        for key in unique_keys:
            if key in self.map:
                self._mark(self.map[key])
                self.row_states[LAST_USE][self.map[key]] = self.steps
        for key in new_keys:
            free_slots = [
                slot
                for slot in range(1, len(self.weight))
                if int(self.row_states[LAST_USE][slot]) < 0
            ]
            slot = free_slots[0] if free_slots else self._evict()
            self._mark(slot)
            self.weight.data[slot] = first_row(key, self.weight.shape[1])
            self.row_states[KEY][slot] = key
            self.row_states[LAST_USE][slot] = self.steps
            self.map[key] = slot
            self.pending.add(slot)
            self.inserted += 1

    def _mark(self, slot: int) -> None:
        if self.marker is not None:
            self.marker.looked_up(torch.tensor([slot]))

    def _evict(self) -> int:
        slot = int(self.leaving_order(self.row_states)[0])
        assert int(self.row_states[LAST_USE][slot]) < self.steps
        self.evicted += 1
        self._free(slot)
        return slot

    def _free(self, slot: int) -> None:
        self._mark(slot)
        del self.map[int(self.row_states[KEY][slot])]
        self.row_states[KEY][slot] = 0
        self.row_states[LAST_USE][slot] = -1
        self.weight.data[slot] = 0
        self.pending.add(slot)

    def follow(self, optimizer: Optimizer) -> None:
        """Begin states before steps of an optimizer, and count the steps."""

        def count(*_: object) -> None:
            self.steps += 1

        optimizer.register_step_pre_hook(lambda *_: self.begin_states([optimizer]))
        optimizer.register_step_post_hook(count)

    def refuse_optimizer(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Refuse none."""

    def begin_states(self, optimizers: Sequence[Optimizer]) -> None:
        """See `KeyedSlots`."""
        slots = torch.tensor(sorted(self.pending), dtype=torch.int64)
        for optimizer in optimizers:
            group = optimizer.param_groups[0]
            for name, state in row_states(
                optimizer.state.get(self.weight, {}), len(self.weight)
            ).items():
                state.data[slots] = first_entry(optimizer, group, name) or 0.0
        self.pending.clear()

    def state_dict(self) -> dict[str, Any]:
        """See `KeyedSlots`."""
        return {
            "settings": self.settings,
            "steps": self.steps,
            "inserted": self.inserted,
            "evicted": self.evicted,
            "refused": self.refused,
            "admission": {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `KeyedSlots`."""
        self.steps, self.inserted = state["steps"], state["inserted"]
        self.evicted, self.refused = state["evicted"], state["refused"]
        used = (self.row_states[LAST_USE] >= 0).nonzero().flatten().tolist()
        self.map = {int(self.row_states[KEY][slot]): slot for slot in used}
        assert len(self.map) == len(used)
        self.pending.clear()

    def find(self, keys: Tensor) -> Tensor:
        """See `KeyedSlots`."""
        return torch.tensor([self.map.get(key, 0) for key in keys.tolist()], dtype=torch.int64)

    def delete(self, keys: Tensor) -> None:
        """See `KeyedSlots`."""
        for key in keys.tolist():
            if key in self.map:
                self._free(self.map[key])

    def leaving_order(self, row_states: Mapping[str, Tensor]) -> Tensor:
        """See `KeyedSlots`."""
        last_use, key = row_states[LAST_USE].tolist(), row_states[KEY].tolist()
        used = [slot for slot, use in enumerate(last_use) if use >= 0]
        return torch.tensor(
            sorted(used, key=lambda slot: (last_use[slot], key[slot])), dtype=torch.int64
        )


class DictEmbedding(nn.Module):
    """Looks keys up in slots; [..., dim] from int64 [...]."""

    def __init__(self, capacity_rows: int, dim: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(capacity_rows + 1, dim))
        self.sparse = sparse
        self.slots = DictSlots(self.weight)

    def forward(self, keys: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.slots.look_up(keys)
        slots = self.slots.find(keys.flatten()).view_as(keys)
        return nn.functional.embedding(slots, self.weight, padding_idx=0, sparse=self.sparse)
