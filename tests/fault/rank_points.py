"""Points of what ranks do together at which one of them is killed, or hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Container
from typing import Any

from recpoint.catalog.restore.chain import ChainReading
from recpoint.catalog.store import durable
from recpoint.testing import die_at as dying
from recpoint.trainer_plugin.ranks.ranks import Occasion, Ranks
from recpoint.trainer_plugin.restore.target import ModelTarget

__all__ = ["announce_protocol", "stop_at_step"]


def announce_protocol() -> None:
    """Have all that ranks do together, and each part of a restore, be a step to die at."""
    about: list[str] = []
    exchange = Ranks.exchange

    def remembered(ranks: Ranks, occasion: Occasion, *said: Any, **more: Any) -> list[list[int]]:
        about.append(occasion)
        return exchange(ranks, occasion, *said, **more)

    setattr(Ranks, "exchange", remembered)  # noqa: B010
    _announce(Ranks, "_join", lambda *_: "meet")
    # What follows an exchange of sizes are the objects.
    _announce(Ranks, "_answered", lambda *_: f"exchange {about.pop() if about else 'objects'}")
    _announce(ModelTarget, "begin", lambda *_: "restore")
    _announce(ChainReading, "_account", lambda _, entry: f"restored-{entry.content}")
    _announce(ModelTarget, "finish", lambda *_: "restored all but the state")


def _announce(owner: type, method: str, name: Callable[..., str]) -> None:
    """Have each call be a step right before it."""
    call = getattr(owner, method)

    def announced(*arguments: Any, **named: Any) -> Any:
        durable.step(name(*arguments))
        return call(*arguments, **named)

    setattr(owner, method, announced)


def stop_at_step(
    kill: int | str | None,
    by: signal.Signals,
    *,
    besides: Container[str],
    count_into: str | None,
) -> None:
    """Send this process a signal at a step; arguments as for `rank_lives.rank_life`."""
    if not isinstance(kill, str):
        dying.install(die_at=kill, besides=besides, count_into=count_into)
        return

    def observe(name: str) -> None:
        if name.startswith(kill):
            os.kill(os.getpid(), by)

    durable.set_observer(observe)
