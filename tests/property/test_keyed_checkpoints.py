"""Keyed tables that are looked up, cut, killed and restored at random have the rows of a dict."""

from __future__ import annotations

import copy
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from recpoint import Checkpointer, KeyedEmbedding, LeastRecent, LeastUsed
from recpoint.catalog.restore.keyed_rows import KEY, LAST_USE, USES
from recpoint.embeddings import cached, local
from recpoint.embeddings.keyed.eviction import Eviction
from tests.example_counts import examples
from tests.flat_settings import arguments
from tests.training_builder import persist_all, until

DIM, RATE, GRADIENT = 3, 0.5, 0.25
_KEYS = [-(2**63), -1, 0, 1, 2, 3, 5, 8, 13, 2**40, 2**63 - 1]
_SOME_KEYS = strategies.lists(strategies.sampled_from(_KEYS), min_size=1, max_size=3)
_RULES: dict[str, Eviction] = {
    "recent": LeastRecent(),
    "ttl": LeastRecent(ttl_batches=2),
    "used": LeastUsed(),
}


def first_values(table: str, ids: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return first values that binary fractions of few digits have."""
    return (ids.remainder(8) / 8).to(dtype)[:, None].expand(-1, dim).clone()


@dataclass
class Row:
    """What a key has: its value is the same in each column."""

    last_use: int
    uses: int
    value: float


@dataclass
class Truth:
    """Keys and rows as the rules say; every number is exact in binary32."""

    capacity_rows: int
    evicts: str
    steps: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    gradients: dict[int, float] = field(default_factory=dict)

    def order(self) -> list[int]:
        """Return the keys in the order in which they leave."""

        def rank(key: int) -> tuple[int, ...]:
            row = self.rows[key]
            by_use = (row.uses,) if self.evicts == "used" else ()
            return (*by_use, row.last_use, key)

        return sorted(self.rows, key=rank)

    def has_room(self, keys: set[int]) -> bool:
        """Whether a lookup of these keys finds rows for all."""
        return len(keys | {k for k, row in self.rows.items() if row.last_use == self.steps}) <= (
            self.capacity_rows
        )

    def look_up(self, keys: list[int]) -> None:
        """Look keys up in training, and go back once."""
        if self.evicts == "ttl":
            for key in [k for k, row in self.rows.items() if row.last_use < self.steps - 2]:
                del self.rows[key]
        for key in set(keys) & self.rows.keys():
            self.rows[key].last_use = self.steps
            self.rows[key].uses += 1
        new_keys = set(keys) - self.rows.keys()
        leaving = [key for key in self.order() if self.rows[key].last_use < self.steps]
        for key in leaving[: max(len(self.rows) + len(new_keys) - self.capacity_rows, 0)]:
            del self.rows[key]
        for key in new_keys:
            self.rows[key] = Row(self.steps, 1, key % 8 / 8)
        for key in keys:
            self.gradients[key] = self.gradients.get(key, 0.0) + GRADIENT

    def step(self) -> None:
        """Apply the gradients."""
        for key, gradient in self.gradients.items():
            self.rows[key].value -= RATE * gradient
        self.gradients.clear()
        self.steps += 1

    def shrink(self, capacity_rows: int) -> None:
        """Let keys leave for which there are no rows."""
        self.capacity_rows = capacity_rows
        for key in self.order()[: max(len(self.rows) - capacity_rows, 0)]:
            del self.rows[key]


class KeyedRuns(RuleBasedStateMachine):
    """One run, whose trainer is killed again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.checkpoints: Checkpointer | None = None
        self.snapshots: dict[int, Truth] = {}

    @initialize(evicts=strategies.sampled_from(sorted(_RULES)), sparse=strategies.booleans())
    def begin(self, evicts: str, sparse: bool) -> None:
        self.sparse = sparse
        self.truth = Truth(4, evicts)
        self.build(is_cached=False)

    def build(self, *, is_cached: bool) -> None:
        """Start a trainer, which goes on from the newest checkpoint.

        Args:
            is_cached: rows are in a cache, which has fewer slots than the table, and at home.
        """
        self.table = KeyedEmbedding(
            DIM,
            self.truth.capacity_rows,
            sparse=self.sparse,
            initial=first_values,
            evict=_RULES[self.truth.evicts],
            name="users",
        )
        self.model = torch.nn.ModuleDict({"users": self.table})
        if is_cached:
            cached(self.model, local(), self.truth.capacity_rows)
        self.optimizer = torch.optim.SGD(self.table.parameters(), lr=RATE)
        self.checkpoints = Checkpointer(
            self.model,
            self.optimizer,
            **arguments(
                {
                    "run": str(self.folder / "run"),
                    "directory": self.folder / "staging",
                    "interval_batches": 10**6,
                    "small_table_values": 0,
                    "verify_unmarked_rows": 1000,
                    "handle_sigterm": False,
                    "announce": False,
                }
            ),
        )
        self.checkpoints.__enter__()
        self.checkpoints.restore()

    @rule(keys=_SOME_KEYS)
    def look_up(self, keys: list[int]) -> None:
        if self.truth.has_room(set(keys)):
            (self.table(torch.tensor(keys)).sum() * GRADIENT).backward()
            self.truth.look_up(keys)

    @rule()
    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.truth.step()
        assert self.checkpoints is not None
        self.checkpoints.step()

    @rule()
    def evaluate(self) -> None:
        self.table.eval()
        with torch.no_grad():
            values = self.table(torch.tensor(_KEYS))[:, 0].tolist()
        self.table.train()
        rows = self.truth.rows
        assert values == [rows[key].value if key in rows else 0.0 for key in _KEYS]

    @rule(keys=_SOME_KEYS)
    def delete(self, keys: list[int]) -> None:
        keys = [key for key in keys if key not in self.truth.gradients]
        assert self.checkpoints is not None
        self.checkpoints.delete_rows("users", torch.tensor(keys, dtype=torch.int64))
        for key in keys:
            self.truth.rows.pop(key, None)

    @rule()
    def cut(self) -> None:
        assert self.checkpoints is not None
        step = self.checkpoints.batches_done
        if step in self.snapshots or not step:
            return
        count = self.checkpoints.stats.committed
        assert self.checkpoints.checkpoint()
        until(lambda: persist_all(self.folder / "staging") > 0)
        until(lambda: self.checkpoints is not None and self.checkpoints.stats.committed > count)
        snapshot = copy.deepcopy(self.truth)
        snapshot.gradients.clear()
        self.snapshots[step] = snapshot

    @rule(
        capacity_rows=strategies.sampled_from([None, None, 4, 3, 9]),
        is_cached=strategies.booleans(),
    )
    def kill(self, capacity_rows: int | None, is_cached: bool) -> None:
        assert self.checkpoints is not None
        self.checkpoints.__exit__(RuntimeError, RuntimeError("killed"), None)
        rows = capacity_rows or self.truth.capacity_rows
        newest = max(self.snapshots, default=None)
        evicts = self.truth.evicts
        self.truth = Truth(rows, evicts) if newest is None else self._snapshot(newest, rows)
        self.build(is_cached=is_cached)
        assert self.checkpoints.batches_done == (newest or 0)

    def _snapshot(self, step: int, capacity_rows: int) -> Truth:
        for later in [taken for taken in self.snapshots if taken > step]:
            del self.snapshots[later]
        truth = copy.deepcopy(self.snapshots[step])
        truth.shrink(capacity_rows)
        return truth

    @invariant()
    def has_the_rows_of_the_dict(self) -> None:
        if self.checkpoints is None:
            return
        states = self.table.slots.row_states
        weight = self.table.slots.rows.memory.rows(torch.arange(len(states[KEY])))
        slots = (states[LAST_USE] >= 0).nonzero().flatten().tolist()
        rows = {
            int(states[KEY][slot]): Row(
                int(states[LAST_USE][slot]),
                int(states[USES][slot]) if USES in states else 0,
                float(weight[slot, 0]),
            )
            for slot in slots
        }
        counts_uses = self.truth.evicts == "used"
        assert rows == {
            key: Row(row.last_use, row.uses if counts_uses else 0, row.value)
            for key, row in self.truth.rows.items()
        }
        assert self.table.slots.steps == self.truth.steps
        assert not weight[[slot for slot in range(len(weight)) if slot not in slots]].any()

    def teardown(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.__exit__(RuntimeError, RuntimeError("over"), None)
        shutil.rmtree(self.folder)


TestKeyedRuns = KeyedRuns.TestCase
TestKeyedRuns.settings = settings(max_examples=examples(18), stateful_step_count=25, deadline=None)
