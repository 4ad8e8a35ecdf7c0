"""Computes what a restore from a full and one increment brings back, and the bits of its rows.

The rows are those that an agent would store and a restore would add up, by the agent's own
functions: widths of rows, residuals, and the method of the codes. No store is needed, so dozens of
rules can be tried on one trained model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import stored_sizes
from benchmarks.learning import method_of
from benchmarks.stored_sizes import Form, form_of
from recpoint.catalog.persist.priced_codes import RESIDUALS, priced_method
from recpoint.catalog.persist.residual_price import residual_price, sampled_spans
from recpoint.catalog.persist.residuals import residuals_to
from recpoint.catalog.persist.row_widths import with_fewer_chunks
from recpoint.format.job import QuantizerName
from recpoint.kernels.allocation import EXACT, WIDTHS, allocate, row_bits
from recpoint.kernels.quantize import dequantize_packed, quantize_packed

__all__ = ["ChainRows", "Rule", "TableCopy", "chain_rows", "stored_bits", "value_bits"]

#: Bits of a value in each form: of codes with parameters of binary16 and binary32, then exact.
_VALUE_BITS = np.array([*np.repeat(WIDTHS, 2), 32], np.float64)


class Rule(NamedTuple):
    """How rows of tables are stored.

    Attributes:
        bits: width of all rows; None: each row has the width that the price gives it.
        price: loss for each stored bit, if rows have widths of their own.
        residual: whether increments store differences from their full.
        quantizer: a setting.
    """

    bits: int | None = None
    price: float = 0.0
    residual: bool = False
    quantizer: QuantizerName = "auto"


class TableCopy(NamedTuple):
    """A table when a checkpoint was cut.

    Attributes:
        rows: f32 [n, dim].
        importance: f32 [n], as an agent computes it.
    """

    rows: Tensor
    importance: Tensor


class ChainRows(NamedTuple):
    """Rows as a restore from a full and an increment returns them.

    Forms are indices in `stored_forms` of a table whose rows have widths of their own.

    Attributes:
        values: f32 [wanted rows, dim].
        full_forms: the form of each row of the full, u8 [n].
        increment_forms: the forms of the rows of the increment, u8 [changed rows].
    """

    values: Tensor
    full_forms: Form
    increment_forms: Form


def chain_rows(
    full: TableCopy, newest: TableCopy, changed: Tensor, wanted: Tensor, rule: Rule, *, seed: int
) -> ChainRows:
    """Return rows of a table after a restore from a full and an increment.

    Args:
        full: the table when the full was cut.
        newest: the table when the increment was cut.
        changed: ids of the rows of the increment, int64, ascending.
        wanted: ids of the rows to return, int64, ascending.
        rule: of both.
        seed: draws the samples by which methods are chosen.
    """
    full_widths = _row_widths(full, rule)
    needed = torch.cat([changed, wanted]).unique()
    restored = _decoded(full.rows, full_widths, needed, rule, seed, residual=False)
    position = torch.searchsorted(needed, changed)
    base, rows = restored[position], newest.rows[changed]
    stored = residuals_to(base, rows) if rule.residual else rows
    importance = newest.importance[changed]
    if rule.residual and rule.bits is None:
        rule = rule._replace(price=_residual_price(rows, stored, importance, rule))
    widths = _row_widths(TableCopy(stored, importance), rule)
    newer = _decoded(stored, widths, None, rule, seed, residual=rule.residual)
    if rule.residual:
        # What is stored exactly is the row itself.
        newer = torch.where(newer.isnan() | (widths == EXACT)[:, None], rows, base + newer)
    restored[position] = newer
    return ChainRows(
        values=restored[torch.searchsorted(needed, wanted)],
        full_forms=_forms(full.rows, full_widths),
        increment_forms=_forms(stored, widths),
    )


def _residual_price(rows: Tensor, residuals: Tensor, importance: Tensor, rule: Rule) -> float:
    """Return what a bit of residuals may cost, where the rows are one block."""
    positions = torch.cat([torch.arange(s.start, s.stop) for s in sampled_spans(len(rows))])
    return residual_price(
        rows[positions],
        residuals[positions],
        importance[positions],
        rule.price,
        quantizer=rule.quantizer,
    )


def value_bits(forms: Form) -> float:
    """Return the bits of a value in rows of these forms, the mean over the rows."""
    return float(_VALUE_BITS[forms].mean())


def stored_bits(forms: Form, dim: int) -> float:
    """Return the bits that the codes, parameters and exact values of rows take together."""
    of_form = [row_bits(dim, width, wide=wide) for width in WIDTHS for wide in (False, True)]
    bits = np.array([*of_form, row_bits(dim, EXACT, wide=False)], np.float64)
    return float(bits[forms].sum())


def _forms(rows: Tensor, widths: Tensor) -> Form:
    """Return the stored forms of rows f32 [n, dim] of these widths, u8 [n]."""
    forms = np.full(len(rows), 2 * len(WIDTHS), np.uint8)
    for number, width in enumerate(WIDTHS):
        positions = np.flatnonzero(widths.numpy() == width)
        of_width = form_of(rows[torch.from_numpy(positions)], width)
        forms[positions] = np.where(
            of_width == stored_sizes.EXACT, forms[positions], 2 * number + of_width
        )
    return forms


def _row_widths(table: TableCopy, rule: Rule) -> Tensor:
    """Return the bits of each row, u8 [n]; `EXACT` for a row that is stored as it is."""
    if rule.bits is not None:
        return torch.full((len(table.rows),), rule.bits, dtype=torch.uint8)
    widths = allocate(table.rows.contiguous(), table.importance.contiguous(), rule.price)
    return torch.from_numpy(with_fewer_chunks(widths.numpy(), table.rows.shape[1]))


def _decoded(
    rows: Tensor, widths: Tensor, ids: Tensor | None, rule: Rule, seed: int, *, residual: bool
) -> Tensor:
    """Return the rows `ids` (None: all) as their codes decode to."""
    if rule.bits is not None:
        is_leveled = residual and rule.quantizer == "auto" and rule.bits < max(WIDTHS)
        method = RESIDUALS if is_leveled else method_of(rows, rule.bits, rule.quantizer, seed=seed)
    else:
        by_price = priced_method(rule.quantizer, residual=residual)
        # Of several widths the method matters most for the narrowest, which errs most.
        method = by_price or method_of(rows, min(WIDTHS), rule.quantizer, seed=seed)
    chosen, of_chosen = (rows, widths) if ids is None else (rows[ids], widths[ids])
    decoded = chosen.clone()
    for width in WIDTHS:
        positions = torch.nonzero(of_chosen == width).flatten()
        if not len(positions):
            continue
        packed, scale, offset, exact, _ = quantize_packed(
            chosen[positions], width, method, half_parameters=True
        )
        of_width = dequantize_packed(packed, scale, offset, dim=rows.shape[1], bits=width)
        decoded[positions] = torch.where(exact[:, None], chosen[positions], of_width)
    return decoded
