"""Measures the choice of a width for each row: its speed, the bits it wastes, and what it is worth.

Speeds are bytes of F32 rows in a second, of one thread. `gb_per_s_all_widths` takes rows for which
every width has to be tried, `gb_per_s` rows whose importances spread as those of a trained model
do, and `gb_per_s_with_codes` has these rows quantized with the agent's method and packed, too, each
width by itself. These three take 1 MiB of rows that lie in memory: they are speeds of kernels. What
an agent reaches with staged rows is `gb_per_s_agent_…` (`agent_steps`).

The choice goes by the errors of asymmetric codes. If the agent stores codes of a search, their
errors are smaller. `bits_vs_searched` says what that costs: the bits of the choice, over those of a
choice by the errors of a search at each width, at the same sum of importance times stored error.

`rms_vs_uniform` is the root mean square of what rounding changes in the logits of later samples,
over the same with one width for all rows, at as many bits a row. `rms_by_counts_vs_uniform` is the
same for a choice that knows the counts of lookups alone, as for SGD.

`million_lookups_per_s` is the speed at which lookups are counted, in a table of 2^22 rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import agent_steps
from benchmarks.learning import Learned, Task, restored_rows, retail
from benchmarks.machine import keep_freed_memory
from benchmarks.report import Report, Spread, alternate, spread_of
from recpoint.catalog.persist.priced_codes import priced_method
from recpoint.kernels import lookup_counts, row_gather
from recpoint.kernels.allocation import EXACT, WIDTHS, allocate, reference, row_bits
from recpoint.kernels.lookup_counts import reference as counting
from recpoint.kernels.quantize import (
    ASYMMETRIC,
    default_method,
    dequantize,
    quantize,
    quantize_packed,
)

__all__ = ["KEYS", "run"]

_COUNT_SPEED = "million_lookups_per_s"
_SPEEDS = ("gb_per_s_all_widths", "gb_per_s", "gb_per_s_with_codes")
_RATIOS = (
    "rms_vs_uniform_full",
    "rms_vs_uniform_increment",
    "rms_by_counts_vs_uniform_full",
    "rms_by_counts_vs_uniform_increment",
)
KEYS = (*agent_steps.KEYS, *_SPEEDS, _COUNT_SPEED, "bits_vs_searched", *_RATIOS)

_DIMS = (8, 16, 64, 128)
#: The widths for all rows that the choice is compared with.
_UNIFORM = (3, 4)
#: The rows of the last batches stand for those of an increment.
_INCREMENT_BATCHES = 60
_SAMPLES_AT_ONCE = 4096
_CHOICES = (*WIDTHS, EXACT)


def run(*, smoke: bool) -> Report:
    """Measure speeds on rows of 8 to 128 values, then models of purchases with rows of 16 and 64.

    Each figure is the worst of all row lengths; `bits_vs_searched` also of the damages of 3, 4 and
    5 bits for all rows, and the ratios of `rms` of 3 and 4 bits. `full` counts the bits of all
    rows, `increment` those of the rows that the last 60 batches trained.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    report = Report(
        name="allocation",
        columns=("dim", "price", "bits a value: full", "increment", "rms of logits"),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Before freed memory is kept, which an agent does not do.
        agent_steps.measure(report, row_bytes=1 << (20 if smoke else 26), rounds=2 if smoke else 7)
        keep_freed_memory()
        _speeds(report, values=1 << 14 if smoke else 1 << 18, rounds=3 if smoke else 41)
        _count_speed(report, rows=1 << (12 if smoke else 22), rounds=3 if smoke else 41)
    finally:
        torch.set_num_threads(threads)
    figures: dict[str, list[float]] = {key: [] for key in ("bits_vs_searched", *_RATIOS)}
    for dim in (16, 64):
        batches, tests = (4, 2) if smoke else (None, None)
        task = retail(dim=dim, batches=batches, tests=tests, rows=1 << (10 if smoke else 18))
        learned = task.learn(0)
        figures["bits_vs_searched"].append(_errors(report, learned, dim))
        for key, value in zip(_RATIOS, _deviations(report, task, learned, dim), strict=True):
            figures[key].append(value)
    report.figures |= {key: max(values) for key, values in figures.items()}
    return report


def _speeds(report: Report, values: int, rounds: int) -> None:
    worst: dict[str, list[Spread]] = {key: [] for key in _SPEEDS}
    for dim in _DIMS:
        torch.manual_seed(dim)
        rows = 0.05 * torch.randn(values // dim, dim)
        equal = torch.ones(len(rows))
        spread = torch.exp(3.0 * torch.randn(len(rows)))
        _gate(rows[:200], spread[:200], 1e-5)
        seconds = alternate(
            rounds,
            partial(allocate, rows, equal, 1e-12),
            partial(allocate, rows, spread, 1e-4),
            partial(_store, rows, spread, 1e-4),
        )
        for key, times in zip(worst, seconds, strict=True):
            report.timed(f"{key}, dim {dim}", times)
            worst[key].append(spread_of([rows.nbytes / each / 1e9 for each in times]))
    for key, spreads in worst.items():
        report.put(key, min(spreads))


def _count_speed(report: Report, rows: int, rounds: int) -> None:
    """Count lookups of ids that come as those of clicks do: few of them very often."""
    torch.manual_seed(0)
    ids = (rows * torch.rand(1 << 16, dtype=torch.float64) ** 4).long()
    codes, expected = (torch.zeros(rows, dtype=torch.uint8) for _ in range(2))
    lookup_counts.count(codes, ids[:2000], start=0)
    counting.count(expected, ids[:2000], start=0)
    if not torch.equal(codes, expected):
        raise RuntimeError("counts of lookups: not the codes of the reference")
    (times,) = alternate(rounds, partial(lookup_counts.count, codes, ids, start=0))
    report.timed(_COUNT_SPEED, times)
    report.put(_COUNT_SPEED, spread_of([len(ids) / each / 1e6 for each in times]))


def _store(rows: Tensor, importance: Tensor, price: float) -> None:
    """Choose widths and quantize, with the kernels that the agent calls."""
    method = priced_method("auto")
    assert method is not None  # of this setting
    widths = allocate(rows, importance, price)
    for width in WIDTHS:
        ids = torch.nonzero(widths == width).flatten()
        chosen = torch.empty(len(ids), rows.shape[1])
        row_gather.gather(rows, ids, chosen)
        quantize_packed(chosen, width, method, half_parameters=True)


def _gate(rows: Tensor, importance: Tensor, price: float) -> None:
    expected = reference.allocate(rows, importance, price)
    if not torch.equal(allocate(rows, importance, price), expected):
        raise RuntimeError(f"rows of {rows.shape[1]} values: not the widths of the reference")


def _errors(report: Report, learned: Learned, dim: int) -> float:
    """Add a note for each damage; return the largest ratio of bits."""
    rows, importance = _trained(learned)
    plain, bits = _costs(rows, searched=False)
    stored, _ = _costs(rows, searched=True)
    by_plain, by_stored = (_curve(importance, errors, stored, bits) for errors in (plain, stored))
    ratios = []
    for width in (3, 4, 5):
        damage = float((importance * stored[_CHOICES.index(width)]).sum())
        chosen_bits, searched_bits = (
            _bits_at(curve, damage) / dim for curve in (by_plain, by_stored)
        )
        report.notes.append(
            f"dim {dim}, at the damage of {width} bits for all rows: {chosen_bits:.3f} bits a value"
            f" with parameters, {searched_bits:.3f} if the search tried each width"
        )
        ratios.append(chosen_bits / searched_bits)
    return max(ratios)


def _trained(learned: Learned) -> tuple[Tensor, Tensor]:
    """Return rows of a model that were trained, and their importances in F64."""
    model, optimizers = learned
    rows: list[Tensor] = []
    importances: list[Tensor] = []
    for table in model.tables.values():
        sums: Tensor = optimizers[0].state[table.weight]["sum"].mean(dim=1)
        trained_ids = torch.nonzero(sums > 0).flatten()
        drawn_ids = trained_ids[torch.randperm(len(trained_ids))[:3000]]
        rows.append(table.weight.detach()[drawn_ids])
        importances.append(sums[drawn_ids].double())
    return torch.cat(rows).contiguous(), torch.cat(importances)


def _costs(rows: Tensor, *, searched: bool) -> tuple[Tensor, Tensor]:
    """Return the squared error and the bits of each choice for each row: F64 [choices, n] each."""
    dim = rows.shape[1]
    errors: list[Tensor] = []
    bits: list[Tensor] = []
    for width in WIDTHS:
        method = default_method(width) if searched else ASYMMETRIC
        codes, scale, offset, _, wide = quantize(rows, width, method, half_parameters=True)
        difference = rows.double() - dequantize(codes, scale, offset).double()
        errors.append(difference.square().sum(dim=1))
        narrow_bits, wide_bits = (row_bits(dim, width, wide=is_wide) for is_wide in (False, True))
        bits.append(torch.where(wide, wide_bits, narrow_bits).double())
    errors.append(torch.zeros(len(rows), dtype=torch.float64))
    bits.append(torch.full_like(errors[0], row_bits(dim, EXACT, wide=False)))
    return torch.stack(errors), torch.stack(bits)


def _curve(
    importance: Tensor, errors: Tensor, stored_errors: Tensor, bits: Tensor
) -> list[tuple[float, float]]:
    """Return damage and bits a row for prices from high to low, chosen by `errors`."""
    points: list[tuple[float, float]] = []
    for price in torch.logspace(-4, -14, 80, dtype=torch.float64).tolist():
        choice = (importance * errors + price * bits).argmin(dim=0)[None]
        damage = float((importance * stored_errors.gather(0, choice)[0]).sum())
        points.append((damage, float(bits.gather(0, choice).mean())))
    return points


def _bits_at(curve: list[tuple[float, float]], damage: float) -> float:
    points: Any = np.array(sorted(point for point in curve if point[0] > 0.0))
    return float(np.interp(np.log(damage), np.log(points[:, 0]), points[:, 1]))


def _deviations(report: Report, task: Task, learned: Learned, dim: int) -> list[float]:
    """Add a table row for each width and price; return the largest ratios of deviations.

    The first ratio is at equal bits of all rows, the second at equal bits of an increment's rows.
    The others are the same for widths by counts of lookups.
    """
    model, optimizers = learned
    model.eval()  # without dropout, logits depend on the rows alone
    tables = list(model.tables.values())
    weights = [table.weight.detach().clone() for table in tables]
    sums: list[Tensor] = [optimizers[0].state[t.weight]["sum"].mean(dim=1) for t in tables]
    ids = torch.cat([batch.sparse for batch in task.batches(0)[-_INCREMENT_BATCHES:]])
    decoded = {
        width: [restored_rows(weight, width, "auto", seed=0) for weight in weights]
        for width in WIDTHS
    }
    logits_before = _logits(task, model)
    if not torch.equal(_logits(task, model), logits_before):
        raise RuntimeError(f"dim {dim}: equal rows gave other logits")

    def measure(name: str, widths: list[Tensor]) -> tuple[float, float, float]:
        with torch.no_grad():
            for number, (table, of_table) in enumerate(zip(tables, widths, strict=True)):
                for width in WIDTHS:
                    chosen = of_table == width
                    table.weight[chosen] = decoded[width][number][chosen]
                exact = of_table == EXACT
                table.weight[exact] = weights[number][exact]
        rms = float((_logits(task, model) - logits_before).square().mean().sqrt())
        bits = [torch.where(w == EXACT, 32, w).double() for w in widths]
        in_increment = [b[ids[:, number].unique()] for number, b in enumerate(bits)]
        means = float(torch.cat(bits).mean()), float(torch.cat(in_increment).mean())
        report.rows.append((dim, name, *means, rms))
        return *means, rms

    prices = torch.logspace(-11, -16.5, 14, dtype=torch.float64) * len(task.batches(0))
    curves: list[Any] = []
    for name, importances in (("", sums), (", by counts", _scaled_counts(task, sums))):
        points = [
            measure(
                f"{price:.1e}{name}",
                [allocate(w, s, price) for w, s in zip(weights, importances, strict=True)],
            )
            for price in prices.tolist()
        ]
        curves.append(np.array(points))
    ratios: list[list[float]] = []
    for width in _UNIFORM:
        all_of_width = [torch.full((len(w),), width, dtype=torch.uint8) for w in weights]
        *_, rms = measure(f"{width} bits for all", all_of_width)
        ratios.append(
            [
                float(np.exp(np.interp(width, points[:, column], np.log(points[:, 2])))) / rms
                for points in curves
                for column in (0, 1)
            ]
        )
    for table, weight in zip(tables, weights, strict=True):
        table.weight.data.copy_(weight)
    return [max(of_widths) for of_widths in zip(*ratios, strict=True)]


def _scaled_counts(task: Task, sums: list[Tensor]) -> list[Tensor]:
    """Return counts of the lookups of training, with one factor so that sums have the same mean."""
    codes = [torch.zeros(len(of_table), dtype=torch.uint8) for of_table in sums]
    for number, batch in enumerate(task.batches(0)):
        for column, of_table in enumerate(codes):
            ids = batch.sparse[:, column]
            lookup_counts.count(of_table, ids, start=number * len(ids))
    counts = [lookup_counts.values(of_table) for of_table in codes]
    factor = float(torch.cat(sums).sum() / torch.cat(counts).sum())
    return [factor * of_table for of_table in counts]


def _logits(task: Task, model: Any) -> Tensor:
    """Return the logits of the test set: F64 [samples]."""
    with torch.no_grad():
        parts = [
            model(
                task.test.dense[first : first + _SAMPLES_AT_ONCE],
                task.test.sparse[first : first + _SAMPLES_AT_ONCE],
            )
            for first in range(0, len(task.test.label), _SAMPLES_AT_ONCE)
        ]
    return torch.cat(parts).double()
