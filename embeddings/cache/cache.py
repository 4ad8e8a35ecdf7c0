"""Keeps the rows that training needs in slots, and all others at their home (BagPipe, SOSP 2023).

A cache is put together from parts, one module each:

- `planner`: plans the rows of coming batches, and hands the batches out;
- `mover`: the home thread, which moves rows between slots and home;
- `slot_lookups`: returns the slots of rows that a module looks up;
- `steps`: watches the steps of optimizers;
- `cuts`: prepares for checkpoints and makes views of all rows;
- `trainers`: what differs if several trainers share the tables.

A row that a lookup has read with gradients on stays in its slot until the optimizer's step, or
until no gradient can come any more: the graph of the lookup is gone, or its gradient was dropped.
See `TableSlots` for what each thread may touch.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recpoint.embeddings.cache.cuts import Cuts
from recpoint.embeddings.cache.meeting import MeetingOfOne
from recpoint.embeddings.cache.mover import Mover
from recpoint.embeddings.cache.planner import Planner
from recpoint.embeddings.cache.progress import CacheStats
from recpoint.embeddings.cache.reduction import Reduction
from recpoint.embeddings.cache.residents import CachedRows, FirstValues
from recpoint.embeddings.cache.shared_lookups import SharedLookups, SlotChanges
from recpoint.embeddings.cache.slot_lookups import SlotLookups
from recpoint.embeddings.cache.steps import Steps, follow_steps
from recpoint.embeddings.cache.trainers import OneTrainer, Trainers
from recpoint.embeddings.cache.view import CacheView
from recpoint.embeddings.home.contract import Home
from recpoint.interrupts import held

__all__ = ["Cache", "cache_of_one", "caches_of"]


class Cache:
    """The cached tables of one model.

    All methods are called from the training thread. An optimizer's step that fails calls no hook
    at its end, so the home thread may still be waiting for that end: methods that use slots or the
    home let it go on first.

    Args:
        mover: the home thread, with the home and the tables.
        trainers: the trainers that share the tables.
        row_local: optimizer classes that, as the user declares, change only rows looked up.

    Attributes:
        mover: as given.
        home: where rows are that have no slot.
        tables: name -> slots and first values.
    """

    def __init__(self, mover: Mover, trainers: Trainers, *, row_local: tuple[type, ...]) -> None:
        self.mover = mover
        self.home = mover.home
        self.tables = mover.tables
        self._trainers = trainers
        self._progress = trainers.progress
        trainers.new_oracles()
        self._planner = Planner(mover, trainers)
        self._lookups = SlotLookups(mover, trainers, self._planner)
        self._cuts = Cuts(mover, trainers)
        self._steps = Steps(mover, trainers, self._cuts, row_local)
        follow_steps(self._steps)
        _end_all_at_exit()
        _caches.add(self)

    @property
    def batch(self) -> int:
        """Number of the batch that training is at; 1: before the first."""
        return self._progress.batch

    @property
    def planned(self) -> int:
        """Number of the last batch that is planned."""
        return self._progress.planned

    @property
    def expected(self) -> int:
        """Number of the last batch whose rows are known; `planned` or more."""
        return self._progress.expected

    @property
    def stats(self) -> CacheStats:
        """What the cache has done until now; may be read from any thread."""
        return replace(
            self._progress.stats,
            window=max(0, self.planned - self.batch),
            lost_servers=self.home.lost_servers,
            lost_rows=self.home.lost_rows,
        )

    @property
    def weights(self) -> list[Tensor]:
        """The slots of all tables, as the optimizers and the modules have them."""
        return [rows.slots.weight for rows in self.tables.values()]

    @property
    def reduction(self) -> Reduction | None:
        """The part that averages all trainers' gradients before a step; None: there is only one."""
        return self._trainers.reduction

    @property
    def shared_lookups(self) -> SharedLookups | None:
        """The part that makes lookups of keyed tables on all trainers; None: there is only one."""
        return self._trainers.lookups

    def bring_together(self, name: str, ids: Tensor, changes: SlotChanges, *, trains: bool) -> None:
        """Have the rows that a lookup of a shared keyed table reads in slots. Collective.

        Args:
            name, ids, changes, trains: as for `SharedLookups.bring`.

        Raises:
            SettingsError, RanksDiffer, RankLost, HomeError: see `SharedLookups.bring`.
        """
        assert self.shared_lookups is not None
        self.end_failed_step()
        self._lookups.refuse_staying()
        self.shared_lookups.bring(
            self.tables[name],
            ids,
            changes,
            trains=trains,
            will_change=self._steps.will_change,
            forget_plans=self._planner.forget,
        )

    def turn_to(self, reader: object) -> None:
        """Plan the batches of this reader from now on, and forget those of the one before.

        Args:
            reader: stands for the reader; compared by identity.
        """
        self._planner.turn_to(reader)

    def turn_from(self, reader: object) -> None:
        """Forget the batches of this reader, if they are planned."""
        self._planner.turn_from(reader)

    def tell(self, count: int, ids: Callable[[int], Mapping[str, Tensor]], *, window: int) -> int:
        """Learn which batches were read and not handed out. Collective, if trainers share rows.

        Args:
            count: number of these batches.
            ids: returns the ids of one of them, as for `plan`.
            window: number of batches that the reader is to hold.

        Returns:
            How many of them can be expected and planned.
        """
        self.end_failed_step()
        return self._planner.tell(count, ids, window=window)

    def expect(self, ids: Mapping[str, Tensor]) -> None:
        """Keep the rows in slots that the batch after `expected` looks up; no row is fetched.

        Args:
            ids: as for `plan`.
        """
        self._planner.expect(ids)

    def plan(self, ids: Mapping[str, Tensor], *, is_next: bool = False) -> bool:
        """Plan the batch after the last that is planned; its rows begin to arrive.

        Args:
            ids: table name -> ids that the batch looks up, int32 or int64 [n], on the CPU. Names
                of other tables, and ids out of range, are ignored.
            is_next: no batch is held before this one.

        Returns:
            Whether it is planned. Otherwise there is no room until earlier batches are trained.

        Raises:
            SettingsError: with `is_next`, the batch needs more slots than a table has.
            HomeError: the home has failed.
        """
        self.end_failed_step()
        return self._planner.plan(ids, is_next=is_next)

    def end_batch(self) -> None:
        """Take note that the script asks for another batch: it has trained the one before.

        Rows of batches whose gradient no step has applied yet stay in their slots.
        """
        self.end_failed_step()
        self._trainers.end_batch()

    def begin_batch(self) -> None:
        """Wait until the rows of the batch that is handed out next have arrived.

        Collective, if trainers share rows.

        Raises:
            HomeError: the home has failed.
            RankLost: a trainer does not answer.
        """
        self._planner.begin_batch()

    def forget(self) -> None:
        """Forget the plans of batches that were not handed out; rows keep their slots."""
        self._planner.forget()

    def slots_of(self, name: str, ids: Tensor, *, trains: bool) -> Tensor:
        """Return the slots of the rows that a lookup reads; brings rows that have none.

        Args:
            name: name of the table.
            ids: int32 or int64, any shape, on any device.
            trains: gradients flow to the rows.

        Returns:
            Slots, of the shape and dtype of `ids`, on its device.

        Raises:
            IndexError: an id is out of range.
            SettingsError: there are not enough slots; or trainers share the rows, and the lookup is
                outside a plan.
            HomeError: rows that have no slot are looked up, and the home has failed.
        """
        self.end_failed_step()
        return self._lookups.slots_of(name, ids, trains=trains)

    def staying(self) -> AbstractContextManager[None]:
        """Have lookups bring no row and count nowhere, within the block.

        The block is in the training thread and trains nothing. A lookup in it that reads a row
        without a slot raises `NotInSlots`. Rows of the batch that was handed out last have slots.
        """
        return self._lookups.staying()

    def refuse_optimizer(self, name: str, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Refuse an optimizer that changes rows that were not looked up; follow its row states.

        Args:
            name: name of the table.
            optimizer: the optimizer.
            group: the parameter group that has the slots of the table.

        Raises:
            SettingsError: it does.
        """
        rows = self.tables[name]
        self._steps.refuse_optimizer(rows, optimizer, group)
        self._steps.follow_states(rows, optimizer)

    def end_failed_step(self) -> None:
        """Let the home thread go on after a step: one that fails calls no hook at its end.

        Code that ends training after an error has to call it, too.
        """
        self._steps.end_failed()

    def zero_rows(self, name: str, ids: Tensor) -> None:
        """Set rows and their row states to zero.

        Args:
            name: name of the table.
            ids: int64 [n], on the CPU, in any order.

        Raises:
            SettingsError: rows are in the caches of several trainers.
        """
        self._trainers.refuse_reset(name)
        self.end_failed_step()
        rows = self.tables[name]
        slots = rows.slots
        if slots.padding_row is not None and bool((ids == slots.padding_row).any()):
            self._lookups.bring_padding(rows)
            for _, array in slots.arrays():
                array[slots.padding] = 0
        for part_ids in torch.unique(ids).split(max(1, slots.capacity // 2)):
            part_slots = self._lookups.of_rows(rows, part_ids, trains=False)
            self._steps.will_change(rows, part_slots)
            for _, array in slots.arrays():
                array.index_fill_(0, part_slots.to(array.device), 0)

    def refuse_reset(self, name: str) -> None:
        """Refuse a reset of a table's rows if these are in the caches of several trainers.

        Raises:
            SettingsError: they are.
        """
        self._trainers.refuse_reset(name)

    def begin_rows(self, name: str, ids: Tensor, values: Tensor) -> None:
        """Give rows values, and the row states of rows that were never trained.

        Args:
            name: name of the table.
            ids: int64 [n], on the CPU, all different, without the padding row.
            values: [n, dim], on the CPU.

        Raises:
            SettingsError: rows are in the caches of several trainers.
            HomeError: the home has failed.
        """
        self._trainers.refuse_reset(name)
        self.end_failed_step()
        rows = self.tables[name]
        most_rows = max(1, rows.slots.capacity // 2)
        for part_ids, part_values in zip(
            ids.split(most_rows), values.split(most_rows), strict=True
        ):
            with held():  # a slot that has a row must get its values
                part_slots = self._lookups.slots_to_begin(
                    rows, part_ids, saves_rows=self._cuts.saves_rows
                )
                self._steps.will_change(rows, part_slots)
                rows.slots.put_new(part_slots, part_values)

    def empty_rows(self, name: str, ids: Tensor) -> None:
        """Set rows to zero, and give them the row states of rows that were never trained.

        Those that are in no slot become zeros at home. The cache keeps its rows.

        Args:
            name: name of the table.
            ids: int64 [n], on the CPU, ascending, all different, without the padding row.

        Raises:
            SettingsError: rows are in the caches of several trainers.
        """
        self._trainers.refuse_reset(name)
        rows = self.tables[name]
        is_absent = self._trainers.find(rows, ids, None) < 0
        absent_ids, ids_in_slots = ids[is_absent], ids[~is_absent]
        if absent_ids.numel():
            with held():
                self._steps.note_changed(rows, absent_ids)
                self.mover.submit(partial(self.mover.empty, rows, absent_ids))
        if ids_in_slots.numel():
            zeros = torch.zeros(
                len(ids_in_slots), rows.slots.dim, dtype=rows.slots.weight.dtype, device="cpu"
            )
            self.begin_rows(name, ids_in_slots, zeros)

    def add_rows(self, name: str, rows: int, initial: FirstValues) -> None:
        """Give a table more rows. It keeps its slots.

        Args:
            name: name of the table.
            rows: rows of the table afterwards.
            initial: returns the first values of the new rows.

        Raises:
            HomeError: the home has failed, or its tables keep their sizes. Nothing has changed.
        """
        self.end_failed_step()
        self.mover.wait_for_all()
        self.mover.add_rows(self.tables[name], rows, initial)

    def announce_cut(self) -> None:
        """Say that this trainer takes a checkpoint next, or ends; for others that share rows.

        Raises:
            RanksDiffer: trainers do different things.
        """
        self.end_failed_step()
        self._trainers.announce_cut()

    def prepare_view(self, *, writes_back: bool = False) -> Callable[[], None]:
        """Prepare for a view, which must follow before any row changes.

        If rows are to be written back, or if trainers share them, the home thread has all rows that
        have changed written to the home, and freezes it, while training goes on. If the home fails
        meanwhile, the view says so. Collective, if trainers share rows.

        Args:
            writes_back: the home must have the rows of the view, so that it can stage them.

        Returns:
            What has the home thread begin. The caller calls it once its stall is over, also after
            an error: the home thread would take the processor from the cut.

        Raises:
            HomeError: the home has failed.
            RankLost: a trainer does not answer.
        """
        self.end_failed_step()
        return self._cuts.prepare(writes_back=writes_back)

    def stages_at_home(self, name: str) -> bool:
        """Whether the home has a table's rows after `prepare_view(writes_back=True)`.

        It can then stage them itself. All trainers answer alike, because they step together.
        """
        return self._cuts.stages_at_home(name)

    def view(self) -> CacheView:
        """Return a view of each table's part as it is now; it must be released.

        The home is frozen after the write-backs that were planned before. Rows in slots that a
        step changes before the view has copied them are saved first.
        """
        self.end_failed_step()
        return self._cuts.view({name: rows.part for name, rows in self.tables.items()})

    def rows_of(self, name: str, ids: Tensor) -> tuple[Tensor, ...]:
        """Return rows and row states as they are now, wherever they are.

        Collective, if trainers share rows. It returns on no rank before all ranks have their rows:
        a rank that goes on could end the servers.

        Args:
            name: name of the table.
            ids: int64 [n], on the CPU.

        Returns:
            [n, dim] and [n, …] for each row state, in the optimizer's order, on the CPU.
        """
        self.end_failed_step()
        return self._cuts.rows_of(name, ids)

    def restored(self) -> None:
        """Begin anew: no row is in a slot, and none is at home.

        A restore then writes all rows to the home. Collective, if trainers share rows, also after
        these have left each other.

        Raises:
            HomeError: the home has failed. It may be called again, by all trainers.
            RankLost: a trainer does not answer, or its home has failed.
        """
        self.end_failed_step()
        with self._trainers.restoring():
            self.mover.wait_for_all()
            self._cuts.begin_anew()
            self._planner.begin_anew()
            self.mover.begin_anew()

    def size_bytes(self) -> dict[str, int]:
        """Return bytes of memory by role: slots, oracle, and the home's own roles."""
        return {
            "slots": sum(rows.slots.size_bytes for rows in self.tables.values()),
            "oracle": sum(rows.oracle.size_bytes for rows in self.tables.values()),
            **self.home.size_bytes(),
        }

    def close(self) -> None:
        """End the home thread after what it has to do. The home stays open.

        If trainers share rows, a thread that waits for another trainer is given up: that one may be
        waiting for this.
        """
        self.end_failed_step()
        self.mover.end(within_seconds=self._trainers.end_seconds)
        self._trainers.end()


def cache_of_one(
    home: Home, tables: Mapping[str, CachedRows], *, row_local: tuple[type, ...] = ()
) -> Cache:
    """Return the cache of a trainer that shares its rows with no other.

    Args:
        home: where rows are that have no slot.
        tables: name -> slots and first values.
        row_local: as for `Cache`.
    """
    trainers = OneTrainer(tables)
    mover = Mover(home, tables, trainers.progress.stats, MeetingOfOne())
    return Cache(mover, trainers, row_local=row_local)


_caches: weakref.WeakSet[Cache] = weakref.WeakSet()


@functools.cache
def _end_all_at_exit() -> None:
    atexit.register(_end_all)


def _end_all() -> None:
    """End the home threads before the interpreter does, which would end them anywhere."""
    for cache in list(_caches):
        cache.close()


def caches_of(parameters: Iterable[Tensor]) -> list[Cache]:
    """Return the caches that have the slots of some of these parameters, in their order."""
    by_weight = {id(weight): cache for cache in list(_caches) for weight in cache.weights}
    caches = [by_weight[id(parameter)] for parameter in parameters if id(parameter) in by_weight]
    return list(dict.fromkeys(caches))
