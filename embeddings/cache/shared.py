"""Shares the tables of a cache with other trainers, one on each rank (BagPipe, SOSP 2023).

Each row in use is in the cache of one trainer, its owner (`SharedOracle`). For each batch,

1. the owners send the values of rows to the trainers that look them up (`begin_batch`);
2. before an optimizer's step, the trainers send the gradients of these rows to the owners
   (`reduce`), and each owner's optimizer changes its own rows;
3. gradients of rows that the next batch does not look up are sent while it is trained, and the
   owner makes their step then (`LaterStep`).

Results are those of trainers that all have whole tables, and add the gradients of all ranks in rank
order.

All trainers act alike: batches, steps and checkpoints come in the same order on each. Rows move
between a cache and the home as with one trainer. A row that one trainer has written back may enter
another's cache later, so the home threads of all trainers meet after the write-backs of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from recpoint.embeddings.cache.batch_ids import Reading
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.exchange import counts_of, exchange_values
from recpoint.embeddings.cache.meeting import NO_BATCH
from recpoint.embeddings.cache.membership import Membership
from recpoint.embeddings.cache.mover import Mover
from recpoint.embeddings.cache.planned_exchanges import PlannedExchanges
from recpoint.embeddings.cache.progress import Progress
from recpoint.embeddings.cache.rank_channels import RankChannels
from recpoint.embeddings.cache.reduction import Reduction
from recpoint.embeddings.cache.residents import NO_IDS, CachedRows
from recpoint.embeddings.cache.shared_lookups import SharedLookups
from recpoint.embeddings.cache.trainers import Trainers
from recpoint.embeddings.cache.turns import Act, refuse_other_counts
from recpoint.embeddings.home.channel import Channel, GlooChannel
from recpoint.embeddings.home.contract import Home
from recpoint.errors import HomeError, RankLost, SettingsError
from recpoint.interrupts import held
from recpoint.lookahead.oracle import Oracle, Step
from recpoint.lookahead.shared_oracle import SharedOracle

__all__ = ["SeveralTrainers", "shared_cache"]


def shared_cache(
    home: Home,
    tables: Mapping[str, CachedRows],
    *,
    row_local: tuple[type, ...] = (),
    open_channel: Callable[[str], Channel] = GlooChannel,
) -> Cache:
    """Return the cache of a trainer that shares its tables with those on all other ranks.

    It is built on all ranks together.

    Args:
        home: a home that all trainers share.
        tables: as for `Cache`, the same on all ranks; only numbers of slots may differ.
        row_local: as for `Cache`.
        open_channel: opens a channel to all ranks from its name. Collective.

    Raises:
        SettingsError: the tables differ between ranks.
        RankLost: a rank does not answer.
    """
    channels, progress = RankChannels(open_channel, tables), Progress()
    mover = Mover(home, tables, progress.stats, channels.meeting)
    return Cache(mover, SeveralTrainers(mover, progress, channels), row_local=row_local)


class SeveralTrainers(Trainers):
    """The trainers on all ranks, as one of them sees them.

    Args:
        mover: the home thread of this rank.
        progress: at which batch this rank is.
        channels: to the other ranks.
    """

    def __init__(self, mover: Mover, progress: Progress, channels: RankChannels) -> None:
        self.progress = progress
        self._tables = mover.tables
        self._mover = mover
        self._channels = channels
        self._oracles: dict[str, SharedOracle] = {}
        self._membership = Membership(channels, mover, progress)
        self._exchanges = PlannedExchanges(self._tables)
        self._reduction = Reduction(mover, progress, self._membership, self._exchanges)
        self.reduction = self._reduction
        self.lookups = SharedLookups(
            mover, progress, self._membership, self._exchanges, self._oracles
        )
        for rows in self._tables.values():
            slots = rows.slots
            slots.borrowed = torch.full((slots.capacity + 2,), -1, dtype=torch.int64, device="cpu")
            first, last = (
                slots.rows * rank // channels.count for rank in (channels.rank, channels.rank + 1)
            )
            rows.part = range(first, last)

    def new_oracles(self) -> None:
        """Give each table an oracle by which no row has a slot on any rank."""
        for name, rows in self._tables.items():
            oracle = SharedOracle(
                self._channels.capacities[name], rank=self._channels.rank, rows=rows.slots.rows
            )
            # Batch 1 stands for the time before the first batch.
            oracle.plan([NO_IDS] * self._channels.count)
            rows.oracle = self._oracles[name] = oracle

    def tell(self, count: int, ids: Callable[[int], Mapping[str, Tensor]], reading: Reading) -> int:
        """Learn which batches were read on all ranks; see `Trainers.tell`. Collective."""
        self._mover.raise_error()
        batch, coming = self.progress.batch, self._membership.coming
        new_batches = []
        for position in range(coming.last_told - batch, count):
            by_table = ids(position)
            new_batches.append(
                {name: rows.coming_ids(by_table.get(name)) for name, rows in self._tables.items()}
            )
        # A batch whose gradients no step has applied yet is not over.
        waits = self.progress.planned == batch
        if waits:
            # A rank that makes a step would never tell its ids.
            self._channels.turns.agree(Act.READ_IDS, batch + 1)
        over = self._membership.over_batch
        coming.tell(new_batches, last_batch=batch, reading=reading, over=over, waits=waits)
        for oracle in self._oracles.values():
            oracle.release(min(coming.over, oracle.planned))
        if waits:
            coming.refuse_uneven(batch)
        return coming.last_known - batch

    def expect(self, rows: CachedRows, ids: Tensor | None) -> None:
        """Expect the rows of all ranks; see `Trainers.expect`."""
        name = rows.slots.name
        self._oracles[name].expect(self._membership.coming.of(self.progress.expected + 1)[name])

    def plan(self, rows: CachedRows, ids: Tensor | None) -> tuple[Step | None, bool]:
        """Plan the rows of all ranks; see `Trainers.plan`."""
        name = rows.slots.name
        by_rank = self._membership.coming.of(self.progress.planned + 1)[name]
        planned = self._oracles[name].plan(by_rank)
        if planned.step is not None:
            assert rows.slots.borrowed is not None
            rows.slots.borrowed[planned.step.fetched_slots] = -1
        # What is exchanged of a keyed table is known at the lookup.
        if planned.exchange is not None and rows.reserved is None:
            self._exchanges.add(name, planned.exchange)
        return planned.step, planned.exchange is not None

    def plan_none(self, rows: CachedRows) -> None:
        """Refuse it: lookups bring no rows, because ranks must plan alike.

        Raises:
            SettingsError: always.
        """
        name = rows.slots.name
        raise SettingsError(
            f"cached(capacity_rows=...): table {name!r}",
            found=f"{self._channels.capacities[name]} slots on the ranks, of which rows need too "
            "many whose gradients no step has applied yet",
            expected="room for the rows of the next batch",
            next_step="give the table more slots (capacity_rows={name: slots}), or call "
            "optimizer.step() after fewer batches",
        )

    def forget(self) -> None:
        """Forget batches that were not handed out; see `Trainers.forget`."""
        with self.leaving():
            self._reduction.wait_for_later_steps()  # another batch may come than was known
        batch = self.progress.batch
        self._membership.coming.forget(batch)
        self._exchanges.drop(lambda number: number > batch)

    def oracle_outside_plans(self, rows: CachedRows) -> Oracle:
        """Refuse lookups outside a plan: other ranks would have to send rows for them.

        Raises:
            SettingsError: always.
        """
        raise SettingsError(
            f"cached table {rows.slots.name!r}, which {self._channels.count} ranks share",
            found="a lookup of rows that are not in the ids of the batch that was handed out last, "
            "or after a step with it",
            expected="lookups of the rows that Lookahead was told, before the step",
            next_step="have Lookahead(ids=...) return all ids of a batch; to evaluate, read the "
            "batches of all ranks through another Lookahead(reader, model)",
        )

    def refuse_reset(self, name: str) -> None:
        """Refuse a reset of rows, which are in the caches of several ranks.

        Raises:
            SettingsError: always.
        """
        raise SettingsError(
            f"cached table {name!r}, which {self._channels.count} ranks share",
            found="a reset of rows",
            expected="no reset of rows, which may be in another rank's cache",
            next_step="reset rows in a training of one rank that restores the checkpoint",
        )

    def find(self, rows: CachedRows, ids: Tensor, hold: int | None) -> Tensor:
        """Return the slots of rows, owned or borrowed; see `Trainers.find`."""
        self._reduction.dense_layers.refuse_averaged_slots()
        oracle = self._oracles[rows.slots.name]
        if hold is None:
            # Rows of other batches may be read, which a later step may be changing.
            self._reduction.wait_for_later_steps()
            return oracle.slots_of(ids)
        # The gradients of other rows would go to no owner.
        return oracle.slots_needed(ids, batch=hold)

    def begin_batch(self) -> None:
        """Borrow the batch's rows of other ranks; see `Trainers.begin_batch`. Collective."""
        batch, coming = self.progress.batch, self._membership.coming
        with held():
            for name, by_rank in coming.of(batch).items():
                if self._tables[name].reserved is not None:
                    continue  # lookups mark rows of keys
                part = self._tables[name].part
                part_ids = [ids[(ids >= part.start) & (ids < part.stop)] for ids in by_rank]
                self._exchanges.add_part_ids(name, batch, torch.cat(part_ids))
            coming.drop(batch)
            exchanges = self._exchanges.of(batch)
            count = self._channels.count
            sent = counts_of([exchange.lent for exchange in exchanges.values()], count)
            awaited = counts_of([exchange.borrowed for exchange in exchanges.values()], count)
            announced = self._membership.agree(Act.BEGIN_BATCH, sent)
            refuse_other_counts("values of rows", announced, awaited)
            exchange_values(
                self._channels.rows,
                [(self._tables[name].slots, exchange) for name, exchange in exchanges.items()],
            )
            for name, exchange in exchanges.items():
                self._exchanges.borrow(name, exchange)
            # No gradient comes any more for batches whose training is over on all ranks.
            self._exchanges.drop(lambda number: number <= coming.over)

    def end_batch(self) -> None:
        """Take note that training asks for another batch; see `Trainers.end_batch`."""
        self._exchanges.return_all_borrowed()
        self._reduction.wait_before_batch()
        over_batch = self.progress.batch
        for rows in self._tables.values():
            rows.forget_lookups()
            if rows.since is not None:
                over_batch = min(over_batch, rows.since - 1)
        self._membership.over_batch = over_batch

    def reduce(self, optimizer: Optimizer) -> None:
        """Reduce the gradients of all ranks at the owners of rows. Collective."""
        self._reduction.reduce(optimizer)

    def to_change(self, rows: CachedRows) -> Tensor:
        """Return the slots of this rank's rows of which any rank has gradients."""
        return self._reduction.to_change(rows)

    def stepped(self, optimizer: Optimizer, changed: Sequence[CachedRows]) -> None:
        """Take note that a step has changed rows; see `Trainers.stepped`."""
        batch = self.progress.batch
        for name in self._reduction.stepped(optimizer):
            self._exchanges.drop(lambda number: number <= batch, name)
            # The owners have other values of these now.
            self._exchanges.return_borrowed(name)
            rows = self._tables[name]
            if not rows.is_trained:
                # Any rank may write a row back from now on, so that each has to ask the home.
                rows.is_trained = True
                self._mover.submit(partial(self._mover.put_at_home, rows))
        self._reduction.follow_up()

    def changed_ids(self, rows: CachedRows, slots: Tensor) -> Tensor:
        """Return the rows of this rank's part that any rank has looked up.

        Their owners may be other ranks.
        """
        return self._exchanges.part_ids(rows.slots.name) - rows.part.start

    def leaving(self) -> AbstractContextManager[None]:
        """Leave the other ranks if home or ranks fail in the block; see `Membership.leaving`."""
        return self._membership.leaving()

    def announce_cut(self) -> None:
        """Wait until all ranks take a checkpoint next, or end. Collective.

        A rank that makes a step instead would wait for this one, and this one for that rank. The
        loss of the home or of a rank is raised by what comes next.
        """
        with suppress(HomeError, RankLost), self.leaving():
            self._membership.agree(Act.ANNOUNCE_CUT)

    def meet_for_view(self) -> bool:
        """Wait until all ranks prepare for a view; see `Trainers.meet_for_view`. Collective."""
        self._mover.raise_error()
        self._membership.agree(Act.CUT)  # before the home threads meet for it
        self._reduction.wait_for_later_steps()
        return True

    def end_read(self) -> None:
        """Wait until all ranks have read their rows. Collective."""
        self._membership.agree(Act.END_READ)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Empty all caches together, also after ranks have left each other. Collective."""
        self._mover.wait_for_all()
        with suppress(RankLost):
            self._reduction.wait_for_later_steps()
        if self.progress.planned > 1:
            # The home thread of another rank may have failed and closed its channel since this
            # rank's has used it: all ranks leave and open new ones.
            self._membership.leave()
        if self._membership.has_left:
            self._membership.join_again()
        with self.leaving():
            turns = self._channels.turns
            turns.agree(Act.RESTORE, NO_BATCH)  # no rank writes rows back any more
            yield
            turns.agree(Act.END_RESTORE, NO_BATCH)
        self._exchanges.begin_anew()
        self._reduction.begin_anew()
        self._membership.coming.over = 0
        self._membership.coming.forget(self.progress.batch)
        self._membership.over_batch = self.progress.batch

    @property
    def end_seconds(self) -> float:
        """How long to wait for the home thread; see `Membership.end_seconds`."""
        return self._membership.end_seconds

    def end(self) -> None:
        """End the threads beside the home thread, and all channels."""
        self._membership.end()
