"""Trains a DLRM on tasks, with tables restored from fewer bits on the way, and scores it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.criteo_dlrm import CriteoDLRM
from benchmarks.workload import examples_on_path
from recpoint.kernels.quantize import (
    ASYMMETRIC,
    SYMMETRIC,
    Method,
    dequantize_packed,
    kmeans,
    quantize_packed,
)
from recpoint.kernels.quantize.choice import choose
from recpoint.kernels.quantize.method import MethodName

__all__ = ["Learned", "Score", "Task", "criteo_shaped", "evaluate", "restored_rows", "retail"]

_EVALUATED_AT_ONCE = 4096
#: The seed of test sets; no training run uses it.
_TEST_SEED = 1_000_003


class Score(NamedTuple):
    """Log loss and area under the ROC curve on a test set."""

    loss: float
    auc: float

    def worse_than(self, earlier: Score) -> Score:
        """Return the rise of the loss and the fall of the AUC, in percent of `earlier`."""
        return Score(100 * (self.loss / earlier.loss - 1), 100 * (1 - self.auc / earlier.auc))


@dataclass(frozen=True, kw_only=True)
class Task:
    """A learning task.

    Attributes:
        name: for the table of the report.
        build: makes a new model; its parameters are drawn from torch's generator.
        batches: returns the training batches of a seed, in time order; cached for the newest seed.
        test: returns one batch that holds the whole test set, which follows the training batches.
    """

    name: str
    build: Callable[[], Any]
    batches: Callable[[int], list[Any]]
    test: Any

    def learn(
        self,
        seed: int,
        *,
        restores: Collection[int] = (),
        restore: Callable[[Learned, int], None] = lambda learned, step: None,
    ) -> Learned:
        """Train one pass; call `restore` on model and optimizers before each batch in `restores`.

        Random numbers do not depend on restores, so two runs of a seed differ only by the restores.
        """
        torch.manual_seed(seed)
        model = self.build()
        tables = list(model.tables.parameters())
        dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adagrad(tables, lr=0.1),
            torch.optim.Adagrad(dense, lr=0.02),
        ]
        for step, batch in enumerate(self.batches(seed)):
            if step in restores:
                restore(Learned(model, optimizers), step)
            logits = model(batch.dense, batch.sparse)
            loss = F.binary_cross_entropy_with_logits(logits, batch.label)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        return Learned(model, optimizers)


class Learned(NamedTuple):
    """A trained model and the optimizers that trained it."""

    model: Any
    optimizers: list[torch.optim.Optimizer]


def retail(
    *, dim: int, batches: int | None = None, tests: int | None = None, rows: int = 1 << 18
) -> Task:
    """Return the task of the bundled purchases, 1,024 samples a batch, in time order.

    Args:
        dim: values in an embedding row.
        batches: number of training batches; None: two fifths of the log.
        tests: number of batches after the training batches, of which every other one is in the test
            set; None: a fifth of the log.
        rows: most rows of one table.
    """
    examples_on_path()
    from batches import Batch
    from retail import RetailReader
    from train_dlrm import DLRM

    def reader(seed: int, first: int) -> Any:
        reader = RetailReader(lines=512, rows=rows, seed=seed)
        reader.load_state_dict({**reader.state_dict(), "lines_done": first * 512})
        return reader

    total = reader(0, 0).total_batches
    first, tested = 2 * total // 5, 4 * total // 5
    trained = tested - first if batches is None else batches
    late = reader(_TEST_SEED, tested)
    tables = late.tables
    test = [Batch(*parts) for parts in islice(late, 0, tests, 2)]
    return Task(
        name=f"retail, d = {dim}",
        build=lambda: DLRM(tables, 0, dim=dim),
        batches=lru_cache(maxsize=1)(lambda seed: list(islice(reader(seed, first), trained))),
        test=Batch(*(torch.cat(column) for column in zip(*test, strict=True))),
    )


def criteo_shaped(*, smoke: bool) -> Task:
    """Return the task of a log of Criteo's shape and its DLRM, 1,024 samples a batch."""
    examples_on_path()
    from batches import Batch
    from criteo import CriteoShapeReader

    trained, tested, rows = (4, 2, 1 << 10) if smoke else (300, 100, 1 << 18)

    def reader(seed: int) -> Any:
        return CriteoShapeReader(lines=1024, rows=rows, batches=trained + tested, seed=seed)

    def build() -> CriteoDLRM:
        model = CriteoDLRM(tables)
        for weight in model.tables.parameters():
            nn.init.uniform_(weight, -1 / math.sqrt(len(weight)), 1 / math.sqrt(len(weight)))
        return model

    late = reader(_TEST_SEED)
    tables = late.tables
    test = [late.batch(number) for number in range(trained, trained + tested)]
    return Task(
        name="Criteo's shape, d = 16",
        build=build,
        batches=lru_cache(maxsize=1)(lambda seed: list(islice(reader(seed), trained))),
        test=Batch(*(torch.cat(column) for column in zip(*test, strict=True))),
    )


def evaluate(model: Any, test: Any) -> Score:
    """Score `model` on `test`, on which it is not trained."""
    examples_on_path()
    from auc import auc

    training = model.training
    model.eval()
    with torch.no_grad():
        parts = zip(
            test.dense.split(_EVALUATED_AT_ONCE),
            test.sparse.split(_EVALUATED_AT_ONCE),
            strict=True,
        )
        logits = torch.cat([model(dense, sparse) for dense, sparse in parts])
    model.train(training)
    # In binary64: the rounding of a sum of 200,000 binary32 terms would hide the differences.
    loss = F.binary_cross_entropy_with_logits(logits.double(), test.label.double())
    return Score(float(loss), auc(logits, test.label))


def restored_rows(rows: Tensor, bits: int, scheme: str, *, seed: int) -> Tensor:
    """Return rows f32 [n, dim] as a restore from a full checkpoint returns them.

    Args:
        rows: f32 [n, dim], a whole table.
        bits: 2, 3, 4 or 8.
        scheme: a quantizer of the settings, or "k-means", which cannot be stored.
        seed: step of the checkpoint; the agent draws its sample of rows with it.
    """
    if scheme == "k-means":
        return kmeans.decode(kmeans.kmeans(rows, bits))
    method = _method(rows, bits, scheme, seed)
    packed, scale, offset, exact, _ = quantize_packed(rows, bits, method, half_parameters=True)
    decoded = dequantize_packed(packed, scale, offset, dim=rows.shape[1], bits=bits)
    decoded[exact] = rows[exact]
    return decoded


def _method(rows: Tensor, bits: int, scheme: str, seed: int) -> Method:
    if scheme == "symmetric":
        return SYMMETRIC
    if scheme == "asymmetric" or (scheme == "auto" and bits == 8):
        return ASYMMETRIC
    names: dict[str, MethodName | None] = {"auto": None, "greedy": "greedy", "refit": "refit"}
    return choose(rows, bits, seed=seed, name=names[scheme])
