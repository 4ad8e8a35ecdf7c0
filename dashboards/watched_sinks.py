"""Looks at the sinks that a page shows, each in its own thread, so that none waits for another.

A sink itself says which checkpoint its readers see, so a page needs no publisher for that.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Final

from recpoint.errors import RecpointError
from recpoint.serving.sinks.opening import open_sink
from recpoint.serving.sinks.records import CommittedVersion

__all__ = ["SinkView", "WatchedSink"]

#: A look is overdue after so long: a server that hangs may raise no error.
_PATIENCE_SECONDS: Final = 120.0


@dataclass(frozen=True, kw_only=True)
class SinkView:
    """What is known of a sink at one moment; times are monotonic, in seconds.

    Attributes:
        looked: when the sink was read last; None: it was not read yet.
        committed: the version that readers saw then; None: none, or it was not read yet.
        error: why the newest look failed; None: it succeeded.
        due: time by which the next look should have ended; None: no thread looks.
    """

    looked: float | None = None
    committed: CommittedVersion | None = None
    error: RecpointError | None = None
    due: float | None = None

    @property
    def has_no_answer(self) -> bool:
        """Whether the newest look failed, or has not come back in time."""
        return self.error is not None or (self.due is not None and time.monotonic() > self.due)


class WatchedSink:
    """Reads the position of one sink again and again.

    Args:
        url: of the sink, with a password if there is one.
        interval_seconds: from the end of one look to the start of the next.

    Attributes:
        name: the URL without the password.
        seen: what the newest looks have found; replaced and never changed.

    Raises:
        SettingsError: no sink has such a URL, or the library that it needs is not installed.
    """

    def __init__(self, url: str, *, interval_seconds: float) -> None:
        self._url = url
        self._interval_seconds = interval_seconds
        self._stop = threading.Event()
        self.seen = SinkView()
        with open_sink(url) as sink:
            self.name = sink.url
        # A daemon thread: a server that hangs must not keep the page's process from ending.
        self._thread = threading.Thread(target=self._run, name="recpoint-sink", daemon=True)

    def start(self) -> None:
        """Start the thread that looks."""
        self.seen = replace(self.seen, due=time.monotonic() + _PATIENCE_SECONDS)
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to stop; do not wait for a look in progress."""
        self._stop.set()

    def look(self) -> SinkView:
        """Read the sink once, in the calling thread, and return what is known of it now."""
        error: RecpointError | None = None
        committed, looked = self.seen.committed, self.seen.looked
        try:
            with open_sink(self._url) as sink:
                committed = sink.position().committed
            looked = time.monotonic()
        except RecpointError as failure:
            error = failure
        due = time.monotonic() + self._interval_seconds + _PATIENCE_SECONDS
        self.seen = SinkView(looked=looked, committed=committed, error=error, due=due)
        return self.seen

    def _run(self) -> None:
        while not self._stop.is_set():
            self.look()
            self._stop.wait(self._interval_seconds)
