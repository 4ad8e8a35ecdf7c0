"""Reads the catalogs of the runs that an agent serves, periodically and in the background.

A scrape never waits for a store: it gets the values read last and the time of that read. Each run
has its own thread, so if a store hangs, only the values of its own runs grow old.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from recpoint.catalog.overview.overview import RunOverview
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import default_staging_root
from recpoint.catalog.store.contract import now_ms
from recpoint.catalog.store.store import open_store
from recpoint.counting import CAUSES, cause_of
from recpoint.errors import RecpointError
from recpoint.format.record_kinds import VALIDATION

__all__ = ["CatalogFacts", "CatalogWatch", "REFRESH_SECONDS", "current_watch", "look_up"]


_LOG = logging.getLogger("recpoint.metrics")

REFRESH_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 1.0


class CatalogFacts(NamedTuple):
    """A run's catalog at one moment; times are in milliseconds since the epoch.

    Attributes:
        overview: of the run.
        created_ms: when the run was made, by the clock of the host that made it.
        last_validation_ms: time of the newest validation that compared bytes and passed, by the
            store's clock; None: there is none.
    """

    overview: RunOverview
    created_ms: int
    last_validation_ms: int | None


def current_watch(run_url: str, watch: RunWatch | None) -> RunWatch:
    """Return `watch` if its run is still at `run_url`, else a new watch of the run found there.

    A local store lists nothing if its mount is gone. Without this check, the run would look as if
    it had lost everything.

    Raises:
        RecpointError: there is no run at the URL, or it cannot be read.
    """
    run = Run.open(open_store(run_url) if watch is None else watch.run.store)
    if watch is not None and watch.run.id == run.id:
        return watch
    return RunWatch(run, staging=default_staging_root())


def look_up(watch: RunWatch) -> CatalogFacts:
    """Read the catalog of a run: a few listings, and the manifests that are new.

    Raises:
        RecpointError: the run cannot be read.
    """
    run = watch.run
    validations = (
        info.modified_ms
        for name, info in run.records(VALIDATION).listed()
        if name.result == "passed" and name.level != "metadata"
    )
    return CatalogFacts(
        overview=watch.refresh(),
        created_ms=run.record.created_ms,
        last_validation_ms=max(validations, default=None),
    )


class _PolledRun:
    """One run: the facts read last, the time of the first try, and failures counted by cause."""

    def __init__(self) -> None:
        self.since_ms = now_ms()
        self.facts: CatalogFacts | None = None
        self.failures = dict.fromkeys(CAUSES, 0)
        self.stop = threading.Event()


class CatalogWatch:
    """Reads the catalogs of an agent's runs, until `stop`.

    Args:
        runs: returns the URLs of the agent's runs; called every second.
        refresh_seconds: between two reads of a run's catalog.
    """

    def __init__(
        self, runs: Callable[[], Iterable[str]], *, refresh_seconds: float = REFRESH_SECONDS
    ) -> None:
        self._runs = runs
        self._refresh_seconds = refresh_seconds
        self._watched: dict[str, _PolledRun] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._keep_looking_up, name="catalog-watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop reading; a thread that waits for a store is left to end with the process."""
        self._stop.set()
        self._thread.join()
        for watched in self._watched.values():
            watched.stop.set()

    def facts(self, run: str) -> CatalogFacts | None:
        """Return the facts that were read last; None: none yet."""
        watched = self._watched.get(run)
        return None if watched is None else watched.facts

    def since_ms(self, run: str) -> int | None:
        """Return when the first read of a run began, since the epoch; None: not yet."""
        watched = self._watched.get(run)
        return None if watched is None else watched.since_ms

    def failures(self, run: str) -> Mapping[str, int]:
        """Return the number of failed reads for each cause in `CAUSES`."""
        watched = self._watched.get(run)
        return dict.fromkeys(CAUSES, 0) if watched is None else dict(watched.failures)

    def _keep_looking_up(self) -> None:
        while not self._stop.wait(min(_POLL_SECONDS, self._refresh_seconds)):
            try:
                current_runs = set(self._runs())
            except Exception:  # else the thread would end, and no new run would ever be read
                _LOG.exception("the agent's runs cannot be listed; trying again")
                continue
            for ended_run in self._watched.keys() - current_runs:
                self._watched.pop(ended_run).stop.set()
            for run in current_runs - self._watched.keys():
                watched = _PolledRun()
                thread = threading.Thread(
                    target=self._watch, args=(run, watched), name=f"catalog {run}", daemon=True
                )
                try:
                    thread.start()
                except (RuntimeError, MemoryError) as error:  # python's: can't start new thread
                    _LOG.warning("%s: no thread to read its catalog; trying again: %s", run, error)
                    break  # the runs after it would fail too; the next round tries them all
                self._watched[run] = watched

    def _watch(self, run: str, watched: _PolledRun) -> None:
        watch: RunWatch | None = None
        while True:
            try:
                watch = current_watch(run, watch)
                watched.facts = look_up(watch)
            except Exception as error:  # else the thread would end, and the run's values grow old
                watch = None
                watched.failures[cause_of(error)] += 1
                expected = isinstance(error, RecpointError | OSError | MemoryError)
                _LOG.warning(
                    "%s: the catalog cannot be read: %s: %s",
                    run,
                    type(error).__name__,
                    error,
                    exc_info=None if expected else error,
                )
            if watched.stop.wait(self._refresh_seconds):
                return
