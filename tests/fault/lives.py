"""A small training run and the agent beside it, as processes that can be killed at any step.

Hundreds of them, each a real process that takes a real SIGKILL (`tests.forked`).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec.config
import numpy as np
import torch
from torch import Tensor, nn

from recpoint import kernels
from recpoint.catalog.run import Run
from recpoint.catalog.store import open_store
from recpoint.testing import die_at
from tests.forked import forked

__all__ = [
    "STEPS",
    "agent_life",
    "begin",
    "flow_life",
    "serving",
    "sweep_life",
    "table_digest",
    "trainer_life",
]

STEPS = 5
_INTERVAL = 2
_ROWS = 40
_DIM = 3
_PATIENCE_SECONDS = 60.0

# Once, in the server that lives are forked from, and not in each of them.
kernels.warm_up()


def begin(life: Callable[..., None], environment: dict[str, str], **arguments: Any) -> Any:
    """Start a life; its arguments travel by pickling. `environment` is set before anything else."""
    process = forked().Process(target=_live, args=(life, environment, arguments), daemon=True)
    process.start()
    return process


def _live(
    life: Callable[..., None], environment: dict[str, str], arguments: dict[str, Any]
) -> None:
    os.environ.update(environment)
    fsspec.config.set_conf_env(fsspec.config.conf)  # read when it was imported: by the server
    torch.set_num_threads(1)
    life(**arguments)


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


def trainer_life(*, url: str, staging: str, evidence: str, die: int | None = None) -> None:
    """Train to the end from wherever the run is; write what came out to the file `evidence`."""
    from recpoint.trainer_plugin.checkpointer import Checkpointer

    die_at.install(die_at=die)
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
    checkpointer = Checkpointer(
        model,
        optimizers,
        reader=reader,
        run=url,
        interval_batches=_INTERVAL,
        staging=staging,
        close_wait_seconds=_PATIENCE_SECONDS,
        drain_seconds=_PATIENCE_SECONDS,
    )
    with checkpointer:
        checkpointer.restore()
        batches = iter(reader)
        while checkpointer.batches_done < STEPS:
            output = model["top"](model["noise"](model["goods"](next(batches))))
            (output**2).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
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


def agent_life(
    *, staging: str, prefect: str = "off", die: int | None = None, log: str | None = None
) -> None:
    """Serve the staging area until SIGTERM; with `log`, its standard error goes to that file."""
    from recpoint.flows.agent import run_agent

    if log is not None:
        with open(log, "ab") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
    die_at.install(die_at=die)
    run_agent(staging, prefect="auto" if prefect == "auto" else "off")


@contextmanager
def serving(
    staging: Path, environment: dict[str, str], *, log: Path | None = None
) -> Iterator[Any]:
    """An agent for the staging area, as long as the block lasts."""
    process = begin(
        agent_life, environment, staging=str(staging), log=None if log is None else str(log)
    )
    try:
        yield process
        assert process.is_alive(), "the agent ended by itself"
    finally:
        if process.is_alive():
            os.kill(process.pid, signal.SIGTERM)
        process.join(_PATIENCE_SECONDS)


def flow_life(*, job_file: str, die: int | None = None) -> None:
    """Persist one job as a Prefect flow, through the API that the environment names."""
    from prefect.context import refresh_global_settings_context

    from recpoint.flows.persist import run_persist

    # Prefect read its settings when the server of these processes imported it.
    refresh_global_settings_context()
    die_at.install(die_at=die)
    state = run_persist(job_file)
    if not state.is_completed():
        raise AssertionError(f"{state}")


def sweep_life(*, url: str, die: int | None = None) -> None:
    """Remove what no manifest names, however young."""
    from recpoint.catalog.sweep import execute, plan_sweep

    die_at.install(die_at=die)
    run = Run.open(open_store(url))
    execute(run, plan_sweep(run, grace_seconds=0, keep=()))


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
