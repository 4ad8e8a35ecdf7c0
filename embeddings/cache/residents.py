"""One table of a cache: its slots, and which of its rows have to stay in them.

A lookup with gradients on gives autograd the slots of its rows. The rows keep these slots until a
step has applied the gradient, or until no backward pass can come any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from recpoint.embeddings.cache.gradients import SlotGradients
from recpoint.embeddings.cache.reserved_slots import ReservedSlots
from recpoint.embeddings.cache.slots import TableSlots
from recpoint.embeddings.tables.optimizers import Watched
from recpoint.embeddings.tables.tables import Marker
from recpoint.errors import SettingsError
from recpoint.format.first_values import FirstValueRule
from recpoint.lookahead.oracle import Oracle, Step
from recpoint.lookahead.shared_oracle import SharedOracle

__all__ = ["NO_IDS", "CachedRows", "FirstValues"]

#: Returns the first values of rows, [n, dim], from their ids, int64 [n].
FirstValues = Callable[[Tensor], Tensor]

NO_IDS: Final = torch.empty(0, dtype=torch.int64, device="cpu")

#: Lookups that are remembered until a step, for each slot, before equal ones are dropped.
_MOST_LOOKUPS: Final = 4


class CachedRows:
    """One table of a cache: its slots, the oracle that assigns them, and its rows at home.

    Attributes:
        slots: the slots.
        part: the rows that checkpoints of this trainer hold.
        oracle: assigns slots to rows.
        gradients: adds up the gradients of the slots.
        marker: is told the rows that a step changes; None: nobody is, and `is_unmarked` says
            whether any row has changed.
        is_unmarked: a row has changed while there was no marker.
        is_trained: a step has changed rows, on any rank that shares the table.
        rule: the rule that gives rows their first values, as checkpoints name it; None: they name
            none. Rows that the table has got later may have another rule.
        reserved: keeps slots for the rows of new keys, in which case plans are of keys; None: ids
            are row numbers.
    """

    def __init__(
        self,
        slots: TableSlots,
        initial: FirstValues,
        storage: Tensor | None,
        rule: FirstValueRule | None = None,
        reserved: ReservedSlots | None = None,
    ) -> None:
        self.slots = slots
        self.rule = rule
        self.reserved = reserved
        self.part = range(slots.rows)
        self.initial = initial
        #: First values of the rows that the home does not get from `storage`.
        self._initial_beside_storage: FirstValues = _never
        #: The values of a table that had storage, until they are copied to the home.
        self.storage = storage
        self.is_copying = False
        self.oracle: Oracle | SharedOracle  # given by the cache
        self.marker: Marker | None = None
        self.is_unmarked = False
        #: Lookups with gradients on whose gradient no step has applied yet.
        self.looked_up: list[_Lookup] = []
        self.looked_up_rows = 0
        self._newest: _Graph | None = None  # of the lookup that is being made
        self.is_at_home = False  # the home has the table
        self.is_trained = False
        self.watched: tuple[int, Watched] | None = None
        #: The parameter that the module had before, which no optimizer may train any more.
        self.replaced: weakref.ref[Tensor] | None = None
        self_reference = weakref.ref(self)

        def slots_of(ids: Tensor) -> Tensor:
            rows = self_reference()
            assert rows is not None
            return rows.oracle.slots_of(ids)

        self.gradients = SlotGradients(slots, slots_of)

    def drop_storage(self) -> None:
        """Let the table's storage go: the home has all its rows."""
        self.storage = None
        self.initial = self._initial_beside_storage

    def add_rows(self, rows: int, initial: FirstValues) -> None:
        """Give the table more rows. Only the training thread is at work.

        Args:
            rows: rows of the table afterwards.
            initial: returns the first values of the new rows.
        """
        first_new = self.slots.rows
        self.initial = _split(self.initial, first_new, initial)
        self._initial_beside_storage = _split(self._initial_beside_storage, first_new, initial)
        self.slots.rows = rows
        self.part = range(rows)

    def expect(self, oracle: Oracle, ids: Tensor | None) -> None:
        """Expect what a batch looks up; see `Oracle.expect`.

        Args:
            oracle: the table's.
            ids: int32 or int64 [n], on the CPU; None: nothing.
        """
        oracle.expect(self.coming_ids(ids))

    def coming_ids(self, ids: Tensor | None) -> Tensor:
        """Return the rows that a coming batch looks up, as far as they are known: int64 [m].

        Args:
            ids: as for `expect`.
        """
        if ids is not None and self.reserved is not None:
            ids = self.reserved.rows_of(ids.long())
        return self.slots.in_range(ids)

    def plan(self, oracle: Oracle, ids: Tensor | None, *, batch: int) -> Step | None:
        """Plan what a batch looks up; see `Oracle.plan`.

        Args:
            oracle: the table's.
            ids: int32 or int64 [n], on the CPU; None: nothing.
            batch: the batch that training is at.

        Raises:
            CapacityError: see `Oracle.plan`.
        """
        if self.reserved is not None:
            return self.reserved.plan(oracle, ids, batch=batch)
        return oracle.plan(self.slots.in_range(ids))

    @property
    def since(self) -> int | None:
        """Number of the batch of the first lookup that a step may change rows of; None: none."""
        return min((lookup.batch for lookup in self.looked_up), default=None)

    def note_lookup(self, ids: Tensor, slots: Tensor, batch: int) -> None:
        """Remember slots whose rows a step may change; `made_lookup` must follow."""
        self._newest = _Graph(self, _Lookup(ids, slots, batch))
        self._newest.lookup.graph = weakref.ref(self._newest)
        self._remember(self._newest.lookup)
        if self.looked_up_rows > _MOST_LOOKUPS * max(self.slots.capacity, slots.numel()):
            self.forget_lookups()
            self._merge()

    def _remember(self, lookup: _Lookup) -> None:
        lookup.is_remembered = True
        self.looked_up.append(lookup)
        self.looked_up_rows += lookup.slots.numel()

    def made_lookup(self, output: object) -> None:
        """Follow the graph of the lookup's output; it decides how long rows stay in their slots."""
        graph, self._newest = self._newest, None
        if graph is not None and isinstance(output, Tensor) and output.grad_fn is not None:
            output.grad_fn.register_prehook(graph)

    def forget_lookups(self, *, applied: bool = False) -> None:
        """Forget lookups whose gradient was applied or dropped, or can never be computed.

        Args:
            applied: a step has applied the gradients there are.
        """
        is_gone = applied or self.slots.weight.grad is None
        kept_lookups = []
        for lookup in self.looked_up:
            lookup.is_remembered = not is_gone if lookup.has_run else lookup.may_run
            if lookup.is_remembered:
                kept_lookups.append(lookup)
        self.looked_up = kept_lookups
        self.looked_up_rows = sum(lookup.slots.numel() for lookup in kept_lookups)

    def _merge(self) -> None:
        """Merge lookups whose gradients are waiting for a step."""
        waiting = [lookup for lookup in self.looked_up if lookup.has_run]
        if not waiting:
            return
        slots = torch.unique(torch.cat([lookup.slots for lookup in waiting]))
        # In another order than the slots: only lookups whose graphs may run again need it.
        ids = torch.unique(torch.cat([lookup.ids.long() for lookup in waiting]))
        merged = _Lookup(ids, slots, min(lookup.batch for lookup in waiting))
        merged.has_run = True
        self.looked_up = [lookup for lookup in self.looked_up if not lookup.has_run]
        self.looked_up_rows = sum(lookup.slots.numel() for lookup in self.looked_up)
        for lookup in waiting:
            lookup.is_remembered = False
        self._remember(merged)

    def hold_lookups(self, batch: int) -> None:
        """Hold the rows of lookups until `batch`, so that all batches before can be released."""
        self.forget_lookups()
        for lookup in self.looked_up:
            self.oracle.slots_of(lookup.ids, hold=batch)
            lookup.batch = batch

    def has_run(self, lookup: _Lookup) -> None:
        """Take note of a backward pass through a lookup, its first or another one.

        Raises:
            SettingsError: rows of the lookup have left their slots, because a step has applied
                the gradient of an earlier pass.
        """
        lookup.has_run = True
        if lookup.is_remembered:
            return
        last_batch = self.oracle.released + 1
        if not torch.equal(self.oracle.slots_of(lookup.ids, hold=last_batch), lookup.slots):
            raise SettingsError(
                f"cached table {self.slots.name!r}",
                found="another backward pass of a lookup after a step and a later batch",
                expected="all backward passes of a lookup before the batch after its step",
                next_step="look the rows up again",
            )
        lookup.batch = last_batch
        self._remember(lookup)

    def to_change(self) -> Tensor:
        """Return the slots whose rows the next step may change: int64 [n], some several times."""
        gradient = self.slots.weight.grad
        if gradient is not None and gradient.is_sparse:
            changing_slots = gradient._indices()[0].cpu()
        else:
            changing_slots = torch.cat([NO_IDS, *(lookup.slots for lookup in self.looked_up)])
        return (
            changing_slots
            if self.slots.padding_row is None
            else changing_slots[changing_slots != self.slots.padding]
        )

    def stepped(self) -> None:
        """Take note that a step has applied the gradients."""
        self.gradients.end_step()
        self.forget_lookups(applied=True)

    def release(self, batch: int) -> None:
        """Let rows of batches up to this one leave their slots, unless a step may change them."""
        self.forget_lookups()
        first_batch = self.since
        self.oracle.release(batch if first_batch is None else min(batch, first_batch - 1))

    def begin_anew(self) -> None:
        """Forget all lookups, gradients and rows."""
        self.looked_up.clear()
        self.looked_up_rows = 0
        self.gradients.forget()
        self.is_unmarked = False
        self.slots.begin_anew()
        if self.storage is not None:
            self.drop_storage()


class _Lookup:
    """Rows that one lookup has read with gradients on.

    Attributes:
        ids: int32 or int64 [n]: the rows.
        slots: int64 [n]: their slots.
        batch: the batch that training was at.
        has_run: a backward pass has been through it.
        is_remembered: a step may change the rows.
        graph: lives as long as the lookup is in a graph of autograd.
    """

    __slots__ = ("batch", "graph", "has_run", "ids", "is_remembered", "slots")

    def __init__(self, ids: Tensor, slots: Tensor, batch: int) -> None:
        self.ids = ids
        self.slots = slots
        self.batch = batch
        self.has_run = self.is_remembered = False
        self.graph: Callable[[], object] = _nothing

    @property
    def may_run(self) -> bool:
        """Whether a backward pass may go through it."""
        return self.graph() is not None


def _split(before: FirstValues, first_new: int, new: FirstValues) -> FirstValues:
    """Return the first values of a table that has more rows from `first_new` on."""

    def first_values(ids: Tensor) -> Tensor:
        is_new = ids >= first_new
        if bool(is_new.all()):
            return new(ids)
        if not bool(is_new.any()):
            return before(ids)
        new_values = new(ids[is_new])
        values = new_values.new_empty((len(ids), *new_values.shape[1:]))
        values[is_new] = new_values
        values[~is_new] = before(ids[~is_new]).to(values.dtype)
        return values

    return first_values


def _never(ids: Tensor) -> Tensor:
    raise AssertionError(f"{len(ids)} rows of a table whose rows are all at home")


def _nothing() -> None:
    return None


class _Graph:
    """Is held by autograd's graph of one lookup, and told of backward passes."""

    def __init__(self, rows: CachedRows, lookup: _Lookup) -> None:
        self._rows = weakref.ref(rows)
        self.lookup = lookup

    def __call__(self, _gradients: object) -> None:
        rows = self._rows()
        if rows is not None:
            rows.has_run(self.lookup)
