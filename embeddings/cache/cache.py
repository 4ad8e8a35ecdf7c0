"""Keeps the rows that training needs in slots, and all others at their home (BagPipe, SOSP 2023).

A `Lookahead` tells the cache which rows each coming batch looks up (`plan`), and when a batch is
handed out (`begin_batch`). For each table, an oracle gives rows their slots. One thread, the *home
thread*, writes back rows that leave and fetches rows that enter, in the order in which they were
planned. A fetch therefore follows the last write-back of its row.

A row that a lookup has read with gradients on stays in its slot until the optimizer's step, or
until no gradient can come any more: the graph of the lookup is gone, or its gradient was dropped.
See `TableSlots` for what each thread may touch.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from recpoint.embeddings.cache.call_thread import CallThread
from recpoint.embeddings.cache.residents import NO_IDS, CachedRows
from recpoint.embeddings.cache.settling import Settling
from recpoint.embeddings.cache.view import CacheView, SavesRows, TableView
from recpoint.embeddings.home.contract import FrozenRows, Home, TableRows
from recpoint.embeddings.tables.optimizers import Watched, all_rows_changed, row_states
from recpoint.errors import SettingsError
from recpoint.interrupts import held
from recpoint.lookahead.oracle import CapacityError, Oracle, Step
from recpoint.lookahead.shared_oracle import SharedOracle

__all__ = ["Cache", "CacheStats", "caches_of"]


#: Rows that are copied to the home at a time.
_PIECE_ROWS: Final = 65_536
#: Bytes of changed rows that are copied before they are written to the home.
_COPIED_BYTES: Final = 64 << 20

#: Table -> its rows at home, frozen; None: the home does not know the table.
_Frozen = dict[str, FrozenRows | None]


@dataclass(kw_only=True)
class CacheStats:
    """What a cache has done since it was made.

    Attributes:
        batches: batches that were handed out.
        unplanned: batches for which there was no room before they were handed out.
        hits: ids looked up whose rows were in their slots.
        misses: ids looked up whose rows were not: no plan had them, because they belong to an
            evaluation, to a batch that the reader did not give, or to an unplanned one.
        fetched_rows: rows that entered a slot.
        written_rows: rows that were written back.
        fetched_bytes: bytes of rows and row states that came from the home. Rows that were never
            written come from nowhere: their first values are computed.
        written_bytes: bytes of rows and row states that were written back.
        waits: batches and lookups for which training waited.
        wait_seconds: how long it waited for them.
        window: batches that are planned and were not handed out yet.
        reduced_rows: rows of this trainer for which other trainers had gradients, too, counted for
            each step.
        reduced_at_once: those that the step waited for, because the next batch looks them up.
        lost_servers: embedding servers whose rows are being recovered; rank 0 counts them.
        lost_rows: rows and parity rows of these servers that are left to recover.
    """

    batches: int = 0
    unplanned: int = 0
    hits: int = 0
    misses: int = 0
    fetched_rows: int = 0
    written_rows: int = 0
    fetched_bytes: int = 0
    written_bytes: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    window: int = 0
    reduced_rows: int = 0
    reduced_at_once: int = 0
    lost_servers: int = 0
    lost_rows: int = 0


class Cache:
    """The cached tables of one model.

    All methods are called from the training thread.

    Args:
        home: where rows are that have no slot.
        tables: name -> slots and first values.
        row_local: optimizer classes that, as the user declares, change only rows looked up.

    Attributes:
        home: as given.
        tables: as given.
        batch: number of the batch that training is at; 1: before the first.
        planned: number of the last batch that is planned.
        expected: number of the last batch whose rows are known; `planned` or more.
        writes_back_at_cuts: a cut has all rows that have changed written to the home first, so that
            the home has the rows of the cut.
    """

    writes_back_at_cuts = False

    def __init__(
        self, home: Home, tables: Mapping[str, CachedRows], *, row_local: tuple[type, ...] = ()
    ) -> None:
        self.home = home
        self.tables = dict(tables)
        self.batch = self.planned = self.expected = 1
        self._stats = CacheStats()
        self._row_local = row_local
        self._by_weight = {id(rows.slots.weight): rows for rows in self.tables.values()}
        self._lock = threading.Lock()
        self._thread = CallThread("recpoint-home")
        self._error: BaseException | None = None  # of the home thread; nothing is done after it
        self._moves = 0  # numbers the write-backs
        self._end_within: float | None = None  # how long `close` waits for the home thread
        self._arrivals: dict[int, list[Future[None]]] = {}
        self._partly: set[str] = set()  # tables that are planned for the batch after `planned`
        self._views: list[SavesRows] = []  # whose rows in slots are not copied yet
        self._settled: _Frozen | None = None  # by `settle`, for the next view
        self._reader: object = None  # whose batches are planned
        self._turn = 0  # how many times that became another one
        self._trained: set[str] = set()  # tables that a step has changed
        self._stepping: set[int] = set()  # ids of optimizers whose step holds `_dense`
        self._dense = threading.Lock()  # held while a step reads and writes all slots
        for rows in self.tables.values():
            rows.oracle = self._new_oracle(rows)
        _follow_steps(self)

    @property
    def stats(self) -> CacheStats:
        """What the cache has done until now; may be read from any thread."""
        return replace(
            self._stats,
            window=max(0, self.planned - self.batch),
            lost_servers=self.home.lost_servers,
            lost_rows=self.home.lost_rows,
        )

    @property
    def weights(self) -> list[Tensor]:
        """The slots of all tables, as the optimizers and the modules have them."""
        return [rows.slots.weight for rows in self.tables.values()]

    def _new_oracle(self, rows: CachedRows) -> Oracle | SharedOracle:
        oracle = Oracle(rows.slots.capacity)
        oracle.plan(NO_IDS)  # batch 1 stands for the time before the first batch
        return oracle

    # What the Lookahead does.

    def turn_to(self, reader: object) -> None:
        """Plan the batches of this reader from now on, and forget those of the one before.

        Args:
            reader: stands for the reader; compared by identity.
        """
        if reader is not self._reader:
            if self._reader is not None:
                self.forget()
            self._reader = reader
            self._turn += 1

    def turn_from(self, reader: object) -> None:
        """Forget the batches of this reader, if they are planned."""
        if reader is self._reader:
            self.forget()

    def tell(self, count: int, ids: Callable[[int], Mapping[str, Tensor]], *, window: int) -> int:
        """Learn which batches were read and not handed out.

        Args:
            count: number of these batches.
            ids: returns the ids of one of them, as for `plan`.
            window: number of batches that the reader is to hold.

        Returns:
            How many of them can be expected and planned.
        """
        return count

    def expect(self, ids: Mapping[str, Tensor]) -> None:
        """Keep the rows in slots that the batch after `expected` looks up; no row is fetched.

        Args:
            ids: as for `plan`.
        """
        for name, rows in self.tables.items():
            # A table may have been planned for this batch before the others had room.
            if rows.oracle.expected == self.expected:
                self._expect_rows(rows, ids.get(name))
        self.expected += 1

    def _expect_rows(self, rows: CachedRows, ids: Tensor | None) -> None:
        _alone(rows).expect(rows.slots.in_range(ids))

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
        self._raise_error()
        with held():  # a row that has a slot must be fetched into it
            return self._plan(ids, is_next)

    def _plan(self, ids: Mapping[str, Tensor], is_next: bool) -> bool:
        number = self.planned + 1
        moves: list[tuple[CachedRows, Step]] = []
        try:
            for name, rows in self.tables.items():
                if name in self._partly:
                    continue
                try:
                    step, is_planned = self._plan_rows(rows, ids.get(name))
                except CapacityError as error:
                    if is_next:
                        raise self._too_small(name, error.needed) from error
                    break
                if step is not None:
                    moves.append((rows, step))
                if not is_planned:
                    break
                self._partly.add(name)
        finally:
            # What is planned for some tables is under way all the same, also after an error.
            self._arrivals.setdefault(number, []).append(self._start(moves, number))
        if len(self._partly) < len(self.tables):
            return False
        self._partly.clear()
        self.planned = number
        self.expected = max(self.expected, number)
        return True

    def _plan_rows(self, rows: CachedRows, ids: Tensor | None) -> tuple[Step | None, bool]:
        """Plan one table; returns what is to be moved, and whether the table is planned."""
        step = _alone(rows).plan(rows.slots.in_range(ids))
        return step, step is not None

    def end_batch(self) -> None:
        """Take note that the script asks for another batch: it has trained the one before.

        Rows of batches whose gradient no step has applied yet stay in their slots.
        """
        self.end_failed_step()
        for rows in self.tables.values():
            self._release(rows, self.batch)

    def _release(self, rows: CachedRows, batch: int) -> None:
        rows.forget_lookups()
        since = rows.since
        rows.oracle.release(batch if since is None else min(batch, since - 1))

    def begin_batch(self) -> None:
        """Wait until the rows of the batch that is handed out next have arrived.

        Raises:
            HomeError: the home has failed.
        """
        number = self.batch + 1
        if self.planned < number:
            self._pass_over(number)
        # The wait may be interrupted; the batch is then still the next one.
        self._wait(self._arrivals.get(number, []))
        with held():
            self._arrivals.pop(number, None)
            self.batch = number
            self._stats.batches += 1

    def _pass_over(self, number: int) -> None:
        """Begin a batch that there was no room to plan: its lookups bring its rows.

        What was planned for some tables is held until then.
        """
        with held():
            self._stats.unplanned += 1
            for name, rows in self.tables.items():
                if name not in self._partly:
                    _alone(rows).plan(NO_IDS)
            self._partly.clear()
            self.planned = number
            self.expected = max(self.expected, number)

    def forget(self) -> None:
        """Forget the plans of batches that were not handed out; rows keep their slots."""
        for rows in self.tables.values():
            rows.oracle.forget(keep=self.batch)
        self._partly.clear()
        self.planned = self.expected = self.batch
        for number in [number for number in self._arrivals if number > self.batch]:
            # Their rows may be looked up all the same, and then have to be waited for.
            self._arrivals.setdefault(self.batch + 1, []).extend(self._arrivals.pop(number))

    # What lookups do.

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
            SettingsError: there are not enough slots.
            HomeError: rows that have no slot are looked up, and the home has failed.
        """
        self.end_failed_step()
        rows = self.tables[name]
        slots = rows.slots
        flat = ids.detach().reshape(-1).to("cpu").contiguous()
        if slots.padding_row is not None:
            is_padding = flat == slots.padding_row
            if bool(is_padding.any()):
                self._bring_padding(rows)
                found = torch.full(flat.shape, slots.padding, dtype=torch.int64, device="cpu")
                found[~is_padding] = self._slots_of(rows, flat[~is_padding], trains)
                return found.to(ids.dtype).view(ids.shape).to(ids.device)
        found = self._slots_of(rows, flat, trains)
        return found.to(ids.dtype).view(ids.shape).to(ids.device)

    def _slots_of(self, rows: CachedRows, flat: Tensor, trains: bool) -> Tensor:
        hold = self.batch if trains else None
        found = self._find(rows, flat, hold)
        ready = rows.slots.ready
        if found.numel() and not (int(found.min()) >= 0 and bool(ready[found].all())):
            missing = int(((found < 0) | ~ready[found]).sum())
            self._stats.misses += missing
            self._stats.hits -= missing
            found = self._bring(rows, flat, hold)
        self._stats.hits += found.numel()
        if trains:
            rows.note_lookup(flat, found, self.batch)
        return found

    def _find(self, rows: CachedRows, flat: Tensor, hold: int | None) -> Tensor:
        """Return the slots of rows, -1 for none; they stay until the batch `hold` is released."""
        return rows.oracle.slots_of(flat, hold=hold)

    def _bring(self, rows: CachedRows, flat: Tensor, hold: int | None) -> Tensor:
        """Bring rows that are looked up outside a plan."""
        slots = rows.slots
        if not 0 <= int(flat.min()) <= int(flat.max()) < slots.rows:
            raise IndexError(f"table {slots.name!r}: found a row id outside 0 … {slots.rows - 1}")
        self._wait([self._thread.submit(self._raise_error)])  # rows on their way arrive before it
        found = rows.oracle.slots_of(flat, hold=hold)
        missing = torch.unique(flat[found < 0].long())
        if missing.numel():
            # Rows that no step will change may leave as soon as others need their slots.
            until = rows.oracle.released if hold is None else hold
            coming = self._claim(rows, missing, until)
            if coming is not None:
                self._wait([coming])
                found = rows.oracle.slots_of(flat, hold=hold)
            if coming is None or int(found.min()) < 0:  # there is no room for all of them
                found = self._bring_alone(rows, flat)
        return found

    def _bring_alone(self, rows: CachedRows, flat: Tensor) -> Tensor:
        """Bring rows in place of rows that are planned and of rows whose training is over."""
        self.forget()
        # The time until now counts as a batch that is trained.
        self.batch += 1
        self.planned = self.expected = self.batch
        for other in self.tables.values():
            _alone(other).plan(NO_IDS)
            other.hold_lookups(self.batch)
            self._release(other, self.batch - 1)
        found = rows.oracle.slots_of(flat, hold=self.batch)
        missing = torch.unique(flat[found < 0].long())
        if missing.numel():
            coming = self._claim(rows, missing, self.batch)
            if coming is None:
                taken = rows.oracle.capacity - _alone(rows).free
                raise self._too_small(rows.slots.name, taken + missing.numel())
            self._wait([coming])
        return rows.oracle.slots_of(flat)

    def _claim(self, rows: CachedRows, ids: Tensor, hold: int) -> Future[None] | None:
        """Begin to bring rows outside a plan; None: there is no room."""
        with held():
            step = _alone(rows).claim(ids, hold=hold)
            return None if step is None else self._start([(rows, step)], self.batch)

    def _bring_padding(self, rows: CachedRows) -> None:
        slots = rows.slots
        if not slots.ready[slots.padding]:
            assert slots.padding_row is not None
            ids = torch.tensor([slots.padding_row], dtype=torch.int64, device="cpu")
            at = torch.tensor([slots.padding], dtype=torch.int64, device="cpu")
            self._wait([self._thread.submit(self._guarded(lambda: self._bring_in(rows, ids, at)))])

    def _too_small(self, name: str, needed: int) -> SettingsError:
        # One number for all tables gives each an even share, and small tables only their rows.
        together = sum(min(rows.slots.rows, needed) for rows in self.tables.values())
        return SettingsError(
            f"cached(capacity_rows=...): table {name!r}",
            found=f"{self.tables[name].slots.capacity} slots",
            expected=f"at least {needed}: the rows that are looked up together, or whose gradients "
            "no step has applied yet",
            next_step=f"give the table more slots: capacity_rows={{{name!r}: {needed}}}, or "
            f"{together} if you give one number for all tables; or look up fewer rows at a time, "
            "and evaluate under torch.no_grad()",
        )

    # What the home thread does.

    def _start(self, moves: Sequence[tuple[CachedRows, Step]], batch: int) -> Future[None]:
        """Have the home thread move the rows of a batch's steps, at most one a table."""
        for rows, step in moves:
            rows.slots.ready[step.fetched_slots] = False
        return self._thread.submit(self._guarded(lambda: self._move(moves, batch)))

    def _guarded(self, act: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            self._raise_error()
            try:
                act()
            except BaseException as error:
                self._error = error
                raise

        return guarded

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _move(self, moves: Sequence[tuple[CachedRows, Step]], batch: int) -> None:
        leaving = [(rows, step) for rows, step in moves if step.evicted_slots.numel()]
        self._write_back([one for one in map(self._changed, leaving) if one is not None])
        for rows, step in leaving:
            rows.slots.ids[step.evicted_slots] = -1
        self._wait_for_write_backs(batch)
        entering = [(rows, step) for rows, step in moves if step.fetched_ids.numel()]
        found = self._read_home([(rows, step.fetched_ids) for rows, step in entering])
        for (rows, step), (records, there) in zip(entering, found, strict=True):
            self._put(rows, step.fetched_ids, step.fetched_slots, records, there)

    def _wait_for_write_backs(self, batch: int) -> None:
        """Return when no row that enters a slot next is still being written back.

        The home thread writes rows back itself, before.
        """

    def _changed(self, leaving: tuple[CachedRows, Step]) -> TableRows | None:
        """Return those of the rows that leave that differ from the home's; None: none does."""
        rows, step = leaving
        differs = rows.slots.changed[step.evicted_slots]
        if not bool(differs.any()):
            return None
        # A step that writes every slot writes the same bytes to these.
        records = rows.slots.records(step.evicted_slots[differs])
        return TableRows(rows.slots.name, step.evicted_ids[differs], records)

    def _write_back(self, changed: Sequence[TableRows]) -> None:
        if not changed:
            return
        for one in changed:
            self.put_at_home(self.tables[one.table])
        self._moves += 1
        self.home.write_back_all(changed, batch=self._moves)
        self._stats.written_rows += sum(len(one.ids) for one in changed)
        self._stats.written_bytes += sum(one.records.nbytes for one in changed)

    def put_at_home(self, rows: CachedRows) -> None:
        """Have the home know a table. Only the home thread, or nobody else, may be at work."""
        if not rows.is_at_home:
            layout = rows.slots.fix_layout()
            self.home.add_table(
                rows.slots.name, rows=rows.slots.rows, record_bytes=layout.size_bytes
            )
            rows.is_at_home = True

    def _bring_in(self, rows: CachedRows, ids: Tensor, at: Tensor) -> None:
        ((records, there),) = self._read_home([(rows, ids)])
        self._put(rows, ids, at, records, there)

    def _put(
        self, rows: CachedRows, ids: Tensor, at: Tensor, records: Tensor | None, there: Tensor
    ) -> None:
        slots = rows.slots
        is_new = ~there
        new = rows.initial(ids[is_new]) if bool(is_new.any()) else None
        with self._dense:
            if records is not None and new is None:
                slots.put(at, records)
            elif records is not None:
                slots.put(at[there], records[there])
            if new is not None:
                slots.put_new(at[is_new], new)
            slots.ids[at] = ids
            slots.changed[at] = False
            slots.ready[at] = True
        self._stats.fetched_rows += ids.numel()
        if records is not None:
            self._stats.fetched_bytes += int(there.sum()) * records.shape[1]

    def _read_home(
        self, entering: Sequence[tuple[CachedRows, Tensor]]
    ) -> list[tuple[Tensor | None, Tensor]]:
        """Return for each table records, uint8 [n, bytes], and which of them the home has."""
        found: list[tuple[Tensor | None, Tensor]] = []
        wanted: list[TableRows] = []
        for rows, ids in entering:
            there = torch.zeros(ids.numel(), dtype=torch.bool, device="cpu")
            layout, records = rows.slots.layout, None
            if rows.is_at_home and layout is not None:
                records = torch.empty(len(ids), layout.size_bytes, dtype=torch.uint8, device="cpu")
                wanted.append(TableRows(rows.slots.name, ids, records))
            found.append((records, there))
        has = iter(self.home.fetch_all(wanted) if wanted else [])
        return [(records, there if records is None else next(has)) for records, there in found]

    def _wait(self, futures: Iterable[Future[None]]) -> None:
        left = [one for one in futures if not (one.done() and one.exception() is None)]
        if not left:
            return
        begun = time.perf_counter()
        for one in left:
            one.result()
        self._stats.waits += 1
        self._stats.wait_seconds += time.perf_counter() - begun

    def _copy_storage(self, rows: CachedRows) -> None:
        """Write the rows of a table that had storage to the home, and let the storage go."""
        storage, slots = rows.storage, rows.slots
        assert storage is not None
        self.put_at_home(rows)
        for first in range(0, slots.rows, _PIECE_ROWS):
            ids = torch.arange(
                first, min(first + _PIECE_ROWS, slots.rows), dtype=torch.int64, device="cpu"
            )
            records = slots.new_records(storage[ids.to(storage.device)].cpu())
            self._moves += 1
            self.home.write_back(slots.name, ids, records, batch=self._moves)
        rows.drop_storage()

    # What steps of optimizers do.

    def refuse_replaced(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer with a parameter that a module had before its table was cached.

        Raises:
            SettingsError: it has one.
        """
        for rows in self.tables.values():
            old = None if rows.replaced is None else rows.replaced()
            if old is not None and any(
                parameter is old
                for group in optimizer.param_groups
                for parameter in group["params"]
            ):
                raise SettingsError(
                    f"cached table {rows.slots.name!r}",
                    found=f"{type(optimizer).__name__} with the parameter that the module had "
                    "before cached()",
                    expected="an optimizer that trains the slots",
                    next_step="call cached(...) first, then build the optimizer",
                )

    def is_trained_by(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer trains a table of this cache."""
        return any(
            rows.slots.weight is parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (rows := self._by_weight.get(id(parameter))) is not None
        )

    def before_step(self, optimizer: Optimizer) -> None:
        """Take note of the rows that a step is about to change."""
        self.end_failed_step()
        touches_all = False
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                rows = self._by_weight.get(id(parameter))
                if rows is None or rows.slots.weight is not parameter:
                    continue
                rows.slots.refuse_other(parameter)
                self._refuse_other_rows(rows, optimizer, group)
                self._refuse_other_states(rows, optimizer)
                if parameter.grad is None:
                    continue
                rows.gradients.refuse_applied()
                touches_all |= not parameter.grad.is_sparse
                # SGD adds each entry of a sparse gradient to the weight by itself.
                rows.gradients.begin_step(summed=type(optimizer) is not SGD)
                self._will_change(rows, self._to_change(rows))
        if touches_all:
            # The step reads every slot and writes it again, so that nothing may arrive meanwhile.
            self._dense.acquire()
            self._stepping.add(id(optimizer))

    def _to_change(self, rows: CachedRows) -> Tensor:
        """Return the slots whose rows the next step may change."""
        return rows.to_change()

    def _will_change(self, rows: CachedRows, slots: Tensor) -> None:
        with self._lock:
            for view in self._views:
                view.save(rows.slots.name, slots)
        rows.slots.changed[slots] = True
        if rows.marker is None:
            rows.is_unmarked = True
        else:
            rows.marker.mark(self._changed_ids(rows, slots))

    def _changed_ids(self, rows: CachedRows, slots: Tensor) -> Tensor:
        """Return the rows that a checkpoint of this trainer has to hold, from slots that change."""
        return rows.slots.ids[slots]

    def after_step(self, optimizer: Optimizer) -> None:
        """Take note that a step has changed the rows."""
        self.end_failed_step()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                rows = self._by_weight.get(id(parameter))
                if rows is None or rows.slots.weight is not parameter:
                    continue
                if parameter.grad is None:
                    rows.gradients.end_step()  # a hook of the step may have dropped it
                    if not rows.slots.states:
                        self.follow_states(rows, optimizer)
                    continue
                rows.stepped()
                self.follow_states(rows, optimizer)
                self._trained.add(rows.slots.name)

    def follow_states(self, rows: CachedRows, optimizer: Optimizer) -> None:
        """Look at the row states that an optimizer has for a table now."""
        slots = rows.slots
        slots.follow_states(
            row_states(optimizer.state.get(slots.weight, {}), slots.weight.shape[0])
        )
        if rows.storage is not None and not rows.is_copying:
            rows.is_copying = True
            self._thread.submit(self._guarded(lambda: self._copy_storage(rows)))

    def end_failed_step(self) -> None:
        """Let the home thread go on after a step: one that fails calls no hook at its end.

        Each call of the training thread does this first. Code that ends training after an error
        has to do it, too.
        """
        if self._stepping:
            self._stepping.clear()
            self._dense.release()

    def _refuse_other_rows(
        self, rows: CachedRows, optimizer: Optimizer, group: Mapping[str, Any]
    ) -> None:
        known = rows.watched
        if known is not None and known[0] == id(optimizer) and not known[1].differ(group):
            return
        self.refuse_optimizer(rows, optimizer, group)
        rows.watched = id(optimizer), Watched(group)

    def _refuse_other_states(self, rows: CachedRows, optimizer: Optimizer) -> None:
        """Refuse row states that are not those of the rows in slots, as of another training."""
        slots = rows.slots
        state = optimizer.state.get(slots.weight, {})
        size = slots.weight.shape[0]
        found = row_states(state, size)
        if slots.states:
            is_right = all(found.get(name) is own for name, own in slots.states.items())
        elif slots.rows != size and row_states(state, slots.rows):
            is_right = False
        else:
            # Before the first step, rows have the states that the optimizer gives to new ones.
            is_right = all(bool((one == one[slots.blank]).all()) for one in found.values())
        if not is_right:
            raise SettingsError(
                f"cached table {slots.name!r}",
                found=f"row states of {type(optimizer).__name__} that were loaded or replaced "
                "outside of recpoint",
                expected="the states that the optimizer has made for the rows in slots, because "
                "those of all other rows are at home",
                next_step="restore the states with the model from a checkpoint, "
                "Checkpointer.restore(), and use no optimizer.load_state_dict()",
            )

    def refuse_optimizer(
        self, rows: CachedRows, optimizer: Optimizer, group: Mapping[str, Any]
    ) -> None:
        """Refuse an optimizer that changes rows that were not looked up.

        Raises:
            SettingsError: it does.
        """
        weight = rows.slots.weight
        sparse = weight.grad.is_sparse if weight.grad is not None else False
        reason = all_rows_changed(
            optimizer, group, sparse=sparse, dtype=weight.dtype, row_local=self._row_local
        )
        if reason is not None:
            raise SettingsError(
                f"cached table {rows.slots.name!r}",
                found=f"{type(optimizer).__name__}: {reason.why}",
                expected="an optimizer that changes only the rows that were looked up, because the "
                "others are not in memory",
                next_step=reason.change.replace(
                    "Options.row_local_optimizers", "cached(row_local_optimizers=...)"
                ),
            )

    def zero_rows(self, name: str, ids: Tensor) -> None:
        """Set rows and their row states to zero.

        Args:
            name: name of the table.
            ids: int64 [n], on the CPU, in any order.
        """
        self.end_failed_step()
        rows = self.tables[name]
        if rows.slots.padding_row is not None and bool((ids == rows.slots.padding_row).any()):
            self._bring_padding(rows)
            for _, array in rows.slots.arrays():
                array[rows.slots.padding] = 0
        for part in torch.unique(ids).split(max(1, rows.slots.capacity // 2)):
            at = self._slots_of(rows, part, trains=False)
            self._will_change(rows, at)
            for _, array in rows.slots.arrays():
                array.index_fill_(0, at.to(array.device), 0)

    # What checkpoints do.

    def announce_cut(self) -> None:
        """Say that this trainer takes a checkpoint next, or ends; for others that share rows."""

    def settle(self) -> Callable[[], None]:
        """Prepare for a view, which must follow before any row changes.

        With `writes_back_at_cuts`, the home thread has all rows that have changed written to the
        home, and freezes it, while training goes on. If the home fails meanwhile, the view says so.

        Returns:
            What has the home thread begin. The caller calls it once its stall is over, also after
            an error: the home thread would take the processor from the cut.

        Raises:
            HomeError: the home has failed.
        """
        if not self.writes_back_at_cuts:
            return lambda: None
        self.end_failed_step()
        self._raise_error()
        return self._begin_settling()

    def _begin_settling(self) -> Callable[[], None]:
        settling, may_begin = Settling(self.tables, self._lock), threading.Event()
        with held():
            self._views.append(settling)
            unused, self._settled = self._settled, {}  # of a cut that has failed
            act = self._guarded(partial(self._settle, settling, self._settled, unused or {}))
            self._thread.submit(partial(self._until_over, settling, may_begin, act))
        return may_begin.set

    def _until_over(
        self, settling: Settling, may_begin: threading.Event, act: Callable[[], None]
    ) -> None:
        """Have steps save rows until `act` is over, also if it fails or never begins its work."""
        may_begin.wait()
        try:
            act()
        finally:
            with self._lock:
                self._views.remove(settling)

    def _settle(self, settling: Settling, frozen: _Frozen, unused: _Frozen) -> None:
        _release_all(unused)
        for name in filter(self.stages_at_home, list(self.tables)):
            self.put_at_home(self.tables[name])
        copied: list[TableRows] = []
        for name in self.tables:
            if (rows := settling.take(name)) is not None:
                copied.append(rows)
            if sum(one.records.nbytes for one in copied) > _COPIED_BYTES:
                self._write_back(copied)
                copied = []
        self._write_back(copied)
        self._freeze_all(frozen)

    def _freeze_all(self, frozen: _Frozen) -> None:
        for name in self.tables:
            frozen[name] = self._freeze(name)  # each is released, also if the next one fails

    def stages_at_home(self, name: str) -> bool:
        """Whether the home has a table's rows after `settle`, so that it can stage them itself."""
        return self.writes_back_at_cuts and name in self._trained

    def view(self) -> CacheView:
        """Return a view of each table's part as it is now; it must be released.

        The home is frozen after the write-backs that were planned before. Rows in slots that a
        step changes before the view has copied them are saved first.
        """
        return self._view({name: rows.part for name, rows in self.tables.items()})

    def _view(self, parts: Mapping[str, range]) -> CacheView:
        self.end_failed_step()
        settled, self._settled = self._settled, None
        if settled is None:
            self._raise_error()
            view = CacheView(self._thread.submit, self._lock, self._freeze, self._collected)
        else:
            view = self._settled_view(settled)
        for name, rows in self.tables.items():
            view.add(name, TableView(rows.slots, rows.initial, parts[name]))
        self._views.append(view)
        return view

    def _settled_view(self, frozen: _Frozen) -> CacheView:
        """Return a view of rows that `settle` has written back and frozen."""

        def take(name: str) -> FrozenRows | None:
            self._raise_error()
            return frozen.pop(name)

        def collected(view: CacheView) -> None:
            self._collected(view)
            with suppress(RuntimeError):  # the cache was closed, and its home thread ends
                self._thread.submit(partial(_release_all, frozen))  # if the view has never begun

        return CacheView(self._thread.submit, self._lock, take, collected)

    def _freeze(self, name: str) -> FrozenRows | None:
        self._raise_error()
        rows = self.tables[name]
        return self.home.freeze(name, range(rows.slots.rows)) if rows.is_at_home else None

    def _collected(self, view: CacheView) -> None:
        if view in self._views:
            self._views.remove(view)

    # What restores do.

    def restored(self) -> None:
        """Begin anew: no row is in a slot, and none is at home.

        A restore then writes all rows to the home.
        """
        self.end_failed_step()
        self._wait([self._thread.submit(lambda: None)])
        settled, self._settled = self._settled, None  # of a cut that has failed
        _release_all(settled or {})
        self._error = None
        for rows in self.tables.values():
            slots = rows.slots
            rows.oracle = self._new_oracle(rows)
            rows.forget_all()
            rows.is_unmarked = False
            slots.ids.fill_(-1)
            slots.ready.zero_()
            slots.changed.zero_()
            slots.layout = None
            if rows.storage is not None:
                rows.drop_storage()
            if rows.is_at_home:
                self.home.clear(slots.name)
        self.batch = self.planned = self.expected = 1
        self._arrivals.clear()
        self._partly.clear()

    def fetch_home(self, name: str, ids: Tensor, records: Tensor) -> None:
        """Read rows that `write_home` wrote, while nothing is trained.

        Args:
            name: name of the table.
            ids: int64 [n], ascending.
            records: uint8 [n, bytes]. Those of rows that the home has are written to it.
        """
        rows = self.tables[name]
        self.put_at_home(rows)
        self.home.fetch(name, ids, records)

    def write_home(self, name: str, ids: Tensor, records: Tensor) -> None:
        """Write rows to the home while nothing is trained.

        Args:
            name: name of the table.
            ids: int64 [n], ascending.
            records: uint8 [n, bytes], as the slots' layout says.
        """
        rows = self.tables[name]
        self.put_at_home(rows)
        self._moves += 1
        self.home.write_back(name, ids, records, batch=self._moves)

    # Other.

    def rows_of(self, name: str, ids: Tensor) -> tuple[Tensor, ...]:
        """Return rows and row states as they are now, wherever they are.

        Args:
            name: name of the table.
            ids: int64 [n], on the CPU.

        Returns:
            [n, dim] and [n, …] for each row state, in the optimizer's order, on the CPU.
        """
        wanted, inverse = torch.unique(ids, return_inverse=True)
        outs = [
            torch.empty((wanted.numel(), *array.shape[1:]), dtype=array.dtype, device="cpu")
            for _, array in self.tables[name].slots.arrays()
        ]
        unused, self._settled = self._settled, None  # of a cut that has failed
        if unused is not None:
            self._thread.submit(partial(_release_all, unused))
        self._settle_for_reading()
        view = self._view({one: range(rows.slots.rows) for one, rows in self.tables.items()})
        view.fetch(name, wanted, outs)
        view.begin()
        view.finish()
        return tuple(out[inverse] for out in outs)

    def _settle_for_reading(self) -> None:
        """Prepare for a view that reads rows; there is nothing to do for one trainer."""

    def size_bytes(self) -> dict[str, int]:
        """Return bytes of memory by role: slots, oracle, and the home's own roles."""
        return {
            "slots": sum(rows.slots.size_bytes for rows in self.tables.values()),
            "oracle": sum(rows.oracle.size_bytes for rows in self.tables.values()),
            **self.home.size_bytes(),
        }

    def close(self) -> None:
        """End the home thread after what it has to do. The home stays open."""
        self.end_failed_step()
        self._thread.end(within_seconds=self._end_within)


def _release_all(frozen: _Frozen) -> None:
    for rows in frozen.values():
        if rows is not None:
            rows.release()
    frozen.clear()


def _alone(rows: CachedRows) -> Oracle:
    """Return the oracle of a table that no other trainer shares."""
    assert isinstance(rows.oracle, Oracle)
    return rows.oracle


_caches: weakref.WeakSet[Cache] = weakref.WeakSet()
_hooks: list[Any] = []


def _follow_steps(cache: Cache) -> None:
    """Tell the cache of each step of each optimizer."""
    _caches.add(cache)
    if not _hooks:
        # Of all optimizers, because the one of a table is built after the table is cached.
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))
        atexit.register(_end_all)


def _end_all() -> None:
    """End the home threads before the interpreter does, which would end them anywhere."""
    for cache in list(_caches):
        cache.close()


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    for cache in list(_caches):
        cache.refuse_replaced(optimizer)
    caches = _caches_of(optimizer)
    if not caches:
        return None

    def look() -> None:
        for cache in caches:
            cache.before_step(optimizer)

    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        look()
        return None

    def with_look() -> Any:
        # The gradients are there after it, and the step begins then.
        loss = closure()
        with torch.no_grad():
            look()
        return loss

    if len(args) > 1:
        return (args[0], with_look, *args[2:]), kwargs
    return args, {**kwargs, "closure": with_look}


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for cache in _caches_of(optimizer):
        cache.after_step(optimizer)


def caches_of(parameters: Iterable[Tensor]) -> list[Cache]:
    """Return the caches that have the slots of some of these parameters, in their order."""
    by_weight = {id(weight): cache for cache in list(_caches) for weight in cache.weights}
    found = [by_weight[id(one)] for one in parameters if id(one) in by_weight]
    return list(dict.fromkeys(found))


def _caches_of(optimizer: Optimizer) -> list[Cache]:
    """Return the caches of tables that an optimizer trains."""
    return [cache for cache in list(_caches) if cache.is_trained_by(optimizer)]
