"""Measures how many rows have each form at one price of a bit, for traces that have no model.

A DLRM is trained on the purchases with rows of 64 values. Its price is chosen as `priced_models`
says. Fulls are cut at three moments, so that increments of as many shares of the rows are measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from benchmarks.coded_chain import Rule
from benchmarks.learning import retail
from benchmarks.priced_models import TrainedModel
from benchmarks.stored_sizes import Form
from recpoint.kernels.allocation import WIDTHS

__all__ = ["Mix", "drawn_forms", "measured_mix"]

#: The share of rows of each form: F64 [forms].
Shares = np.ndarray[Any, np.dtype[np.float64]]

#: Shares of the batches after which fulls are cut; the price is measured on the second.
_FULLS = (0.6, 0.75, 0.88)


class Mix(NamedTuple):
    """The forms of a model's rows at its price.

    Attributes:
        full: of all rows that were ever trained, in a full of the end of the run.
        increments: for each increment, the share of the trained rows that it has, and their forms.
    """

    full: Shares
    increments: tuple[tuple[float, Shares], ...]


def measured_mix(optimizer: str, *, smoke: bool) -> Mix:
    """Train the model, and return the mix at its price.

    Args:
        optimizer: of the tables; what follows a comma says how states are stored.
        smoke: tiny sizes.
    """
    task = retail(dim=64, batches=8, tests=4, rows=1 << 10) if smoke else retail(dim=64)
    row_wise = optimizer == "row-wise Adagrad"
    model = TrainedModel(task, "row-wise Adagrad" if row_wise else "Adagrad", 0, full_at=_FULLS)
    price, _ = model.highest_price()
    increments: list[tuple[float, Shares]] = []
    full: Shares | None = None
    for full_at in _FULLS:
        chains = model.chains(Rule(price=price, residual=True), full_at)
        increment = np.concatenate([chain.increment_forms for chain in chains.values()])
        increments.append((model.changed_share(full_at), _shares(increment)))
        full = _shares(
            np.concatenate(
                [chain.full_forms[model.trained[table].numpy()] for table, chain in chains.items()]
            )
        )
    assert full is not None  # of the last of several fulls
    return Mix(full, tuple(increments))


def drawn_forms(shares: Shares, rows: int, *, seed: int) -> Form:
    """Draw the forms of rows with these shares: u8 [rows]."""
    drawn = np.random.default_rng(seed).random(rows, dtype=np.float32)
    return np.searchsorted(np.cumsum(shares)[:-1], drawn, side="right").astype(np.uint8)


def _shares(forms: Form) -> Shares:
    counts = np.bincount(forms, minlength=2 * len(WIDTHS) + 1)
    shares: Shares = counts / counts.sum()
    return shares
