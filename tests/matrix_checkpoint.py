"""Makes a checkpoint in one environment, and goes on from it in another.

    python -m tests.matrix_checkpoint write FOLDER
    python -m tests.matrix_checkpoint read FOLDER

`tests/matrix.py` runs it under different versions of torch. The model has tables under SparseAdam
and Adagrad, and dense layers under Adam, to whose groups torch 2.7 added a key.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim import Adagrad, Adam, Optimizer, SparseAdam
from torch.optim.lr_scheduler import StepLR

from recpoint import Checkpointer, Options, Staging
from recpoint.catalog.check.validate import validate
from recpoint.catalog.persist import persist
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.catalog.store.store import open_store
from tests.training_builder import BATCH, ROWS, Recommender

__all__ = ["main"]

_BATCHES = 3


class _Training:
    """The model, its optimizers and the scheduler, with first values of a seed."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Recommender(sparse=True)
        dense = [*self.model.norm.parameters(), *self.model.top.parameters()]
        self.optimizers: list[Optimizer] = [
            SparseAdam(self.model.users.parameters(), lr=0.01),
            Adagrad(self.model.items.parameters(), lr=0.05),
            Adam(dense, lr=0.02, weight_decay=0.01),
        ]
        self.scheduler = StepLR(self.optimizers[2], step_size=2)

    def train(self, batch: int) -> None:
        """Train the batch of this number."""
        drawn = torch.Generator().manual_seed(batch)
        users = torch.randint(0, ROWS, (BATCH,), generator=drawn)
        items = torch.randint(0, ROWS // 2, (BATCH, 3), generator=drawn)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(users, items).square().sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.scheduler.step()

    def facts(self) -> dict[str, Any]:
        """Return all values that a checkpoint has to bring back."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scheduler": self.scheduler.last_epoch,
        }


def _store(folder: Path) -> None:
    for staged in staged_runs(folder / "staging"):
        for job in StagedRun(staged.path).staged_jobs():
            persist.persist_job(job)


def _trained(training: _Training, folder: Path, batches: range) -> None:
    """Restore what there is, train batches, and take a checkpoint after each."""
    with Checkpointer(
        training.model,
        training.optimizers,
        schedulers=[training.scheduler],
        run=str(folder / "run"),
        staging=Staging(directory=folder / "staging", jobs=8),
        interval_batches=1,
        options=Options(on_error="raise", handle_sigterm=False),
    ) as checkpoints:
        checkpoints.restore()
        if batches.start:
            _require_equal(torch.load(folder / "facts.pt"), training.facts())
        for batch in batches:
            training.train(batch)
            checkpoints.step()
        checkpoints.close(final=False)
    _store(folder)
    stored_run = Run.open(open_store(str(folder / "run")))
    newest = max(stored_run.representations())
    if newest.step != batches.stop or not validate(stored_run, newest, level="full").passed:
        raise RuntimeError(f"checkpoint {newest} is not that of batch {batches.stop}, or damaged")


def _require_equal(expected: Any, restored: Any, path: str = "") -> None:
    """Compare values bit for bit. Settings that one version lacks are not compared.

    Raises:
        RuntimeError: a value differs; the message has its path.
    """
    if isinstance(expected, torch.Tensor):
        is_equal = torch.equal(expected, restored)
    elif isinstance(expected, dict):
        for key in expected.keys() & restored.keys():
            _require_equal(expected[key], restored[key], f"{path}/{key}")
        # Only a group of an optimizer may have keys that another version lacks.
        is_equal = "params" in expected or expected.keys() == restored.keys()
    elif isinstance(expected, list | tuple):
        is_equal = len(expected) == len(restored)
        for number, pair in enumerate(zip(expected, restored, strict=False)):
            _require_equal(*pair, f"{path}/{number}")
    else:
        is_equal = bool(expected == restored)
    if not is_equal:
        raise RuntimeError(f"{path}: {restored!r:.200}, expected {expected!r:.200}")


def main(what: str, folder: Path) -> None:
    """Write a checkpoint of three batches to a folder, or go on from it for two batches."""
    if what == "write":
        training = _Training(seed=0)
        _trained(training, folder, range(_BATCHES))
        torch.save(training.facts(), folder / "facts.pt")
    else:
        _trained(_Training(seed=1), folder, range(_BATCHES, _BATCHES + 2))
    print(f"{what}: torch {torch.__version__}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
