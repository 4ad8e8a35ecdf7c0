"""Lives of a training with a home in files; a process dies at a boundary of a call to its home."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad

from recpoint import Checkpointer, Lookahead, Options, Precision, Staging, Timeouts
from recpoint.embeddings.cache.install import read_rows
from recpoint.embeddings.home.contract import FrozenRows
from recpoint.embeddings.home.files import FileHome
from recpoint.embeddings.home.homes import FileLimits
from tests.cached_training import Batches, Model, cached_model, plain_model, train
from tests.polling import until
from tests.training_builder import InlineAgent, seed_everything

__all__ = ["HALF", "TOTAL", "cached_life"]

TOTAL, HALF, _INTERVAL = 15, 5, 5
_SLOTS = {"users": 10, "items": 26}
_LIMITS = FileLimits(index_rows=300, segment_bytes=8_192, buffer_bytes=4_096)


class _Boundaries:
    """Counts boundaries of calls; kills the process at one of them."""

    def __init__(self, die: int | None, count_into: str | None) -> None:
        self._die = die
        self._count_into = count_into
        self._lock = threading.Lock()
        self._passed = 0

    def cross(self, name: str) -> None:
        with self._lock:  # whoever dies keeps it, so that no other thread goes on
            self._passed += 1
            if self._count_into is not None:
                with open(self._count_into, "a") as file:
                    file.write(f"{name}\n")
            if self._passed == self._die:
                os.kill(os.getpid(), signal.SIGKILL)

    def around(self, name: str, call: Callable[[], Any]) -> Any:
        self.cross(f"before {name}")
        found = call()
        self.cross(f"after {name}")
        return found


class _MortalRows(FrozenRows):
    def __init__(self, rows: FrozenRows, boundaries: _Boundaries) -> None:
        self._rows = rows
        self._boundaries = boundaries

    def fetch(self, ids: Tensor, out: Tensor) -> Tensor:
        found: Tensor = self._boundaries.around("drain", lambda: self._rows.fetch(ids, out))
        return found

    def release(self) -> None:
        self._boundaries.around("release", self._rows.release)


class _MortalHome(FileHome):
    """A home in files whose calls have boundaries."""

    def __init__(self, directory: Path, boundaries: _Boundaries) -> None:
        super().__init__(directory, limits=_LIMITS)
        self._boundaries = boundaries
        self.is_restoring = False

    def fetch(self, table: str, ids: Tensor, out: Tensor) -> Tensor:
        fetch = super().fetch
        found: Tensor = self._boundaries.around("fetch", lambda: fetch(table, ids, out))
        return found

    def write_back(self, table: str, ids: Tensor, records: Tensor, *, batch: int) -> None:
        write = super().write_back
        name = "refill" if self.is_restoring else "write-back"
        self._boundaries.around(name, lambda: write(table, ids, records, batch=batch))

    def freeze(self, table: str, rows: range) -> FrozenRows:
        freeze = super().freeze
        # After it, the rows in slots are collected.
        frozen = self._boundaries.around("freeze", lambda: freeze(table, rows))
        return _MortalRows(frozen, self._boundaries)


def cached_life(
    *,
    place: str,
    is_cached: bool = True,
    total: int = TOTAL,
    die: int | None = None,
    count_into: str | None = None,
) -> None:
    """Restore and train to the end; tell in the file `told` what was restored and what came out.

    Args:
        place: directory of run, staging area, home and told file.
        is_cached: whether rows are in a cache.
        total: batches of the run to train.
        die: number of the boundary at which the process dies, from 1 on; None: it does not.
        count_into: file to which each boundary appends its name; None: no file.
    """
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    reader: Any = Batches()
    home = _MortalHome(Path(place) / "home", _Boundaries(die, count_into)) if is_cached else None
    if home is None:
        model = plain_model(sparse=True)
    else:
        model, cache = cached_model(_SLOTS, home, sparse=True)
        reader = Lookahead(reader, model, window=4)
    seed_everything(1)  # the models draw first, and not alike
    optimizer = Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.2)
    with InlineAgent(Path(place) / "staging"):
        checkpoints = Checkpointer(
            model,
            optimizer,
            run=f"{place}/run",
            reader=reader,
            interval_batches=_INTERVAL,
            bits=Precision(bits="lossless", small_table_values=0),
            staging=Staging(directory=f"{place}/staging"),
            timeouts=Timeouts(close_seconds=120.0, drain_seconds=120.0),
            options=Options(handle_sigterm=False, announce=False),
        )
        if home is not None:
            home.is_restoring = True
        checkpoints.restore()
        if home is not None:
            home.is_restoring = False
        first = checkpoints.batches_done

        def after(_: int) -> None:
            checkpoints.step()
            if checkpoints.batches_done % _INTERVAL == 0:  # each life has the same
                due = checkpoints.batches_done // _INTERVAL - first // _INTERVAL
                until(lambda: checkpoints.stats.committed == due)

        train(model, optimizer, reader, batches=total - first, after=after)
        checkpoints.close()
        told = {
            "first": first,
            "end": checkpoints.batches_done,
            "digest": _digest(model, optimizer),
        }
        if home is not None:
            told["written"] = cache.stats.written_rows
            cache.close()
            home.close()
    (Path(place) / "told").write_text(json.dumps(told))


def _digest(model: Model, optimizer: torch.optim.Optimizer) -> str:
    tensors = list(model.top.state_dict().values())
    for name in ("users", "items"):
        tensors += read_rows(model, name, optimizer).values()
    digest = hashlib.sha256()
    for tensor in (*tensors, torch.get_rng_state()):
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
