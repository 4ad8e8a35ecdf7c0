"""What the order of the rows of a keyed table needs to be given."""

from __future__ import annotations

from torch import Tensor

from recpoint.kernels.arguments import require_integers

__all__ = ["outside", "require_columns"]


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


def outside(slots: Tensor, position: int, rows: int) -> ValueError:
    """Return the error for a slot that the table does not have."""
    return ValueError(f"slots: {int(slots[position])}, expected 0 to {rows - 1}")
