"""Says which trainer's cache holds which rows, if several trainers share one store of rows.

Each trainer (a rank of a data-parallel job) has a bounded cache. A row is in one cache at most: its
trainer, the *owner*, trains it. A batch has a part on each rank. A rank that looks up a row of
another owner *borrows* it: it gets the row's value for this batch, and gives the row's gradient to
the owner. This is BagPipe's logically replicated, physically partitioned cache (SOSP 2023): rows
that only one trainer uses are in its cache alone.

Every rank knows the ids of all ranks, and runs the same `SharedOracle` on them. So each rank knows
where every row is, and no rank has to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from recpoint.kernels.slot_map import SlotMap, Taken
from recpoint.lookahead.oracle import CapacityError, Step

__all__ = ["Claimed", "Exchange", "Planned", "Rows", "SharedOracle"]

_NONE: Final = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows that two ranks exchange, and the slots that this rank has them in.

    Attributes:
        ids: int64 [n], ascending.
        slots: int64 [n]: slots of the cache of this rank.
    """

    ids: Tensor
    slots: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """Which rows of one table a rank has in a batch, and which it exchanges.

    Attributes:
        batch: the batch.
        own: rows that this rank owns and that any rank looks up.
        borrowed: for each rank, rows that it owns and that this rank looks up; none for this rank.
        lent: for each rank, rows that this rank owns and that the other looks up; none for this
            rank.
    """

    batch: int
    own: Rows
    borrowed: tuple[Rows, ...]
    lent: tuple[Rows, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """What one call of `plan` has changed for this rank.

    Attributes:
        step: rows that leave and enter the cache of this rank; None: nothing changed there.
        exchange: None: there was no room in some cache, and the same batch is to be planned again
            after another is released.
    """

    step: Step | None
    exchange: Exchange | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Claimed:
    """What one call of `claim` has changed.

    Attributes:
        step: rows that leave and enter the cache of this rank; None: nothing changed there.
        moves: whether rows leave or enter the cache of any rank.
        exchange: None: there is no room in some cache.
    """

    step: Step | None
    moves: bool
    exchange: Exchange | None


class SharedOracle:
    """Plans the caches of all ranks for one table.

    A row that is in no cache gets an owner when a batch looks it up: the rank that looks it up, or
    one of them, which depends on the id alone. It keeps this owner until it leaves the cache.
    The oracle files a borrowed row under the key `id + rows`, so it never counts as an owned row.

    Two oracles that are called alike answer alike, on any rank. Otherwise as `Oracle`.

    Args:
        capacities: slots of each rank's cache, 1 or more.
        rank: the rank whose steps are wanted.
        rows: rows of the table, 1 or more.
    """

    def __init__(self, capacities: Sequence[int], *, rank: int, rows: int) -> None:
        self._maps = [SlotMap(capacity) for capacity in capacities]
        self._rank = rank
        self._rows = rows
        self._planned = self._released = self._expected = 0
        self._kept_until = self._dropped = 0  # as in Oracle
        self._taken_by_rank: dict[
            int, Taken
        ] = {}  # ranks that have room for the batch that is planned next
        # The same for rows that are claimed.
        self._claimed_by_rank: dict[int, Taken] = {}
        # For each slot of this rank, the last planned batch that needs its row.
        self._used = torch.zeros(self.capacity, dtype=torch.int64, device="cpu")
        #: By planned batch that is not released: slots of the rows that this rank has for it.
        self._needed: dict[int, Tensor] = {}
        # Whether each slot has a row for the batch that was asked for last.
        self._is_needed = torch.zeros(self.capacity, dtype=torch.bool, device="cpu")
        self._asked_batch, self._asked_slots = 0, _NONE

    @property
    def capacity(self) -> int:
        """Slots of this rank's cache."""
        return self._maps[self._rank].capacity

    @property
    def planned(self) -> int:
        """The last batch that is planned; 0: none is."""
        return self._planned

    @property
    def expected(self) -> int:
        """The last batch that is planned or expected; 0: none is."""
        return self._expected

    @property
    def released(self) -> int:
        """The last batch that is trained; 0: none is."""
        return self._released

    @property
    def size_bytes(self) -> int:
        """Bytes of memory. They follow the capacities, and the rows of planned batches."""
        own_bytes = self._used.nbytes + self._is_needed.nbytes
        needed = sum(slots.nbytes for slots in self._needed.values())
        return sum(slot_map.size_bytes for slot_map in self._maps) + own_bytes + needed

    def plan(self, ids: Sequence[Tensor]) -> Planned:
        """Plan the next batch, `planned` + 1.

        Args:
            ids: for each rank, the rows that its part of the batch looks up: int64 [k], ascending,
                all different.

        Raises:
            CapacityError: a rank needs more slots for this batch alone than its cache has; no slot
                has changed.
        """
        batch = self._planned + 1
        needs = self._needs(ids)
        for (_, _, needed_ids), slot_map in zip(needs, self._maps, strict=True):
            if needed_ids.numel() > slot_map.capacity:
                raise CapacityError(needed_ids.numel(), slot_map.capacity)
        step = None
        for rank, (_, _, needed_ids) in enumerate(needs):
            if rank in self._taken_by_rank:
                continue
            plan_of_rank = self._take(rank, needed_ids, batch)
            if plan_of_rank is None:
                return Planned(step=step, exchange=None)
            self._taken_by_rank[rank] = plan_of_rank
            if rank == self._rank:
                step = self._step(batch, plan_of_rank)
        self._taken_by_rank.clear()
        self._planned = batch
        self._expected = max(self._expected, batch)
        return Planned(step=step, exchange=self._exchange(batch, needs))

    def _needs(self, ids: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor], Tensor]]:
        """Return for each rank its own rows, the rows it borrows of each rank, and all its keys."""
        union = torch.unique(torch.cat([*ids]))
        users = torch.zeros((len(ids), union.numel()), dtype=torch.bool, device="cpu")
        for rank, rank_ids in enumerate(ids):
            users[rank, torch.searchsorted(union, rank_ids)] = True
        owner = self._owners(union, users)
        own_ids = [union[owner == rank] for rank in range(len(ids))]
        needs = []
        for rank in range(len(ids)):
            borrowed = [
                _NONE if lender == rank else union[users[rank] & (owner == lender)]
                for lender in range(len(ids))
            ]
            needs.append(
                (own_ids[rank], borrowed, torch.cat([own_ids[rank], *self._keys(borrowed)]))
            )
        return needs

    def _owners(self, union: Tensor, users: Tensor) -> Tensor:
        owner = self.owners(union)
        new = torch.nonzero(owner < 0).view(-1)
        if new.numel():
            is_user = users[:, new]
            # The k-th of a row's users, so that rows that all ranks look up are dealt out to all.
            k = union[new] % is_user.sum(0)
            owner[new] = ((is_user.cumsum(0) == k + 1) & is_user).long().argmax(0)
        return owner

    def _keys(self, borrowed: Sequence[Tensor]) -> list[Tensor]:
        return [ids + self._rows for ids in borrowed]

    def _take(self, rank: int, needed_ids: Tensor, batch: int) -> Taken | None:
        slot_map = self._maps[rank]
        step = slot_map.take(needed_ids, use=batch, released=self._released)
        if step is None and self._kept_until > self._planned:
            # As in Oracle: rows stay no longer for batches that are only expected.
            for peer, peer_map in enumerate(self._maps):
                peer_map.lower(self._planned + (peer in self._taken_by_rank))
            self._kept_until, self._dropped = 0, self._expected
            step = slot_map.take(needed_ids, use=batch, released=self._released)
        return step

    def _step(self, batch: int, taken_slots: Taken) -> Step:
        is_own_evicted = taken_slots.evicted_ids < self._rows
        is_own_fetched = taken_slots.fetched_ids < self._rows
        return Step(
            batch=batch,
            evicted_ids=taken_slots.evicted_ids[is_own_evicted],
            evicted_slots=taken_slots.evicted_slots[is_own_evicted],
            fetched_ids=taken_slots.fetched_ids[is_own_fetched],
            fetched_slots=taken_slots.fetched_slots[is_own_fetched],
        )

    def _exchange(
        self, batch: int, needs: Sequence[tuple[Tensor, list[Tensor], Tensor]]
    ) -> Exchange:
        own_ids, borrowed, needed_ids = needs[self._rank]
        slots = self._maps[self._rank].find(needed_ids)
        self._used[slots] = self._used[slots].clamp_(min=batch)
        # A claim adds to what the plan had.
        self._needed[batch] = torch.cat([self._needed.get(batch, _NONE), slots])
        if batch == self._asked_batch:
            self._is_needed[slots] = True
            self._asked_slots = self._needed[batch]
        _, *borrowed_slots = slots.split([own_ids.numel(), *(ids.numel() for ids in borrowed)])
        lent = [needs_of_rank[1][self._rank] for needs_of_rank in needs]
        return Exchange(
            batch=batch,
            own=Rows(ids=own_ids, slots=slots[: own_ids.numel()]),
            borrowed=tuple(
                Rows(ids=ids, slots=places)
                for ids, places in zip(borrowed, borrowed_slots, strict=True)
            ),
            lent=tuple(Rows(ids=ids, slots=self._maps[self._rank].find(ids)) for ids in lent),
        )

    def claim(self, ids: Sequence[Tensor], *, batch: int, again: bool = False) -> Claimed:
        """Give slots to rows that a planned batch looks up, whether or not its plan has them.

        They stay until the batch is released, also if its plan is forgotten.

        Args:
            ids: as for `plan`.
            batch: planned, and not released.
            again: the call before had these rows, too, and found no room in some cache.

        Raises:
            CapacityError: a rank needs more slots for these rows alone than its cache has; no slot
                has changed.
        """
        if not again:
            self._claimed_by_rank.clear()
        needs = self._needs(ids)
        for (_, _, needed_ids), slot_map in zip(needs, self._maps, strict=True):
            if needed_ids.numel() > slot_map.capacity:
                raise CapacityError(needed_ids.numel(), slot_map.capacity)
        step, moves = None, False
        for rank, (_, _, needed_ids) in enumerate(needs):
            if rank in self._claimed_by_rank:
                continue
            taken_slots = self._take(rank, needed_ids, batch)
            if taken_slots is None:
                return Claimed(step=step, moves=moves, exchange=None)
            self._claimed_by_rank[rank] = taken_slots
            self._maps[rank].hold(needed_ids, batch)
            moves |= bool(taken_slots.fetched_ids.numel() or taken_slots.evicted_ids.numel())
            if rank == self._rank:
                step = self._step(batch, taken_slots)
        return Claimed(step=step, moves=moves, exchange=self._exchange(batch, needs))

    def leave_unclaimed(self) -> None:
        """Let rows leave that only plans need; the batches after the last claim are forgotten."""
        for slot_map in self._maps:
            slot_map.lower(self._released)

    def owners(self, ids: Tensor) -> Tensor:
        """Return the rank that owns each row, int64 [k], -1 where no cache has it: int64 [k]."""
        owner = torch.full(ids.shape, -1, dtype=torch.int64, device="cpu")
        for rank, slot_map in enumerate(self._maps):
            owner[slot_map.find(ids) >= 0] = rank
        return owner

    def expect(self, ids: Sequence[Tensor]) -> None:
        """Keep rows in the caches that the batch `expected` + 1 looks up; it is planned later.

        Args:
            ids: as for `plan`.
        """
        self._expected += 1
        if self._planned >= self._dropped:
            for slot_map in self._maps:
                for part in ids:
                    slot_map.expect(part, self._expected)
            self._kept_until = self._expected

    def release(self, batch: int) -> None:
        """Say that all batches up to `batch` are trained on all ranks.

        Raises:
            ValueError: the batch is not planned.
        """
        if batch > self._planned:
            raise ValueError(f"batch: {batch}, expected {self._planned} or less, which are planned")
        self._released = max(self._released, batch)
        self._drop_needed(lambda number: number <= batch)

    def _drop_needed(self, is_over: Callable[[int], bool]) -> None:
        for number in [number for number in self._needed if is_over(number)]:
            del self._needed[number]

    def slots_of(self, ids: Tensor, *, hold: int | None = None) -> Tensor:
        """Return the slot of each row in this rank's cache, owned or borrowed.

        Args:
            ids: int32 or int64 [k], on the CPU.
            hold: only rows that stay until this batch is released are wanted. No call can make
                them stay longer, because the other ranks would not know.

        Returns:
            int64 [k]; -1 where a row has no slot, or one for too short a time.
        """
        slot_map = self._maps[self._rank]
        slots = slot_map.find(ids)
        missing = torch.nonzero(slots < 0).view(-1)
        if missing.numel():
            slots[missing] = slot_map.find(ids[missing].long() + self._rows)
        if hold is not None:
            slots[(slots >= 0) & (self._used[slots] < hold)] = -1
        return slots

    def slots_needed(self, ids: Tensor, *, batch: int) -> Tensor:
        """Return the slot of each row that this rank has for a batch, owned or borrowed.

        Args:
            ids: int32 or int64 [k], on the CPU.
            batch: planned, and not released.

        Returns:
            int64 [k]; -1 where the row is neither borrowed for the batch nor owned by this rank and
            looked up by any rank, even if it has a slot for another batch.
        """
        if batch != self._asked_batch:
            self._is_needed[self._asked_slots] = False
            self._asked_batch, self._asked_slots = batch, self._needed.get(batch, _NONE)
            self._is_needed[self._asked_slots] = True
        slots = self.slots_of(ids)
        slots[(slots >= 0) & ~self._is_needed[slots]] = -1
        return slots

    def held(self) -> tuple[Tensor, Tensor]:
        """Return all rows that this rank owns, and their slots.

        Returns:
            int64 [n], ascending, and int64 [n].
        """
        ids, slots = self._maps[self._rank].rows()
        is_own = ids < self._rows
        return ids[is_own], slots[is_own]

    def forget(self, *, keep: int) -> None:
        """Forget the batches after `keep`, planned or expected; `keep` + 1 is planned next.

        Raises:
            ValueError: `keep` is not planned, or is before `released`.
        """
        if not self._released <= keep <= self._planned:
            raise ValueError(
                f"keep: {keep}, expected {self._released} (released) to {self._planned} (planned)"
            )
        for slot_map in self._maps:
            slot_map.lower(keep)
        self._taken_by_rank.clear()
        self._planned = self._expected = keep
        self._kept_until = self._dropped = 0
        self._used.clamp_(max=keep)
        self._drop_needed(lambda number: number > keep)
        self._asked_batch = 0
