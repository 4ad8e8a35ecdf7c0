"""Which rows of a table an optimizer changes, and which of its state belongs to rows.

With dense gradients a row that was not looked up has a gradient of zeros. Whether its bytes stay
as they are then depends on the update. They do when the update adds -lr * 0: x + (-0.0) is x for
every x, also for -0.0. They do not when anything pulls on every row (weight decay), remembers
earlier gradients (momentum, moments), or adds +0.0 (maximize), which turns -0.0 into +0.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from recpoint.format.dtypes import dtype_name

__all__ = [
    "AllRows",
    "FullyDirtyTables",
    "Watched",
    "all_rows_changed",
    "always_changes_all_rows",
    "changes_gradient_rows",
    "counts_one_change",
    "row_states",
]

_WATCHED = ("momentum", "weight_decay", "maximize", "eps")
_KNOWN = (SGD, Adagrad, SparseAdam)
#: TorchRec's, which is not imported for it: Adagrad with one sum a row, of dense gradients only.
_ROWWISE_ADAGRAD = "torchrec.optim.rowwise_adagrad.RowWiseAdagrad"
_MAX_ENTRY_DIMS = 4
_MAX_STATES = 64
_MAX_ENTRY_SIZE = 2**20


class FullyDirtyTables(RuntimeWarning):
    """Tables whose optimizer changes every row at each step, so that increments are fulls."""


class AllRows(NamedTuple):
    """Why every row of a table changes at each step, and what to do about it."""

    why: str
    change: str


class Watched:
    """The hyperparameters that `all_rows_changed` looks at: when they change, ask it again."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        there = [name for name in _WATCHED if name in group]
        # One call into C for all of them: this is compared after each step.
        self._read = itemgetter(*there) if there else _nothing
        self._values = self._read(group)
        self._size = len(group)

    def differ(self, group: Mapping[str, Any]) -> bool:
        """Whether they are others now, or may be."""
        try:
            changed: bool = len(group) != self._size or self._read(group) != self._values
        except (KeyError, RuntimeError, ValueError):
            return True  # one is gone, or is an array, which is not compared as a whole
        return changed


def _nothing(_group: Mapping[str, Any]) -> None:
    return None


def all_rows_changed(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    *,
    sparse: bool,
    dtype: torch.dtype,
    row_local: tuple[type, ...] = (),
) -> AllRows | None:
    """Why a step changes rows that were not looked up; None if it changes no such row.

    Args:
        optimizer: the table's optimizer.
        group: its parameter group, with the hyperparameters as they are now.
        sparse: whether the table's gradients are sparse.
        dtype: the table's.
        row_local: classes of which the user says that they change no other row.
    """
    if isinstance(optimizer, row_local):
        return None
    if always_changes_all_rows(optimizer, row_local):
        return _unknown(type(optimizer))
    kind = type(optimizer)
    if kind is SparseAdam:
        return None  # its update is masked to the rows of the sparse gradient
    rowwise = _is_rowwise(kind)
    if _active(group.get("weight_decay", 0)):
        return AllRows("weight_decay pulls on every row", "set weight_decay=0 for its group")
    if kind is SGD and _active(group.get("momentum", 0)):
        # Also with sparse gradients: the sparse momentum buffer keeps every row it ever held.
        return AllRows(
            "momentum goes on moving rows that were looked up earlier",
            "set momentum=0 for its group",
        )
    if sparse:
        return None
    if group.get("maximize", False):
        return AllRows(
            "maximize=True with dense gradients adds +0.0 to every row, which changes -0.0",
            "minimize the negated loss, or use sparse=True",
        )
    # In a narrow dtype a small eps is zero: 0 / (sqrt(0) + 0) is NaN in rows never looked up.
    if (kind is Adagrad or rowwise) and not _is_positive(group["eps"], dtype):
        return AllRows(
            f"eps={group['eps']} is zero in {dtype}: rows without gradient become NaN",
            "use a larger eps",
        )
    return None


def always_changes_all_rows(optimizer: Optimizer, row_local: tuple[type, ...]) -> bool:
    """Whether each step changes rows that were not looked up, whatever the hyperparameters are."""
    kind = type(optimizer)
    return not (isinstance(optimizer, row_local) or kind in _KNOWN or _is_rowwise(kind))


def _is_rowwise(kind: type) -> bool:
    return f"{kind.__module__}.{kind.__qualname__}" == _ROWWISE_ADAGRAD


def changes_gradient_rows(optimizer: Optimizer) -> bool:
    """Whether a step with a sparse gradient changes the rows of that gradient, and leaves it.

    Unless `all_rows_changed` gives a reason why it changes all.
    """
    return type(optimizer) in _KNOWN


def counts_one_change(optimizer: Optimizer) -> bool:
    """Whether a step with a sparse gradient changes a weight in place exactly once."""
    return type(optimizer) in (SGD, Adagrad)  # SparseAdam skips gradients without entries


def _unknown(kind: type) -> AllRows:
    if kind.__module__.startswith("torch.optim"):
        return AllRows(
            f"{kind.__name__} moves every row by its moments",
            "use SparseAdam with sparse=True, or Adagrad",
        )
    return AllRows(
        f"{kind.__name__} is not known to change only rows that were looked up",
        "if it does, name it in Options.row_local_optimizers",
    )


def _active(hyperparameter: Any) -> bool:
    # A tensor may change without being replaced, and reading it may wait for a GPU: assume it acts.
    return isinstance(hyperparameter, Tensor) or hyperparameter != 0


def _is_positive(eps: Any, dtype: torch.dtype) -> bool:
    """Whether it is once it is in `dtype`; each of them, where there is one for each column."""
    return bool(torch.as_tensor(eps, dtype=torch.float64, device="cpu").to(dtype).min().item() > 0)


def row_states(state: Mapping[Any, Any], rows: int) -> dict[str, Tensor]:
    """The parts of a parameter's optimizer state that have one entry for each row, by name.

    Everything else (step counts, sparse buffers, factored moments) belongs to the state tree.
    """
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if (
            isinstance(name, str)
            and 0 < len(name) <= 1024
            and isinstance(value, Tensor)
            and value.layout is torch.strided
            and 1 <= value.dim() <= 1 + _MAX_ENTRY_DIMS
            and value.shape[0] == rows
            and all(1 <= size <= _MAX_ENTRY_SIZE for size in value.shape[1:])
            and value.is_contiguous()
            and _storable(value.dtype)
            and len(found) < _MAX_STATES
        ):
            found[name] = value
    return found


def _storable(dtype: torch.dtype) -> bool:
    try:
        dtype_name(dtype)
    except ValueError:
        return False
    return True
