"""Says with which entries optimizers begin the row states of a row that was never trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.optim import Optimizer

from recpoint.embeddings.tables.optimizers import is_rowwise_adagrad

__all__ = ["begins_with_zeros", "first_entry"]

#: Optimizers whose row states are zeros before the first step, and stay right for a row that is
#: still untrained at a later step. Subclasses may do something else. ASGD is none of them: once it
#: averages, the zeros of a new row would be averaged with its values.
_BEGIN_WITH_ZEROS: Final[tuple[type[Optimizer], ...]] = (
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
    torch.optim.SparseAdam,
)


def begins_with_zeros(optimizer: Optimizer | None) -> bool:
    """Whether each row state that the optimizer makes in a step begins with zeros."""
    return type(optimizer) in _BEGIN_WITH_ZEROS


def first_entry(optimizer: Optimizer, group: Mapping[str, Any], state: str) -> float | None:
    """Return the value that fills a row state of a new row; None: it is not known.

    Args:
        optimizer: the table's optimizer.
        group: its parameter group that has the table.
        state: name of the row state.
    """
    if begins_with_zeros(optimizer):
        return 0.0
    is_adagrad = type(optimizer) is torch.optim.Adagrad or is_rowwise_adagrad(type(optimizer))
    value = group.get("initial_accumulator_value") if is_adagrad and state == "sum" else None
    return float(value) if isinstance(value, int | float) else None
