"""Builds the benchmarks' workload: tables of any size, a real Checkpointer, persists on call."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from recpoint import Consecutive, Loss, Options, Precision
from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.format.job import Job, Outcome
from recpoint.trainer_plugin.checkpointer import Checkpointer
from recpoint.trainer_plugin.settings import FixedBits

__all__ = [
    "ROOT",
    "StagedTraining",
    "Tables",
    "examples_on_path",
    "scratch",
    "staged_run",
    "wait_for",
]

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]


def examples_on_path() -> None:
    """Make the modules of `examples/` importable, as they are for its scripts."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)


@contextmanager
def scratch(*, in_memory: bool = True) -> Iterator[Path]:
    """Yield a temporary directory, in memory if there is room, else on disk."""
    memory = Path("/dev/shm")
    parent = memory if in_memory and memory.is_dir() else Path(tempfile.gettempdir())
    path = Path(tempfile.mkdtemp(prefix="recpoint-bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Tables(nn.Module):
    """`count` tables of `rows` x `dim` F32 values with distinct contents, and a small MLP."""

    def __init__(self, *, count: int, rows: int, dim: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1, dim, sparse=True) for _ in range(count))
        generator = torch.Generator().manual_seed(7)
        for table in self.tables:
            assert isinstance(table, nn.Embedding)
            # uniform_ in place: nn.Embedding's own initialisation takes minutes at 50 M rows.
            weight = torch.empty(rows, dim).uniform_(-0.05, 0.05, generator=generator)
            table.weight = nn.Parameter(weight)
            table.num_embeddings = rows
        self.top = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def table(self, index: int) -> nn.Embedding:
        """Return table `index`."""
        table = self.tables[index]
        assert isinstance(table, nn.Embedding)
        return table

    def optimizers(self, *, state: bool) -> list[torch.optim.Optimizer]:
        """Return optimizers: Adagrad (`state`) or SGD for the tables, and Adagrad for the MLP."""
        kind = torch.optim.Adagrad if state else torch.optim.SGD
        return [
            kind(self.tables.parameters(), lr=0.1),
            torch.optim.Adagrad(self.top.parameters(), lr=0.02),
        ]


class StagedTraining:
    """A checkpointer whose jobs this process persists when the benchmark calls `persist`."""

    def __init__(self, checkpointer: Checkpointer, staging: Path, url: str) -> None:
        self.checkpointer = checkpointer
        self.staging = staging
        self.url = url
        self.directory = StagedRun.of(staging, open_store(url).url).path

    def cut(self) -> Path:
        """Take a checkpoint, wait until it is staged, and return its job file."""
        if not self.checkpointer.checkpoint():
            raise RuntimeError(f"no checkpoint was cut: {self.checkpointer.stats}")
        return wait_for(lambda: next(iter(StagedRun(self.directory).staged_jobs()), None))

    def cut_and_persist(self) -> tuple[Job, Outcome]:
        """Call `cut`, then `persist`; return the job and the outcome."""
        job = job_files.read_job(self.cut())
        return job, self.persist()

    def persist(self) -> Outcome:
        """Persist the staged job without Prefect, and wait until the trainer knows of it."""
        committed_before = self.checkpointer.stats.committed
        job_file = StagedRun(self.directory).staged_jobs()[0]
        outcome = persist_job(job_file)
        if outcome.result != "committed":
            raise RuntimeError(outcome.error)
        self.wait_for_commit(committed_before)
        return outcome

    def wait_for_commit(self, committed_before: int) -> None:
        """Wait until the trainer knows of more commits than `committed_before`."""
        wait_for(lambda: self.checkpointer.stats.committed > committed_before or None)


def wait_for(look: Callable[[], T | None], *, seconds: float = 120.0) -> T:
    """Poll `look` until it returns something other than None, and return that."""
    deadline = time.monotonic() + seconds
    while (value := look()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing after {seconds} s")
        time.sleep(0.002)
    return value


@contextmanager
def staged_run(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    *,
    url: str,
    staging: Path,
    bits: Precision | Loss | FixedBits = "lossless",
    row_local_optimizers: Sequence[type] = (),
) -> Iterator[StagedTraining]:
    """Yield a started run without an interval: the benchmark takes checkpoints by `cut`."""
    checkpointer = Checkpointer(
        model,
        optimizers,
        run=url,
        interval_batches=10**9,
        bits=bits,
        options=Options(
            row_local_optimizers=row_local_optimizers, on_error="raise", handle_sigterm=False
        ),
        policy=Consecutive(full_every=10_000),
        staging=staging,
    )
    checkpointer.restore()
    try:
        yield StagedTraining(checkpointer, staging, url)
    finally:
        checkpointer.close(final=False)
