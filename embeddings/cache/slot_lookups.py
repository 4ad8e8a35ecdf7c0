"""Returns the slots of rows that a module looks up, and brings rows that have none."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch
from torch import Tensor

from recpoint.embeddings.cache.mover import Mover
from recpoint.embeddings.cache.planner import Planner
from recpoint.embeddings.cache.residents import CachedRows
from recpoint.embeddings.cache.trainers import Trainers
from recpoint.interrupts import held
from recpoint.lookahead.oracle import Oracle

__all__ = ["NotInSlots", "SlotLookups"]


class NotInSlots(Exception):
    """A lookup inside `SlotLookups.staying` reads a row that has no slot."""


class SlotLookups:
    """Looks up slots in the tables of one cache.

    Args:
        mover: fetches rows that have no slot.
        trainers: the trainers that share the tables.
        planner: plans the rows of batches.
    """

    def __init__(self, mover: Mover, trainers: Trainers, planner: Planner) -> None:
        self._tables = mover.tables
        self._mover = mover
        self._trainers = trainers
        self._planner = planner
        self._progress = trainers.progress
        self._may_bring = True

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Bring no row, and count no lookup, within the block.

        Raises:
            NotInSlots: from a lookup in the block.
        """
        stats = self._progress.stats
        hits, misses, self._may_bring = stats.hits, stats.misses, False
        try:
            yield
        finally:
            stats.hits, stats.misses, self._may_bring = hits, misses, True

    def refuse_staying(self) -> None:
        """Refuse a lookup that brings rows, within `staying`.

        Raises:
            NotInSlots: the lookup is in such a block.
        """
        if not self._may_bring:
            raise NotInSlots

    def slots_of(self, name: str, ids: Tensor, *, trains: bool) -> Tensor:
        """Return the slots of the rows that a lookup reads; see `Cache.slots_of`."""
        rows = self._tables[name]
        flat_ids = ids.detach().reshape(-1).to("cpu").contiguous()
        slots = self._with_padding(rows, flat_ids, trains)
        return slots.to(ids.dtype).view(ids.shape).to(ids.device)

    def _with_padding(self, rows: CachedRows, flat_ids: Tensor, trains: bool) -> Tensor:
        if rows.slots.padding_row is not None:
            is_padding = flat_ids == rows.slots.padding_row
            if bool(is_padding.any()):
                self.bring_padding(rows)
                slots = torch.full(
                    flat_ids.shape, rows.slots.padding, dtype=torch.int64, device="cpu"
                )
                slots[~is_padding] = self.of_rows(rows, flat_ids[~is_padding], trains=trains)
                return slots
        return self.of_rows(rows, flat_ids, trains=trains)

    def of_rows(self, rows: CachedRows, flat_ids: Tensor, *, trains: bool) -> Tensor:
        """Return the slots of rows beside the padding row, int64 [n]; see `slots_of`."""
        hold = self._progress.batch if trains else None
        slots = self._trainers.find(rows, flat_ids, hold)
        ready, stats = rows.slots.ready, self._progress.stats
        if slots.numel() and not (int(slots.min()) >= 0 and bool(ready[slots].all())):
            self.refuse_staying()
            missing_ids = int(((slots < 0) | ~ready[slots]).sum())
            stats.misses += missing_ids
            stats.hits -= missing_ids
            slots = self._bring(rows, flat_ids, hold)
        stats.hits += slots.numel()
        if trains:
            rows.note_lookup(flat_ids, slots, self._progress.batch)
        return slots

    def slots_to_begin(self, rows: CachedRows, ids: Tensor, *, saves_rows: bool) -> Tensor:
        """Return the slots of rows that begin anew, whatever their values are: int64 [n].

        Args:
            rows: the table.
            ids: int64 [n], all different, without the padding row.
            saves_rows: a cut may want the rows as they are now, so that they have to be in slots.
        """
        slots = self._trainers.find(rows, ids, None)
        is_missing = slots < 0
        missing_count = int(is_missing.sum())
        if bool(rows.slots.ready[slots[~is_missing]].all()):
            if not missing_count:
                return slots
            batch = self._progress.batch
            oracle = self._trainers.oracle_outside_plans(rows)
            reserved = rows.reserved
            if (
                not saves_rows
                and reserved is not None
                and reserved.free(oracle, missing_count, batch=batch)
            ):
                step = oracle.claim(ids[is_missing], hold=batch)
                assert step is not None and not step.evicted_ids.numel()
                rows.slots.enter(step.fetched_ids, step.fetched_slots)
                return self._trainers.find(rows, ids, None)
        return self.of_rows(rows, ids, trains=False)

    def _bring(self, rows: CachedRows, flat_ids: Tensor, hold: int | None) -> Tensor:
        """Bring rows that are looked up outside a plan."""
        last_row = rows.slots.rows - 1
        if not 0 <= int(flat_ids.min()) <= int(flat_ids.max()) <= last_row:
            raise IndexError(f"table {rows.slots.name!r}: found a row id outside 0 … {last_row}")
        oracle = self._trainers.oracle_outside_plans(rows)
        # Rows on their way arrive before it.
        self._mover.wait([self._mover.thread.submit(self._mover.raise_error)])
        slots = oracle.slots_of(flat_ids, hold=hold)
        missing_ids = torch.unique(flat_ids[slots < 0].long())
        if missing_ids.numel():
            # Rows that no step will change may leave as soon as others need their slots.
            last_batch = oracle.released if hold is None else hold
            arrival = self._claim(rows, oracle, missing_ids, last_batch)
            if arrival is not None:
                self._mover.wait([arrival])
                slots = oracle.slots_of(flat_ids, hold=hold)
            if arrival is None or int(slots.min()) < 0:  # there is no room for all of them
                slots = self._bring_alone(rows, oracle, flat_ids)
        return slots

    def _bring_alone(self, rows: CachedRows, oracle: Oracle, flat_ids: Tensor) -> Tensor:
        """Bring rows in place of rows that are planned and of rows whose training is over."""
        self._planner.forget()
        # The time until now counts as a batch that is trained.
        self._progress.batch += 1
        self._progress.forget_plans()
        batch = self._progress.batch
        for other_rows in self._tables.values():
            self._trainers.plan_none(other_rows)
            other_rows.hold_lookups(batch)
            other_rows.release(batch - 1)
        slots = oracle.slots_of(flat_ids, hold=batch)
        missing_ids = torch.unique(flat_ids[slots < 0].long())
        if missing_ids.numel():
            arrival = self._claim(rows, oracle, missing_ids, batch)
            if arrival is None:
                taken_slots = oracle.capacity - oracle.free
                needed_slots = taken_slots + missing_ids.numel()
                raise self._planner.too_small(rows.slots.name, needed_slots)
            self._mover.wait([arrival])
        return oracle.slots_of(flat_ids)

    def _claim(
        self, rows: CachedRows, oracle: Oracle, ids: Tensor, hold: int
    ) -> Future[None] | None:
        """Begin to bring rows outside a plan; None: there is no room."""
        with held():
            step = oracle.claim(ids, hold=hold)
            return None if step is None else self._mover.start([(rows, step)], self._progress.batch)

    def bring_padding(self, rows: CachedRows) -> None:
        """Have the padding row of a table in its slot."""
        slots = rows.slots
        if not slots.ready[slots.padding]:
            assert slots.padding_row is not None
            padding_id = torch.tensor([slots.padding_row], dtype=torch.int64, device="cpu")
            padding_slot = torch.tensor([slots.padding], dtype=torch.int64, device="cpu")
            self._mover.wait([self._mover.bring(rows, padding_id, padding_slot)])
