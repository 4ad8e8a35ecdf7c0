"""What first values need to be given."""

from __future__ import annotations

__all__ = ["require_columns"]


def require_columns(columns: range) -> None:
    """Refuse columns that do not follow one another.

    Raises:
        ValueError: says what was found.
    """
    if columns.step != 1 or columns.start < 0:
        raise ValueError(f"columns: {columns!r}, expected a range from 0 on, of step 1")
