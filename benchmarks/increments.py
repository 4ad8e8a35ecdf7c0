"""Measures what increments with residuals cost and save, at prices of a bit that fulls were given.

`bits=Loss` measures what rounding whole rows costs, as a full does. A restore of an increment has
other errors: rows that have changed since the full come back from residuals, and all others from
the full. Costs here are mean squares of what rounding changes in the logits of the next batches.
Residuals have the price that the agent gives them, by a sample of the changed rows.

`cost_vs_measured` is the cost of a restore of an increment over that of whole rows, at the same
price: what `Loss` measures should be no less. `bits_vs_whole` is the bits of the increment's rows,
over those that they would take as whole rows. `residuals_alone_vs_cost` is what rounding the
residuals of all looked-up rows would say of the cost: the rows that have not changed have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.learning import Learned, Task, retail
from benchmarks.report import Report
from recpoint.catalog.persist.priced_codes import priced_method
from recpoint.catalog.persist.residual_price import residual_price, sampled_spans
from recpoint.catalog.persist.residuals import residuals_to
from recpoint.kernels.allocation import EXACT, WIDTHS, allocate
from recpoint.kernels.quantize import dequantize, quantize

__all__ = ["KEYS", "run"]

KEYS = ("cost_vs_measured", "bits_vs_whole", "residuals_alone_vs_cost")

_DIMS = (16, 64)
#: What a bit may cost, in importances that are mean squared gradients of a batch.
_PRICES = (1e-13, 1e-14, 1e-15, 1e-16)
#: Batches before the full, and from there to the increments.
_FULL_AT = 100
_AGES = (5, 40, 200)
#: Batches after an increment whose logits are compared.
_NEXT_BATCHES = 8
#: Changed rows of a table whose bits are counted.
_COUNTED_ROWS = 1 << 14


class _Rounded(NamedTuple):
    """Rows as a restore has them, [n, dim], and the bits of each row's codes, u8 [n]."""

    values: Tensor
    widths: Tensor


def run(*, smoke: bool) -> Report:
    """Train purchases with rows of 16 and 64 values, with a full and three increments.

    Each increment stands on the full alone, and has all rows that were looked up since. Each figure
    is the worst of all row lengths, prices and increments; of `residuals_alone_vs_cost`, the least.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, without its warning
    report = Report(
        name="increments",
        columns=(
            "dim",
            "price",
            "batches since the full",
            "bits a value: whole",
            "residual",
            "cost, whole rows",
            "cost_vs_measured",
            "residuals_alone_vs_cost",
        ),
    )
    full_at, ages = (3, (2, 4)) if smoke else (_FULL_AT, _AGES)
    for dim in _DIMS:
        batches = full_at + max(ages) + _NEXT_BATCHES
        task = retail(dim=dim, batches=batches, tests=2, rows=1 << (10 if smoke else 18))
        chains = _Chains(report, task, dim, full_at)
        task.learn(0, restores=range(full_at, full_at + max(ages) + 1), restore=chains.look(ages))
    rows: Sequence[Any] = report.rows
    report.figures["cost_vs_measured"] = max(row[6] for row in rows)
    report.figures["bits_vs_whole"] = max(row[4] / row[3] for row in rows)
    report.figures["residuals_alone_vs_cost"] = min(row[7] for row in rows)
    return report


class _Chains:
    """A full and increments for each price, of one training.

    Args:
        report: gets a row for each price and increment.
        task: what is trained.
        dim: values of a row.
        full_at: batches before the full.
    """

    def __init__(self, report: Report, task: Task, dim: int, full_at: int) -> None:
        self._report = report
        self._task = task
        self._dim = dim
        self._full_at = full_at
        self._bases: Mapping[float, list[Tensor]] = {}
        self._changed: list[Tensor] = []  # of each table: bool [rows]

    def look(self, ages: Sequence[int]) -> Any:
        """Return what looks at a model before each batch from the full on."""
        return partial(self._look, frozenset(ages))

    @torch.no_grad()
    def _look(self, ages: frozenset[int], learned: Learned, step: int) -> None:
        tables = list(learned.model.tables.values())
        weights = [table.weight.detach() for table in tables]
        sums = [learned.optimizers[0].state[table.weight]["sum"] for table in tables]
        importances = [state.mean(dim=1) / step for state in sums]
        if step == self._full_at:
            self._changed = [torch.zeros(len(weight), dtype=torch.bool) for weight in weights]
            self._bases = {
                price: [
                    _rounded(weight, importance, price, residual=False).values
                    for weight, importance in zip(weights, importances, strict=True)
                ]
                for price in _PRICES
            }
        if step - self._full_at in ages:
            for price in _PRICES:
                self._compare(learned.model, weights, importances, price, step)
        for number, changed in enumerate(self._changed):
            changed[self._task.batches(0)[step].sparse[:, number]] = True

    def _compare(
        self,
        model: Any,
        weights: Sequence[Tensor],
        importances: Sequence[Tensor],
        price: float,
        step: int,
    ) -> None:
        batches = self._task.batches(0)[step : step + _NEXT_BATCHES]
        whole: list[Tensor] = []
        residual: list[Tensor] = []
        restored: list[Tensor] = []
        bits: list[tuple[Tensor, Tensor]] = []
        for number, (weight, importance, base, changed) in enumerate(
            zip(weights, importances, self._bases[price], self._changed, strict=True)
        ):
            changed_ids = torch.nonzero(changed).flatten()
            rows = _TableRows(weight, base, importance)
            spans = sampled_spans(len(changed_ids))
            sampled_ids = torch.cat([changed_ids[span.start : span.stop] for span in spans])
            own_price = rows.of(sampled_ids).residual_price(price)
            counted = rows.of(changed_ids[torch.randperm(len(changed_ids))[:_COUNTED_ROWS]])
            bits.append((counted.whole(price).widths, counted.residual(own_price).widths))
            looked_up = torch.cat([batch.sparse[:, number] for batch in batches]).unique()
            of_next = rows.of(looked_up)
            as_whole, as_residual = of_next.whole(price), of_next.residual(own_price)
            is_changed = changed[looked_up][:, None]
            as_restored = torch.where(is_changed, as_residual.values, of_next.base)
            for rows_of_form, values in (
                (whole, as_whole.values),
                (residual, as_residual.values),
                (restored, as_restored),
            ):
                rows_of_form.append(weight.index_copy(0, looked_up, values))
        cost, alone, measured = (
            _deviation(model, batches, values) for values in (restored, residual, whole)
        )
        whole_bits, residual_bits = (
            float(torch.where(widths == EXACT, 32, widths).double().mean())
            for widths in (torch.cat(of_form) for of_form in zip(*bits, strict=True))
        )
        age = step - self._full_at
        self._report.rows.append(
            (
                self._dim,
                f"{price:.0e}",
                age,
                whole_bits,
                residual_bits,
                measured,
                cost / measured,
                alone / cost,
            )
        )


class _TableRows(NamedTuple):
    """Rows of a table as they are, and as its full has them, [n, dim]; importances [n]."""

    rows: Tensor
    base: Tensor
    importance: Tensor

    def of(self, ids: Tensor) -> _TableRows:
        """Return some of the rows."""
        return _TableRows(self.rows[ids], self.base[ids], self.importance[ids])

    def residual_price(self, price: float) -> float:
        """Return what a bit of the residuals may cost."""
        residuals = residuals_to(self.base, self.rows)
        return residual_price(self.rows, residuals, self.importance, price)

    def whole(self, price: float) -> _Rounded:
        """Return the rows as a full restores them."""
        return _rounded(self.rows, self.importance, price, residual=False)

    def residual(self, price: float) -> _Rounded:
        """Return the rows as an increment restores them."""
        residuals = residuals_to(self.base, self.rows)
        rounded = _rounded(residuals, self.importance, price, residual=True)
        is_exact = (rounded.widths == EXACT)[:, None]
        values = torch.where(is_exact, self.rows, self.base + rounded.values)
        return _Rounded(values, rounded.widths)


def _rounded(rows: Tensor, importance: Tensor, price: float, *, residual: bool) -> _Rounded:
    method = priced_method("auto", residual=residual)
    assert method is not None
    widths = allocate(rows, importance, price)
    values = rows.clone()
    for width in WIDTHS:
        ids = torch.nonzero(widths == width).flatten()
        coded = quantize(rows[ids], width, method, half_parameters=True)
        values[ids] = dequantize(coded.codes, coded.scale, coded.offset)
    return _Rounded(values, widths)


def _deviation(model: Any, batches: Sequence[Any], values: Sequence[Tensor]) -> float:
    """Return the mean square of what other rows change in logits; the model stays as it is."""
    weights = [table.weight.detach() for table in model.tables.values()]
    saved = [weight.clone() for weight in weights]
    training = model.training
    model.eval()  # without dropout, logits depend on the rows alone
    before = _logits(model, batches)
    for weight, of_table in zip(weights, values, strict=True):
        weight.copy_(of_table)
    after = _logits(model, batches)
    for weight, rows in zip(weights, saved, strict=True):
        weight.copy_(rows)
    if not torch.equal(_logits(model, batches[:1]), before[: len(batches[0].label)]):
        raise RuntimeError("equal rows gave other logits")
    model.train(training)
    return float((after - before).square().mean())


def _logits(model: Any, batches: Sequence[Any]) -> Tensor:
    """Return the logits of batches: F64 [samples]."""
    return torch.cat([model(batch.dense, batch.sparse) for batch in batches]).double()
