"""Builds a small training: a recommender, a reader with a state, and an agent in a thread."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recpoint import Checkpointer
from recpoint.catalog.persist import persist
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.agent_lock import AgentLock
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.errors import RanksMissing
from recpoint.format import state_tree
from recpoint.format.job import Outcome
from tests.flat_settings import arguments
from tests.polling import PATIENCE_SECONDS
from tests.polling import until as until

ROWS, DIM, BATCH = 203, 6, 8


class Recommender(nn.Module):
    """A model with every kind of state: two tables, dense layers, dropout and batch norm."""

    def __init__(self, *, sparse: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, DIM, sparse=sparse, dtype=dtype)
        self.items = nn.EmbeddingBag(ROWS // 2, DIM, mode="sum", sparse=sparse, dtype=dtype)
        self.norm = nn.BatchNorm1d(2 * DIM)
        self.drop = nn.Dropout(0.2)
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        features = torch.cat([self.users(users), self.items(items)], dim=1).float()
        scores: Tensor = self.top(self.drop(self.norm(features)))
        return scores.squeeze(1)


class Batches:
    """An endless reader, shuffled by its own generator, with noise from all global generators."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.position = 0
        self.told: list[int] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor, Tensor]:
        self.position += 1
        users = torch.from_numpy(self.generator.integers(0, ROWS, BATCH))
        items = torch.from_numpy(self.generator.integers(0, ROWS // 2, (BATCH, 3)))
        noise = random.random() + float(np.random.random())
        return users, items, torch.rand(BATCH) + noise

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.bit_generator.state, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.bit_generator.state = state["generator"]
        self.position = state["position"]

    def batches_until_checkpoint(self, n: int) -> None:
        self.told.append(n)


@dataclass
class Training:
    """A small training process: model, optimizers, schedulers, reader."""

    model: Recommender
    optimizers: list[torch.optim.Optimizer]
    reader: Batches
    schedulers: list[Any] = field(default_factory=list)

    def batch(self) -> None:
        users, items, target = next(self.reader)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(self.model(users, items), target).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def everything(training: Training) -> list[object]:
    """Return all state as bytes and JSON, so that a comparison compares every bit."""
    names = {id(p): name for name, p in training.model.named_parameters()}
    state = {
        "model": dict(training.model.state_dict()),
        "optimizers": [
            {
                "groups": optimizer.state_dict()["param_groups"],
                "state": {
                    names[id(p)]: dict(s)
                    for p, s in sorted(optimizer.state.items(), key=lambda item: names[id(item[0])])
                },
            }
            for optimizer in training.optimizers
        ],
        "schedulers": [
            {k: dict(v) if isinstance(v, dict) else v for k, v in s.state_dict().items()}
            for s in training.schedulers
        ],
        "reader": training.reader.state_dict(),
        "next": [random.random(), float(np.random.random()), torch.rand(3)],
    }
    tree, tensors = state_tree.flatten(state)
    return [tree, *[tensor.contiguous().view(-1).view(torch.uint8).tolist() for tensor in tensors]]


class InlineAgent:
    """Does the agent's work in a thread, without Prefect; holds the agent's lock."""

    def __init__(self, staging: Path) -> None:
        self.staging = staging
        self.errors: list[BaseException] = []
        self._has_lock = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> InlineAgent:
        self._thread.start()
        until(lambda: self._has_lock.is_set() or bool(self.errors))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        assert not self.errors, self.errors

    def _run(self) -> None:
        try:
            with AgentLock(self.staging):
                self._has_lock.set()
                while not self._stop.wait(0.01):
                    for job in _staged_jobs(self.staging):
                        # Other ranks may stage later; a trainer that takes over removes the job.
                        with suppress(RanksMissing, FileNotFoundError):
                            persist.persist_job(job)
        except BaseException as error:
            self.errors.append(error)


def _staged_jobs(staging: Path) -> list[Path]:
    return [
        job
        for run in [run.path for run in staged_runs(staging)]
        for job in StagedRun(run).staged_jobs()
    ]


def persist_all(staging: Path) -> int:
    """Persist every staged job; return their number."""
    jobs = _staged_jobs(staging)
    for job in jobs:
        persist.persist_job(job)
    return len(jobs)


def reject(job_file: Path, error_type: str) -> None:
    """Answer a staged job as an agent does that cannot commit it."""
    job = job_files.read_job(job_file)
    outcome = Outcome(
        step=job.step,
        generation=job.generation,
        attempt=job.attempt,
        result="rejected",
        error_type=error_type,
        error="for the test",
        stored_bytes=0,
        rank_bytes=0,
        links_to_read=0,
        quantizers=(),
        finished_ms=0,
    )
    job_files.finish(job_file, outcome)


@dataclass
class Place:
    """The places of one test's run and staging area."""

    run: str
    staging: Path

    def agent(self) -> InlineAgent:
        return InlineAgent(self.staging)

    def persist_all(self) -> int:
        return persist_all(self.staging)

    @property
    def run_directory(self) -> Path:
        return StagedRun.of(self.staging, self.run).path


def simple_training(seed: int = 1, *, lr: float = 0.1) -> Training:
    """Return a training of the recommender under plain SGD: only looked-up rows change."""
    seed_everything(seed)
    model = Recommender()
    return Training(model, [torch.optim.SGD(model.parameters(), lr=lr)], Batches(seed))


def checkpointer(training: Training, place: Place, /, **settings: Any) -> Checkpointer:
    """Return a checkpointer of all of `training` with short waits; `settings` as `arguments`."""
    return Checkpointer(
        training.model,
        training.optimizers,
        **arguments(
            {
                "run": place.run,
                "directory": place.staging,
                "reader": training.reader,
                "schedulers": training.schedulers,
                "interval_batches": 2,
                "small_table_values": 0,  # otherwise all these tables would count as small
                "close_seconds": 120.0,
                "drain_seconds": 120.0,
                "handle_sigterm": False,
                "announce": False,
                **settings,
            }
        ),
    )


def train(training: Training, ckpt: Checkpointer, batches: int) -> None:
    """Train so many batches, with the checkpointer's `step` after each."""
    for _ in range(batches):
        training.batch()
        ckpt.step()
