"""Measures what restores from fewer bits cost: log loss and AUC after a restore and at the end.

Relative losses are in percent of the value before: the rise of the log loss and the fall of the
AUC, both on a test set of 100,000 samples that lies after the training data. Dense layers and
optimizer state are always restored exactly. All tables are quantized, as with `bits=N`; with
"rule", tables of at most 2^14 values stay exact, as with `bits="auto"`.
"""

from __future__ import annotations

import math
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from benchmarks.learning import Learned, Score, Task, criteo_shaped, evaluate, restored_rows, retail
from benchmarks.report import Report
from benchmarks.workload import scratch, staged_run
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.job import QuantizerName
from recpoint.trainer_plugin.schedule.outlook import bits_for
from recpoint.trainer_plugin.settings import Precision

__all__ = [
    "KEYS",
    "RULE",
    "WIDTHS",
    "Immediate",
    "Outcome",
    "Spread",
    "interval_of",
    "report_of",
    "run",
]

WIDTHS = (2, 3, 4, 8)
KEYS = (
    *(f"{loss}_{bits}bit" for loss in ("relative_loss", "auc_loss") for bits in WIDTHS),
    "relative_loss_at_rule",
    "paired_mean",
    "paired_ci95",
)
SCHEMES = ("symmetric", "asymmetric", "greedy", "refit", "k-means", "auto", "rule")
#: Expected restores -> the width that the rule chooses.
RULE = {restores: bits_for(1000 * restores) for restores in (1, 3, 20, 100)}
#: The relative loss must stay below this, in percent.
LIMIT = 0.01

_RETAIL_16, _RETAIL_64, _CRITEO = "retail 16", "retail 64", "Criteo's shape"
#: Number of seeds of each task. On the task with ten seeds, the ends of runs are compared in pairs.
_SEEDS = {_RETAIL_64: 3, _CRITEO: 3, _RETAIL_16: 10}
#: Seeds of each task of a smoke run.
_SMOKE_SEEDS = {_RETAIL_64: 1, _CRITEO: 1, _RETAIL_16: 3}


class Immediate(NamedTuple):
    """The effect on a model of one restore just before the test."""

    scheme: str
    bits: int
    loss: Score


class Spread(NamedTuple):
    """A run with `restores` restores: the immediate effect of the last one, and the final score."""

    restores: int
    bits: int
    at_once: Score
    at_end: Score


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All measurements of one task with one seed; `never` is the run without a restore.

    `paired`: whether this is the task whose ends of runs are compared in pairs.
    """

    task: str
    seed: int
    paired: bool
    never: Score
    immediate: list[Immediate]
    spread: list[Spread]


def run(*, smoke: bool) -> Report:
    """Train every task with every seed, and compare.

    `relative_loss_<b>bit` is the loss of the default quantizer just after a restore at the end of
    the run: the mean over the seeds, the worse of log loss and AUC, of the worst task. For
    `relative_loss_at_rule`, the run is restored as often as the rule expects for the width, at even
    distances, with small tables exact. The figure is the loss at the last of these restores, the
    worst of all tasks and seeds, with three or more seeds of each task. `paired_mean` and
    `paired_ci95` (half the interval) compare the ends of such runs with the end of the same run
    without restores, over ten seeds of the retail task at d = 16: the worst of the widths.
    """
    _gate(smoke)
    jobs = [
        (name, seed, smoke)
        for name, count in (_SMOKE_SEEDS if smoke else _SEEDS).items()
        for seed in range(count)
    ]
    workers = 1 if smoke else torch.get_num_threads()
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for outcome in pool.map(_measure, *zip(*jobs, strict=True)):
            outcomes.append(outcome)
            print(f"{len(outcomes)} of {len(jobs)}: {outcome}", file=sys.stderr, flush=True)
    return report_of(outcomes)


@cache
def _task(name: str, smoke: bool) -> Task:
    if name == _CRITEO:
        return criteo_shaped(smoke=smoke)
    dim = 16 if name == _RETAIL_16 else 64
    return retail(dim=dim, batches=6, tests=4, rows=1 << 10) if smoke else retail(dim=dim)


def _measure(name: str, seed: int, smoke: bool) -> Outcome:
    """Measure one task with one seed, in one thread, so that results do not depend on the load.

    The first seed measures all schemes, the others only the default scheme.
    """
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    task = _task(name, smoke)
    model = task.learn(seed).model
    never = evaluate(model, task.test)
    schemes = SCHEMES if seed == 0 else ("auto",)
    immediate = [
        Immediate(scheme, bits, _after_restore(task, model, bits, scheme).worse_than(never))
        for scheme in schemes
        for bits in WIDTHS
        if scheme != "k-means" or _can_cluster(name, bits, smoke)
    ]
    spread = [
        _restored_on_the_way(task, seed, restores, bits, never) for restores, bits in RULE.items()
    ]
    return Outcome(
        task=task.name,
        seed=seed,
        paired=name == _RETAIL_16,
        never=never,
        immediate=immediate,
        spread=spread,
    )


def _can_cluster(name: str, bits: int, smoke: bool) -> bool:
    """Whether k-means is measured.

    Rows of 64 values would take a quarter of an hour. At 8 bits, 16 values have too few clusters.
    """
    return bits < 8 and name != _RETAIL_64 and not smoke


def _restore_tables(model: Any, bits: int, scheme: str, *, step: int) -> None:
    """Replace the model's tables by their values after a restore from a checkpoint of `step`."""
    with torch.no_grad():
        for table in model.tables.values():
            if scheme == "rule" and table.weight.numel() <= Precision().small_table_values:
                continue
            name = "auto" if scheme == "rule" else scheme
            table.weight.copy_(restored_rows(table.weight.detach(), bits, name, seed=step))


def _after_restore(task: Task, model: Any, bits: int, scheme: str) -> Score:
    """Return the score of `model` with its tables restored; leave the model unchanged."""
    weights_before = [table.weight.detach().clone() for table in model.tables.values()]
    if scheme == "k-means":
        _cluster_looked_up(task, model, bits)
    else:
        _restore_tables(model, bits, scheme, step=0)
    score = evaluate(model, task.test)
    with torch.no_grad():
        for table, weight in zip(model.tables.values(), weights_before, strict=True):
            table.weight.copy_(weight)
    return score


def _cluster_looked_up(task: Task, model: Any, bits: int) -> None:
    """Apply k-means only to the rows that the test looks up, because it is slow."""
    with torch.no_grad():
        for column, table in enumerate(model.tables.values()):
            ids = task.test.sparse[:, column].unique()
            table.weight[ids] = restored_rows(table.weight[ids], bits, "k-means", seed=0)


def _restored_on_the_way(task: Task, seed: int, restores: int, bits: int, never: Score) -> Spread:
    steps = len(task.batches(seed))
    restore_steps = sorted({number * steps // (restores + 1) for number in range(1, restores + 1)})
    at_once: list[Score] = []

    def restore_all(learned: Learned, step: int) -> None:
        model = learned.model
        loss_before = evaluate(model, task.test) if step == restore_steps[-1] else None
        _restore_tables(model, bits, "rule", step=step)
        if loss_before is not None:
            at_once.append(evaluate(model, task.test).worse_than(loss_before))

    model = task.learn(seed, restores=restore_steps, restore=restore_all).model
    at_end = evaluate(model, task.test).worse_than(never)
    return Spread(restores, bits, at_once[0], at_end)


def _gate(smoke: bool) -> None:
    """Check that a store returns the bits of `restored_rows`, and optimizer state exactly."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    batches, rows = (4, 1 << 10) if smoke else (50, 1 << 18)
    learned = retail(dim=16, batches=batches, tests=2, rows=rows).learn(0)
    names: dict[int, tuple[QuantizerName, ...]] = {bits: ("auto",) for bits in WIDTHS}
    names[4] = ("auto", "asymmetric", "symmetric", "greedy", "refit")
    with scratch() as memory:
        for bits, quantizers in names.items():
            for quantizer in quantizers:
                stored_at = memory / f"{quantizer}-{bits}"
                _check_stored(learned, stored_at, bits, quantizer)


def _check_stored(learned: Any, stored_at: Any, bits: Any, quantizer: QuantizerName) -> None:
    model, optimizers = learned
    url, staging = str(stored_at / "run"), stored_at / "staging"
    with staged_run(
        model, optimizers, url=url, staging=staging, bits=Precision(bits=bits, quantizer=quantizer)
    ) as tracked:
        job, _ = tracked.cut_and_persist()
    target = MemoryTarget()
    restore(Run.open(open_store(url)), target)
    for staged, (name, table) in zip(job.tables, model.tables.items(), strict=True):
        rows = table.weight.detach()
        if staged.bits == bits:
            rows = restored_rows(rows, bits, quantizer, seed=job.step)
        stored_table = target.tables[f"tables.{name}"]
        if not torch.equal(stored_table.values.view(torch.int32), rows.view(torch.int32)):
            raise RuntimeError(f"{name}, {bits} bits, {quantizer}: the store gave other rows")
        state = stored_table.row_states[0]
        if state is None or not torch.equal(state, optimizers[0].state[table.weight]["sum"]):
            raise RuntimeError(f"{name}: the store gave another optimizer state")


def report_of(outcomes: list[Outcome]) -> Report:
    """Return the report of the measured outcomes; `run` describes the figures."""
    report = Report(
        name="accuracy",
        columns=("loss and AUC, % worse", *(f"{bits} bits" for bits in WIDTHS)),
    )
    tasks = list(dict.fromkeys(outcome.task for outcome in outcomes))
    worst = dict.fromkeys(WIDTHS, -math.inf)
    worst_auc = dict.fromkeys(WIDTHS, -math.inf)
    for task in tasks:
        of_task = [outcome for outcome in outcomes if outcome.task == task]
        for scheme in SCHEMES:
            cells = []
            for bits in WIDTHS:
                mean = _mean(
                    [i.loss for o in of_task for i in o.immediate if i[:2] == (scheme, bits)]
                )
                cells.append("-" if mean is None else _both(mean))
                if mean is not None and scheme == "auto":
                    worst[bits] = max(worst[bits], *mean)
                    worst_auc[bits] = max(worst_auc[bits], mean.auc)
            report.rows.append((f"{task}, {scheme}", *cells))
    report.figures |= {f"relative_loss_{bits}bit": value for bits, value in worst.items()}
    report.figures |= {f"auc_loss_{bits}bit": value for bits, value in worst_auc.items()}
    report.notes.append(
        "Right after a restore at the end of the run: log loss / AUC, % worse than before it; "
        f"means over the seeds ({', '.join(_described(outcomes, task) for task in tasks)})."
    )
    _rule(report, outcomes, tasks)
    failing = [f"{bits} bits" for bits in WIDTHS if worst[bits] >= LIMIT]
    report.notes.append(
        f"Right after a restore, at or above {LIMIT} % somewhere: {', '.join(failing) or 'none'}; "
        f"AUC alone: {', '.join(f'{b} bits' for b in WIDTHS if worst_auc[b] >= LIMIT) or 'none'}."
    )
    return report


def _rule(report: Report, outcomes: list[Outcome], tasks: list[str]) -> None:
    """Add the runs that were restored on the way to the report."""
    worst, paired = -math.inf, (-math.inf, 0.0)
    for restores, bits in RULE.items():
        for task in tasks:
            of_task = [o for o in outcomes if o.task == task]
            runs = [s for o in of_task for s in o.spread if s.bits == bits]
            at_once = Score(*(max(part) for part in zip(*(s.at_once for s in runs), strict=True)))
            loss, auc = _ends(runs)
            worst = max(worst, *at_once)
            if of_task[0].paired:
                paired = max(paired, loss, auc)
            report.notes.append(
                f"{restores} restores at {bits} bits, {task}: the last one at worst "
                f"{_both(at_once)} %; end of the run against a run without restores "
                f"{_end(loss)} / {_end(auc)} % ({len(runs)} seeds)"
            )
    for outcome in outcomes:
        at_rule = {s.bits: _both(s.at_once) for s in outcome.spread}
        row = f"{outcome.task}, seed {outcome.seed}"
        report.rows.append((row, *(at_rule[bits] for bits in WIDTHS)))
    report.notes.append(
        f"Rows of a seed: loss at the last of {', '.join(map(str, RULE))} restores on the way, as "
        "many as the rule expects for the width, against the value just before it."
    )
    report.figures["relative_loss_at_rule"] = worst
    report.figures["paired_mean"], report.figures["paired_ci95"] = paired


def _ends(runs: list[Spread]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return mean and half the 95 % confidence interval over seeds, of the loss and of the AUC."""
    loss, auc = ([s.at_end[part] for s in runs] for part in (0, 1))
    return interval_of(loss), interval_of(auc)


def _both(score: Score) -> str:
    return f"{score.loss:+.4f} / {score.auc:+.4f}"


def _end(interval: tuple[float, float]) -> str:
    mean, half = interval
    return f"{mean:+.4f} ± {half:.4f}" if half < math.inf else f"{mean:+.4f}"


def interval_of(values: list[float]) -> tuple[float, float]:
    """Return the mean and half the 95 % confidence interval; infinite for fewer than 3 values."""
    if len(values) < _LEAST_PAIRS:
        return statistics.fmean(values), math.inf
    half = _STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


#: With fewer values, no confidence interval is computed.
_LEAST_PAIRS = 3
#: Student's t, 97.5 %, by the number of values.
_STUDENT = {
    3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262,
}  # fmt: skip


def _mean(scores: list[Score]) -> Score | None:
    if not scores:
        return None
    return Score(*(statistics.fmean(part) for part in zip(*scores, strict=True)))


def _described(outcomes: list[Outcome], task: str) -> str:
    runs = [outcome for outcome in outcomes if outcome.task == task]
    mean = _mean([outcome.never for outcome in runs])
    assert mean is not None
    return f"{task}: {len(runs)}, loss {mean.loss:.4f}, AUC {mean.auc:.4f}"
