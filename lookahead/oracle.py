"""Says which rows of a table a bounded cache holds, batch by batch, and where (BagPipe, SOSP 2023).

A table's rows lie in a store. A cache of slots holds the rows that training needs. The oracle reads
the ids of coming batches. Before each batch it says which rows are to be fetched into which slots,
and which rows leave. A row leaves only if no planned batch looks it up, so each lookup hits.

An oracle does no I/O. Its answers follow from the calls alone: two oracles that are called alike
answer alike. It belongs to one thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recpoint.kernels.slot_map import SlotMap, Taken

__all__ = ["CapacityError", "Oracle", "Step"]


class CapacityError(ValueError):
    """A cache has fewer slots than one batch looks up rows.

    Args:
        needed: rows that the batch looks up.
        capacity: slots of the cache.
    """

    def __init__(self, needed: int, capacity: int) -> None:
        super().__init__(f"found {capacity} slots; expected {needed} or more, for one batch")
        self.needed = needed
        self.capacity = capacity


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """What has to be done before a batch is trained. First the evictions, then the fetches.

    Attributes:
        batch: the batch; batches are numbered from 1.
        evicted_ids: int64 [m], ascending: rows that leave the cache. They have to be written back.
        evicted_slots: int64 [m]: the slots that they leave.
        fetched_ids: int64 [n], ascending: rows that enter the cache.
        fetched_slots: int64 [n]: their slots, all different. Slots of evicted rows may be among
            them.
    """

    batch: int
    evicted_ids: Tensor
    evicted_slots: Tensor
    fetched_ids: Tensor
    fetched_slots: Tensor


class Oracle:
    """Plans the cache of one table.

    A row has a slot from the Step that fetches it to the Step that evicts it. Its last use is the
    last batch that is known to need it. Rows whose last use is released may be evicted, and are
    evicted only if a slot is needed and none is free: first those with the earliest last use, among
    equals those with the lowest slots. Free slots are used lowest first.

    Batches can be known before they are planned (`expect`). Their rows then stay if they have
    slots, and take none if they have not. Planned batches come first: if there is no room for one,
    rows stay no longer for batches that are only expected, until these are planned.

    Args:
        capacity: slots of the cache, 1 or more.

    Raises:
        ValueError: the capacity is less than 1.
    """

    def __init__(self, capacity: int) -> None:
        self._map = SlotMap(capacity)
        self._planned = self._released = self._expected = 0
        self._kept_until = 0  # last expected batch for which rows are kept; 0: none
        self._dropped = 0  # last expected batch for which rows are no longer kept; 0: none

    @property
    def capacity(self) -> int:
        """Slots of the cache."""
        return self._map.capacity

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
    def free(self) -> int:
        """Slots that a plan could use now: they are free, or their rows may be evicted."""
        return self.capacity - self._map.size + self._map.evictable(self._released)

    @property
    def unused(self) -> int:
        """Slots that no row has."""
        return self.capacity - self._map.size

    @property
    def size_bytes(self) -> int:
        """Bytes of memory. They follow the capacity, not the rows of the table."""
        return self._map.size_bytes

    def plan(self, ids: Tensor) -> Step | None:
        """Plan the next batch, `planned` + 1.

        Args:
            ids: int32 or int64 [k], on the CPU: rows that the batch looks up, 0 or more. Rows may
                come several times.

        Returns:
            The Step; each row of the batch has a slot from now on. None: there is no room before
            more batches are released, and no slot has changed.

        Raises:
            CapacityError: the batch alone looks up more rows than there are slots; no slot has
                changed.
            IndexError: an id is negative; nothing has changed.
            ValueError: `ids` has another form.
        """
        batch = self._planned + 1
        step = self._map.take(ids, use=batch, released=self._released)
        if step is None and self._kept_until > self._planned:
            self._map.lower(self._planned)
            self._kept_until, self._dropped = 0, self._expected
            step = self._map.take(ids, use=batch, released=self._released)
        if step is None:
            if ids.numel() > self.capacity:
                needed = torch.unique(ids).numel()
                if needed > self.capacity:
                    raise CapacityError(needed, self.capacity)
            return None
        self._planned = batch
        self._expected = max(self._expected, batch)
        return _step(batch, step)

    def expect(self, ids: Tensor) -> None:
        """Keep rows that have slots for the batch `expected` + 1, which is planned later.

        Args:
            ids: as for `plan`.

        Raises:
            ValueError: `ids` has another form.
        """
        self._expected += 1
        # Not before all batches that had to give way are planned: each plan would drop some anew.
        if self._planned >= self._dropped:
            self._map.expect(ids, self._expected)
            self._kept_until = self._expected

    def release(self, batch: int) -> None:
        """Say that all batches up to `batch` are trained: their rows may be evicted from now on.

        Rows that are not evicted keep their slots, and later batches find them there.

        Raises:
            ValueError: the batch is not planned.
        """
        if batch > self._planned:
            raise ValueError(f"batch: {batch}, expected {self._planned} or less, which are planned")
        self._released = max(self._released, batch)

    def slots_of(self, ids: Tensor, *, hold: int | None = None) -> Tensor:
        """Return the slot of each row.

        Args:
            ids: int32 or int64 [k], on the CPU.
            hold: the rows that are found may not be evicted before this batch is released, even if
                plans are forgotten. The batch need not be planned yet.

        Returns:
            int64 [k]; -1 where a row has no slot.

        Raises:
            ValueError: `ids` has another form, or `hold` is negative.
        """
        return self._map.find(ids) if hold is None else self._map.hold(ids, hold)

    def claim(self, ids: Tensor, *, hold: int) -> Step | None:
        """Give slots to rows outside any plan.

        If `hold` is released already, the next eviction has to look at all slots.

        Args:
            ids: int32 or int64 [k], on the CPU: different rows that have no slot.
            hold: the rows may not be evicted before this batch is released, even if plans are
                forgotten. The batch need not be planned yet.

        Returns:
            The Step, whose batch is `hold`. None: there is no room, and nothing has changed.

        Raises:
            IndexError: an id is negative; nothing has changed.
            ValueError: a row comes twice or has a slot, `ids` has another form, or `hold` is
                negative; nothing has changed.
        """
        step = self._map.add(ids, use=hold, released=self._released)
        return None if step is None else _step(hold, step)

    def forget(self, *, keep: int) -> None:
        """Forget the batches after `keep`, planned or expected; `keep` + 1 is planned next.

        Rows that these batches need may be evicted once `keep` is released, unless `slots_of` or
        `claim` holds them for longer. No row loses its slot, because it may have been fetched.

        Raises:
            ValueError: `keep` is not planned, or is before `released`.
        """
        if not self._released <= keep <= self._planned:
            raise ValueError(
                f"keep: {keep}, expected {self._released} (released) to {self._planned} (planned)"
            )
        self._map.lower(keep)
        self._planned = self._expected = keep
        self._kept_until = self._dropped = 0

    def drop(self, ids: Tensor) -> Tensor:
        """Take the slots from rows at once, whatever holds them. The slots become free.

        Args:
            ids: int32 or int64 [k], on the CPU.

        Returns:
            int64 [k]: the slots that the rows had; -1 where a row had none, or comes again.

        Raises:
            ValueError: `ids` has another form.
        """
        return self._map.drop(ids)

    def held(self) -> tuple[Tensor, Tensor]:
        """Return all rows that have a slot, and their slots.

        Returns:
            int64 [n], ascending, and int64 [n].
        """
        return self._map.rows()


def _step(batch: int, taken_slots: Taken) -> Step:
    return Step(
        batch=batch,
        evicted_ids=taken_slots.evicted_ids,
        evicted_slots=taken_slots.evicted_slots,
        fetched_ids=taken_slots.fetched_ids,
        fetched_slots=taken_slots.fetched_slots,
    )
