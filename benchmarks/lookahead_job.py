"""Trains a job with or without Lookahead, in a process of its own: `lookahead` compares them."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.criteo_dlrm import CriteoDLRM
from benchmarks.forked import forked
from benchmarks.workload import StagedTraining, Tables, examples_on_path, wait_for
from recpoint import Checkpointer, Consecutive, Lookahead, Options
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.format.job import Job

__all__ = ["Result", "Task", "Taken", "play"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a job does.

    Attributes:
        kind: "criteo": a DLRM on samples of Criteo's shape. "table": one table of 64 values a row,
            with Adagrad's state, of which each batch looks up rows that no other batch of its
            interval looks up.
        folder: directory of run and staging area; a job that finds a run there resumes it.
        rows: criteo: most rows of each table; table: rows.
        lookups: criteo: samples of a batch; table: rows of a batch.
        batches: batches of the whole job.
        interval: batches between two checkpoints.
        window: window of the Lookahead; 0: no Lookahead.
        kill_at: the job kills itself with SIGKILL after this batch; 0: never.
        digests: whether checkpoints are digested, outside the measured time.
    """

    kind: Literal["criteo", "table"]
    folder: str
    rows: int
    lookups: int
    batches: int
    interval: int
    window: int
    kill_at: int = 0
    digests: bool = True


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A checkpoint that the job took.

    Attributes:
        kind: full or increment.
        stall_ms: the stall.
        dirty_rows: rows that it holds.
        rows_before, rows_in_stall: rows copied before the stall and in it; -1 without Lookahead.
        last_rows: rows that the last batch before it looked up.
        digest: of its rows in the slot, with their places.
    """

    kind: str
    stall_ms: float
    dirty_rows: int
    rows_before: int
    rows_in_stall: int
    last_rows: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the job did.

    Attributes:
        taken: its checkpoints.
        state: digest of tables, dense layers and optimizer state at the end.
        cpu_seconds, wall_seconds: of the training loop, without persisting checkpoints.
    """

    taken: list[Taken]
    state: str
    cpu_seconds: float
    wall_seconds: float


def play(task: Task) -> Result | None:
    """Run a job in a process of its own; None: it killed itself, as it was told."""
    process, results = forked(_tell, task)
    with results:
        try:
            result: Result | None = results.recv()
        except EOFError:
            result = None
    process.join()
    if task.kill_at and process.exitcode == -signal.SIGKILL:
        return None
    if process.exitcode or result is None:
        raise RuntimeError(f"{task}: exit code {process.exitcode}")
    return result


def _tell(task: Task, pipe: Connection) -> None:
    pipe.send(_main(task))


class _Rows:
    """Batches of one table: int64 [rows of a batch], distinct within an interval."""

    def __init__(self, task: Task) -> None:
        self._task, self._position = task, 0

    def __iter__(self) -> Iterator[Tensor]:
        per = self._task.interval * self._task.lookups
        step = self._task.rows // per
        while True:
            number = self._position % self._task.interval
            first = torch.arange(self._task.lookups) * self._task.interval + number
            self._position += 1
            yield first * step + self._position % step

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]


class _Table:
    """The table, and how a batch trains it."""

    def __init__(self, task: Task) -> None:
        self.model = Tables(count=1, rows=task.rows, dim=64)
        self.optimizers = self.model.optimizers(state=True)
        self.reader: Any = _Rows(task)

    @staticmethod
    def ids(batch: Tensor) -> dict[str, Tensor]:
        return {"tables.0": batch}

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model.top(self.model.table(0)(batch)).square().mean()
        return loss


class _Criteo:
    """The DLRM, and how a batch trains it."""

    def __init__(self, task: Task) -> None:
        examples_on_path()
        from criteo import CriteoShapeReader

        self.reader: Any = CriteoShapeReader(lines=task.lookups, rows=task.rows)
        self.model = CriteoDLRM(self.reader.tables)
        dense = [p for n, p in self.model.named_parameters() if not n.startswith("tables.")]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adagrad(self.model.tables.parameters(), lr=0.1),
            torch.optim.Adagrad(dense, lr=0.02),
        ]
        self._names = [f"tables.{name}" for name in self.reader.tables]

    def ids(self, batch: Any) -> dict[str, Tensor]:
        return dict(zip(self._names, batch.sparse.t().contiguous(), strict=True))

    def loss(self, batch: Any) -> Tensor:
        logits = self.model(batch.dense, batch.sparse)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)


def _main(task: Task) -> Result:
    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # otherwise torch warns of the default
    job = _Table(task) if task.kind == "table" else _Criteo(task)
    reader = Lookahead(job.reader, ids=job.ids, window=task.window) if task.window else job.reader
    folder = Path(task.folder)
    checkpointer = Checkpointer(
        job.model,
        job.optimizers,
        reader=reader,
        run=str(folder / "run"),
        interval_batches=task.interval,
        staging=folder / "staging",
        policy=Consecutive(full_every=10_000),
        options=Options(on_error="raise", handle_sigterm=False, announce=False),
    )
    checkpointer.restore()
    staged = StagedTraining(checkpointer, folder / "staging", str(folder / "run"))
    checkpoints: list[Taken] = []
    cpu, wall = -process_time(), -perf_counter()
    batches = iter(reader)
    while checkpointer.batches_done < task.batches:
        batch = next(batches)
        for optimizer in job.optimizers:
            optimizer.zero_grad()
        job.loss(batch).backward()
        for optimizer in job.optimizers:
            optimizer.step()
        checkpointer.step()
        if checkpointer.batches_done == task.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if checkpointer.batches_done % task.interval == 0:
            cpu, wall = cpu + process_time(), wall + perf_counter()
            last = sum(ids.unique().numel() for ids in job.ids(batch).values())
            checkpoints.append(_taken(staged, last, digests=task.digests))
            cpu, wall = cpu - process_time(), wall - perf_counter()
    cpu, wall = cpu + process_time(), wall + perf_counter()
    checkpointer.close(final=False)
    return Result(taken=checkpoints, state=_state(job), cpu_seconds=cpu, wall_seconds=wall)


def _taken(staged: StagedTraining, last_rows: int, *, digests: bool) -> Taken:
    path = wait_for(lambda: next(iter(StagedRun(staged.directory).staged_jobs()), None))
    job = job_files.read_job(path)
    digest = _digest(job, staged.directory) if digests else ""
    stats = staged.checkpointer.stats
    staged.persist()
    copied = stats.copied
    return Taken(
        kind=job.kind,
        stall_ms=stats.stalls_ms[-1],
        dirty_rows=job.dirty_rows,
        rows_before=-1 if copied is None else copied.rows_before,
        rows_in_stall=-1 if copied is None else copied.rows_in_stall,
        last_rows=last_rows,
        digest=digest,
    )


def _digest(job: Job, directory: Path) -> str:
    """Digest the rows in the slot: all that a checkpoint holds besides the reader's position."""
    sha256 = hashlib.sha256()
    for segment in job.segments:
        if segment.name[1].isdigit():
            sha256.update(f"{segment.name} {segment.offset} {segment.crc32c}".encode())
    return sha256.hexdigest()


def _state(job: _Table | _Criteo) -> str:
    sha256 = hashlib.sha256()
    tensors = [value for _, value in sorted(job.model.state_dict().items())]
    for optimizer in job.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                tensors += [v for _, v in sorted(optimizer.state[parameter].items())]
    for tensor in tensors:
        sha256.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()
