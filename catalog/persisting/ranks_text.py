"""Ranks, for people."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

__all__ = ["ranks_text"]

_MOST_NAMED: Final = 20


def ranks_text(ranks: Collection[int]) -> str:
    """Ranks for people, few enough to be read: `rank 1`, `ranks 1, 2, 3`."""
    named = ", ".join(str(rank) for rank in sorted(ranks)[:_MOST_NAMED])
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}{more}"
