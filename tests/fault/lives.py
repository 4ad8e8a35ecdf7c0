"""A small training run and the agent beside it, as processes that can be killed at any step.

Hundreds of them, each a real process that takes a real SIGKILL (`tests.forked`).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec.config
import numpy as np
import torch
from torch import Tensor, nn

from recpoint import Staging, Timeouts
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.cancels import is_cancelled
from recpoint.catalog.store.store import open_store
from recpoint.format.naming import ManifestName
from recpoint.testing import die_at
from tests.forked import ForkedProcess

__all__ = [
    "BESIDES_ON_S3",
    "STEPS",
    "agent_life",
    "begin",
    "besides_of",
    "cancelling_life",
    "consolidation_life",
    "flow_life",
    "import_life",
    "serving",
    "sweep_life",
    "table_digest",
    "trainer_life",
]

STEPS = 5
_INTERVAL = 2
_ROWS = 40
_DIM = 3
_PATIENCE_SECONDS = 240.0

_OF_STAGING = {"chunk", "fsync", "mkdir", "open", "rename", "reserve", "unlink", "write"}
_BEFORE_A_REQUEST = {"create", "delete", "put"}

#: Kinds of steps that are left out where the run is on S3. Those in memory and in the staging area
#: are there with a run on a local disk too. Right before a request the store is as it was right
#: after the last one, and there all die: once between any two requests, and after the last.
BESIDES_ON_S3 = frozenset(_OF_STAGING | _BEFORE_A_REQUEST)


def begin(
    life: Callable[..., None], environment: dict[str, str], **arguments: Any
) -> ForkedProcess:
    """Start a life; its arguments travel by pickling. `environment` is set before anything else."""
    process = ForkedProcess(target=_live, args=(life, environment, arguments), daemon=True)
    process.start()
    return process


def _live(
    life: Callable[..., None], environment: dict[str, str], arguments: dict[str, Any]
) -> None:
    os.environ.update(environment)
    fsspec.config.set_conf_env(fsspec.config.conf)  # read when it was imported: by the server
    torch.set_num_threads(1)
    life(**arguments)


def besides_of(url: str) -> frozenset[str]:
    """Kinds of steps that are left out for the run under `url`: none on a local disk."""
    return BESIDES_ON_S3 if url.startswith("s3://") else frozenset()


class _Counting:
    """A reader whose position matters: batch n is drawn from a generator of its own."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(11)

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.randint(0, _ROWS, (6,), generator=self._generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


def _training() -> tuple[nn.ModuleDict, list[torch.optim.Optimizer], _Counting]:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    model = nn.ModuleDict(
        {
            "goods": nn.Embedding(_ROWS, _DIM, sparse=True),
            "noise": nn.Dropout(0.3),
            "top": nn.Linear(_DIM, 1),
        }
    )
    optimizers = [
        torch.optim.Adagrad(model["goods"].parameters(), lr=0.1),
        torch.optim.Adam(model["top"].parameters(), lr=0.01),
    ]
    reader = _Counting()
    return model, optimizers, reader


def _batch(model: nn.ModuleDict, optimizers: list[torch.optim.Optimizer], goods: Tensor) -> None:
    output = model["top"](model["noise"](model["goods"](goods)))
    (output**2).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def trainer_life(
    *,
    url: str,
    staging: str,
    evidence: str,
    die: int | None = None,
    count_into: str | None = None,
    besides: Container[str] = (),
) -> None:
    """Train to the end from wherever the run is; write what came out to the file `evidence`."""
    from recpoint.trainer_plugin.checkpointer import Checkpointer
    from recpoint.trainer_plugin.pipeline import outcomes

    # A killed agent has a successor, however long this machine takes to start it.
    outcomes._AGENT_GRACE_SECONDS = _PATIENCE_SECONDS
    die_at.install(die_at=die, count_into=count_into, besides=besides)
    model, optimizers, reader = _training()
    checkpointer = Checkpointer(
        model,
        optimizers,
        reader=reader,
        run=url,
        interval_batches=_INTERVAL,
        staging=staging,
        timeouts=Timeouts(close_seconds=_PATIENCE_SECONDS, drain_seconds=_PATIENCE_SECONDS),
    )
    with checkpointer:
        checkpointer.restore()
        batches = iter(reader)
        while checkpointer.batches_done < STEPS:
            _batch(model, optimizers, next(batches))
            checkpointer.step()
            if checkpointer.batches_done % _INTERVAL == 0:
                # Every life has the same checkpoints: none is skipped because the agent was slow.
                _wait(lambda: checkpointer.stats.committed == checkpointer.stats.staged > 0)
    stats = checkpointer.stats
    if stats.failed or stats.skipped:
        raise AssertionError(f"{stats}")
    contents = {
        "goods": table_digest(model.state_dict()["goods.weight"]),
        "state": _state_digest([*model.state_dict().values()], optimizers),
        "random": hashlib.sha256(
            torch.get_rng_state().numpy().tobytes()
            + repr((random.getstate(), np.random.get_state())).encode()
        ).hexdigest(),
        "next_batch": next(iter(reader)).tolist(),
    }
    Path(evidence).write_text(json.dumps(contents))


def cancelling_life(
    *, url: str, staging: str, die: int | None = None, count_into: str | None = None
) -> None:
    """Train until the first checkpoint is marked to be dropped; an agent that does nothing."""
    from recpoint.trainer_plugin.checkpointer import Checkpointer

    die_at.install(die_at=die, count_into=count_into)
    model, optimizers, reader = _training()
    checkpointer = Checkpointer(
        model,
        optimizers,
        reader=reader,
        run=url,
        interval_batches=_INTERVAL,
        staging=Staging(directory=staging, when_busy="cancel"),
        timeouts=Timeouts(drain_seconds=0.0),
    )
    checkpointer.restore()
    batches = iter(reader)
    for _ in range(2):
        for _ in range(_INTERVAL):
            _batch(model, optimizers, next(batches))
            checkpointer.step()
        _wait(lambda: checkpointer.stats.staged == 1)
    (job_file,) = StagedRun.of(staging, Run.open(open_store(url)).url).staged_jobs()
    _wait(lambda: is_cancelled(job_file))
    checkpointer.close(final=False)


def agent_life(
    *,
    staging: str,
    prefect: str = "off",
    die: int | None = None,
    count_into: str | None = None,
    besides: Container[str] = (),
    log: str | None = None,
    once: bool = False,
) -> None:
    """Serve the staging area until SIGTERM, or `once`; `log` is a file for its standard error."""
    from recpoint.flows.agent.agent import run_agent

    if log is not None:
        with open(log, "ab") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
    die_at.install(die_at=die, count_into=count_into, besides=besides)
    run_agent(staging, prefect="auto" if prefect == "auto" else "off", once=once)


@contextmanager
def serving(
    staging: Path, environment: dict[str, str], *, log: Path | None = None
) -> Iterator[ForkedProcess]:
    """An agent for the staging area, as long as the block lasts."""
    process = begin(
        agent_life, environment, staging=str(staging), log=None if log is None else str(log)
    )
    try:
        yield process
        assert process.is_alive(), "the agent ended by itself"
    finally:
        process.terminate()
        process.join(_PATIENCE_SECONDS)


def flow_life(
    *, url: str, job_file: str, die: int | None = None, count_into: str | None = None
) -> None:
    """Persist one job of the run as a Prefect flow, through the API that the environment names."""
    from prefect.context import refresh_global_settings_context

    from recpoint.catalog.persist.persist import PersistJob
    from recpoint.flows.persist import run_persist

    # Prefect read its settings when the server of these processes imported it.
    refresh_global_settings_context()
    die_at.install(die_at=die, count_into=count_into, besides=besides_of(url))
    state = run_persist(PersistJob.open(job_file)).state
    if not state.is_completed():
        raise AssertionError(f"{state}")


def consolidation_life(
    url: str, step: int, links: int | None, die: int | None, count_into: str | None = None
) -> None:
    """Consolidate the checkpoint at `step` of generation 1."""
    die_at.install(die_at=die, count_into=count_into, besides=besides_of(url))
    run = Run.open(open_store(url))
    consolidate(run, plan_consolidation(run, ManifestName(step, 1), links=links))


def sweep_life(*, url: str, die: int | None = None, count_into: str | None = None) -> None:
    """Remove what no manifest names, however young."""
    from recpoint.catalog.retention.sweep import execute, plan_sweep

    die_at.install(die_at=die, count_into=count_into, besides=besides_of(url))
    run = Run.open(open_store(url))
    execute(run, plan_sweep(run, grace_seconds=0, keep=()))


def import_life(
    *, source: str, url: str, scratch: str, die: int | None = None, count_into: str | None = None
) -> None:
    """Write a run from another tool's checkpoint, as `recpoint import` does."""
    from recpoint.catalog.foreign.recognize import open_foreign
    from recpoint.cli.imported_run import planned_run, write_run

    die_at.install(die_at=die, count_into=count_into)
    with open_foreign(source) as checkpoint:
        planned = planned_run(checkpoint, {}, ["users"])
    write_run(source, url, planned, Path(scratch))


def table_digest(values: Tensor) -> str:
    """Of the exact bytes."""
    return hashlib.sha256(values.detach().contiguous().numpy().tobytes()).hexdigest()


def _state_digest(tensors: list[Tensor], optimizers: list[torch.optim.Optimizer]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name in sorted(state):
                digest.update(name.encode())
                digest.update(torch.as_tensor(state[name]).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing was committed within {_PATIENCE_SECONDS} s")
        time.sleep(0.01)
