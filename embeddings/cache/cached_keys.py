"""Keeps the rows of a keyed table's slots in a cache and at home.

Which key has which slot is decided when a lookup is made, as without a cache (`KeySlots`). The
slots are the rows of the table here: a row of the cache, and a record at home, belong to a slot of
the keyed table, whichever key has it. A slot whose key changes begins anew in the cache. Its old
row is not written back.

Plans are hints: the keys of coming batches that have slots now name the rows that are brought, and
the cache keeps a slot free for each key that has none (`reserved_slots.py`).

If several trainers share the rows, all give the same slots to the same keys, and make each lookup
together (`shared_lookups.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Never

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from recpoint.catalog.restore.state import canonical_name
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.lookup_places import rows_of_lookup
from recpoint.embeddings.cache.refused_uses import copy_refused, loaded_state_refused
from recpoint.embeddings.cache.reserved_slots import ReservedSlots
from recpoint.embeddings.cache.residents import CachedRows
from recpoint.embeddings.cache.shared_lookups import SlotChanges
from recpoint.embeddings.cache.slots import TableSlots
from recpoint.embeddings.keyed.embedding import KeyedEmbedding, KeyedEmbeddingBag
from recpoint.embeddings.keyed.slot_memory import LookupRows
from recpoint.errors import SettingsError

__all__ = ["CachedKeys", "KeyedLookup", "keyed_lookups_of", "keyed_modules", "rows_of_keyed"]

KeyedLookup = KeyedEmbedding | KeyedEmbeddingBag


class CachedKeys:
    """The rows of one keyed table's slots, in a cache; a `SlotMemory`.

    Args:
        cache: the cache.
        name: name of the table in it.
        is_bag: whether lookups sum rows in bags.
        sparse: whether lookups give sparse gradients.
    """

    is_whole = False

    def __init__(self, cache: Cache, name: str, *, is_bag: bool, sparse: bool) -> None:
        self.cache = cache
        self.name = name
        self._is_bag = is_bag
        self._sparse = sparse
        slots = cache.tables[name].slots
        self._changes = SlotChanges(slots.dim, slots.weight.dtype)
        #: Row states of all slots -> those of this trainer's part, which are in the same memory.
        self._parts: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None = None

    @classmethod
    def install(cls, cache: Cache, name: str, module: KeyedLookup) -> CachedKeys:
        """Have a module, whose weight are the slots of a cache already, find its rows there."""
        rows = module.slots.rows
        is_bag = isinstance(module, KeyedEmbeddingBag)
        keys = cls(cache, name, is_bag=is_bag, sparse=rows.sparse)
        rows.memory = keys
        rows.follow_weight()
        return keys

    @property
    def weight(self) -> Parameter:
        """The slots of the cache."""
        return self.cache.tables[self.name].slots.weight

    @weight.setter
    def weight(self, weight: Parameter) -> None:
        self.cache.tables[self.name].slots.refuse_other(weight)

    @property
    def zero_row(self) -> int:
        """The place of row 0, which is the padding row."""
        return self.cache.tables[self.name].slots.padding

    @property
    def ranks(self) -> int:
        """Number of trainers that share the rows."""
        shared = self.cache.shared_lookups
        return 1 if shared is None else shared.ranks

    @property
    def rank(self) -> int:
        """Number of this trainer among them."""
        shared = self.cache.shared_lookups
        return 0 if shared is None else shared.rank

    @property
    def part(self) -> range:
        """The rows that checkpoints of this trainer hold."""
        return self.cache.tables[self.name].part

    def part_of(self, row_states: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the row states of this trainer's part; the same objects in each call.

        Args:
            row_states: name -> [rows], those of the table's slots; the same object in each call.
        """
        if self.ranks == 1:
            return row_states
        if self._parts is None or self._parts[0] is not row_states:
            part = slice(self.part.start, self.part.stop)
            self._parts = row_states, {name: state[part] for name, state in row_states.items()}
        return self._parts[1]

    def share_restored(self, row_states: Mapping[str, Tensor]) -> None:
        """Write the parts that other trainers have restored into row states. Collective.

        Args:
            row_states: name -> int64 [rows], those of the table's slots, with the part of this
                trainer.

        Raises:
            RanksDiffer: trainers do different things.
            RankLost: a trainer does not answer.
        """
        self._changes.clear()
        shared = self.cache.shared_lookups
        if shared is None:
            return
        own_states = self.part_of(row_states)
        for name, state in row_states.items():
            parts = shared.share(own_states[name].contiguous().view(torch.uint8))
            state.copy_(torch.cat([part.clone().view(state.dtype) for part in parts]))

    def refuse_reset(self) -> None:
        """Refuse to take rows from keys outside of lookups, if trainers share the rows.

        Raises:
            SettingsError: they do.
        """
        if self.ranks > 1:
            self.cache.refuse_reset(self.name)

    def gather(self, own_part: Tensor) -> list[Tensor]:
        """Send bytes to all trainers; see `SlotMemory`."""
        shared = self.cache.shared_lookups
        return [own_part] if shared is None else shared.gather(self.name, own_part)

    def put(self, slots: Tensor, values: Tensor) -> None:
        """Begin rows with values, and with the row states of rows that were never trained."""
        if self.ranks > 1:  # their owners write them when the lookup is made
            self._changes.put(slots, values)
        else:
            self.cache.begin_rows(self.name, slots, values)

    def empty(self, slots: Tensor) -> None:
        """Begin rows with zeros; see `SlotMemory`."""
        if self.ranks > 1:
            self._changes.empty(torch.unique(slots))
        else:
            self.cache.empty_rows(self.name, torch.unique(slots))

    def drop_gradients(self, slots: Tensor) -> None:
        """Do nothing: the cache refuses a gradient that an earlier step has applied."""

    def begin_entry(self, slots: Tensor, state: Tensor, value: float) -> None:
        """Do nothing: rows begin with all their row states."""

    def lookup_rows(self, weight: Tensor, slots: Tensor, *, trains: bool) -> LookupRows:
        """Bring slots, and return where they are in the cache; see `SlotMemory`."""
        self.cache.tables[self.name].slots.refuse_other(weight)
        if self.ranks > 1:
            self.cache.bring_together(self.name, slots, self._changes, trains=trains)
        rows = rows_of_lookup(
            self.cache, self.name, slots, trains=trains, sparse=self._sparse, is_bag=self._is_bag
        )
        return rows if trains else rows._replace(weight=rows.weight.detach())

    def rows(self, slots: Tensor) -> Tensor:
        """Return a copy of rows, wherever they are; see `SlotMemory`."""
        return self.cache.rows_of(self.name, slots)[0]

    def looked_up(self, module: object, args: object, output: object) -> None:
        """Follow the graph of a lookup; a forward hook of the module."""
        self.cache.tables[self.name].made_lookup(output)

    def refuse_state(self, *_: object) -> None:
        """Refuse `load_state_dict`; see `loaded_state_refused`.

        Raises:
            SettingsError: always.
        """
        raise loaded_state_refused(self.name)

    def __reduce__(self) -> Never:
        raise copy_refused(self.name)


def keyed_modules(model: nn.Module) -> dict[str, KeyedLookup]:
    """Return the keyed tables of a model by name, as other tables are named."""
    if not isinstance(model, nn.Module):
        return {}
    return {
        canonical_name(model, name) or "weight": module
        for name, module in model.named_modules()
        if isinstance(module, KeyedLookup)
    }


def rows_of_keyed(name: str, module: KeyedLookup, capacity: int) -> CachedRows:
    """Return the rows of a keyed table's slots, none of which has been written.

    Args:
        name: name of the table.
        module: the table.
        capacity: number of slots of the cache.

    Raises:
        SettingsError: the table has keys, is cached already, or is on a GPU.
    """
    weight, keys = module.weight, module.slots
    problem = None
    if keyed_lookups_of(module) is not None:
        problem = "a table that is cached already"
    elif keys.rows_used or keys.rows.is_trained:
        problem = f"{keys.rows_used} keys that have rows already"
    elif weight.is_cuda:
        problem = f"a weight on {weight.device}"
    if problem is not None:
        raise SettingsError(
            f"cached(model): keyed table {name!r}",
            found=problem,
            expected="a new keyed table in memory or on the meta device",
            next_step="cache a new model and restore a checkpoint into it, or leave the table out: "
            "capacity_rows={name: slots} for the others",
        )
    slots = TableSlots(
        name,
        rows=module.capacity_rows + 1,
        capacity=capacity,
        dim=module.dim,
        dtype=weight.dtype,
        device=torch.device("cpu"),
        trained=weight.requires_grad,
        padding_row=0,
    )

    def zeros(ids: Tensor) -> Tensor:
        return torch.zeros(len(ids), slots.dim, dtype=slots.weight.dtype, device="cpu")

    return CachedRows(slots, zeros, None, reserved=ReservedSlots(keys, slots))


def keyed_lookups_of(module: nn.Module) -> CachedKeys | None:
    """Return the rows of a keyed table in a cache; None: it is another module, or not cached."""
    if isinstance(module, KeyedLookup):
        memory = module.slots.rows.memory
        return memory if isinstance(memory, CachedKeys) else None
    return None
