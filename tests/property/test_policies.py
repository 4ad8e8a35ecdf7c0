"""Random training, failures, cancels, skips and restarts under every policy, against the truth.

All of it is real: a model and its optimizer, the Checkpointer and its background thread, the
staging area, what the agent does with a job, a store. The truth is a copy of all rows at each cut.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from torch import Tensor, nn

from recpoint import Checkpointer, Options, Staging, Timeouts
from recpoint.catalog.persist import persist
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.staging.agent_lock import AgentLock
from recpoint.catalog.staging.area import StagedRun
from recpoint.format.naming import ManifestName
from recpoint.trainer_plugin.policy import POLICIES, Policy
from recpoint.trainer_plugin.settings import WhenBusy
from tests.example_counts import examples
from tests.running_parts import pipeline_of
from tests.staged_plays import StagedPlay

ROWS, DIM = 40, 3
_Rows = dict[str, list[Tensor]]

_ids = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=6)
_bounds: list[dict[str, Any]] = [{}, {}, {"full_every": 2}, {"full_every": 3}]
_policies = st.tuples(
    st.builds(
        lambda kind, bound: kind(**bound),
        st.sampled_from([*POLICIES.values()]),
        st.sampled_from(_bounds),
    ),
    st.sampled_from([("skip", 1), ("skip", 3), ("cancel", 1), ("wait", 1)]),
)


_Drawn = tuple[Policy, tuple[WhenBusy, int]]


class _Reader:
    """A reader whose state cannot be had once: a cut that fails is a user's error too."""

    def __init__(self) -> None:
        self.fails = False

    def state_dict(self) -> dict[str, int]:
        if self.fails:
            self.fails = False
            raise RuntimeError("the reader's state cannot be had")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Trainings(StagedPlay):
    """Lives of one trainer after another on one run; an agent that works when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        # In memory where that is possible: these tests are about order, not about disks.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.directory = Path(tempfile.mkdtemp(prefix="recpoint-policies-", dir=memory))
        self.url, self.staging = str(self.directory / "run"), self.directory / "staging"
        self.run_directory = StagedRun.of(self.staging, self.url).path
        self.agent = AgentLock(self.staging)
        self.agent.__enter__()
        self.truth: dict[ManifestName, _Rows] = {}
        self.generation = 0
        self.ckpt = None

    def teardown(self) -> None:
        if self.ckpt is not None:
            self.check_line()
            self.ckpt.close(final=False)
        self.agent.__exit__()
        shutil.rmtree(self.directory)

    # --- what is there ---------------------------------------------------------------------------

    def rows(self) -> _Rows:
        found = {}
        for name in ("a", "b"):
            weight = self.model[name].weight
            assert isinstance(weight, Tensor)
            found[name] = [weight.detach().clone(), self.adagrad.state[weight]["sum"].clone()]
        return found

    def note(self) -> None:
        """A cut may have been taken: its truth is what the rows are now."""
        pipeline = pipeline_of(self.trainer)
        step = self.trainer.batches_done
        if pipeline._ledger.newest_step == step:
            self.truth.setdefault(ManifestName(step, self.generation), self.rows())
        self.settled()

    def check(self, name: ManifestName) -> None:
        target = MemoryTarget()
        restore(self.run(), target, Selection.of(name))
        for table, (values, sums) in self.truth[name].items():
            assert torch.equal(target.tables[table].values, values), (name, table)
            (stored,) = target.tables[table].row_states
            assert stored is not None and torch.equal(stored, sums), (name, table)

    def check_line(self) -> None:
        for name in self.run().live_line():
            self.check(name)

    # --- lives -----------------------------------------------------------------------------------

    def start(self, policy: _Drawn, step: int | None) -> None:
        chosen, (when_busy, slots) = policy
        torch.manual_seed(self.generation)
        self.model = nn.ModuleDict(
            {name: nn.Embedding(ROWS, DIM, sparse=True) for name in ("a", "b")}
        )
        self.adagrad = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        self.reader = _Reader()
        self.ckpt = Checkpointer(
            self.model,
            self.adagrad,
            run=self.url,
            reader=self.reader,
            staging=Staging(
                directory=self.staging,
                when_busy=when_busy,
                busy_wait_seconds=0.02 if when_busy == "wait" else 60.0,
                jobs=slots,
            ),
            interval_batches=10**6,
            policy=chosen,
            timeouts=Timeouts(drain_seconds=0.0),
            options=Options(handle_sigterm=False),
        )
        line = self.run().live_line() if self.generation else []
        report = self.ckpt.restore(step=step)
        self.generation = self.run().generation_numbers()[-1]
        if report is None:
            assert not line
            return
        restored = ManifestName(report.restored.step, report.restored.generation)
        assert restored == (line[0] if step is None else restored) and restored in line
        for table, tensors in self.truth[restored].items():
            for ours, theirs in zip(self.rows()[table], tensors, strict=True):
                assert torch.equal(ours, theirs), (restored, table)

    @initialize(policy=_policies)
    def first_start(self, policy: _Drawn) -> None:
        self.start(policy, None)

    @rule(policy=_policies, back=st.integers(0, 2), drained=st.booleans())
    def restart(
        self,
        policy: _Drawn,
        back: int,
        drained: bool,
    ) -> None:
        self.check_line()
        self.trainer.close(final=False)
        if drained:
            for path, _ in self.jobs():
                persist.persist_job(path)
        line = self.run().live_line()
        self.start(policy, line[back].step if 0 < back < len(line) else None)

    # --- training --------------------------------------------------------------------------------

    def train(self, a: list[int], b: list[int]) -> None:
        self.adagrad.zero_grad()
        self.model["a"](torch.tensor(a)).sum().backward()
        self.model["b"](torch.tensor(b)).pow(2).sum().backward()
        self.adagrad.step()

    @rule(a=_ids, b=_ids)
    def batch(self, a: list[int], b: list[int]) -> None:
        self.train(a, b)
        self.trainer.step()
        self.note()

    @rule(a=_ids, b=_ids)
    def batch_and_checkpoint(self, a: list[int], b: list[int]) -> None:
        self.batch(a, b)
        self.trainer.checkpoint()
        self.note()

    @rule(a=_ids, b=_ids)
    def rows_that_are_announced(self, a: list[int], b: list[int]) -> None:
        with torch.no_grad():
            weight = self.model["a"].weight
            assert isinstance(weight, Tensor)
            weight[torch.tensor(b)] += 1
        self.trainer.mark("a", torch.tensor(b))
        self.batch(a, b)

    @rule(a=_ids, b=_ids)
    def a_cut_that_fails(self, a: list[int], b: list[int]) -> None:
        self.reader.fails = True
        self.batch_and_checkpoint(a, b)
        self.reader.fails = False

    # --- the agent -------------------------------------------------------------------------------

    @rule(a=_ids, b=_ids, lost=_ids, how=st.sampled_from(["stored", "rejected", "gone"]))
    def chain_that_grows(self, a: list[int], b: list[int], lost: list[int], how: str) -> None:
        """Checkpoints that go well, but perhaps one: else histories are too short to tell much."""
        for rows, fate in ((a, "stored"), (lost, how), (b, "stored")):
            self.batch_and_checkpoint(rows, rows)
            if self.jobs() and fate == "rejected":
                self.reject_oldest("StagingError")
            elif self.jobs() and fate == "gone":
                self.lose_newest()
            while self.jobs():
                self.persist_oldest()

    @precondition(lambda self: self.jobs())
    @rule()
    def damage_oldest(self) -> None:
        path, job = self.jobs()[0]
        slot = StagedRun(self.run_directory).slots_directory / job.slot
        with slot.open("r+b") as file:
            file.seek(job.segments[0].offset)
            byte = file.read(1)[0]
            file.seek(job.segments[0].offset)
            file.write(bytes([byte ^ 1]))
        assert persist.persist_job(path).result == "rejected"
        self.settled()


Trainings.TestCase.settings = settings(
    max_examples=examples(15),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTrainings = pytest.mark.slow(Trainings.TestCase)
