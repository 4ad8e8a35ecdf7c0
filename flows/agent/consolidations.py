"""Consolidates runs in the background, one at a time, in a process that waits while jobs are due.

A staged job never waits for a consolidation: the consolidating process has the lowest priority, is
stopped (SIGSTOP) while a job is due or at work, and has its own memory. If jobs leave it no time at
all, chains grow. The trainer's policy sees that in its outcomes, and writes a full checkpoint.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

from recpoint.catalog.consolidate.choice import choose_consolidation
from recpoint.catalog.consolidate.plan import ConsolidationTriggers, newest_checkpoint
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.notes import read_note, remove_note, write_note_durably
from recpoint.catalog.store.store import open_store
from recpoint.errors import NothingToRestore, RecpointError, RunRecordLost, StagingRefused
from recpoint.flows.agent.background import BackgroundThread, ChildProcess, RunTries
from recpoint.flows.agent.children import damage_of
from recpoint.format.job import Job
from recpoint.format.notes import CONSOLIDATION_NOTE, ConsolidationNote

__all__ = ["BackgroundConsolidation", "Which"]


#: Which runs to consolidate: those with policy `continuous`, all, or none.
Which = Literal["auto", "all", "off"]

_LOG = logging.getLogger("recpoint.consolidate")

_POLL_SECONDS: Final = 0.1
#: Pauses after a failure; each failure in a row doubles the pause.
_FIRST_PAUSE_SECONDS: Final = 15.0
_LONGEST_PAUSE_SECONDS: Final = 3600.0

#: What was logged last, if a merge may have too large a manifest.
_HELD_BACK: Final = "held back"
_NEXT_OF_HELD_BACK: Final = (
    "Restores read the whole chain until the trainer takes a full checkpoint. Next: restart the "
    "trainer with fewer bits (bits=, Precision(state=16) or 8), so that manifests name fewer "
    "chunks"
)


@dataclass
class _Candidate:
    """A run that may be worth consolidating.

    Attributes:
        run_url: its URL.
        tries: its consolidations.
        is_new: something was committed since the last turn.
        turn: number of its last turn; the run with the lowest is next.
        last_warning: the damage that was logged last, or that a merge was held back.
    """

    run_url: str
    tries: RunTries = field(default_factory=RunTries)
    is_new: bool = True
    turn: int = 0
    last_warning: str | None = None


class BackgroundConsolidation:
    """Checks a run after each of its commits, and consolidates it when that pays.

    Args:
        which: which runs to consolidate.
        triggers: when a consolidation pays; the defaults if None.
        prefect_url: returns the URL at which Prefect answers now; None: it does not answer.
        tell: called with the run when its status has changed.
    """

    def __init__(
        self,
        *,
        which: Which,
        triggers: ConsolidationTriggers | None,
        prefect_url: Callable[[], str | None],
        tell: Callable[[StagedRun], None],
    ) -> None:
        self._which = which
        self._triggers = triggers or ConsolidationTriggers()
        self._tell = tell
        self._lock = threading.Lock()
        self._candidates: dict[StagedRun, _Candidate] = {}
        self._turns = 0
        self._at_work: StagedRun | None = None
        self._child = ChildProcess(
            "recpoint.flows.agent.consolidate_process", prefect_url=prefect_url
        )
        self._thread = BackgroundThread(
            "consolidate", self._consolidate_next, every_seconds=_POLL_SECONDS, child=self._child
        )

    def start(self, found_runs: list[StagedRun]) -> None:
        """Start the thread, with the runs that an earlier agent consolidated."""
        if self._which == "off":
            return
        for staged_run in found_runs:
            if (note := read_note(staged_run, CONSOLIDATION_NOTE)) is not None:
                self._candidates[staged_run] = _Candidate(note.run_url)
        self._thread.start()

    def committed(self, staged_run: StagedRun, job: Job) -> None:
        """Note that a job of a run was committed: the run is to be checked.

        Args:
            staged_run: the run.
            job: the job.
        """
        wanted = self._which == "all" or (self._which == "auto" and job.policy == "continuous")
        try:
            _note_for_next_agent(staged_run, job.run_url if wanted else None)
        except (OSError, StagingRefused) as error:
            _LOG.warning("%s: cannot be noted for the next agent: %s", staged_run.name, error)
        with self._lock:
            if not wanted:
                self._candidates.pop(staged_run, None)
            elif staged_run in self._candidates:
                self._candidates[staged_run].is_new = True
            else:
                self._candidates[staged_run] = _Candidate(job.run_url)

    def forget(self, staged_run: StagedRun) -> None:
        """Forget a run whose directory is gone."""
        with self._lock:
            self._candidates.pop(staged_run, None)

    def give_way(self, busy: bool) -> None:
        """Stop the consolidating process while jobs are due (`busy`); continue it afterwards."""
        self._child.pause(busy)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do now."""
        if self._which == "off":
            return True
        with self._lock:
            return self._at_work is None and self._next() is None

    def stop(self) -> None:
        """End the thread and kill the process; the next agent continues unfinished work."""
        self._thread.stop()

    def status(self, staged_run: StagedRun) -> dict[str, object] | None:
        """Return a run's consolidation for its status file; None: the run is not consolidated."""
        with self._lock:
            candidate = self._candidates.get(staged_run)
            if candidate is None:
                return None
            state = "idle"
            if self._at_work == staged_run:
                state = "waiting" if self._child.is_paused else "at work"
            return candidate.tries.status(state)

    def done(self, staged_run: StagedRun) -> int:
        """Return how many consolidations of a run were done; takes no lock."""
        candidate = self._candidates.get(staged_run)
        return 0 if candidate is None else candidate.tries.done

    def _next(self) -> StagedRun | None:
        """Return the due run whose last turn is longest ago, so that no run starves another."""
        now = time.monotonic()
        due = [
            (candidate.turn, staged_run)
            for staged_run, candidate in self._candidates.items()
            if candidate.is_new and now >= candidate.tries.retry_at
        ]
        return min(due, key=lambda pair: pair[0], default=(0, None))[1]

    def _consolidate_next(self) -> None:
        with self._lock:
            staged_run = None if self._child.is_paused else self._next()
            if staged_run is None:
                return
            candidate = self._candidates[staged_run]
            candidate.is_new = False
            self._turns += 1
            candidate.turn = self._turns
            self._at_work = staged_run
        try:
            self._serve(staged_run, candidate)
        except Exception as error:  # the thread must go on, whatever the error
            text = f"{type(error).__name__}: {error}"
            self._failed(staged_run, candidate, text, damage_of(error))
            if not isinstance(error, RecpointError | OSError):
                _LOG.exception("%s: unexpected error in a consolidation", staged_run.name)
        finally:
            with self._lock:
                self._at_work = None
            self._tell(staged_run)

    def _serve(self, staged_run: StagedRun, candidate: _Candidate) -> None:
        try:
            run = Run.open(open_store(candidate.run_url))
        except RunRecordLost:
            raise
        except NothingToRestore as gone:
            # The run was removed or moved away. If there is another commit, it is checked again.
            candidate.tries.last_error = str(gone)
            _LOG.info("%s: there is nothing to consolidate: %s", staged_run.name, gone)
            return
        name = newest_checkpoint(run)
        if name is None:
            return
        plan = choose_consolidation(run, name, triggers=self._triggers)
        if plan.is_held_back:
            self._hold_back(staged_run, candidate, plan.reason)
            return
        if not plan.pays:
            candidate.tries.last_error = candidate.last_warning = None
            return
        _LOG.info("%s: consolidating step %d: %s", staged_run.name, name.step, plan.reason)
        self._tell(staged_run)
        answer = self._child.run(candidate.run_url, json.dumps(asdict(self._triggers)))
        if self._thread.is_stopping:
            return
        tries = candidate.tries
        if "done" in answer:
            tries.succeed(str(answer["done"]))
        elif "nothing" in answer:
            tries.failures, tries.last_error = 0, None
        else:
            error = str(answer.get("error", "its process ended without an answer"))
            self._failed(staged_run, candidate, error, answer.get("damage"))
            return
        candidate.last_warning = None
        _LOG.info("%s: %s", staged_run.name, answer.get("done") or answer.get("nothing"))

    def _hold_back(self, staged_run: StagedRun, candidate: _Candidate, reason: str) -> None:
        """Note that a merge pays and may have too large a manifest; warn once, until one is made.

        Restores read a longer and longer chain, until the trainer's policy takes a full.
        """
        candidate.tries.last_error = reason
        level = logging.DEBUG if candidate.last_warning == _HELD_BACK else logging.WARNING
        candidate.last_warning = _HELD_BACK
        _LOG.log(level, "%s: not consolidated: %s. %s", staged_run.name, reason, _NEXT_OF_HELD_BACK)

    def _failed(
        self, staged_run: StagedRun, candidate: _Candidate, error: str, damage: str | None
    ) -> None:
        """Note a failure: try again after a pause, or, if the chain is damaged, after a commit.

        Args:
            staged_run: the run.
            candidate: the run.
            error: what happened.
            damage: what is damaged in the chain (`damage_of`); None: nothing, waiting may help.
        """
        candidate.tries.fail(error)
        next_try = "the next try is after the next commit"
        if damage is None:
            pause = candidate.tries.pause(
                first=_FIRST_PAUSE_SECONDS, longest=_LONGEST_PAUSE_SECONDS
            )
            candidate.is_new = True
            next_try = f"next try in {pause:.0f} s"
        # A warning only once for each damage: all newer checkpoints need the same damaged link.
        is_logged = damage is not None and damage == candidate.last_warning
        candidate.last_warning = damage
        level = logging.DEBUG if is_logged else logging.WARNING
        _LOG.log(level, "%s: not consolidated, %s: %s", staged_run.name, next_try, error)


def _note_for_next_agent(staged_run: StagedRun, run_url: str | None) -> None:
    """Note the URL of a run to consolidate in the background; None removes the note."""
    if run_url is None:
        remove_note(staged_run, CONSOLIDATION_NOTE)
        return
    note = ConsolidationNote(run_url=run_url)
    if read_note(staged_run, CONSOLIDATION_NOTE) != note:
        write_note_durably(staged_run, CONSOLIDATION_NOTE, note)
