"""Measures the choice of a width for each row: its speed on one core, and the bits it wastes.

Speeds are bytes of F32 rows in a second. `gb_per_s_all_widths` takes rows for which every width has
to be tried, `gb_per_s` rows whose importances spread as those of a trained model do.

The choice goes by the errors of asymmetric codes. The agent stores codes of the searching method
where rows take less than 8 bits, whose errors are smaller. `bits_vs_searched` says what that costs:
the bits of the choice, over those of a choice by the errors of the stored codes, at the same sum of
importance times stored error.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.learning import retail
from benchmarks.machine import keep_freed_memory
from benchmarks.report import Report, Spread, alternate, spread_of
from recpoint.kernels.allocation import EXACT, WIDTHS, allocate, reference, row_bits
from recpoint.kernels.quantize import ASYMMETRIC, default_method, dequantize, quantize

__all__ = ["KEYS", "run"]

KEYS = ("gb_per_s_all_widths", "gb_per_s", "bits_vs_searched")

_DIMS = (8, 16, 64, 128)
_CHOICES = (*WIDTHS, EXACT)


def run(*, smoke: bool) -> Report:
    """Measure speeds on rows of 8 to 128 values, then errors on trained rows of 16 and 64.

    Each figure is the worst of all row lengths; `bits_vs_searched` also of the damages of 3, 4 and
    5 bits for all rows.
    """
    keep_freed_memory()
    report = Report(name="allocation", columns=("dim", "damage of", "bits a value", "searched"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _speeds(report, values=1 << 14 if smoke else 1 << 18, rounds=3 if smoke else 41)
    finally:
        torch.set_num_threads(threads)
    report.figures["bits_vs_searched"] = max(_errors(report, dim, smoke) for dim in (16, 64))
    return report


def _speeds(report: Report, values: int, rounds: int) -> None:
    worst: dict[str, list[Spread]] = {"gb_per_s_all_widths": [], "gb_per_s": []}
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
        )
        for key, times in zip(worst, seconds, strict=True):
            report.timed(f"{key}, dim {dim}", times)
            worst[key].append(spread_of([rows.nbytes / each / 1e9 for each in times]))
    for key, spreads in worst.items():
        report.put(key, min(spreads))


def _gate(rows: Tensor, importance: Tensor, price: float) -> None:
    expected = reference.allocate(rows, importance, price)
    if not torch.equal(allocate(rows, importance, price), expected):
        raise RuntimeError(f"rows of {rows.shape[1]} values: not the widths of the reference")


def _errors(report: Report, dim: int, smoke: bool) -> float:
    """Add a table row for each damage; return the largest ratio of bits."""
    rows, importance = _trained(dim, smoke)
    plain, bits = _costs(rows, searched=False)
    stored, _ = _costs(rows, searched=True)
    by_plain, by_stored = (_curve(importance, errors, stored, bits) for errors in (plain, stored))
    ratios = []
    for width in (3, 4, 5):
        damage = float((importance * stored[_CHOICES.index(width)]).sum())
        chosen_bits, searched_bits = (
            _bits_at(curve, damage) / dim for curve in (by_plain, by_stored)
        )
        report.rows.append((dim, f"{width} bits", chosen_bits, searched_bits))
        ratios.append(chosen_bits / searched_bits)
    return max(ratios)


def _trained(dim: int, smoke: bool) -> tuple[Tensor, Tensor]:
    """Return rows of the purchases' model that were trained, and their importances in F64."""
    batches, tests = (4, 2) if smoke else (None, None)
    task = retail(dim=dim, batches=batches, tests=tests, rows=1 << (10 if smoke else 18))
    model, optimizers = task.learn(0)
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
