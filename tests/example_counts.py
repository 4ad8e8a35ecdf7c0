"""Says how many examples the property tests draw: half of them by day, all by night."""

from __future__ import annotations

import os

__all__ = ["examples"]

#: `make nightly` sets it.
_ALL = os.environ.get("RECPOINT_ALL_EXAMPLES") == "1"


def examples(count: int) -> int:
    """Return how many of `count` examples a test draws in this process."""
    return count if _ALL else (count + 1) // 2
