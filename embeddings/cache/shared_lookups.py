"""Looks up rows of keyed tables on all ranks that share them, and begins rows of new keys.

Which rows a lookup reads is known when it is made, because keys get slots then. So a lookup is
collective. All ranks tell which rows they read. Then

1. rows whose keys have left, and which no lookup reads, become zeros where they are;
2. rows that are in no cache get an owner, whose home thread fetches them;
3. the owners write the first values of rows that have got another key;
4. the owners send the values of rows to the ranks that read them.

Plans of coming batches are hints: they have rows fetched before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.embeddings.cache.exchange import exchange_values
from recpoint.embeddings.cache.membership import Membership
from recpoint.embeddings.cache.mover import Mover
from recpoint.embeddings.cache.planned_exchanges import PlannedExchanges
from recpoint.embeddings.cache.progress import Progress
from recpoint.embeddings.cache.residents import NO_IDS, CachedRows
from recpoint.embeddings.cache.turns import Act
from recpoint.errors import RanksDiffer, SettingsError
from recpoint.interrupts import held
from recpoint.lookahead.oracle import CapacityError
from recpoint.lookahead.shared_oracle import Exchange, SharedOracle

__all__ = ["BegunRows", "SharedLookups", "SlotChanges"]

#: The batch that stands for the time before the first one.
_NO_BATCH: Final = 1


class BegunRows(NamedTuple):
    """Rows that have begun anew since the last lookup.

    Attributes:
        ids: int64 [n], ascending, all different.
        values: [n, dim], their first values.
        is_empty: bool [n]: the row has no key, and its values are zeros.
    """

    ids: Tensor
    values: Tensor
    is_empty: Tensor

    def chosen(self, is_chosen: Tensor) -> BegunRows:
        """Return some of the rows, bool [n]."""
        return BegunRows(self.ids[is_chosen], self.values[is_chosen], self.is_empty[is_chosen])


class SlotChanges:
    """Collects the rows of one table that begin anew until the next lookup.

    Args:
        dim: values of a row.
        dtype: of the values.
    """

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        self._dim, self._dtype = dim, dtype
        self._changes: list[BegunRows] = []

    def put(self, ids: Tensor, values: Tensor) -> None:
        """Begin rows, int64 [n], all different, with values [n, dim]."""
        self._changes.append(BegunRows(ids, values, torch.zeros_like(ids, dtype=torch.bool)))

    def empty(self, ids: Tensor) -> None:
        """Begin rows, int64 [n], with zeros."""
        zeros = torch.zeros(len(ids), self._dim, dtype=self._dtype, device="cpu")
        self._changes.append(BegunRows(ids, zeros, torch.ones_like(ids, dtype=torch.bool)))

    def newest(self) -> BegunRows:
        """Return each row as it began last."""
        if not self._changes:
            values = torch.zeros(0, self._dim, dtype=self._dtype, device="cpu")
            return BegunRows(NO_IDS, values, NO_IDS.bool())
        all_ids, all_values, is_empty = map(torch.cat, zip(*self._changes, strict=True))
        ids, inverse = torch.unique(all_ids, return_inverse=True)
        order = torch.arange(len(all_ids), dtype=torch.int64, device="cpu")
        last = torch.zeros_like(ids).scatter_reduce_(0, inverse, order, "amax")
        return BegunRows(ids, all_values[last], is_empty[last])

    def clear(self) -> None:
        """Forget all of them."""
        self._changes.clear()


class SharedLookups:
    """The lookups of keyed tables on all ranks that share their rows, as one rank makes them.

    Args:
        mover: the home thread of this rank.
        progress: at which batch this rank is.
        membership: the other ranks.
        exchanges: the rows that ranks exchange.
        oracles: name of a table -> says which rank has which of its rows.
    """

    def __init__(
        self,
        mover: Mover,
        progress: Progress,
        membership: Membership,
        exchanges: PlannedExchanges,
        oracles: Mapping[str, SharedOracle],
    ) -> None:
        self._mover = mover
        self._progress = progress
        self._membership = membership
        self._exchanges = exchanges
        self._oracles = oracles

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self._membership.channels.count

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._membership.channels.rank

    def share(self, own_part: Tensor) -> list[Tensor]:
        """Send bytes that this rank has restored to all, uint8 [n]; return those of each rank.

        Collective.

        Raises:
            RanksDiffer: ranks do different things.
            RankLost: a rank does not answer.
        """
        with self._membership.leaving():
            self._membership.agree(Act.SHARE_KEYS)
            return self._membership.channels.rows.gather(own_part)

    def gather(self, name: str, own_part: Tensor) -> list[Tensor]:
        """Send bytes to all ranks for a lookup, uint8 [n], and return those of each. Collective.

        Args:
            name: the table that is looked up.
            own_part: what this rank sends.

        Raises:
            SettingsError: the lookup is outside the batches of a reader.
            RanksDiffer: ranks do different things.
            RankLost: a rank does not answer.
        """
        self._refuse_outside(name)
        channels = self._membership.channels
        tables = list(self._mover.tables)
        said = torch.tensor(
            [tables.index(name), self._membership.over_batch], dtype=torch.int64, device="cpu"
        )
        with self._membership.leaving():
            numbers = self._membership.agree(Act.LOOK_UP, said.expand(channels.count, 2))
            names = [tables[number] for number in numbers[:, 0].tolist()]
            if set(names) != {name}:
                raise RanksDiffer(
                    f"a lookup of keyed table {name!r}",
                    found=f"lookups of {names!r:.400} on ranks 0 to {channels.count - 1}",
                    expected="the same table on all ranks, because they share its rows",
                    next_step="look keyed tables up in the same order on each rank",
                )
            coming, oracle = self._membership.coming, self._oracles[name]
            # The exchanges of ids tell it later, and rows would stay in their slots until then.
            coming.over = max(coming.over, int(numbers[:, 1].min()))
            oracle.release(min(coming.over, oracle.planned))
            return channels.rows.gather(own_part)

    def _refuse_outside(self, name: str) -> None:
        batch, oracle = self._progress.batch, self._oracles[name]
        if batch == _NO_BATCH or batch <= oracle.released:
            raise SettingsError(
                f"keyed table {name!r}, which {self.ranks} ranks share",
                found="a lookup before the first batch of a Lookahead, or after its last one",
                expected="lookups within the batches that a Lookahead hands out on all ranks, "
                "which say how long rows have to stay",
                next_step="read batches through recpoint.Lookahead(reader, model, window=...), "
                "those of an evaluation through one of its own",
            )

    def bring(
        self,
        rows: CachedRows,
        ids: Tensor,
        changes: SlotChanges,
        *,
        trains: bool,
        will_change: Callable[[CachedRows, Tensor], None],
        forget_plans: Callable[[], None],
    ) -> None:
        """Have the rows that a lookup reads in slots of this rank's cache. Collective.

        Args:
            rows: the table.
            ids: int64 [n], the rows; they may come several times.
            changes: the rows that have begun anew on each rank.
            trains: gradients flow to the rows.
            will_change: saves and marks rows in slots, int64 [n], that are about to change.
            forget_plans: forgets what was planned for coming batches.

        Raises:
            SettingsError: there are not enough slots; or see `gather`.
            RanksDiffer: ranks do different things.
            RankLost: a rank does not answer.
            HomeError: the home has failed.
        """
        name = rows.slots.name
        own_ids = torch.unique(rows.slots.in_range(ids.reshape(-1)))
        gathered = self.gather(name, own_ids.view(torch.uint8))
        ids_by_rank = [part.clone().view(torch.int64) for part in gathered]
        with self._membership.leaving():
            begun = changes.newest()
            is_read = torch.isin(begun.ids, torch.cat(ids_by_rank))
            # Rows of keys that an interrupted lookup has inserted are read by nobody.
            unread_ids = begun.ids[~is_read & ~begun.is_empty]
            ids_by_rank[0] = torch.unique(torch.cat([ids_by_rank[0], unread_ids]))
            is_left = ~is_read & begun.is_empty
            with held():
                moves = self._empty(rows, begun.chosen(is_left), will_change)
                exchange = self._claim(rows, ids_by_rank, moves, forget_plans)
                self._begin(rows, begun.chosen(~is_left), will_change)
                changes.clear()
                channel = self._membership.channels.rows
                exchange_values(channel, [(rows.slots, exchange)])
                self._exchanges.borrow(name, exchange)
                if trains:
                    self._exchanges.extend(name, exchange)

    def _empty(
        self,
        rows: CachedRows,
        left: BegunRows,
        will_change: Callable[[CachedRows, Tensor], None],
    ) -> bool:
        """Make rows zeros where they are; whether a home thread has to do that, on any rank."""
        owners = self._oracles[rows.slots.name].owners(left.ids)
        self._begin(rows, left.chosen(owners == self._membership.channels.rank), will_change)
        absent_ids = left.ids[owners < 0]
        part_ids = absent_ids[(absent_ids >= rows.part.start) & (absent_ids < rows.part.stop)]
        if part_ids.numel():
            self._mover.submit(partial(self._mover.empty, rows, part_ids))
        return bool(absent_ids.numel())

    def _claim(
        self,
        rows: CachedRows,
        ids_by_rank: Sequence[Tensor],
        moves: bool,
        forget_plans: Callable[[], None],
    ) -> Exchange:
        """Have the rows that all ranks read in caches; return what ranks exchange of them."""
        oracle, batch = self._oracles[rows.slots.name], self._progress.batch
        arrivals: list[Future[None]] = []
        exchange = None
        for is_last in (False, True):
            try:
                claimed = oracle.claim(ids_by_rank, batch=batch, again=is_last)
            except CapacityError as error:
                raise _too_small(rows, self.ranks) from error
            assert rows.slots.borrowed is not None
            if claimed.step is not None:
                rows.slots.borrowed[claimed.step.fetched_slots] = -1
            # All home threads meet, or none does.
            if moves or claimed.moves:
                steps = [] if claimed.step is None else [(rows, claimed.step)]
                arrivals.append(self._mover.start(steps, batch))
            moves, exchange = False, claimed.exchange
            if exchange is not None or is_last:
                break
            forget_plans()  # their rows take the slots
            oracle.leave_unclaimed()
        self._mover.wait(arrivals)
        if exchange is None:
            raise _too_small(rows, self.ranks)
        self._wait_for(rows, exchange.own.slots)
        return exchange

    def _wait_for(self, rows: CachedRows, slots: Tensor) -> None:
        """Wait until rows are in their slots that a plan may just be bringing."""
        if not bool(rows.slots.ready[slots].all()):
            self._mover.wait([self._mover.thread.submit(self._mover.raise_error)])

    def _begin(
        self,
        rows: CachedRows,
        begun: BegunRows,
        will_change: Callable[[CachedRows, Tensor], None],
    ) -> None:
        """Write the first values of those rows that this rank owns."""
        owners = self._oracles[rows.slots.name].owners(begun.ids)
        own = begun.chosen(owners == self._membership.channels.rank)
        if own.ids.numel():
            slots = self._oracles[rows.slots.name].slots_of(own.ids)
            self._wait_for(rows, slots)
            will_change(rows, slots)
            rows.slots.put_new(slots, own.values)


def _too_small(rows: CachedRows, ranks: int) -> SettingsError:
    name = rows.slots.name
    return SettingsError(
        f"cached(capacity_rows=...): keyed table {name!r}, which {ranks} ranks share",
        found=f"{rows.slots.capacity} slots on this rank, of which rows need too many that are "
        "looked up in this batch, or whose gradients no step has applied yet",
        expected="room for these rows on each rank: those that it looks up, and its share of all",
        next_step=f"give the table more slots: capacity_rows={{{name!r}: slots}}; or look up fewer "
        "rows at a time",
    )
