"""Marking rows against the training step it belongs to; evaluation marks nothing.

A DLRM of eight tables on the bundled purchases. Two equal models, one of them under a Checkpointer,
take turns. What marking costs is measured on everything the plugin hooks into and nothing else
(lookups, their backward pass, the optimizers' step without gradients, the checkpointer's own step)
and set against a whole training step: the difference of two whole steps would show the machine's
noise.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.report import Report, alternate
from benchmarks.workload import StagedRun, examples_on_path, scratch, staged_run
from recpoint.catalog import staged

__all__ = ["run"]


def run(*, quick: bool) -> Report:
    """Measure it at two batch sizes.

    `mark_share_of_step` is at 2,048 samples, the batch that ECRM (2021) trains Criteo with. Marking
    costs nearly the same at any batch, so its share is larger in the shorter step of 512 samples:
    that is `mark_share_of_step_512`.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()
    rounds = 60 if quick else 400
    report = Report(
        name="tracking",
        columns=("batch", "training step ms", "hooked parts ms", "with marking ms", "share %"),
    )
    shares: dict[int, float] = {}
    evaluation_marks = 0
    for batch_size in (512, 2048):
        with scratch() as folder:
            share, marks, row = _measure(batch_size, rounds, folder)
        shares[batch_size] = share
        evaluation_marks += marks
        report.rows.append((batch_size, *row))
    report.figures = {
        "mark_share_of_step": shares[2048],
        "mark_share_of_step_512": shares[512],
        "eval_marks": float(evaluation_marks),
    }
    report.notes.append(
        f"rows marked by lookups in evaluation or without gradients: {evaluation_marks}"
    )
    return report


def _measure(
    batch_size: int, rounds: int, folder: Path
) -> tuple[float, int, tuple[float, float, float, float]]:
    examples_on_path()
    from retail import RetailReader
    from train_dlrm import DLRM

    reader = RetailReader(lines=batch_size // 2, rows=1 << 18, seed=0)
    batches = list(itertools.islice(reader, 32))

    def built() -> tuple[Any, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        model = DLRM(reader.tables, reader.dense_width)
        dense = [p for n, p in model.named_parameters() if not n.startswith("tables.")]
        return model, [
            torch.optim.Adagrad(model.tables.parameters(), lr=0.1),
            torch.optim.Adagrad(dense, lr=0.02),
        ]

    plain, plain_optimizers = built()
    marked, marked_optimizers = built()
    with staged_run(
        marked, marked_optimizers, url=str(folder / "run"), staging=folder / "staging"
    ) as tracked:
        step = tracked.checkpointer.step
        train = _training(plain, plain_optimizers, batches)
        without = _hooked_parts(plain, plain_optimizers, batches, lambda: None)
        with_marks = _hooked_parts(marked, marked_optimizers, batches, step)
        # The parts that follow a whole step find its caches and threads; they are not counted.
        alternate(10, train, with_marks, without, with_marks)
        step_s, _, without_s, with_s = alternate(rounds, train, with_marks, without, with_marks)
        added = statistics.median(b - a for a, b in zip(without_s, with_s, strict=True))
        marks = _evaluation_marks(tracked, marked, batches)
    step_median = statistics.median(step_s)
    share = added / step_median
    return (
        share,
        marks,
        (
            1e3 * step_median,
            1e3 * statistics.median(without_s),
            1e3 * statistics.median(with_s),
            100 * share,
        ),
    )


def _training(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], batches: list[Any]
) -> Callable[[], None]:
    turn = itertools.cycle(batches)

    def step() -> None:
        batch = next(turn)
        loss = F.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.label)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            # Gradients left here would be added to in the parts, by one of the two models only.
            optimizer.zero_grad()

    return step


def _hooked_parts(
    model: Any,
    optimizers: list[torch.optim.Optimizer],
    batches: list[Any],
    checkpointer_step: Callable[[], None],
) -> Callable[[], None]:
    turn = itertools.cycle(batches)

    def parts() -> None:
        batch = next(turn)
        rows = [table(batch.sparse[:, c]) for c, table in enumerate(model.tables.values())]
        torch.stack(rows).sum().backward()
        for optimizer in optimizers:
            optimizer.zero_grad()
            optimizer.step()
        checkpointer_step()

    return parts


def _evaluation_marks(tracked: StagedRun, model: Any, batches: list[Any]) -> int:
    """Rows that an increment holds after lookups that train nothing."""
    tracked.cut_and_persist()  # the full: everything before is stored
    with torch.no_grad():
        model(batches[0].dense, batches[0].sparse)
    model.eval()
    model(batches[1].dense, batches[1].sparse)
    with torch.no_grad():
        model(batches[2].dense, batches[2].sparse)
    model.train()
    tracked.checkpointer.step()
    return staged.read_job(tracked.cut()).dirty_rows
