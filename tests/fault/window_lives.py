"""Lives of a training that copies rows ahead; a thread kills its process at a moment of its own."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from recpoint import Checkpointer, Lookahead, Options, Precision, Staging, Timeouts
from tests.polling import until
from tests.training_builder import InlineAgent, seed_everything

__all__ = ["TOTAL", "Kill", "window_life"]

TOTAL, _INTERVAL, _BATCH = 20, 5, 24
_ROWS = {"goods": 4_200, "users": 300}


class Kill(NamedTuple):
    """When a life is killed: so long after a batch began, or after its `step()` was called."""

    batch: int
    moment: Literal["batch", "step"]
    seconds: float


class _Reader:
    def __init__(self) -> None:
        self.generator = np.random.default_rng(5)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield {
                name: torch.from_numpy(self.generator.integers(0, rows, _BATCH))
                for name, rows in _ROWS.items()
            }

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.bit_generator.state = state["generator"]


def window_life(
    *,
    place: str,
    policy: Literal["consecutive", "one_shot", "intermittent", "continuous"],
    bits: Literal["lossless", 8, 4, 2],
    window: int | None,
    kill: Kill | None = None,
    trains: bool = True,
) -> None:
    """Restore and train to the end; tell in the file `told` what was restored and what came out.

    Args:
        place: directory of run, staging area and told file.
        policy, bits: as of the Checkpointer.
        window: how many batches the reader reads ahead; None: it does not.
        kill: when the process kills itself with SIGKILL; None: never.
        trains: False: only restore.
    """
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    seed_everything(1)
    model = nn.ModuleDict(
        {name: nn.Embedding(rows, 8, sparse=name == "goods") for name, rows in _ROWS.items()}
    )
    model["noise"] = nn.Dropout(0.3)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    reader: Any = _Reader()
    if window is not None:
        reader = Lookahead(reader, window=window)
    is_armed = threading.Event()
    if kill is not None:
        threading.Thread(target=_killer, args=(is_armed, kill.seconds), daemon=True).start()
    told: dict[str, Any] = {}
    with InlineAgent(Path(place) / "staging"):
        checkpoints = Checkpointer(
            model,
            optimizer,
            run=f"{place}/run",
            reader=reader,
            interval_batches=_INTERVAL,
            bits=Precision(bits=bits, small_table_values=0),
            policy=policy,
            staging=Staging(directory=f"{place}/staging"),
            timeouts=Timeouts(close_seconds=120.0, drain_seconds=120.0),
            options=Options(handle_sigterm=False, announce=False, copy_share=0.9),
        )
        checkpoints.restore()
        first = checkpoints.batches_done
        told["restored"] = [first, _digest(model, optimizer)]
        batches = iter(reader)
        before = 0
        while trains and checkpoints.batches_done < TOTAL:
            number = checkpoints.batches_done + 1
            if kill is not None and kill.moment == "batch" and kill.batch == number:
                is_armed.set()
            batch = next(batches)
            optimizer.zero_grad()
            rows = torch.cat([model[name](batch[name]) for name in _ROWS], dim=1)
            model["noise"](rows).square().sum().backward()
            optimizer.step()
            if kill is not None and kill.batch == number:
                is_armed.set()
            checkpoints.step()
            if number % _INTERVAL == 0:
                copied = checkpoints.stats.copied
                before += 0 if copied is None else copied.rows_before
                due = number // _INTERVAL - first // _INTERVAL  # each life has the same
                _until_committed(checkpoints, due)
        checkpoints.close(final=False)
        if kill is not None and trains:  # the life was over before
            os.kill(os.getpid(), signal.SIGKILL)
    told["end"] = [checkpoints.batches_done, _digest(model, optimizer)]
    told["rows_before"] = before
    (Path(place) / "told").write_text(json.dumps(told))


def _until_committed(checkpoints: Checkpointer, count: int) -> None:
    until(lambda: checkpoints.stats.committed == count)


def _killer(is_armed: threading.Event, seconds: float) -> None:
    is_armed.wait()
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = [*model.state_dict().values()]
    tensors += [one for state in optimizer.state.values() for one in state.values()]
    digest = hashlib.sha256()
    for tensor in (*tensors, torch.get_rng_state()):
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
