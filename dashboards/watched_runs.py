"""Refreshes the runs that a page shows, each in its own thread, so that none waits for another.

A page reads the newest overview at once, even if the store is slow or cannot be reached.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from recpoint.catalog.overview.alarms import Alarm, alarms
from recpoint.catalog.overview.overview import RunOverview
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.store.run_url import naming_run, parse_run_url
from recpoint.dashboards.catalog_watch import current_watch
from recpoint.errors import ChainError, FormatError, RecpointError, RunRecordLost, SettingsError

__all__ = ["REFRESH_SECONDS", "RunView", "Standing", "WatchedRun", "WatchedRuns"]


_LOG = logging.getLogger("recpoint.dashboard")

REFRESH_SECONDS = 5.0

#: After a refresh, rest at least so many times as long as it took: a slow store, or fifty runs of
#: ten thousand checkpoints, must not be read all the time.
_REST = 4.0

#: A refresh is overdue after so long, plus ten times what the refresh before it took: a file server
#: that hangs raises no error.
_PATIENCE_SECONDS = 60.0

#: The state of a run in one word. `reading`: not read yet; `no answer`: the newest refresh failed,
#: or has not come back.
Standing = Literal["alarm", "no answer", "reading", "ended", "starting", "fine"]


@dataclass(frozen=True, kw_only=True)
class RunView:
    """What is known of a run at one moment; times are monotonic, in seconds.

    Attributes:
        overview: the last one that was read; None: none yet.
        alarms: of that overview.
        error: why the newest refresh failed; None: it succeeded.
        at: time of the overview; None: there is none.
        failing_since: time of the first of the consecutive failures up to now; None: none failed.
        version: grows with every refresh.
        due: time by which the next refresh should have ended; None: no thread refreshes the run.
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
        """Whether a refresh has not come back in time, as when a file server hangs."""
        return self.due is not None and time.monotonic() > self.due

    @property
    def damaged(self) -> bool:
        """Whether the newest refresh found the catalog damaged: waiting does not repair that."""
        return isinstance(self.error, FormatError | ChainError | RunRecordLost)

    @property
    def standing(self) -> Standing:
        """The state of the run in one word; if several apply, the worst."""
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
        """Return the age of the overview; None: there is none."""
        return None if self.at is None else time.monotonic() - self.at


class WatchedRun:
    """Refreshes the overview of one run again and again.

    Args:
        url: run URL, as the user gave it.
        interval_seconds: least time from the end of one refresh to the start of the next.
        intervals: so many checkpoint intervals of the run without a commit raise an alarm.
    """

    def __init__(self, url: str, *, interval_seconds: float, intervals: float) -> None:
        self._url = url
        self._interval_seconds = interval_seconds
        self._intervals = intervals
        self._stop = threading.Event()
        self._watch: RunWatch | None = None
        self.seen = RunView()
        try:
            self.name = parse_run_url(url).url
        except SettingsError as error:
            # The URL may hold a credential; the error's subject leaves it out.
            self.name = error.subject
        # A daemon thread: a store that hangs must not keep the page's process from ending.
        self._thread = threading.Thread(target=self._run, name="recpoint-watch", daemon=True)

    def start(self) -> None:
        """Start the thread that refreshes the run."""
        self.seen = replace(self.seen, due=time.monotonic() + _PATIENCE_SECONDS)
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to stop; do not wait for a refresh in progress."""
        self._stop.set()

    def refresh(self) -> RunView:
        """Read the run once, in the calling thread, and return what is known of it now."""
        view = self.seen
        version = view.version + 1
        began = time.monotonic()
        try:
            self._watch = current_watch(self._url, self._watch)
            overview = self._watch.refresh()
        except Exception as raised:  # else the thread would end and the page show "fine" for ever
            error = raised if isinstance(raised, RecpointError) else self._unexpected(raised)
            error.next_step = naming_run(error.next_step, self.name)
            failing_since = view.failing_since
            now = time.monotonic()
            due = self._due(now, now - began)
            self.seen = replace(
                view,
                error=error,
                failing_since=now if failing_since is None else failing_since,
                version=version,
                due=due,
            )
        else:
            now = time.monotonic()
            self.seen = RunView(
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
        _LOG.error("%s: the run cannot be read", self.name, exc_info=raised)
        self._watch = None
        return RecpointError(
            self.name,
            found=f"{type(raised).__name__}: {raised}",
            expected="a catalog that this process can read",
            next_step="see the log of recpoint dashboard, which tries again by itself",
        )

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            self.refresh()
            self._stop.wait(self._pause(time.monotonic() - began))


class WatchedRuns:
    """The runs that a page shows, in the order given, without duplicates.

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
        """Start to refresh all runs."""
        for run in self._runs:
            run.start()

    def stop(self) -> None:
        """Ask all threads to stop."""
        for run in self._runs:
            run.stop()

    @property
    def runs(self) -> Sequence[WatchedRun]:
        """All runs."""
        return self._runs
