"""Trains a DLRM on tasks, with tables restored from fewer bits on the way, and scores it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.criteo_dlrm import CriteoDLRM
from benchmarks.row_wise import RowWiseAdagrad
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

__all__ = [
    "Learned",
    "Score",
    "Task",
    "criteo_shaped",
    "evaluate",
    "log_loss",
    "logits_of",
    "method_of",
    "restored_rows",
    "retail",
    "score_of",
    "train_batch",
]

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
        test: one batch that holds the whole test set, which follows the training batches.
        held_out: one batch of samples that are in neither set.
    """

    name: str
    build: Callable[[], Any]
    batches: Callable[[int], list[Any]]
    test: Any
    held_out: Any

    def learn(
        self,
        seed: int,
        *,
        row_wise: bool = False,
        restores: Collection[int] = (),
        restore: Callable[[Learned, int], None] = lambda learned, step: None,
    ) -> Learned:
        """Train one pass; call `restore` on model and optimizers before each batch in `restores`.

        Tables are trained with Adagrad; `row_wise`: with one accumulator a row.
        Random numbers do not depend on restores, so two runs of a seed differ only by the restores.
        """
        torch.manual_seed(seed)
        model = self.build()
        tables = list(model.tables.parameters())
        dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
        of_tables = RowWiseAdagrad if row_wise else torch.optim.Adagrad
        optimizers: list[torch.optim.Optimizer] = [
            of_tables(tables, lr=0.1),
            torch.optim.Adagrad(dense, lr=0.02),
        ]
        for step, batch in enumerate(self.batches(seed)):
            if step in restores:
                restore(Learned(model, optimizers), step)
            train_batch(model, optimizers, batch)
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
    after_training = [Batch(*parts) for parts in islice(late, 0, tests)]
    return Task(
        name=f"retail, d = {dim}",
        build=lambda: DLRM(tables, 0, dim=dim),
        batches=lru_cache(maxsize=1)(lambda seed: list(islice(reader(seed, first), trained))),
        test=_joined(after_training[::2]),
        held_out=_joined(after_training[1::2]),
    )


def criteo_shaped(*, smoke: bool) -> Task:
    """Return the task of a log of Criteo's shape and its DLRM, 1,024 samples a batch."""
    examples_on_path()
    from criteo import CriteoShapeReader

    trained, tested, held_out, rows = (4, 2, 1, 1 << 10) if smoke else (300, 100, 50, 1 << 18)

    def reader(seed: int) -> Any:
        total = trained + tested + held_out
        return CriteoShapeReader(lines=1024, rows=rows, batches=total, seed=seed)

    def build() -> CriteoDLRM:
        model = CriteoDLRM(tables)
        for weight in model.tables.parameters():
            nn.init.uniform_(weight, -1 / math.sqrt(len(weight)), 1 / math.sqrt(len(weight)))
        return model

    late = reader(_TEST_SEED)
    tables = late.tables
    after_training = [late.batch(trained + number) for number in range(tested + held_out)]
    return Task(
        name="Criteo's shape, d = 16",
        build=build,
        batches=lru_cache(maxsize=1)(lambda seed: list(islice(reader(seed), trained))),
        test=_joined(after_training[:tested]),
        held_out=_joined(after_training[tested:]),
    )


def _joined(batches: list[Any]) -> Any:
    """Return one batch of all samples."""
    return type(batches[0])(*(torch.cat(column) for column in zip(*batches, strict=True)))


def train_batch(model: Any, optimizers: Sequence[torch.optim.Optimizer], batch: Any) -> None:
    """Train a model with one batch."""
    logits = model(batch.dense, batch.sparse)
    loss = F.binary_cross_entropy_with_logits(logits, batch.label)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def evaluate(model: Any, test: Any) -> Score:
    """Score `model` on `test`, on which it is not trained."""
    return score_of(logits_of(model, test), test)


def logits_of(model: Any, samples: Any) -> Tensor:
    """Return the logits of a batch of any size in evaluation mode: F32 [n]."""
    training = model.training
    model.eval()
    with torch.no_grad():
        parts = zip(
            samples.dense.split(_EVALUATED_AT_ONCE),
            samples.sparse.split(_EVALUATED_AT_ONCE),
            strict=True,
        )
        logits = torch.cat([model(dense, sparse) for dense, sparse in parts])
    model.train(training)
    return logits


def score_of(logits: Tensor, samples: Any) -> Score:
    """Score the logits F32 [n] of n samples."""
    examples_on_path()
    from auc import auc

    return Score(log_loss(logits, samples), auc(logits, samples.label))


def log_loss(logits: Tensor, samples: Any) -> float:
    """Return the mean log loss of the logits F32 [n] of n samples."""
    # In binary64: the rounding of a sum of 200,000 binary32 terms would hide the differences.
    return float(F.binary_cross_entropy_with_logits(logits.double(), samples.label.double()))


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
    method = method_of(rows, bits, scheme, seed=seed)
    packed, scale, offset, exact, _ = quantize_packed(rows, bits, method, half_parameters=True)
    decoded = dequantize_packed(packed, scale, offset, dim=rows.shape[1], bits=bits)
    decoded[exact] = rows[exact]
    return decoded


def method_of(rows: Tensor, bits: int, scheme: str, *, seed: int) -> Method:
    """Return the method with which an agent quantizes rows f32 [n, dim] of a table.

    Args:
        rows: the rows; of many, a sample is drawn.
        bits: width of the codes.
        scheme: a quantizer of the settings.
        seed: step of the checkpoint.
    """
    if scheme == "symmetric":
        return SYMMETRIC
    if scheme == "asymmetric" or (scheme == "auto" and bits == 8):
        return ASYMMETRIC
    names: dict[str, MethodName | None] = {"auto": None, "greedy": "greedy", "refit": "refit"}
    return choose(rows, bits, seed=seed, name=names[scheme])
