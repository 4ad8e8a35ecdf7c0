"""Remembers which rows ranks exchange, from the plan of a batch until its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from recpoint.embeddings.cache.exchange import merged
from recpoint.embeddings.cache.residents import NO_IDS, CachedRows
from recpoint.lookahead.shared_oracle import Exchange

__all__ = ["PlannedExchanges"]


class PlannedExchanges:
    """The exchanges of batches that are planned and not trained yet.

    Args:
        tables: name -> slots and first values.
    """

    def __init__(self, tables: Mapping[str, CachedRows]) -> None:
        self._tables = tables
        #: By table and batch: what was planned and is not trained yet.
        self._exchanges: dict[str, dict[int, Exchange]] = {name: {} for name in tables}
        #: By table and batch: rows of this rank's part that any rank looks up.
        self._part_ids: dict[str, dict[int, Tensor]] = {name: {} for name in tables}
        #: By table: slots of the rows that are borrowed for the batch that training is at.
        self._borrowed_slots: dict[str, Tensor] = {}

    def add(self, name: str, exchange: Exchange) -> None:
        """Remember the exchange of a table."""
        self._exchanges[name][exchange.batch] = exchange

    def extend(self, name: str, exchange: Exchange) -> None:
        """Remember the exchange of a lookup, beside those of the same batch before."""
        earlier = self._exchanges[name].get(exchange.batch)
        self.add(name, exchange if earlier is None else merged([earlier, exchange]))

    def add_part_ids(self, name: str, batch: int, ids: Tensor) -> None:
        """Remember the rows of this rank's part that any rank looks up, int64 [n]."""
        self._part_ids[name][batch] = ids

    def of(self, batch: int) -> dict[str, Exchange]:
        """Return the exchange of each table for a batch that is planned and not trained.

        Those of keyed tables are made by lookups.
        """
        return {
            name: by_batch[batch] for name, by_batch in self._exchanges.items() if batch in by_batch
        }

    def pending(self, name: str, batch: int) -> Exchange | None:
        """Return what is exchanged of a table up to a batch; None: nothing."""
        exchanges = [
            exchange for number, exchange in self._exchanges[name].items() if number <= batch
        ]
        return merged(exchanges) if exchanges else None

    def part_ids(self, name: str) -> Tensor:
        """Return the rows of this rank's part that any rank has looked up: int64 [n]."""
        return torch.cat([NO_IDS, *self._part_ids[name].values()])

    def borrow(self, name: str, exchange: Exchange) -> None:
        """Take note that the values of borrowed rows are in their slots."""
        ids = torch.cat([rows.ids for rows in exchange.borrowed])
        borrowed_slots = torch.cat([rows.slots for rows in exchange.borrowed])
        slots = self._tables[name].slots
        assert slots.borrowed is not None
        slots.borrowed[borrowed_slots] = ids
        slots.ready[borrowed_slots] = True
        earlier_slots = self._borrowed_slots.get(name, NO_IDS)  # of other lookups
        self._borrowed_slots[name] = torch.cat([earlier_slots, borrowed_slots])

    def return_borrowed(self, name: str) -> None:
        """Take note that the owners may have other values of a table's borrowed rows."""
        if name in self._borrowed_slots:
            self._tables[name].slots.ready[self._borrowed_slots.pop(name)] = False

    def return_all_borrowed(self) -> None:
        """Take note that the owners may have other values of all borrowed rows."""
        for name in list(self._borrowed_slots):
            self.return_borrowed(name)

    def drop(self, is_over: Callable[[int], bool], name: str | None = None) -> None:
        """Forget batches.

        Args:
            is_over: says of the number of a batch whether it is to be forgotten.
            name: of this table only; None: of all tables.
        """
        names = self._tables if name is None else [name]
        for table in names:
            _drop(self._exchanges[table], is_over)
            _drop(self._part_ids[table], is_over)

    def begin_anew(self) -> None:
        """Forget all batches, also what is borrowed: no row is in a slot."""
        self.drop(lambda _: True)
        self._borrowed_slots.clear()


def _drop(
    by_batch: dict[int, Exchange] | dict[int, Tensor], is_over: Callable[[int], bool]
) -> None:
    for number in [number for number in by_batch if is_over(number)]:
        del by_batch[number]
