"""Measures what one price of a bit costs in log loss: full, increment, residuals, 8-bit moments.

Models of purchases with rows of 16 and 64 values and of Criteo's shape are trained with row-wise
and elementwise Adagrad, ten seeds each (`priced_models` says how). `--minutes` bounds the time.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch

from benchmarks.accuracy import interval_of
from benchmarks.coded_chain import Rule, TableCopy, chain_rows
from benchmarks.learning import Learned, Task, criteo_shaped, retail, train_batch
from benchmarks.priced_job import give_price
from benchmarks.priced_models import (
    RESTORES,
    RULE_NAMES,
    EndOutcome,
    OptimizerName,
    PriceOutcome,
    RulePoint,
    measure,
    measure_end,
)
from benchmarks.report import Report
from benchmarks.row_wise import RowWiseAdagrad
from benchmarks.workload import scratch, staged_run
from recpoint.catalog.persist.row_widths import importance
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.kernels import moments
from recpoint.trainer_plugin.settings import Precision

__all__ = ["KEYS", "report_of", "run"]

Outcome = TypeVar("Outcome", PriceOutcome, EndOutcome)

KEYS = (
    "loss_increase",
    "loss_increase_ci95_high",
    "loss_increase_worst_model",
    "loss_increase_at_end",
    "loss_increase_at_end_ci95_high",
    "rms_vs_uniform",
)

_OPTIMIZERS: Final[tuple[OptimizerName, ...]] = ("row-wise Adagrad", "Adagrad")
_SEEDS: Final = 10
#: The least that have an interval.
_SMOKE_SEEDS: Final = 3
#: Of the job whose stored bytes are compared.
_GATE_PRICE: Final = 2.0**-36
_GATE_SCALE: Final = 2.0**-6
#: It has rows of at least so many forms.
_GATE_FORMS: Final = 4
#: So many first seeds of a task have a curve: other prices, and one width for all rows.
_CURVES: Final = 1


def run(*, smoke: bool, minutes: float | None = None) -> Report:
    """Train all models, and measure restores of them.

    Figures are shares of the log loss before a restore, on a test set after the training data.
    `loss_increase` is the rise right after a restore from a full and an increment at the chosen
    price: the mean over the seeds, of the worst task and optimizer; `loss_increase_ci95_high` is
    the upper end of its 95 % interval, and `loss_increase_worst_model` the worst of all models.
    `loss_increase_at_end` compares the ends of runs with 1, 3 and 20 restores on the way with the
    end of the same run without. `rms_vs_uniform` is the root mean square of what changes in the
    logits, over the same with one width for all rows and no residuals at as many stored bytes.

    Args:
        smoke: tiny sizes of one task.
        minutes: no model is begun after this time; None: all are measured. Each task and optimizer
            has then been measured with equally many seeds, or one more.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that results do not depend on the load
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    outcomes: list[PriceOutcome] = []
    ends: list[EndOutcome] = []
    try:
        _gate()
        seeds = _SMOKE_SEEDS if smoke else _SEEDS
        tasks = [new_task() for new_task in _tasks(smoke)]
        for seed, task, optimizer in itertools.product(range(seeds), tasks, _OPTIMIZERS):
            if time.monotonic() < end:
                outcomes.append(measure(task, optimizer, seed, curve=seed < _CURVES))
                print(outcomes[-1], file=sys.stderr, flush=True)
        by_name = {task.name: task for task in tasks}
        for outcome, restores in itertools.product(outcomes, RESTORES):
            if time.monotonic() < end:
                ends.append(measure_end(outcome, by_name[outcome.task], restores))
                print(ends[-1], file=sys.stderr, flush=True)
    finally:
        torch.set_num_threads(threads)
    return report_of(outcomes, ends)


def _tasks(smoke: bool) -> list[Callable[[], Task]]:
    if smoke:
        return [partial(retail, dim=16, batches=8, tests=4, rows=1 << 10)]
    return [partial(retail, dim=16), partial(retail, dim=64), partial(criteo_shaped, smoke=False)]


def _gate() -> None:
    """Check that a store returns the rows of `chain_rows`, and sums from 8 bits."""
    task = retail(dim=16, batches=24, tests=2, rows=1 << 12)
    for optimizer in _OPTIMIZERS:
        learned = task.learn(0, row_wise=optimizer == "row-wise Adagrad")
        with scratch() as memory:
            _check_stored(learned, task.batches(1)[:8], memory)


def _check_stored(learned: Learned, batches: Sequence[Any], directory: Path) -> None:
    """Store a full, and an increment after these batches, at one price; compare a restore."""
    model, optimizers = learned
    sums = [optimizers[0].state[table.weight]["sum"] for table in model.tables.values()]
    copies: list[list[TableCopy]] = []
    url = str(directory / "run")
    with staged_run(
        model,
        optimizers,
        url=url,
        staging=directory / "staging",
        bits=Precision(bits=8, residual=True, state=8),
        row_local_optimizers=(RowWiseAdagrad,),
    ) as tracked:
        for batches_before in ([], batches):
            for batch in batches_before:
                train_batch(model, optimizers, batch)
                tracked.checkpointer.step()
            job = give_price(tracked.cut(), _GATE_PRICE, scale=_GATE_SCALE)
            copies.append(
                [
                    TableCopy(table.weight.detach().clone(), importance(of_table, _GATE_SCALE))
                    for table, of_table in zip(model.tables.values(), sums, strict=True)
                ]
            )
            tracked.persist()
    target = MemoryTarget()
    restore(Run.open(open_store(url)), target)
    widths: set[int] = set()
    for number, (name, staged) in enumerate(zip(model.tables, job.tables, strict=True)):
        full, newest = copies[0][number], copies[1][number]
        expected = newest.rows
        if staged.allocation is not None:
            changed = torch.cat([batch.sparse[:, number] for batch in batches]).unique()
            ids = torch.arange(len(expected))
            rule = Rule(price=_GATE_PRICE, residual=True)
            chain = chain_rows(full, newest, changed, ids, rule, seed=job.step)
            expected = chain.values
            widths |= {*chain.full_forms.tolist(), *chain.increment_forms.tolist()}
        stored = target.tables[f"tables.{name}"]
        if not torch.equal(stored.values.view(torch.int32), expected.view(torch.int32)):
            raise RuntimeError(f"{name} at a price: the store gave other rows")
        state, expected_sums = stored.row_states[0], sums[number]
        if expected_sums.dim() == 2:
            codes, grids, _ = moments.encode(expected_sums)
            expected_sums = moments.decode(codes, grids)
        if state is None or not torch.equal(state, expected_sums):
            raise RuntimeError(f"{name} at a price: the store gave another optimizer state")
    if len(widths) < _GATE_FORMS:
        raise RuntimeError(f"rows of {sorted(widths)} forms only: the check proves too little")


def report_of(outcomes: Sequence[PriceOutcome], ends: Sequence[EndOutcome]) -> Report:
    """Return the report of measured models; `run` describes the figures.

    Args:
        outcomes: of the models, at least one.
        ends: of runs that were restored on the way.
    """
    report = Report(
        name="price_accuracy",
        columns=(
            "rule", "seeds", "bits, full", "increment", "MB", "rms", "loss, %", "± 95 %", "worst",
        ),
    )  # fmt: skip
    figures: dict[str, list[float]] = {key: [] for key in KEYS}
    for (task, optimizer), models in _by_model(outcomes).items():
        report.rows.append((f"{task}, {optimizer}", len(models), *[""] * 7))
        for number, name in enumerate(RULE_NAMES):
            points = [outcome.points[number] for outcome in models if number < len(outcome.points)]
            if not points:
                continue
            rises = [point.loss.loss for point in points]
            mean, half = interval_of(rises)
            report.rows.append((name, len(points), *_means(points), mean, _half(half), max(rises)))
            if number == 0:
                figures["loss_increase"].append(mean / 100)
                figures["loss_increase_ci95_high"].append((mean + half) / 100)
                figures["loss_increase_worst_model"].append(max(rises) / 100)
        ratios = [_rms_ratio(outcome) for outcome in models if len(outcome.points) > 2]
        figures["rms_vs_uniform"] += [statistics.fmean(ratios)] if ratios else []
        report.notes.append(_about(task, optimizer, models, ratios))
    for (task, optimizer), runs in _by_model(ends).items():
        for restores in RESTORES:
            rises = [run.loss.loss for run in runs if run.restores == restores]
            if not rises:
                continue
            mean, half = interval_of(rises)
            report.notes.append(
                f"{task}, {optimizer}, {_restores_text(restores)}: the end of the run "
                f"{mean:+.4f} ± {_half(half)} % ({len(rises)} seeds)"
            )
            if restores:
                figures["loss_increase_at_end"].append(mean / 100)
                figures["loss_increase_at_end_ci95_high"].append((mean + half) / 100)
    for key, values in figures.items():
        if values and max(values) < math.inf:
            report.figures[key] = max(values)
        else:
            report.leave_out([key], "too few models were measured")
    return report


def _by_model(measured: Sequence[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    models: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in measured:
        models.setdefault((outcome.task, outcome.optimizer), []).append(outcome)
    return models


def _means(points: Sequence[RulePoint]) -> tuple[float, float, float, float]:
    """Return the mean bits of full and increment, megabytes, and change of logits."""
    columns = zip(*(point[1:5] for point in points), strict=True)
    full, increment, stored_mb, rms = (statistics.fmean(column) for column in columns)
    return full, increment, stored_mb, rms


def _rms_ratio(outcome: PriceOutcome) -> float:
    """Return the change of logits at the chosen price, over one width at as many bytes."""
    names = dict(zip(RULE_NAMES, outcome.points, strict=True))
    uniform = [names[f"{bits} bits"] for bits in (2, 3, 4, 8)]
    at_price = outcome.points[0]
    expected = np.interp(
        math.log(at_price.stored_mb),
        [math.log(point.stored_mb) for point in uniform],
        [math.log(point.rms) for point in uniform],
    )
    return at_price.rms / math.exp(float(expected))


def _about(
    task: str, optimizer: str, models: Sequence[PriceOutcome], ratios: Sequence[float]
) -> str:
    prices = sorted(math.log2(outcome.points[0].rule.price) for outcome in models)
    text = (
        f"{task}, {optimizer}: the increment has {models[0].changed_share:.1%} of the trained "
        f"rows; log loss {statistics.fmean(outcome.never.loss for outcome in models):.4f}, "
        f"price 2^{prices[0]:.2f} to 2^{prices[-1]:.2f}"
    )
    if ratios:
        text += f"; logits change by {min(ratios):.3f} to {max(ratios):.3f} of one width's change"
    return text


def _half(half: float) -> str:
    return f"{half:.4f}" if half < math.inf else "-"


def _restores_text(restores: int) -> str:
    return f"{restores} restores" if restores else "rows moved once by a rounding error of F32"
