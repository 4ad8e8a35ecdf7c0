"""Random training with a reader that looks ahead, under every policy, against the truth.

Predictions are right, wrong, partial or missing; rows change in every way that training has;
checkpoints are taken early, lost and skipped. The truth is a copy of all rows at each cut.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from torch import Tensor, nn

from recpoint import Checkpointer, Lookahead, Options, Staging, Timeouts
from recpoint.catalog.persist import persist
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.staging.agent_lock import AgentLock
from recpoint.catalog.staging.area import StagedRun
from recpoint.format.naming import ManifestName
from recpoint.trainer_plugin.policy import Consecutive, Continuous, Intermittent, OneShot, Policy
from recpoint.trainer_plugin.snapshot.window import Window
from tests.example_counts import examples
from tests.running_parts import pipeline_of
from tests.staged_plays import StagedPlay
from tests.training_builder import until

_INTERVAL = 6
#: Rows and whether gradients are sparse; the copier takes 2,048 rows of a table in one step.
_TABLES = {"goods": (2_100, True), "users": (40, False), "shops": (70, True)}
_Batch = dict[str, Tensor]
_Rows = dict[str, dict[str, Tensor]]

_tables = st.sampled_from([*_TABLES])
_ids = st.lists(st.integers(0, 39), min_size=1, max_size=5)
_windows = st.tuples(
    st.integers(0, _INTERVAL - 1),
    st.sampled_from(
        ["nothing", "announced", "deleted", "decayed", "other memory", "other states", "early"]
        + ["no step", "fails", "no slot", "lost"]
    ),
    _tables,
    st.sampled_from(["stored", "stored", "stored", "rejected", "gone", "waits"]),
)


class _Reader:
    """Batches that follow from a seed and their number; each also says what is told of it."""

    def __init__(self, seed: int) -> None:
        self.seed, self.position = seed, 0

    def __iter__(self) -> Iterator[tuple[_Batch, _Batch]]:
        while True:
            self.position += 1
            draw = random.Random(f"{self.seed} {self.position}")
            ids = {
                name: torch.tensor(draw.choices(range(rows), k=4))
                for name, (rows, _) in _TABLES.items()
            }
            yield ids, self._told(draw, ids)

    def _told(self, draw: random.Random, ids: _Batch) -> _Batch:
        kind = draw.choice(["right", "right", "right", "partial", "wrong", "nothing"])
        if kind == "right":
            return ids
        if kind == "partial":
            return {name: some[:2] for name, some in ids.items() if draw.random() < 0.7}
        if kind == "wrong":
            return {
                name: torch.tensor(draw.choices(range(-5, rows + 5), k=6), dtype=torch.int32)
                for name, (rows, _) in _TABLES.items()
            }
        return {}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class _Extra:
    """Has a state that cannot be had once: a cut that fails."""

    def __init__(self) -> None:
        self.fails = False

    def state_dict(self) -> dict[str, int]:
        if self.fails:
            self.fails = False
            raise RuntimeError("the state cannot be had")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Windows(StagedPlay):
    """One trainer after another on one run; an agent that works when it is told to."""

    policy: Policy

    def __init__(self) -> None:
        super().__init__()
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.directory = Path(tempfile.mkdtemp(prefix="recpoint-windows-", dir=memory))
        self.url, self.staging = str(self.directory / "run"), self.directory / "staging"
        self.run_directory = StagedRun.of(self.staging, self.url).path
        self.agent = AgentLock(self.staging)
        self.agent.__enter__()
        self.truth: dict[ManifestName, _Rows] = {}
        self.generation = 0
        self.ckpt = None

    def teardown(self) -> None:
        try:
            if self.ckpt is not None:
                while self.jobs():
                    self.persist_oldest()
                for name in self.run().live_line():
                    self.check(name)
                self.ckpt.close(final=False)
        finally:
            self.agent.__exit__()
            shutil.rmtree(self.directory)

    # --- what is there ---------------------------------------------------------------------------

    @property
    def window(self) -> Window | None:
        pipeline = pipeline_of(self.trainer)
        assert pipeline.ahead is not None
        window = pipeline.ahead.window
        assert window is None or isinstance(window, Window)
        return window

    def weight(self, name: str) -> Tensor:
        weight = self.model[name].weight
        assert isinstance(weight, Tensor)
        return weight

    def rows(self) -> _Rows:
        """All rows, and row states by name."""
        found = {}
        for name in _TABLES:
            weight = self.weight(name)
            state = self.optimizers[name].state.get(weight, {})
            states = {
                key: one
                for key, one in state.items()
                if isinstance(one, Tensor) and one.shape == weight.shape
            }
            arrays = {"": weight.detach(), **states}
            found[name] = {key: one.clone() for key, one in arrays.items()}
        return found

    def cut(self) -> None:
        """A checkpoint was cut: its truth is what the rows are now."""
        self.truth[ManifestName(self.trainer.batches_done, self.generation)] = self.rows()
        copied = self.trainer.stats.copied
        assert copied is not None
        event(f"a cut: {copied.why_plain}")
        event(f"rows were copied before a cut: {copied.rows_before > 0}")
        self.settled()

    def check(self, name: ManifestName) -> None:
        target = MemoryTarget()
        restore(self.run(), target, Selection.of(name))
        for table, arrays in self.truth[name].items():
            found = target.tables[table]
            assert torch.equal(found.values, arrays[""]), (name, table)
            names = [state.name for state in target.specs[table].row_states]
            assert sorted(names) == sorted(arrays.keys() - {""}), (name, table)
            for state, stored in zip(names, found.row_states, strict=True):
                assert stored is not None and torch.equal(stored, arrays[state]), (name, table)

    # --- lives -----------------------------------------------------------------------------------

    def start(self) -> None:
        torch.manual_seed(self.generation)
        self.model = nn.ModuleDict(
            {name: nn.Embedding(rows, 2, sparse=sparse) for name, (rows, sparse) in _TABLES.items()}
        )
        # SparseAdam creates its row states in its first step.
        makes: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "goods": torch.optim.SparseAdam,
            "users": torch.optim.SGD,
            "shops": torch.optim.Adagrad,
        }
        self.optimizers = {name: make([self.weight(name)], lr=0.1) for name, make in makes.items()}
        self.extra = _Extra()
        self.ahead = Lookahead(_Reader(self.seed), ids=lambda batch: batch[1], window=self.size)
        self.ckpt = Checkpointer(
            self.model,
            [*self.optimizers.values()],
            run=self.url,
            reader=self.ahead,
            extras={"extra": self.extra},
            staging=Staging(directory=self.staging, jobs=self.slots),
            interval_batches=_INTERVAL,
            policy=self.policy,
            timeouts=Timeouts(drain_seconds=0.0),
            options=Options(handle_sigterm=False, announce=False, copy_share=1.0),
        )
        report = self.ckpt.restore()
        self.generation = self.run().generation_numbers()[-1]
        if report is not None:
            restored = ManifestName(report.restored.step, report.restored.generation)
            for table, arrays in self.truth[restored].items():
                found = self.rows()[table]
                for key, one in arrays.items():
                    assert torch.equal(found[key], one), (restored, table, key)
        self.batches = iter(self.ahead)

    @initialize(
        seed=st.integers(0, 1_000),
        size=st.sampled_from([1, 4, 6, 20]),
        slots=st.sampled_from([1, 1, 3]),
    )
    def first_start(self, seed: int, size: int, slots: int) -> None:
        self.seed, self.size, self.slots = seed, size, slots
        self.start()

    @rule(drained=st.booleans())
    def restart(self, drained: bool) -> None:
        self.trainer.close(final=False)
        if drained:
            for path, _ in self.jobs():
                persist.persist_job(path)
        self.start()

    # --- training --------------------------------------------------------------------------------

    def train(self, *, steps: bool = True) -> None:
        ids, _ = next(self.batches)
        for name, some in ids.items():
            self.model[name](some).pow(2).sum().backward()
        if steps:
            for optimizer in self.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
        self.trainer.step()
        pipeline = pipeline_of(self.trainer)
        if pipeline._ledger.newest_step == self.trainer.batches_done:
            self.cut()

    @rule(count=st.integers(1, 2 * _INTERVAL))
    def some_batches(self, count: int) -> None:
        for _ in range(count):
            self.train()

    @rule(windows=st.lists(_windows, min_size=2, max_size=6))
    def windows_in_a_row(self, windows: list[tuple[int, str, str, str]]) -> None:
        """Each is disturbed once, and cut: else few windows are open when something happens."""
        for at, disturbance, table, fate in windows:
            cuts = len(self.truth)
            for _ in range(at):
                self.train()
            self.wait_for_the_plan()
            self.disturb(disturbance, table)
            for _ in range(2 * _INTERVAL):
                if len(self.truth) > cuts:
                    break
                self.train()
            if self.jobs() and fate == "rejected":
                self.reject_oldest("StagingError")
            elif self.jobs() and fate == "gone":
                self.lose_newest()
            elif fate == "stored":
                self.persist_all()

    def disturb(self, disturbance: str, table: str) -> None:
        ids = [0, 7, 39]
        if disturbance == "announced":
            self.rows_that_are_announced(table, ids)
        elif disturbance == "deleted":
            self.rows_that_are_deleted(table, ids)
        elif disturbance == "decayed":
            self.a_table_that_is_decayed(table)
        elif disturbance == "other memory":
            self.a_table_in_other_memory(table)
        elif disturbance == "other states":
            self.other_row_states(table)
        elif disturbance == "early":
            self.checkpoint()
        elif disturbance == "no step":
            self.batches_without_a_step(2)
        elif disturbance == "fails":
            self.a_cut_that_fails()
        elif disturbance == "no slot":
            self.a_slot_that_is_removed()
        elif disturbance == "lost" and self.jobs():
            self.reject_oldest("StagingError")

    @rule(count=st.integers(1, 4))
    def batches_without_a_step(self, count: int) -> None:
        for _ in range(count):
            self.train(steps=False)

    @rule()
    def checkpoint(self) -> None:
        """Early, in a window or without one; also while no slot is free."""
        if self.trainer.checkpoint():
            self.cut()

    @rule()
    def wait_for_the_plan(self) -> None:
        window = self.window
        if window is not None:
            until(lambda: not window._thread.is_alive() or window._copier is not None)

    @rule(table=_tables, ids=_ids)
    def rows_that_are_announced(self, table: str, ids: list[int]) -> None:
        with torch.no_grad():
            self.weight(table)[torch.tensor(ids)] += 1
        self.trainer.mark(table, torch.tensor(ids))

    @rule(table=_tables, ids=_ids)
    def rows_that_are_deleted(self, table: str, ids: list[int]) -> None:
        self.trainer.delete_rows(table, torch.tensor(ids))

    @rule(table=_tables)
    def a_table_that_is_decayed(self, table: str) -> None:
        with torch.no_grad():
            self.weight(table).mul_(0.9)
        self.train()

    @rule(table=_tables)
    def a_table_in_other_memory(self, table: str) -> None:
        weight = self.weight(table)
        weight.data = weight.detach() + 1
        self.train()

    @rule(table=_tables)
    def other_row_states(self, table: str) -> None:
        optimizer = self.optimizers[table]
        optimizer.load_state_dict(optimizer.state_dict())
        self.train()

    @rule()
    def a_cut_that_fails(self) -> None:
        self.extra.fails = True
        if self.trainer.checkpoint():
            self.cut()
        self.extra.fails = False

    @rule()
    def a_slot_that_is_removed(self) -> None:
        window = self.window
        if window is not None:
            window.slot.path.unlink(missing_ok=True)

    # --- the agent -------------------------------------------------------------------------------

    @rule()
    def persist_all(self) -> None:
        while self.jobs():
            self.persist_oldest()


def _machine(policy: Policy) -> Any:
    machine: Any = type("Windows", (Windows,), {"policy": policy})
    case = machine.TestCase
    case.settings = settings(
        max_examples=int(os.environ.get("RECPOINT_WINDOWS_EXAMPLES", examples(10))),
        stateful_step_count=12,
        # Shrinking would take minutes; the steps are in the message as they are.
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return pytest.mark.slow(case)


TestConsecutive = _machine(Consecutive(full_every=4))
TestOneShot = _machine(OneShot(full_every=4))
TestIntermittent = _machine(Intermittent())
TestContinuous = _machine(Continuous())
