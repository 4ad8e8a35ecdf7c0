"""Paces a publisher: while a server is busy with its readers, writes leave it time.

Redis executes one command after another, and a publisher that writes without a pause takes a core
of it. A publisher cannot see readers, but it feels them: its own requests take longer than at their
best. It then pauses in proportion, as LEDBAT does on networks (RFC 6817). On a server that nobody
else uses, requests take no longer than at their best, so there are hardly any pauses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["RedisPace"]

#: Requests that take up to so many times their best are taken for undisturbed.
_UNDISTURBED: Final = 1.3
#: With each request the best time grows by this factor: a server may have become slower for good.
#: So the best is about the least of the last few hundred requests.
_FORGETTING: Final = 1.002


class RedisPace:
    """Says how long to pause after each request; for one thread at a time.

    Args:
        pause: seconds of pause for each second that a request takes longer than at its best; 0: no
            pauses. A publication takes at most `1 + pause` times as long as without pauses.
    """

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._best_seconds: dict[object, float] = {}

    def pause_seconds(self, kind: object, taken_seconds: float) -> float:
        """Return how long to pause after a request.

        Args:
            kind: requests of one kind take equally long on a server that does nothing else.
            taken_seconds: from the request to its answer.
        """
        best_seconds = self._best_seconds.get(kind, taken_seconds) * _FORGETTING
        self._best_seconds[kind] = min(best_seconds, taken_seconds)
        excess_seconds = taken_seconds - _UNDISTURBED * self._best_seconds[kind]
        return self._pause * max(0.0, excess_seconds)

    @contextmanager
    def paced(self, kind: object) -> Iterator[None]:
        """Make a request in a `with` block, and pause after it; an error ends the block at once.

        Args:
            kind: as for `pause_seconds`.
        """
        start = time.perf_counter()
        yield
        pause_seconds = self.pause_seconds(kind, time.perf_counter() - start)
        if pause_seconds > 0:
            time.sleep(pause_seconds)
