"""What a rank of a test's job has of its own, and what it says to the others, to be looked at."""

from __future__ import annotations

from typing import Any

from recpoint.trainer_plugin.ranks.ranks import Occasion, Ranks

__all__ = ["Origin", "count_exchanges"]


class Origin:
    """An extra: the rank in whose process it began, through all restores."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rank = state["rank"]


def count_exchanges() -> list[str]:
    """What each exchange of this process with other ranks is about, from now on."""
    found: list[str] = []
    exchange = Ranks.exchange

    def counted(ranks: Ranks, about: Occasion, *said: Any, **more: Any) -> list[list[int]]:
        found.append(about)
        return exchange(ranks, about, *said, **more)

    setattr(Ranks, "exchange", counted)  # noqa: B010
    return found
