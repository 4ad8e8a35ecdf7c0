"""Caches of several trainers hold each row once, and every lookup finds its newest value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from recpoint.lookahead.oracle import CapacityError
from recpoint.lookahead.shared_oracle import Exchange, Planned, Rows, SharedOracle
from tests.example_counts import examples

ROWS = 24


class Job(RuleBasedStateMachine):
    """Some ranks, each with an oracle and a cache; the store and the caches have versions of rows.

    A batch is trained by adding one to each row that any rank looks up.
    """

    @initialize(capacities=st.lists(st.integers(3, ROWS + 8), min_size=1, max_size=4))
    def begin(self, capacities: list[int]) -> None:
        ranks = range(len(capacities))
        self.capacities = capacities
        self.oracles = [SharedOracle(capacities, rank=rank, rows=ROWS) for rank in ranks]
        self.store = [0] * ROWS
        self.versions = [0] * ROWS  # as the rows have to be
        # By rank: slot -> row and version, or the row that is borrowed.
        self.slots: list[dict[int, tuple[int, int]]] = [{} for _ in ranks]
        self.plans: dict[int, tuple[list[list[int]], list[Any]]] = {}
        self.expected: list[list[list[int]]] = []
        self.batch = 0

    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        if not self.expected:
            self.expect(data)
        parts = self.expected[0]
        given = [_tensor(part) for part in parts]
        try:
            found = [self.oracles[0].plan(given)]
        except CapacityError as error:
            assert error.needed > error.capacity
            for oracle in self.oracles[1:]:
                with pytest.raises(CapacityError):
                    oracle.plan(given)
            self.forget()  # the batch cannot be trained
            return
        found += [oracle.plan(given) for oracle in self.oracles[1:]]
        self.move(found)
        is_planned = {one.exchange is not None for one in found}
        assert len(is_planned) == 1, "the oracles of all ranks agree"
        if is_planned == {True}:
            self.plans[self.oracles[0].planned] = (parts, [one.exchange for one in found])
            del self.expected[:1]
        else:
            assert self.oracles[0].released < self.oracles[0].planned, "there is room otherwise"

    @rule(data=st.data())
    def expect(self, data: st.DataObject) -> None:
        parts = self.drawn(data)
        self.expected.append(parts)
        for oracle in self.oracles:
            oracle.expect([_tensor(part) for part in parts])

    def drawn(self, data: st.DataObject) -> list[list[int]]:
        ids = st.lists(st.integers(0, ROWS - 1), max_size=4, unique=True)
        return [sorted(data.draw(ids)) for _ in self.oracles]

    def move(self, found: list[Planned]) -> None:
        # All write back before any fetches, as the home threads do.
        for slots, one in zip(self.slots, found, strict=True):
            if one.step is not None:
                for row, slot in zip(
                    one.step.evicted_ids.tolist(), one.step.evicted_slots.tolist(), strict=True
                ):
                    had, version = slots.pop(slot)
                    assert had == row
                    assert version == self.versions[row], "its last training is over"
                    self.store[row] = version
        for slots, one in zip(self.slots, found, strict=True):
            if one.step is not None:
                for row, slot in zip(
                    one.step.fetched_ids.tolist(), one.step.fetched_slots.tolist(), strict=True
                ):
                    assert slot not in slots
                    assert self.store[row] == self.versions[row], "written back before"
                    slots[slot] = (row, self.store[row])

    @rule()
    def train(self) -> None:
        number = self.batch + 1
        if number not in self.plans:
            return
        parts, exchanges = self.plans.pop(number)
        self.batch = number
        # Owners send values, and every lookup finds the newest.
        for rank, exchange in enumerate(exchanges):
            for owner, rows in enumerate(exchange.borrowed):
                _agree(rows, exchanges[owner].lent[rank])
            values = {row: self.slots[rank][slot] for row, slot in _pairs(exchange.own)}
            for owner, rows in enumerate(exchange.borrowed):
                lent = dict(_pairs(exchanges[owner].lent[rank]))
                for row, slot in _pairs(rows):
                    assert slot not in self.slots[rank], "no owned row is in its slot"
                    values[row] = self.slots[owner][lent[row]]
            for row in parts[rank]:
                assert values[row] == (row, self.versions[row])
            self.finds_what_the_batch_needs(rank, number, exchange, parts[rank])
        looked_up = {row for part in parts for row in part}
        owned = sorted(row for exchange in exchanges for row in exchange.own.ids.tolist())
        assert owned == sorted(looked_up), "each row has one owner"
        for row in looked_up:
            self.versions[row] += 1
        for rank, exchange in enumerate(exchanges):
            for row, slot in _pairs(exchange.own):
                self.slots[rank][slot] = (row, self.versions[row])

    def finds_what_the_batch_needs(
        self, rank: int, number: int, exchange: Exchange, part: list[int]
    ) -> None:
        """Rows that have slots for other batches are not found."""
        expected = [-1] * ROWS
        for rows in (exchange.own, *exchange.borrowed):
            for row, slot in _pairs(rows):
                expected[row] = slot
        found = self.oracles[rank].slots_needed(_tensor(list(range(ROWS))), batch=number).tolist()
        assert found == expected
        assert all(found[row] >= 0 for row in part)

    @rule()
    def release(self) -> None:
        for oracle in self.oracles:
            oracle.release(self.batch)

    @rule()
    def forget(self) -> None:
        self.plans.clear()
        self.expected.clear()
        for oracle in self.oracles:
            oracle.forget(keep=self.batch)

    @invariant()
    def each_row_is_in_one_cache(self) -> None:
        seen: list[int] = []
        for rank, oracle in enumerate(self.oracles):
            ids, slots = oracle.held()
            assert dict(zip(slots.tolist(), ids.tolist(), strict=True)) == {
                slot: row for slot, (row, _) in self.slots[rank].items()
            }
            assert len(self.slots[rank]) <= self.capacities[rank]
            seen += ids.tolist()
        assert len(seen) == len(set(seen))


def _tensor(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def _pairs(rows: Rows) -> list[tuple[int, int]]:
    return list(zip(rows.ids.tolist(), rows.slots.tolist(), strict=True))


def _agree(borrowed: Rows, lent: Rows) -> None:
    assert torch.equal(borrowed.ids, lent.ids)
    assert -1 not in lent.slots.tolist()


TestJob = Job.TestCase
TestJob.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
