"""Consolidates runs in the background, one at a time, in a process that waits while jobs are due.

A staged job never waits for a consolidation: the consolidating process has the lowest priority, is
stopped (SIGSTOP) while a job is due or at work, and has its own memory. If jobs leave it no time at
all, chains grow. The trainer's policy sees that in its outcomes, and writes a full checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from recpoint.catalog.consolidate.plan import (
    ConsolidationTriggers,
    choose_consolidation,
    newest_checkpoint,
)
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.notes import read_note, remove_note, write_note_durably
from recpoint.catalog.store.store import open_store
from recpoint.errors import NothingToRestore, RecpointError, RunRecordLost, StagingRefused
from recpoint.flows.agent.children import READY, answer_of, damage_of, environment_of
from recpoint.flows.agent.gate import growing_pause
from recpoint.format.job import Job
from recpoint.format.notes import CONSOLIDATION_NOTE, ConsolidationNote

__all__ = ["BackgroundConsolidation", "Which"]


#: Which runs to consolidate: those with policy `continuous`, all, or none.
Which = Literal["auto", "all", "off"]

_LOG = logging.getLogger("recpoint.consolidate")

_POLL_SECONDS: Final = 0.1
_END_SECONDS: Final = 3.0
#: Pauses after a failure; each failure in a row doubles the pause.
_FIRST_PAUSE_SECONDS: Final = 15.0
_LONGEST_PAUSE_SECONDS: Final = 3600.0

#: What was logged last, if a merge may have too large a manifest.
_HELD_BACK: Final = "held back"
_NEXT_OF_HELD_BACK: Final = (
    "Restores read the whole chain until the trainer takes a full checkpoint. Next: restart the "
    "trainer with fewer bits (bits=, Precision(state=16)), so that manifests name fewer chunks"
)


@dataclass
class _Candidate:
    """A run that may be worth consolidating."""

    run_url: str
    is_new: bool = True  # something was committed since the last turn
    turn: int = 0  # number of its last turn; the run with the lowest is next
    failures: int = 0
    retry_at: float = 0.0
    done: int = 0
    last: str | None = None
    last_error: str | None = None
    told: str | None = None  # the damage that was logged last


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
        self._prefect_url = prefect_url
        self._tell = tell
        self._lock = threading.Lock()
        self._candidates: dict[StagedRun, _Candidate] = {}
        self._turns = 0
        self._at_work: StagedRun | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._may_be_stopped = False  # if stopped before `ready`, it would outlive a killed agent
        self._paused = False
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._keep_consolidating, name="consolidate", daemon=True
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
        with self._lock:
            if busy == self._paused:
                return
            self._paused = busy
            if self._may_be_stopped:
                self._signal(signal.SIGSTOP if busy else signal.SIGCONT)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do now."""
        if self._which == "off":
            return True
        with self._lock:
            return self._at_work is None and self._next() is None

    def stop(self) -> None:
        """End the thread and kill the process; the next agent continues unfinished work."""
        self._stop.set()
        with self._lock:
            self._signal(signal.SIGKILL)
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def status(self, staged_run: StagedRun) -> dict[str, object] | None:
        """Return a run's consolidation for its status file; None: the run is not consolidated."""
        with self._lock:
            candidate = self._candidates.get(staged_run)
            if candidate is None:
                return None
            at_work = self._at_work == staged_run
            return {
                "state": ("waiting" if self._paused else "at work") if at_work else "idle",
                "done": candidate.done,
                "last": candidate.last,
                "last_error": candidate.last_error,
            }

    def done(self, staged_run: StagedRun) -> int:
        """Return how many consolidations of a run were done; takes no lock."""
        candidate = self._candidates.get(staged_run)
        return 0 if candidate is None else candidate.done

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _next(self) -> StagedRun | None:
        """Return the due run whose last turn is longest ago, so that no run starves another."""
        now = time.monotonic()
        due = [
            (candidate.turn, staged_run)
            for staged_run, candidate in self._candidates.items()
            if candidate.is_new and now >= candidate.retry_at
        ]
        return min(due, key=lambda pair: pair[0], default=(0, None))[1]

    def _keep_consolidating(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            with self._lock:
                staged_run = None if self._paused else self._next()
                if staged_run is None:
                    continue
                candidate = self._candidates[staged_run]
                candidate.is_new = False
                self._turns += 1
                candidate.turn = self._turns
                self._at_work = staged_run
            try:
                self._serve(staged_run, candidate)
            except Exception as error:  # the thread must go on, whatever the error
                self._failed(
                    staged_run, candidate, f"{type(error).__name__}: {error}", damage_of(error)
                )
                if not isinstance(error, RecpointError | OSError):
                    _LOG.exception("%s: unexpected error in a consolidation", staged_run.name)
            finally:
                with self._lock:
                    self._at_work = self._process = None
                    self._may_be_stopped = False
                self._tell(staged_run)

    def _serve(self, staged_run: StagedRun, candidate: _Candidate) -> None:
        try:
            run = Run.open(open_store(candidate.run_url))
        except RunRecordLost:
            raise
        except NothingToRestore as gone:
            # The run was removed or moved away. If there is another commit, it is checked again.
            candidate.last_error = str(gone)
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
            candidate.last_error = candidate.told = None
            return
        _LOG.info("%s: consolidating step %d: %s", staged_run.name, name.step, plan.reason)
        self._tell(staged_run)
        answer = self._run_process(candidate.run_url)
        if self._stop.is_set():
            return
        if "done" in answer or "nothing" in answer:
            candidate.failures, candidate.last_error, candidate.told = 0, None, None
            said = str(answer.get("done") or answer.get("nothing"))
            if "done" in answer:
                candidate.done += 1
                candidate.last = said
            _LOG.info("%s: %s", staged_run.name, said)
        else:
            error = str(answer.get("error", "its process ended without an answer"))
            self._failed(staged_run, candidate, error, answer.get("damage"))

    def _hold_back(self, staged_run: StagedRun, candidate: _Candidate, reason: str) -> None:
        """Note that a merge pays and may have too large a manifest; warn once, until one is made.

        Restores read a longer and longer chain, until the trainer's policy takes a full.
        """
        candidate.last_error = reason
        level = logging.DEBUG if candidate.told == _HELD_BACK else logging.WARNING
        candidate.told = _HELD_BACK
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
        candidate.failures += 1
        candidate.last_error = error
        then = "the next try is after the next commit"
        if damage is None:
            pause = growing_pause(
                candidate.failures - 1, first=_FIRST_PAUSE_SECONDS, longest=_LONGEST_PAUSE_SECONDS
            )
            candidate.retry_at = time.monotonic() + pause
            candidate.is_new = True
            then = f"next try in {pause:.0f} s"
        # A warning only once for each damage: all newer checkpoints need the same damaged link.
        level = (
            logging.DEBUG if damage is not None and damage == candidate.told else logging.WARNING
        )
        candidate.told = damage
        _LOG.log(level, "%s: not consolidated, %s: %s", staged_run.name, then, error)

    def _run_process(self, run_url: str) -> dict[str, Any]:
        """Consolidate in a child process; return its answer."""
        arguments = [run_url, json.dumps(asdict(self._triggers)), str(os.getpid())]
        process = subprocess.Popen(
            [sys.executable, "-m", "recpoint.flows.agent.consolidate_process", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=environment_of(self._prefect_url()),
        )
        with self._lock:
            self._process = process
            if self._stop.is_set():
                self._signal(signal.SIGKILL)
        assert process.stdout is not None
        if process.stdout.readline().strip() == READY.encode():
            with self._lock:
                self._may_be_stopped = True
                if self._paused:
                    self._signal(signal.SIGSTOP)
        said, _ = process.communicate()
        return answer_of(said, process.returncode)


def _note_for_next_agent(staged_run: StagedRun, run_url: str | None) -> None:
    """Note the URL of a run to consolidate in the background; None removes the note."""
    if run_url is None:
        remove_note(staged_run, CONSOLIDATION_NOTE)
        return
    note = ConsolidationNote(run_url=run_url)
    if read_note(staged_run, CONSOLIDATION_NOTE) != note:
        write_note_durably(staged_run, CONSOLIDATION_NOTE, note)
