"""Checks the grace: younger objects may still be read or written."""

from __future__ import annotations

from typing import Final

from recpoint.errors import SettingsError

__all__ = [
    "GRACE_FLOOR_SECONDS",
    "require_grace",
]


#: Longer than any restore without a lease, and than any upload of a chunk.
GRACE_FLOOR_SECONDS: Final = 3600.0


def require_grace(
    grace_seconds: float, *, floor_seconds: float = GRACE_FLOOR_SECONDS, why: str
) -> None:
    """Refuse a grace that is too short.

    Args:
        grace_seconds: the grace that the caller asked for.
        floor_seconds: the shortest allowed grace.
        why: why it must be that long, for the error.

    Raises:
        SettingsError: the grace is shorter.
    """
    if not grace_seconds >= floor_seconds:
        raise SettingsError(
            "grace_seconds",
            found=str(grace_seconds),
            expected=f"at least {floor_seconds:g}: {why}",
            next_step="give a longer grace; 86400 is a day",
        )
