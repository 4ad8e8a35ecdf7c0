"""Finds how many writes at once a store and its network take, from what is written.

More writes at once are faster until the network or the store is full; from there on they only take
memory. A store that is asked for too much answers some requests with 429 or 503. Neither point is
known beforehand, and both move.
"""

from __future__ import annotations

from typing import Final

__all__ = ["FIRST_STREAMS", "StreamCount"]

#: Where the search begins.
FIRST_STREAMS: Final = 4

#: A measurement takes at least so long, and two writes of each stream.
_MEASURED_SECONDS: Final = 1.0
_WRITES_EACH: Final = 2
#: More streams stay if they bring this share of what they would bring on a network without end, and
#: fewer if they lose less than this share.
_GROWTH_SHARE: Final = 0.5
#: After a trial that failed, so many measurements pass before the next.
_REST: Final = 8
#: Refusals that come together count once.
_REFUSALS_APART_SECONDS: Final = 2.0


class StreamCount:
    """The number of writes at once: more while that is faster, half after the store refuses.

    It measures what is written with so many streams, and then with a quarter more (at least one
    more). If that was faster by at least half of what was added, it goes on from there; if not, it
    goes back, and tries a fifth fewer after a while, then more again. Fewer stay if they lose less
    than half of what was taken: so an unlucky measurement is made good. Times in which the writers
    had no use for all streams count for nothing.

    It reads no clock and starts nothing; its caller serializes the calls.

    Args:
        most: the most streams, 1 or more.

    Attributes:
        streams: the number now, from 1 to `most`.
    """

    def __init__(self, most: int) -> None:
        self.streams = min(FIRST_STREAMS, most)
        self._most = most
        self._before: tuple[int, float] | None = None  # streams and bytes a second before a trial
        self._rest = 0
        self._tries_more = True
        self._refused_seconds: float | None = None
        self._begin()

    def wrote(self, size_bytes: int, *, at_seconds: float, all_used: bool) -> None:
        """Note the end of a write.

        Args:
            size_bytes: the bytes that it wrote.
            at_seconds: when it ended, by a clock that nobody sets.
            all_used: whether all streams were in use then.
        """
        if not all_used:
            self._begin()
            return
        if self._settling:  # writes that began beside another number of streams
            self._settling -= 1
            self._began_seconds = at_seconds
            return
        self._bytes += size_bytes
        self._writes += 1
        seconds = at_seconds - self._began_seconds
        # Streams that began together also end together: only whole rounds have the right rate.
        rounds, more = divmod(self._writes, self.streams)
        if not more and rounds >= _WRITES_EACH and seconds >= _MEASURED_SECONDS:
            self._measured(self._bytes / seconds)
            self._begin()

    def refused(self, *, at_seconds: float) -> None:
        """Note that the store answered that it is asked for too much."""
        last_seconds = self._refused_seconds
        self._refused_seconds = at_seconds
        if last_seconds is not None and at_seconds - last_seconds < _REFUSALS_APART_SECONDS:
            return
        self.streams = max(1, self.streams // 2)
        self._before, self._rest = None, _REST
        self._begin()

    def _begin(self) -> None:
        self._settling, self._began_seconds = self.streams, 0.0
        self._bytes = self._writes = 0

    def _measured(self, bytes_per_second: float) -> None:
        if self._before is not None:
            streams, rate = self._before
            self._before = None
            more = (self.streams - streams) / streams
            if bytes_per_second < rate * (1 + _GROWTH_SHARE * more):
                self.streams, self._rest = streams, _REST
                self._tries_more = not self._tries_more
                return
        if self._rest:
            self._rest -= 1
            return
        if self._tries_more:
            streams = min(self._most, self.streams + max(1, self.streams // 4))
        else:
            streams = max(1, self.streams - max(1, self.streams // 5))
        if streams == self.streams:
            self._tries_more, self._rest = not self._tries_more, _REST
            return
        self._before = self.streams, bytes_per_second
        self.streams = streams
