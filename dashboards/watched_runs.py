"""Runs that a page shows: each is looked at by a thread of its own, so that none waits for another.

What a page reads is the newest snapshot, at once, however slow or absent the store is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from recpoint.catalog.overview.overview import Alarm, RunOverview, alarms
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.store.run_url import naming_run, parse_run_url
from recpoint.dashboards.catalog_watch import current_watch
from recpoint.errors import ChainError, FormatError, RecpointError, RunRecordLost, SettingsError

__all__ = ["REFRESH_SECONDS", "Seen", "Standing", "WatchedRun", "WatchedRuns"]


_LOG = logging.getLogger("recpoint.dashboard")

REFRESH_SECONDS = 5.0

#: After a look that took long, rest so many times as long: a slow store, or fifty runs of ten
#: thousand checkpoints, are asked less often and not all the time.
_REST = 4.0

#: How long a look may take that has taken no time so far: a file server that hangs says nothing.
_PATIENCE_SECONDS = 60.0

#: What a run amounts to: `reading`: not seen yet; `no answer`: the newest look failed, or has not
#: come back.
Standing = Literal["alarm", "no answer", "reading", "ended", "starting", "fine"]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is known of a run at one moment.

    Attributes:
        overview: as it was last seen; None: never.
        alarms: of that overview.
        error: why the newest look failed; None: it did not.
        at: monotonic time of the overview; None: there is none.
        failing_since: monotonic time of the first of the failures in a row; None: none.
        version: grows with every look.
        due: monotonic time by which the next look should be over; None: nobody looks.
    """

    overview: RunOverview | None = None
    alarms: tuple[Alarm, ...] = ()
    error: RecpointError | None = None
    at: float | None = None
    failing_since: float | None = None
    version: int = 0
    due: float | None = None

    @property
    def overdue(self) -> bool:
        """Whether a look has not come back, as from a file server that hangs."""
        return self.due is not None and time.monotonic() > self.due

    @property
    def damaged(self) -> bool:
        """Whether the newest look failed at the catalog itself: waiting will not mend that."""
        return isinstance(self.error, FormatError | ChainError | RunRecordLost)

    @property
    def standing(self) -> Standing:
        """What to say of it in one word: the worst comes first."""
        if self.alarms or self.damaged:
            return "alarm"
        if self.error is not None or self.overdue:
            return "no answer"
        if self.overview is None:
            return "reading"
        if self.overview.ended is not None:
            return "ended"
        return "fine" if self.overview.checkpoints else "starting"

    def age_seconds(self) -> float | None:
        """How old the overview is; None: there is none."""
        return None if self.at is None else time.monotonic() - self.at


class WatchedRun:
    """One run, looked at again and again.

    Args:
        url: as it was given.
        interval_seconds: from the end of one look to the next, at least.
        intervals: of a run's own, without a commit, that are an alarm.
    """

    def __init__(self, url: str, *, interval_seconds: float, intervals: float) -> None:
        self._url = url
        self._interval_seconds = interval_seconds
        self._intervals = intervals
        self._stop = threading.Event()
        self._watch: RunWatch | None = None
        self.seen = Seen()
        try:
            self.name = parse_run_url(url).url
        except SettingsError as error:
            # It may hold a credential: not even its own error repeats that.
            self.name = error.subject
        # A daemon: a store that hangs must not keep the page's process.
        self._thread = threading.Thread(target=self._run, name="recpoint-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self.seen = replace(self.seen, due=time.monotonic() + _PATIENCE_SECONDS)
        self._thread.start()

    def stop(self) -> None:
        """Look no more; does not wait for a look that is going on."""
        self._stop.set()

    def refresh(self) -> Seen:
        """Look once, here and now."""
        before = self.seen
        version = before.version + 1
        began = time.monotonic()
        try:
            self._watch = current_watch(self._url, self._watch)
            overview = self._watch.refresh()
        except Exception as raised:  # or the thread would end, and a page be fine for ever
            error = raised if isinstance(raised, RecpointError) else self._unexpected(raised)
            error.next_step = naming_run(error.next_step, self.name)
            since = before.failing_since
            now = time.monotonic()
            due = self._due(now, now - began)
            self.seen = replace(
                before,
                error=error,
                failing_since=now if since is None else since,
                version=version,
                due=due,
            )
        else:
            now = time.monotonic()
            self.seen = Seen(
                overview=overview,
                alarms=alarms(overview, intervals=self._intervals),
                at=now,
                version=version,
                due=self._due(now, now - began),
            )
        return self.seen

    def _due(self, now: float, took: float) -> float:
        return now + self._pause(took) + _PATIENCE_SECONDS + 10 * took

    def _pause(self, took: float) -> float:
        return max(self._interval_seconds, _REST * took)

    def _unexpected(self, raised: Exception) -> RecpointError:
        _LOG.error("%s cannot be looked at", self.name, exc_info=raised)
        self._watch = None
        return RecpointError(
            self.name,
            found=f"{type(raised).__name__}: {raised}",
            expected="a catalog that this process can read",
            next_step="see the log of recpoint dashboard; it tries again",
        )

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            self.refresh()
            self._stop.wait(self._pause(time.monotonic() - began))


class WatchedRuns:
    """The runs of a page, in the order given, each URL once.

    Args:
        urls: run URLs.
        interval_seconds, intervals: see `WatchedRun`.
    """

    def __init__(self, urls: Iterable[str], *, interval_seconds: float, intervals: float) -> None:
        self._runs = [
            WatchedRun(url, interval_seconds=interval_seconds, intervals=intervals)
            for url in dict.fromkeys(urls)
        ]

    def start(self) -> None:
        """Begin to look at all of them."""
        for run in self._runs:
            run.start()

    def stop(self) -> None:
        """Look no more."""
        for run in self._runs:
            run.stop()

    @property
    def runs(self) -> Sequence[WatchedRun]:
        """All of them."""
        return self._runs
