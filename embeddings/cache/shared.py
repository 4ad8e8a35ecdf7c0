"""The cache of one trainer among several that train the same tables (BagPipe, SOSP 2023).

Each row in use is in the cache of one trainer, its owner (`SharedOracle`). For each batch,

1. the owners send the values of rows to the trainers that look them up (`begin_batch`);
2. before an optimizer's step, the trainers send the gradients of these rows to the owners
   (`before_step`), and each owner's optimizer changes its own rows;
3. gradients of rows that the next batch does not look up are sent while it is trained, and the
   owner makes their step then (`LaterStep`).

Results are those of trainers that all have whole tables, and add the gradients of all ranks in rank
order.

All trainers act alike: batches, steps and checkpoints come in the same order on each. Rows move
between a cache and the home as in any `Cache`. A row that one trainer has written back may enter
another's cache later, so the home threads of all trainers meet after the write-backs of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, Never

import torch
from torch import Tensor
from torch.optim import Optimizer

from recpoint.embeddings.cache.batch_ids import ComingIds, Reading
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.call_thread import CallThread
from recpoint.embeddings.cache.channel import Channel, GlooChannel
from recpoint.embeddings.cache.data_parallel import DenseLayers
from recpoint.embeddings.cache.exchange import (
    LocalGradient,
    Outgoing,
    Reduced,
    counts_of,
    exchange_values,
    merged,
)
from recpoint.embeddings.cache.later_step import LaterStep
from recpoint.embeddings.cache.residents import NO_IDS, CachedRows
from recpoint.embeddings.cache.same_tables import capacities_of_ranks, refuse_differing
from recpoint.embeddings.cache.slots import TableSlots
from recpoint.embeddings.cache.step_agreement import (
    TableStep,
    agree_on_step,
    numbers_of_step,
)
from recpoint.embeddings.cache.turns import Act, Turns, refuse_other_counts
from recpoint.embeddings.home.contract import FrozenRows, Home
from recpoint.errors import HomeError, RankLost, RanksDiffer, SettingsError
from recpoint.interrupts import held
from recpoint.lookahead.oracle import Step
from recpoint.lookahead.shared_oracle import Exchange, SharedOracle

__all__ = ["SharedCache"]

_END_SECONDS: Final = 10.0

#: By which norms of the same float32 values may differ, if ranks add them in another order.
_ROUNDING: Final = 1e-5

#: Of what is done at any batch.
_NO_BATCH: Final = 1


class SharedCache(Cache):
    """The cached tables of one model, of which each trainer has a part.

    It is built on all ranks together. Otherwise as `Cache`.

    Args:
        home: a home that all trainers share.
        tables: as for `Cache`, the same on all ranks; only numbers of slots may differ.
        row_local: as for `Cache`.
        open_channel: opens a channel to all ranks from its name. Collective.

    Raises:
        SettingsError: the tables differ between ranks.
        RankLost: a rank does not answer.
    """

    def __init__(
        self,
        home: Home,
        tables: Mapping[str, CachedRows],
        *,
        row_local: tuple[type, ...] = (),
        open_channel: Callable[[str], Channel] = GlooChannel,
    ) -> None:
        self._open_channel = open_channel
        ids_channel = self._open_channels()
        self._rank, self._count = self._rows_channel.rank, self._rows_channel.count
        try:
            refuse_differing(self._rows_channel, tables)
            self._capacities = capacities_of_ranks(self._rows_channel, tables)
        except BaseException:
            for one in (ids_channel, self._rows_channel, self._later_channel, self._home_channel):
                one.close()
            raise
        for rows in tables.values():
            slots = rows.slots
            slots.borrowed = torch.full((slots.capacity + 2,), -1, dtype=torch.int64, device="cpu")
            ends = [slots.rows * one // self._count for one in (self._rank, self._rank + 1)]
            rows.part = range(*ends)
        self._numbers = numbers_of_step(len(tables))  # that ranks say before they exchange rows
        self._take_turns()
        super().__init__(home, tables, row_local=row_local)
        self._coming = self._new_coming(ids_channel)
        self._over = self.batch  # the last batch whose training is over on this rank
        #: By table and batch: what was planned and is not trained yet.
        self._exchanges: dict[str, dict[int, Exchange]] = {name: {} for name in tables}
        #: By table and batch: rows of this rank's part that any rank looks up.
        self._in_part: dict[str, dict[int, Tensor]] = {name: {} for name in tables}
        #: Slots of the rows that are borrowed for the batch that training is at.
        self._borrowed: dict[str, Tensor] = {}
        #: Slots of the rows that the step that is being made changes, now or later, by table.
        self._changing: dict[str, Tensor] = {}
        self._later_thread = CallThread("recpoint-later-steps")
        #: What the step that is being made does later; None: nothing.
        self._to_follow: tuple[Outgoing, list[LaterStep]] | None = None
        self._following: list[Future[None]] = []
        self._following_batch = 0  # the batch of these steps
        self._stepped: set[str] = set()  # tables that the home has to know
        self._dense_layers = DenseLayers(
            {name: rows.slots.weight for name, rows in self.tables.items()}
        )

    def _open_channels(self) -> Channel:
        """Open a channel for each thread; returns that of ids. Collective.

        Each thread has a channel of its own, so that no message reaches another thread.
        """
        self._has_left = False
        self._rows_channel = self._open_channel("rows")
        self._later_channel = self._open_channel("gradients for later steps")
        self._home_channel = self._open_channel("sign of a home thread")
        return self._open_channel("ids of coming batches")

    def _take_turns(self) -> None:
        """Have each thread say what it does before it exchanges bytes."""
        self._turns = Turns(self._rows_channel, self._numbers)
        self._later_turns = Turns(self._later_channel, self._numbers)
        self._home_turns = Turns(self._home_channel)

    def _agree(self, act: Act, numbers: Tensor | None = None) -> Tensor:
        """Wait until all ranks do the same after the same batch; see `Turns.agree`. Collective."""
        return self._turns.agree(act, self.batch, numbers)

    def _new_oracle(self, rows: CachedRows) -> SharedOracle:
        slots = rows.slots
        oracle = SharedOracle(self._capacities[slots.name], rank=self._rank, rows=slots.rows)
        oracle.plan([NO_IDS] * self._count)  # batch 1 stands for the time before the first batch
        return oracle

    def _new_coming(self, channel: Channel) -> ComingIds:
        rows = {name: one.slots.rows for name, one in self.tables.items()}
        return ComingIds(channel, rows, last=self.batch)

    # What the Lookahead does.

    def tell(self, count: int, ids: Callable[[int], Mapping[str, Tensor]], *, window: int) -> int:
        """Learn which batches were read on all ranks; see `Cache.tell`. Collective."""
        self.end_failed_step()
        with self._leaving():
            return self._tell(count, ids, window)

    def _tell(self, count: int, ids: Callable[[int], Mapping[str, Tensor]], window: int) -> int:
        self._raise_error()
        new = []
        for at in range(self._coming.told - self.batch, count):
            by_table = ids(at)
            new.append(
                {
                    name: rows.slots.in_range(by_table.get(name))
                    for name, rows in self.tables.items()
                }
            )
        # A batch whose gradients no step has applied yet is not over.
        waits = self.planned == self.batch
        if waits:
            # A rank that makes a step would never tell its ids.
            self._turns.agree(Act.READ_IDS, self.batch + 1)
        reading = Reading(self._turn, window)
        self._coming.tell(new, at=self.batch, reading=reading, over=self._over, waits=waits)
        for rows in self.tables.values():
            rows.oracle.release(min(self._coming.over, rows.oracle.planned))
        if waits:
            self._coming.refuse_uneven(self.batch)
        return self._coming.known - self.batch

    def _expect_rows(self, rows: CachedRows, ids: Tensor | None) -> None:
        _shared(rows).expect(self._coming.of(self.expected + 1)[rows.slots.name])

    def plan(self, ids: Mapping[str, Tensor], *, is_next: bool = False) -> bool:
        """Plan the batch after the last that is planned; see `Cache.plan`."""
        with self._leaving():
            return super().plan(ids, is_next=is_next)

    def _plan_rows(self, rows: CachedRows, ids: Tensor | None) -> tuple[Step | None, bool]:
        name = rows.slots.name
        planned = _shared(rows).plan(self._coming.of(self.planned + 1)[name])
        if planned.step is not None:
            assert rows.slots.borrowed is not None
            rows.slots.borrowed[planned.step.fetched_slots] = -1
        if planned.exchange is not None:
            self._exchanges[name][planned.exchange.batch] = planned.exchange
        return planned.step, planned.exchange is not None

    def end_batch(self) -> None:
        """Take note that the script asks for another batch; see `Cache.end_batch`."""
        self.end_failed_step()
        self._forget_borrowed()
        if self._following_batch < self.batch:
            with self._leaving():  # the rows of these steps may be in the batch that comes
                self._wait_for_later_steps()
        over = self.batch
        for rows in self.tables.values():
            rows.forget_lookups()
            if rows.since is not None:
                over = min(over, rows.since - 1)
        self._over = over

    def begin_batch(self) -> None:
        """Wait for the batch's rows, and borrow those of other ranks. Collective.

        Raises:
            HomeError: the home has failed.
            RankLost: a rank does not answer.
        """
        with self._leaving():
            super().begin_batch()
            self._exchange_values()

    def _exchange_values(self) -> None:
        with held():
            for name, by_rank in self._coming.of(self.batch).items():
                part = self.tables[name].part
                here = [one[(one >= part.start) & (one < part.stop)] for one in by_rank]
                self._in_part[name][self.batch] = torch.cat(here)
            self._coming.drop(self.batch)
            tables = [
                (rows.slots, self._exchanges[name][self.batch])
                for name, rows in self.tables.items()
            ]
            sent = counts_of([one.lent for _, one in tables], self._count)
            awaited = counts_of([one.borrowed for _, one in tables], self._count)
            refuse_other_counts("values of rows", self._agree(Act.BEGIN_BATCH, sent), awaited)
            exchange_values(self._rows_channel, tables)
            for slots, exchange in tables:
                ids = torch.cat([rows.ids for rows in exchange.borrowed])
                at = torch.cat([rows.slots for rows in exchange.borrowed])
                assert slots.borrowed is not None
                slots.borrowed[at] = ids
                slots.ready[at] = True
                self._borrowed[slots.name] = at
            # No gradient comes any more for batches whose training is over on all ranks.
            self._drop(lambda number: number <= self._coming.over)

    def _drop(self, is_over: Callable[[int], bool], name: str | None = None) -> None:
        for kept in (self._exchanges, self._in_part):
            for by_batch in kept.values() if name is None else [kept[name]]:
                for number in [one for one in by_batch if is_over(one)]:
                    del by_batch[number]

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Leave the other ranks if home or ranks fail in the block, so that none waits for this.

        Ranks lose each other after one of them has lost the home. Then this rank may know of that,
        and says what came first.
        """
        try:
            yield
        except (HomeError, RankLost, RanksDiffer) as error:
            self._leave()
            if isinstance(error, RankLost) and isinstance(self._error, HomeError):
                raise self._error from None
            raise

    def _leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._rows_channel.close()
            self._coming.leave()
            self._later_thread.submit(self._later_channel.close)
            # After what it was given: the home threads of ranks that know of no loss may wait for
            # more than that.
            self._thread.submit(self._home_channel.close)

    def _pass_over(self, number: int) -> Never:
        name, rows = next(
            (name, rows) for name, rows in self.tables.items() if name not in self._partly
        )
        raise SettingsError(
            f"cached(capacity_rows=...): table {name!r}",
            found=f"{self._capacities[name]} slots on the ranks, of which rows need too many whose "
            "gradients no step has applied yet",
            expected="room for the rows of the next batch",
            next_step="give the table more slots (capacity_rows={name: slots}), or call "
            "optimizer.step() after fewer batches",
        )

    def forget(self) -> None:
        """Forget the plans of batches that were not handed out; see `Cache.forget`."""
        with self._leaving():
            self._wait_for_later_steps()  # another batch may come than was known
        super().forget()
        self._coming.forget(self.batch)
        self._drop(lambda number: number > self.batch)

    def _forget_borrowed(self) -> None:
        for name, at in self._borrowed.items():
            self.tables[name].slots.ready[at] = False
        self._borrowed.clear()

    # What lookups do.

    def slots_of(self, name: str, ids: Tensor, *, trains: bool) -> Tensor:
        """Return the slots of the rows that a lookup reads; see `Cache.slots_of`."""
        self._dense_layers.refuse_averaged_slots()
        return super().slots_of(name, ids, trains=trains)

    def _slots_of(self, rows: CachedRows, flat: Tensor, trains: bool) -> Tensor:
        if not trains:
            # Rows of other batches may be read, which a later step may be changing.
            self._wait_for_later_steps()
        return super()._slots_of(rows, flat, trains)

    def _find(self, rows: CachedRows, flat: Tensor, hold: int | None) -> Tensor:
        # The gradients of other rows would go to no owner.
        oracle = _shared(rows)
        return oracle.slots_of(flat) if hold is None else oracle.slots_needed(flat, batch=hold)

    def _bring(self, rows: CachedRows, flat: Tensor, hold: int | None) -> Never:
        """Refuse lookups outside a plan: other ranks would have to send rows for them."""
        slots = rows.slots
        if not 0 <= int(flat.min()) <= int(flat.max()) < slots.rows:
            raise IndexError(f"table {slots.name!r}: found a row id outside 0 … {slots.rows - 1}")
        raise SettingsError(
            f"cached table {slots.name!r}, which {self._count} ranks share",
            found="a lookup of rows that are not in the ids of the batch that was handed out last, "
            "or after a step with it",
            expected="lookups of the rows that Lookahead was told, before the step",
            next_step="have Lookahead(ids=...) return all ids of a batch; to evaluate, read the "
            "batches of all ranks through another Lookahead(reader, model)",
        )

    def zero_rows(self, name: str, ids: Tensor) -> Never:
        """Refuse it: rows are in the caches of several ranks.

        Raises:
            SettingsError: always.
        """
        raise SettingsError(
            f"cached table {name!r}, which {self._count} ranks share",
            found="a reset of rows",
            expected="no reset of rows, which may be in another rank's cache",
            next_step="reset rows in a training of one rank that restores the checkpoint",
        )

    # What the home thread does.

    def _guarded(self, act: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            try:
                act()
            except BaseException as error:
                self._error = error  # before other ranks can leave this one
                self._home_channel.close()  # the other home threads must not wait for this one
                raise

        return super()._guarded(guarded)

    def _wait_for_write_backs(self, batch: int) -> None:
        self._home_turns.agree(Act.MOVE_ROWS, batch)

    def _copy_storage(self, rows: CachedRows) -> None:
        if self._rank == 0:
            super()._copy_storage(rows)
        else:
            rows.drop_storage()
        self._home_turns.agree(Act.COPY_TABLE, _NO_BATCH)

    # What steps of optimizers do.

    def before_step(self, optimizer: Optimizer) -> None:
        """Reduce the gradients of all ranks at the owners of rows. Collective."""
        self.end_failed_step()
        trained = self._trained_by(optimizer)
        for rows in trained:
            rows.gradients.refuse_applied()
        with self._leaving():
            self._wait_for_later_steps()
            self._reduce(optimizer, trained)
        super().before_step(optimizer)

    def _trained_by(self, optimizer: Optimizer) -> list[CachedRows]:
        weights = _parameters(optimizer)
        return [
            rows
            for name, rows in self.tables.items()
            if id(rows.slots.weight) in weights and self._pending(name)
        ]

    def _pending(self, name: str) -> list[Exchange]:
        return [one for number, one in self._exchanges[name].items() if number <= self.batch]

    def _reduce(self, optimizer: Optimizer, trained: Sequence[CachedRows]) -> None:
        """Put the gradients of all ranks in place of this rank's, for rows that it owns.

        Those of rows that the next batch does not look up are zero or left out.
        """
        if not trained:
            return
        now: list[tuple[LocalGradient, Exchange]] = []
        later: list[tuple[LocalGradient, Exchange]] = []
        later_steps: list[LaterStep] = []
        is_next_known = self._coming.known > self.batch
        coming = self._coming.of(self.batch + 1) if is_next_known else {}
        steps = {}
        for rows in trained:
            name, exchange = rows.slots.name, merged(self._pending(rows.slots.name))
            if rows.gradients.is_averaged:
                steps[name] = TableStep(exchange=exchange, at_once=exchange, is_averaged=True)
                continue
            later_step = LaterStep.of(optimizer, rows.slots) if is_next_known else None
            next_ids = partial(_together, coming.get(name, []))
            steps[name] = TableStep.of(exchange, later_step, next_ids)
        steps, others = agree_on_step(
            partial(self._agree, Act.STEP),
            optimizer,
            list(self.tables),
            steps,
            digest=self._dense_layers.digest_of_gradients(optimizer),
        )
        if others:
            self._dense_layers.notice_other_gradients(others)
        for name, step in steps.items():
            self._changing[name] = step.exchange.own.slots
            if step.is_averaged:
                continue
            local = LocalGradient(self.tables[name].slots, self._count)
            now.append((local, step.at_once))
            if step.late is not None and step.later_step is not None:
                later.append((local, step.late))
                later_steps.append(step.later_step)
            self._stats.reduced_rows += _count_lent(step.exchange)
            self._stats.reduced_at_once += _count_lent(step.at_once)
        to_follow = Outgoing(self._rank, self._count, later)  # before gradients are replaced
        for name in self._put_averages(now, steps):
            del self._changing[name]
        if later_steps:
            self._to_follow = to_follow, later_steps

    def _put_averages(
        self,
        gradients: Sequence[tuple[LocalGradient, Exchange]],
        steps: Mapping[str, TableStep],
    ) -> list[str]:
        """Exchange gradients, and put averages in their place; tables of which there are none."""
        if not gradients:
            return []
        without = []
        found = Outgoing(self._rank, self._count, gradients).reduce(self._rows_channel)
        for (local, _), reduced in zip(gradients, found, strict=True):
            if reduced is None:
                without.append(local.slots.name)
            else:
                self._put_gradient(local.slots, steps[local.slots.name].exchange, reduced)
        return without

    def average_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Put the gradients of all ranks in place of this rank's before the step. Collective.

        The step exchanges none of them. `scale_averaged` must follow.

        Args:
            parameters: those among them that are slots.

        Returns:
            The gradients of the rows that this rank owns, for each table.
        """
        self.end_failed_step()
        tables = self._to_average(parameters)
        for rows in tables:
            rows.gradients.refuse_applied()
        if not tables:
            return []
        steps = {}
        for rows in tables:
            exchange = merged(self._pending(rows.slots.name))
            steps[rows.slots.name] = TableStep(
                exchange=exchange, at_once=exchange, is_averaged=rows.gradients.is_averaged
            )
        with self._leaving():
            agree_on_step(
                partial(self._agree, Act.AVERAGE),
                None,
                list(self.tables),
                steps,
                digest=0,  # the norms of dense gradients are compared next
            )
            now = []
            for name, step in steps.items():
                if not step.is_averaged:
                    now.append((LocalGradient(self.tables[name].slots, self._count), step.exchange))
                    self._stats.reduced_rows += _count_lent(step.exchange)
                    self._stats.reduced_at_once += _count_lent(step.exchange)
            self._put_averages(now, steps)
        return [rows.slots.weight.grad for rows in tables if rows.slots.weight.grad is not None]

    def _to_average(self, parameters: Iterable[Tensor]) -> list[CachedRows]:
        ids = {id(one) for one in parameters}
        return [
            rows
            for name, rows in self.tables.items()
            if id(rows.slots.weight) in ids and self._pending(name)
        ]

    def agree_on_norms(self, tables: float, dense: float) -> tuple[list[float], float]:
        """Return the norms of the tables' gradients on all ranks, and that of all others.

        Collective.

        Args:
            tables: norm of the gradients of rows that this rank owns.
            dense: norm of all other gradients, of which all ranks have the averages.

        Raises:
            RanksDiffer: norms of the other gradients differ.
            RankLost: a rank does not answer.
        """
        own = torch.tensor([tables, dense], dtype=torch.float64, device="cpu").view(torch.int64)
        with self._leaving():
            heard = self._agree(Act.AGREE_ON_NORM, own.expand(self._count, 2))
            of_tables, of_dense = heard.contiguous().view(torch.float64).T.tolist()
            if not all(_is_like(one, of_dense[0]) for one in of_dense):
                raise RanksDiffer(
                    "clip_grad_norm_()",
                    found=f"gradients of dense layers with the norms {of_dense} on the ranks",
                    expected="averaged gradients, which are the same on all ranks",
                    next_step="train the dense layers with DistributedDataParallel, or average "
                    "their gradients before clip_grad_norm_()",
                )
        return of_tables, of_dense[0]

    def scale_averaged(self, parameters: Iterable[Tensor], factor: Tensor) -> None:
        """Multiply the gradients that `average_gradients` has put into place.

        Args:
            parameters: as there.
            factor: a scalar.
        """
        for rows in self._to_average(parameters):
            gradient = rows.slots.weight.grad
            if gradient is not None:
                values = gradient._values() if gradient.is_sparse else gradient
                values.mul_(factor.to(values.device))
                rows.gradients.note_averaged()

    def _put_gradient(self, slots: TableSlots, exchange: Exchange, reduced: Reduced) -> None:
        weight, there = slots.weight, reduced.there
        at = reduced.slots[there].to(weight.device)
        values = reduced.values[there].to(weight.device)
        if reduced.is_sparse:
            weight.grad = torch.sparse_coo_tensor(
                at[None], values, weight.shape, is_coalesced=True, check_invariants=False
            )
            return
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        for rows in (exchange.own, *exchange.borrowed):
            weight.grad.index_fill_(0, rows.slots.to(weight.device), 0)
        weight.grad.index_copy_(0, at, values)

    def _wait_for_later_steps(self) -> None:
        following, self._following = self._following, []
        self._wait(following)

    def _follow_up(self, batch: int, outgoing: Outgoing, steps: Sequence[LaterStep]) -> None:
        try:
            sent = self._later_turns.agree(Act.LATER_STEP, batch, outgoing.sent_rows)
            refuse_other_counts("late gradients of rows", sent, outgoing.awaited_rows)
            for step, reduced in zip(steps, outgoing.reduce(self._later_channel), strict=True):
                if reduced is not None:
                    step.make(reduced)
        except BaseException:
            self._later_channel.close()  # the other ranks must not wait for the next exchange
            raise

    def _to_change(self, rows: CachedRows) -> Tensor:
        slots = self._changing.get(rows.slots.name)
        if slots is None:
            raise SettingsError(
                f"cached table {rows.slots.name!r}, which {self._count} ranks share",
                found="a gradient of an earlier batch, whose step was made already",
                expected="one step with the gradients of a batch, or of several",
                next_step="call optimizer.zero_grad() after each step",
            )
        return slots

    def _changed_ids(self, rows: CachedRows, slots: Tensor) -> Tensor:
        """Return the rows of this rank's part that any rank has looked up, counted from its start.

        Their owners may be other ranks.
        """
        ids = torch.cat([NO_IDS, *self._in_part[rows.slots.name].values()])
        return ids - rows.part.start

    def after_step(self, optimizer: Optimizer) -> None:
        """Take note that a step has changed the rows."""
        super().after_step(optimizer)
        trained = [self.tables[name] for name in self._changing]
        for rows in trained:
            name = rows.slots.name
            if id(rows.slots.weight) not in _parameters(optimizer):
                continue
            del self._changing[name]
            self._drop(lambda number: number <= self.batch, name)
            # The owners have other values of these now.
            if name in self._borrowed:
                rows.slots.ready[self._borrowed.pop(name)] = False
            if name not in self._stepped:
                # Any rank may write a row back from now on, so that each has to ask the home.
                self._stepped.add(name)
                self._thread.submit(self._guarded(partial(self.put_at_home, rows)))
        if self._to_follow is not None:
            following = self._later_thread.submit(
                partial(self._follow_up, self.batch, *self._to_follow)
            )
            self._to_follow = None
            self._following.append(following)
            self._following_batch = self.batch
            # Rows that leave their slots next are written back as they are after that.
            self._thread.submit(self._guarded(lambda: following.result()))

    # What reads and checkpoints do.

    def rows_of(self, name: str, ids: Tensor) -> tuple[Tensor, ...]:
        """Return rows and row states as they are now; see `Cache.rows_of`. Collective.

        It returns on no rank before all ranks have their rows: a rank that goes on could end the
        servers.
        """
        with self._leaving():
            found = super().rows_of(name, ids)
            self._agree(Act.END_READ)
        return found

    def _settle_for_reading(self) -> None:
        with held():
            self.settle()()

    def announce_cut(self) -> None:
        """Wait until all ranks take a checkpoint next, or end. Collective.

        A rank that makes a step instead would wait for this one, and this one for that rank. The
        loss of the home or of a rank is raised by what comes next.

        Raises:
            RanksDiffer: ranks do different things.
        """
        self.end_failed_step()
        with suppress(HomeError, RankLost), self._leaving():
            self._agree(Act.ANNOUNCE_CUT)

    def settle(self) -> Callable[[], None]:
        """Have all rows that have changed written to the home, and the home frozen. Collective.

        The home thread does that while training goes on. A view that follows reads all rows,
        whoever owns them, as they are now. If the home fails meanwhile, the view says so.

        Returns:
            See `Cache.settle`.

        Raises:
            HomeError: the home has failed.
            RankLost: a rank does not answer.
        """
        self.end_failed_step()
        with self._leaving():
            self._raise_error()
            self._agree(Act.CUT)  # before the home threads meet for it
            self._wait_for_later_steps()
            return self._begin_settling()

    def _freeze_all(self, frozen: dict[str, FrozenRows | None]) -> None:
        self._home_turns.agree(Act.WRITE_CUT, _NO_BATCH)  # all ranks have written their rows
        super()._freeze_all(frozen)
        # Later write-backs of any rank are not in it.
        self._home_turns.agree(Act.FREEZE_CUT, _NO_BATCH)

    def stages_at_home(self, name: str) -> bool:
        """See `Cache.stages_at_home`. All ranks answer alike, because they step together."""
        return self.writes_back_at_cuts and name in self._stepped

    # What restores do.

    def restored(self) -> None:
        """Begin anew, also after ranks have left each other; see `Cache.restored`. Collective.

        Raises:
            HomeError: the home has failed. It may be called again, on all ranks.
            RankLost: a rank does not answer, or its home has failed.
        """
        self.end_failed_step()
        self._wait([self._thread.submit(lambda: None)])
        with suppress(RankLost):
            self._wait_for_later_steps()
        if self.planned > 1:
            # The home thread of another rank may have failed and closed its channel since this
            # rank's has used it: all ranks leave and open new ones.
            self._leave()
        if self._has_left:
            self._wait([self._thread.submit(lambda: None)])  # until the home thread has left, too
            self._coming.end(within_seconds=0.0)
            self._coming = self._new_coming(self._open_channels())
            self._take_turns()
        with self._leaving():
            self._turns.agree(Act.RESTORE, _NO_BATCH)  # no rank writes rows back any more
            super().restored()
            self._turns.agree(Act.END_RESTORE, _NO_BATCH)
        self._drop(lambda _: True)
        self._borrowed.clear()
        self._changing.clear()
        self._to_follow = None
        self._coming.over = 0
        self._coming.forget(self.batch)
        self._over = self.batch

    def close(self) -> None:
        """End the threads after what they have to do, and their channels. The home stays open.

        A thread that waits for another rank is given up: that rank may be waiting for this one.
        """
        self._end_within = 0.0 if self._has_left else _END_SECONDS
        super().close()
        self._coming.end(within_seconds=self._end_within)
        if self._later_thread.end(within_seconds=self._end_within):
            self._later_channel.close()
        if self._thread.end(within_seconds=0.0):
            self._home_channel.close()
        self._rows_channel.close()


def _count_lent(exchange: Exchange) -> int:
    lent = torch.unique(torch.cat([rows.ids for rows in exchange.lent]))
    return len(lent)


def _is_like(norm: float, other: float) -> bool:
    """Whether two ranks may have computed both from the same gradients."""
    return math.isclose(norm, other, rel_tol=_ROUNDING) or (
        not math.isfinite(norm) and not math.isfinite(other)
    )


def _together(ids: Sequence[Tensor]) -> Tensor:
    found: Tensor = torch.unique(torch.cat([NO_IDS, *ids]))
    return found


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(one) for group in optimizer.param_groups for one in group["params"]}


def _shared(rows: CachedRows) -> SharedOracle:
    assert isinstance(rows.oracle, SharedOracle)
    return rows.oracle
