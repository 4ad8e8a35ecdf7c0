"""Says which row states are second moments: sums or means of squares, which are never negative."""

from __future__ import annotations

from typing import Final

from recpoint.format.manifest import TableSpec

__all__ = ["squared_states"]

#: The names that torch's and FBGEMM's optimizers give to second moments: Adagrad (row-wise too),
#: Adam and its kin, RMSprop.
_NAMES: Final = frozenset({"sum", "exp_avg_sq", "max_exp_avg_sq", "square_avg"})


def squared_states(table: TableSpec) -> tuple[int, ...] | None:
    """Return the indices of the table's row states that are second moments; None if none is.

    The name decides. If an optimizer of the user's own keeps signed values under such a name, the
    agent stores them as they are (format §3.5).
    """
    indices = [n for n, state in enumerate(table.row_states) if state.name in _NAMES]
    return tuple(indices) or None
