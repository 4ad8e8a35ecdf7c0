"""Keyed tables: after any lookups, steps and reloads they are what a dictionary says."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recpoint.catalog.restore.keyed_rows import KEY, LAST_USE, USES
from recpoint.embeddings.home.initial import Uniform
from recpoint.embeddings.keyed.admission import Admission, EachKey, Probability, Seen
from recpoint.embeddings.keyed.embedding import KeyedEmbedding
from recpoint.embeddings.keyed.eviction import Eviction, LeastRecent, LeastUsed
from recpoint.errors import SettingsError
from tests.example_counts import examples

_DIM = 2
_INITIAL = Uniform(seed=3)
#: Few keys, so that they come again; the last are those that a map could take for something else.
_KEYS = st.integers(-3, 9) | st.sampled_from([2**63 - 1, -(2**63), 2**32, -(2**32), 2**62])
_LOOKUPS = st.lists(_KEYS, max_size=7)
_CALLS = (
    st.tuples(st.just("look up"), _LOOKUPS)
    | st.tuples(st.just("look up"), _LOOKUPS)
    | st.tuples(st.just("step"))
    | st.tuples(st.just("read"), _LOOKUPS)
    | st.tuples(st.just("delete"), _LOOKUPS)
    | st.tuples(st.sampled_from(["copy", "reload"]))
)
_RULES = st.builds(LeastRecent, ttl_batches=st.none() | st.integers(1, 4) | st.just(150)) | st.just(
    LeastUsed()
)


_GATES = st.sampled_from([EachKey(), Seen(times=1), Seen(times=3), Probability(share=0.5)])


@dataclass
class _Row:
    slot: int
    last_use: int
    uses: int = 1


@dataclass
class _Dictionary:
    """The rules of a keyed table, written down row by row."""

    capacity: int
    rule: Eviction
    gate: Admission
    rows: dict[int, _Row] = field(default_factory=dict)
    steps: int = 0
    inserted: int = 0
    evicted: int = 0
    refused: int = 0
    seen: Counter[int] = field(default_factory=Counter)

    def look_up(self, keys: list[int]) -> list[int] | None:
        """Return the slots of keys; None: too few rows."""
        ttl = self.rule.ttl_batches
        for key, row in list(self.rows.items()):
            if ttl is not None and row.last_use < self.steps - ttl:
                del self.rows[key]
                self.evicted += 1
        missing_keys = set(keys) - self.rows.keys()
        new_keys = sorted(key for key in missing_keys if self._admits(key))
        free = sorted(set(range(1, self.capacity + 1)) - {row.slot for row in self.rows.values()})
        may_leave = [
            key for key, row in self.rows.items() if row.last_use < self.steps and key not in keys
        ]
        leaving = sorted(may_leave, key=self._score)[: max(len(new_keys) - len(free), 0)]
        if len(free) + len(leaving) < len(new_keys):
            return None
        self.seen.update(missing_keys)
        self.refused += len(missing_keys) - len(new_keys)
        for key in set(keys) & self.rows.keys():
            self.rows[key].last_use = self.steps
            self.rows[key].uses += 1
        slots = sorted(free[: len(new_keys) - len(leaving)] + [self.rows[k].slot for k in leaving])
        for key in leaving:
            del self.rows[key]
        for key, slot in zip(new_keys, slots, strict=True):
            self.rows[key] = _Row(slot, self.steps)
        self.inserted += len(new_keys)
        self.evicted += len(leaving)
        return [self.rows[key].slot if key in self.rows else 0 for key in keys]

    def _admits(self, key: int) -> bool:
        if isinstance(self.gate, Seen):
            return self.seen[key] + 1 >= self.gate.times
        if isinstance(self.gate, Probability):
            return len(self.gate.admitted(torch.tensor([key]), self.steps)) > 0
        return True

    def _score(self, key: int) -> tuple[int, ...]:
        row = self.rows[key]
        if isinstance(self.rule, LeastUsed):
            return row.uses, row.last_use, key
        return row.last_use, key


class _Trained:
    """A table, its optimizer and the dictionary that it has to equal."""

    def __init__(self, capacity: int, rule: Eviction, gate: Admission) -> None:
        self.expected = _Dictionary(capacity, rule, gate)
        self.table = self._new()
        self.optimizer = torch.optim.SGD(self.table.parameters(), lr=0)

    def _new(self) -> KeyedEmbedding:
        expected = self.expected
        return KeyedEmbedding(
            _DIM,
            expected.capacity,
            initial=_INITIAL,
            admit=expected.gate,
            evict=expected.rule,
            name="keys",
        )

    def play(self, call: str, *given: Any) -> None:
        keys = torch.tensor(given[0] if given else [], dtype=torch.int64)
        if call == "look up":
            self._look_up(keys)
        elif call == "step":
            self.optimizer.step()
            self.expected.steps += 1
        elif call == "read":
            before = copy.deepcopy(self.table.state_dict())
            with torch.no_grad():
                self._is_value_of(self.table(keys), keys)
            _equal(self.table.state_dict(), before)
        elif call == "delete":
            self.table.slots.delete(keys)
            for key in keys.tolist():
                self.expected.rows.pop(key, None)
        else:
            if call == "copy":
                self.table = copy.deepcopy(self.table)
            else:
                state, self.table = self.table.state_dict(), self._new()
                self.table.load_state_dict(state)
            self.optimizer = torch.optim.SGD(self.table.parameters(), lr=0)

    def _look_up(self, keys: Tensor) -> None:
        slots = self.expected.look_up(keys.tolist())
        if slots is None:
            with pytest.raises(SettingsError, match="new keys in one lookup"):
                self.table(keys)
        else:
            self._is_value_of(self.table(keys), keys)
            assert self.table.slots.find(keys).tolist() == slots

    def _is_value_of(self, values: Tensor, keys: Tensor) -> None:
        has_row = torch.tensor([key in self.expected.rows for key in keys.tolist()])
        first_values = _INITIAL("keys", keys, _DIM, torch.float32)
        assert torch.equal(values.detach(), first_values * has_row.view(-1, 1))

    def is_equal(self) -> None:
        table, rows = self.table, self.expected.rows
        assert table.keys().tolist() == sorted(rows)
        expected = self.expected
        counts = len(rows), expected.inserted, expected.evicted, expected.refused
        assert table.counts == counts
        by_slot = {row.slot: (key, row) for key, row in rows.items()}
        nothing = (0, _Row(0, -1, 0))
        of_slots = [by_slot.get(slot, nothing) for slot in range(table.capacity_rows + 1)]
        states = table.slots.row_states
        assert states[KEY].tolist() == [key for key, _ in of_slots]
        assert states[LAST_USE].tolist() == [row.last_use for _, row in of_slots]
        if USES in states:
            assert states[USES].tolist() == [row.uses for _, row in of_slots]
        free = torch.tensor([slot not in by_slot for slot in range(table.capacity_rows + 1)])
        assert not table.weight[free].any()
        leaving = sorted(rows, key=self.expected._score)
        assert table.slots.leaving_order(states).tolist() == [rows[key].slot for key in leaving]


def _equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if isinstance(value, dict):
            _equal(value, expected[name])
        elif isinstance(value, Tensor):
            assert torch.equal(value, expected[name])
        else:
            assert value == expected[name]


@settings(max_examples=examples(400), deadline=None)
@given(capacity=st.integers(1, 9), rule=_RULES, gate=_GATES, calls=st.lists(_CALLS, max_size=40))
def test_it_is_the_dictionary(
    capacity: int, rule: Eviction, gate: Admission, calls: list[Any]
) -> None:
    trained = _Trained(capacity, rule, gate)
    for call in calls:
        trained.play(*call)
        trained.is_equal()


@settings(max_examples=examples(60), deadline=None)
@given(share=st.floats(0.01, 1), steps=st.integers(0, 2**40), keys=st.lists(_KEYS, unique=True))
def test_a_key_is_admitted_whatever_keys_come_with_it(
    share: float, steps: int, keys: list[int]
) -> None:
    rule = Probability(share=share)
    together = rule.admitted(torch.tensor(keys, dtype=torch.int64), steps)
    alone = [key for key in keys if len(rule.admitted(torch.tensor([key]), steps))]
    assert together.tolist() == alone
