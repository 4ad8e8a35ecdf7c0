"""What the order of the rows of a keyed table needs to be given."""

from __future__ import annotations

from torch import Tensor

from recpoint.kernels.arguments import require_integers

__all__ = ["require_columns", "require_slots"]


def require_columns(slot_keys: Tensor, last_use: Tensor, uses: Tensor | None) -> None:
    """Refuse columns that are not vectors of int64 on the CPU of one length.

    Raises:
        ValueError: names the argument.
    """
    columns = {"slot_keys": slot_keys, "last_use": last_use}
    if uses is not None:
        columns["uses"] = uses
    for name, column in columns.items():
        require_integers(name, column)
        if len(column) != len(slot_keys):
            raise ValueError(f"{name}: {len(column)} rows, expected {len(slot_keys)} as slot_keys")


def require_slots(slots: Tensor, rows: int) -> None:
    """Refuse what is no vector of slots of a table.

    Raises:
        ValueError: says what was found.
    """
    require_integers("slots", slots)
    if slots.shape[0] and not 0 <= int(slots.min()) <= int(slots.max()) < rows:
        raise ValueError(
            f"slots: {int(slots.min())} to {int(slots.max())}, expected 0 to {rows - 1}"
        )
