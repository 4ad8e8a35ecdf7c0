"""Sweeps a host's runs once a day in the background.

Only the trainer's own host knows which jobs are staged and will still be committed, so its agent
sweeps the run. Each sweep has a process of the lowest priority, and begins while no job is due.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.catalog.staging.notes import read_note, write_note_durably
from recpoint.catalog.staging.trainer_note import read_trainer_note, trainer_state
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import FormatError, RecpointError, SettingsError, StagingRefused
from recpoint.flows.agent.background import BackgroundThread, ChildProcess, RunTries
from recpoint.format.notes import CONSOLIDATION_NOTE, SWEEP_NOTE, SweepNote

__all__ = [
    "BackgroundSweep",
    "SWEEP_EVERY_SECONDS",
    "last_sweep",
    "note_sweep",
    "require_sweep_period",
    "swept_ms",
]


_LOG = logging.getLogger("recpoint.sweep")

SWEEP_EVERY_SECONDS: Final = 24 * 3600.0

#: The same as in prefect.yaml: longer than any persist or consolidation takes.
_GRACE_SECONDS: Final = 24 * 3600.0
_LOOK_SECONDS: Final = 1.0
#: If jobs are due all the time, an overdue sweep waits for so long and then begins nevertheless.
_PATIENCE_SECONDS: Final = 3600.0
#: Pauses after a failure; each failure in a row doubles the pause.
_FIRST_PAUSE_SECONDS: Final = 60.0
_LONGEST_PAUSE_SECONDS: Final = 3600.0
#: How often to check whether a run that needs no further sweep is trained again.
_SETTLED_SECONDS: Final = 60.0


def require_sweep_period(every_seconds: float | None) -> None:
    """Raise SettingsError if the period between sweeps is less than a second."""
    if every_seconds is not None and not every_seconds >= 1.0:
        raise SettingsError(
            "sweep_every",
            found=str(every_seconds),
            expected="at least a second, or None for never",
            next_step="give it in seconds; 86400 is a day",
        )


def note_sweep(staged_run: StagedRun, *, ended_ms: int | None = None) -> None:
    """Note that a run was swept now, or that the wait for its first sweep begins (format §7).

    Args:
        staged_run: the run.
        ended_ms: see `SweepNote`.

    Raises:
        StagingRefused: the directory belongs to another user.
        OSError: the note cannot be written.
    """
    write_note_durably(staged_run, SWEEP_NOTE, SweepNote(at_ms=now_ms(), ended_ms=ended_ms))


def last_sweep(staged_run: StagedRun) -> SweepNote | None:
    """Return the note of the last sweep; None if there is none or it is damaged."""
    return read_note(staged_run, SWEEP_NOTE)


def swept_ms(staged_run: StagedRun) -> int | None:
    """Return `SweepNote.at_ms` of a run; None as for `last_sweep`."""
    note = last_sweep(staged_run)
    return None if note is None else note.at_ms


class BackgroundSweep:
    """Sweeps each run of a staging area when its last sweep is long enough ago.

    The time of the last sweep is kept in the run's directory, so that it survives a restart of the
    agent. A run that is seen for the first time is due after one period. A run whose training has
    ended is swept until a sweep leaves nothing for a later sweep; after that it is swept only if it
    is trained again.

    Args:
        staging: the staging area.
        every_seconds: the period; None: never sweep.
        prefect_url: returns the URL at which Prefect answers now; None: it does not answer.
        tell: called with the run when its status has changed.
    """

    def __init__(
        self,
        staging: Path,
        *,
        every_seconds: float | None,
        prefect_url: Callable[[], str | None],
        tell: Callable[[StagedRun], None],
    ) -> None:
        require_sweep_period(every_seconds)
        self._staging = staging
        self._every = every_seconds
        self._tell = tell
        self._runs: dict[StagedRun, RunTries] = {}
        self._busy = False
        self._at_work: StagedRun | None = None
        self._child = ChildProcess("recpoint.flows.agent.sweep_process", prefect_url=prefect_url)
        self._thread = BackgroundThread(
            "sweep", self._sweep_due_runs, every_seconds=_LOOK_SECONDS, child=self._child
        )

    def start(self) -> None:
        """Start the thread, unless the period is None."""
        if self._every is not None:
            self._thread.start()

    def give_way(self, busy: bool) -> None:
        """Begin no sweep while jobs are due (`busy`).

        A sweep that has begun is not stopped: it must remove objects soon after it has checked
        them.
        """
        self._busy = busy

    def stop(self) -> None:
        """End the thread and kill a sweep at work; the next sweep does the rest."""
        self._thread.stop()

    def status(self, staged_run: StagedRun) -> dict[str, object] | None:
        """Return a run's sweeps for its status file; None: this agent does not sweep."""
        if self._every is None:
            return None
        tries = self._runs.get(staged_run, RunTries())
        state = "at work" if self._at_work == staged_run else "idle"
        return {**tries.status(state), "last_ms": swept_ms(staged_run)}

    def _sweep_due_runs(self) -> None:
        try:
            found_runs = staged_runs(self._staging)
        except (OSError, StagingRefused):
            return  # the agent logs this error
        except Exception:  # no error may end this thread
            _LOG.exception("cannot list the runs to sweep; next try in a moment")
            return
        for gone in self._runs.keys() - set(found_runs):
            del self._runs[gone]
        for staged_run in found_runs:
            if self._thread.is_stopping:
                return
            try:
                self._sweep_if_due(staged_run)
            except Exception as error:  # no error may end this thread
                self._failed(staged_run, f"{type(error).__name__}: {error}")
                if not isinstance(error, RecpointError | OSError):
                    _LOG.exception("%s: unexpected error in a sweep", staged_run.name)

    def _sweep_if_due(self, staged_run: StagedRun) -> None:
        tries = self._runs.setdefault(staged_run, RunTries())
        if time.monotonic() < tries.retry_at:
            return
        last = last_sweep(staged_run)
        at_ms = now_ms()
        if last is None or last.at_ms > at_ms:  # never swept, or the clock was set back since
            note_sweep(staged_run)
            return
        assert self._every is not None
        late_seconds = (at_ms - last.at_ms) / 1000 - self._every
        if late_seconds < 0:
            return
        if self._busy and late_seconds < _PATIENCE_SECONDS:
            return
        ended_ms = _ended_ms(staged_run)
        if ended_ms is not None and last.ended_ms == ended_ms:
            tries.retry_at = time.monotonic() + _SETTLED_SECONDS
            return
        run_url = _run_url(staged_run)
        if run_url is None:
            return  # the run's URL is not known yet
        self._at_work = staged_run
        try:
            self._tell(staged_run)
            self._sweep(staged_run, tries, run_url, ended_ms)
        finally:
            self._at_work = None
            self._tell(staged_run)

    def _sweep(
        self, staged_run: StagedRun, tries: RunTries, run_url: str, ended_ms: int | None
    ) -> None:
        answer = self._child.run(run_url, str(staged_run), str(_GRACE_SECONDS))
        if self._thread.is_stopping:
            return
        if "error" in answer:
            self._failed(staged_run, str(answer["error"]))
            return
        for_good = answer.get("nothing_left") or "gone" in answer
        note_sweep(staged_run, ended_ms=ended_ms if for_good else None)
        tries.succeed(str(answer.get("done") or answer.get("gone")))
        _LOG.info("%s: swept: %s", staged_run.name, tries.last)

    def _failed(self, staged_run: StagedRun, error: str) -> None:
        tries = self._runs.setdefault(staged_run, RunTries())
        tries.fail(error)
        pause = tries.pause(first=_FIRST_PAUSE_SECONDS, longest=_LONGEST_PAUSE_SECONDS)
        _LOG.warning("%s: not swept, next try in %.0f s: %s", staged_run.name, pause, error)


def _ended_ms(staged_run: StagedRun) -> int | None:
    """Return when training ended, in milliseconds since the epoch, as the trainer noted it.

    None: it has not ended, or jobs are still staged.
    """
    note = read_trainer_note(staged_run)
    if note is None or trainer_state(staged_run, note) != "ended" or staged_run.staged_jobs():
        return None
    return note.at_ms


def _run_url(staged_run: StagedRun) -> str | None:
    """Return the URL of the run, as its trainer, an earlier agent or a staged job gives it."""
    if (note := read_trainer_note(staged_run)) is not None:
        return note.run_url
    if (consolidated := read_note(staged_run, CONSOLIDATION_NOTE)) is not None:
        return consolidated.run_url
    for path in staged_run.staged_jobs():
        try:
            return job_files.read_job(path).run_url
        except (FormatError, StagingRefused, FileNotFoundError):
            continue
    return None
