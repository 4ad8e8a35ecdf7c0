"""Says how many examples the property tests draw: a third of them by day, all by night."""

from __future__ import annotations

import os

__all__ = ["draws_all", "examples"]

#: `make nightly` sets it.
_ALL = os.environ.get("RECPOINT_ALL_EXAMPLES") == "1"


def draws_all() -> bool:
    """Return whether this process leaves nothing out: it runs the part `examples`."""
    return _ALL


def examples(count: int) -> int:
    """Return how many of `count` examples a test draws in this process."""
    return count if _ALL else (count + 2) // 3
