"""A handler of a signal may raise anywhere in a lookup: the table stays whole."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adagrad

from recpoint.catalog.restore.keyed_rows import KEY, LAST_USE
from recpoint.embeddings import cached, local
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.lookup_hooks import cache_of
from recpoint.embeddings.home.initial import Uniform
from recpoint.embeddings.keyed.embedding import KeyedEmbedding
from recpoint.embeddings.keyed.eviction import LeastRecent
from tests.interrupted import Arrival, Interrupt, TimeOut, Visits, arrivals, handler_raises

#: One spot of so many is taken; with FAULTS=1 every spot.
_EVERY = int(os.environ.get("FAULTS") or 25)
_LAST_BATCH = torch.tensor([2, 9, -9, 11, 2])


class _Training:
    """A full table, of which the next lookup uses rows, evicts rows and fills free slots.

    Args:
        is_cached: rows are in a cache that has fewer slots than the table, and at home.
    """

    def __init__(self, *, is_cached: bool) -> None:
        self.table = KeyedEmbedding(
            2, 6, initial=Uniform(seed=1), evict=LeastRecent(ttl_batches=2), sparse=True
        )
        self.cache: Cache | None = None
        if is_cached:
            model = nn.ModuleDict({"keyed": self.table})
            cached(model, local(), 5)
            self.cache = cache_of(model)
        self.optimizer = Adagrad([self.table.weight], lr=0.5)
        for keys in ([1, 2, 3], [2, 3, 4], [4, 5], [2, 5, 6]):
            self.train(torch.tensor(keys))

    def train(self, keys: Tensor) -> None:
        self.optimizer.zero_grad()
        self.table(keys).sum().backward()
        self.optimizer.step()

    def interrupted_lookup(self, arrival: Arrival | None) -> Visits:
        visits = Visits(arrival)
        self.optimizer.zero_grad()
        if arrival is None:
            visits.call(lambda: self.table(_LAST_BATCH))
            return visits
        has_raised = False
        try:
            with handler_raises(arrival.error):
                visits.call(lambda: self.table(_LAST_BATCH))
        except (Interrupt, TimeOut):
            has_raised = True
        # How often a lookup in a cache visits a spot depends on the home thread, too.
        assert has_raised == visits.arrived
        return visits

    def is_whole(self) -> bool:
        """Whether map, row states and rows agree."""
        table = self.table
        keys, slots = table.keys(), table.slots.find(table.keys())
        states = table.slots.row_states
        is_free = states[LAST_USE] < 0
        return (
            table.rows_used == len(keys) == len(torch.unique(slots))
            and torch.equal(states[KEY][slots], keys)
            and bool((states[LAST_USE][slots] >= 0).all())
            and not states[KEY][is_free].any()
            and not self.rows[0][is_free].any()
        )

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """Values and sums of all slots."""
        weight = self.table.weight
        if self.cache is None:
            return weight.detach(), self.optimizer.state[weight]["sum"]
        return self.cache.rows_of("keyed", torch.arange(self.table.capacity_rows + 1))

    def everything(self) -> list[Tensor]:
        return [*self.rows, *self.table.slots.row_states.values()]


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_lookup_that_was_interrupted_anywhere_can_be_made_again(is_cached: bool) -> None:
    expected = _Training(is_cached=is_cached)
    visits = expected.interrupted_lookup(None)
    assert expected.table.counts.evicted >= 3
    expected.train(_LAST_BATCH)
    taken = arrivals(visits, every=_EVERY)
    assert len(taken) > 10
    for arrival in taken:
        interrupted = _Training(is_cached=is_cached)
        if not interrupted.interrupted_lookup(arrival).arrived:
            continue
        interrupted.table.eval()
        interrupted.table(_LAST_BATCH)
        interrupted.table.train()
        assert interrupted.is_whole(), arrival
        interrupted.train(_LAST_BATCH)
        for rows, expected_rows in zip(
            interrupted.everything(), expected.everything(), strict=True
        ):
            assert torch.equal(rows, expected_rows), arrival
