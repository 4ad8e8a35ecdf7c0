"""The background thread between a snapshot and its outcome (format §7).

It makes a snapshot durable, writes its job file, and waits for the agent's answer: rules 3, 4 and
8 of the staging order. What it learns comes back as events, which the training thread fetches; it
changes nothing that training uses.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from recpoint.catalog.staging.area import (
    job_path,
    outcome_path,
    read_outcome,
    remove_mark,
    write_mark,
)
from recpoint.errors import FormatError, MalformedObject, StagingError
from recpoint.format.job import Outcome
from recpoint.format.manifest import check_quantizers
from recpoint.format.records import CheckpointRef, pack_record
from recpoint.trainer_plugin.snapshot.seal import Snapshot, seal
from recpoint.trainer_plugin.snapshot.staging import StagingArea

__all__ = ["Answered", "Event", "Failed", "Handoff", "Staged"]


_log = logging.getLogger("recpoint")

_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Staged:
    """The job file exists: the checkpoint survives this process."""

    ref: CheckpointRef


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The agent is done with it, and the slot is free."""

    ref: CheckpointRef
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Failed:
    """It will never become a checkpoint, and no job names its slot."""

    ref: CheckpointRef
    error: BaseException


Event = Staged | Answered | Failed


class Handoff:
    """Hands snapshots over one after another.

    Args:
        area: where they are staged.
        run: id of the run, for the job files.
        run_url: its URL as the store spells it.
        ranks: how many ranks take part.

    Attributes:
        broken: why there is no thread, if it could not be started when that was last tried.
    """

    def __init__(self, area: StagingArea, *, run: str, run_url: str, ranks: int = 1) -> None:
        self._area = area
        self._run = run
        self._run_url = run_url
        self._ranks = ranks
        self._changed = threading.Condition()
        self._queue: deque[Snapshot] = deque()
        self._current: Snapshot | None = None
        self._awaited: dict[CheckpointRef, Snapshot] = {}
        self._unwanted: set[CheckpointRef] = set()  # the agent is to be asked to drop them
        self._marked: set[CheckpointRef] = set()  # it has been
        self._events: deque[Event] = deque()
        self._closing = False
        self._thread: threading.Thread | None = None
        self.broken: StagingError | None = None
        self._process = os.getpid()
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        # Python ends a daemon thread in the middle of a call into torch, and the process aborts:
        # training that never closed its Checkpointer would count as failed. A forked child, where
        # locks may be held by threads that are not there, has nothing to end.
        if os.getpid() == self._process:
            self.close()

    def submit(self, snapshot: Snapshot) -> None:
        """Take charge of a snapshot."""
        with self._changed:
            self._queue.append(snapshot)
            self._changed.notify_all()
        self.ensure_alive()

    def cancel(self, ref: CheckpointRef) -> None:
        """Ask the agent to drop a checkpoint; what it answers is an event, as always."""
        with self._changed:
            self._unwanted.add(ref)
            self._changed.notify_all()
        self.ensure_alive()

    def ensure_alive(self) -> bool:
        """Start the thread when it is not there; True when it had died.

        What it held when it died is reported as failed; where it cannot be started, so is all that
        was submitted, and `broken` says why. Never raises: training waits here.
        """
        thread = self._thread
        if thread is not None and thread.is_alive():
            return False
        died = thread is not None and not self._closing
        if died:
            _log.error("recpoint's background thread died; it is started again")
        lost = self._current
        if lost is not None:
            error = StagingError(
                f"checkpoint of {lost.ref}",
                found="the background thread died while it staged it",
                expected="a thread that lives as long as training",
                next_step="see the log; the next checkpoint holds these rows too",
            )
            self._note_staged(lost, error)
        self._thread = None
        thread = threading.Thread(target=self._run_thread, name="recpoint", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:  # python's: can't start new thread
            self._give_up(error)
            return died
        self._thread, self.broken = thread, None
        return died

    def _give_up(self, error: Exception) -> None:
        """Nobody is there to stage what was submitted: its rows are to come back."""
        self.broken = StagingError(
            "recpoint's background thread",
            found=str(error) or type(error).__name__,
            expected="one more thread in this process",
            next_step="see how many this user or container may have (ulimit -u, pids.max); each "
            "checkpoint tries again, and holds these rows too",
        )
        with self._changed:
            left = list(self._queue)
            self._queue.clear()
        for snapshot in left:
            self._note_staged(snapshot, self.broken)

    def has_events(self) -> bool:
        """Whether `events` would return something; costs no lock."""
        return bool(self._events)

    def events(self) -> list[Event]:
        """What has happened since the last call, in order."""
        found = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def is_staging(self) -> bool:
        """Whether something that was submitted is not staged yet."""
        with self._changed:
            return bool(self._queue) or self._current is not None

    def wait_for_event(self, seconds: float) -> None:
        """Wait until there is an event, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events), timeout=seconds)

    def close(self) -> None:
        """End the thread once what was submitted is staged; staged jobs stay for the agent."""
        atexit.unregister(self._at_exit)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # --- the thread ----------------------------------------------------------------------------

    def _run_thread(self) -> None:
        while True:
            with self._changed:
                if not self._queue and not self._to_mark():
                    if self._closing:
                        return
                    self._changed.wait(_POLL_SECONDS if self._awaited else None)
                if self._queue:
                    self._current = self._queue.popleft()
            if self._current is not None:
                self._stage_current(self._current)
            self._mark_unwanted()
            self._look_for_outcomes()

    def _stage_current(self, snapshot: Snapshot) -> None:
        failure: Exception | None = None
        try:
            self._stage(snapshot)
        except Exception as error:
            # This thread must outlive whatever the disk, the driver or a library raises; the error
            # is not lost: it is counted and logged by the training thread, its rows come back.
            failure = error
        self._note_staged(snapshot, failure)

    def _note_staged(self, snapshot: Snapshot, failure: Exception | None) -> None:
        ref = snapshot.ref
        # A failure after the rename, of the last fsync for instance: the agent may have the job
        # already, so its slot must not be written again before the agent has answered.
        there = _may_exist(self._job_path(ref)) or _may_exist(self._outcome_path(ref))
        with self._changed:
            if failure is None or there:
                self._awaited[ref] = snapshot
                self._events.append(Staged(ref=ref))
            else:
                self._unwanted.discard(ref)
                self._events.append(Failed(ref=ref, error=failure))
            self._current = None
            self._changed.notify_all()

    def _stage(self, snapshot: Snapshot) -> None:
        ref, rank = snapshot.ref, self._area.rank
        job = seal(snapshot, run=self._run, run_url=self._run_url, rank=rank, ranks=self._ranks)
        self._area.create()  # here, and not in the stall: somebody may have cleared it
        # An answer to an earlier attempt at this step would be taken for the answer to this one.
        self._area.forget_outcome(self._outcome_path(ref))
        self._area.write_job(self._job_path(ref), pack_record(job))

    def _to_mark(self) -> set[CheckpointRef]:
        """Those that the agent is to be told of: staged ones, for only a job can be cancelled."""
        return self._unwanted & self._awaited.keys()

    def _mark_unwanted(self) -> None:
        with self._changed:
            wanted = self._to_mark()
            self._unwanted -= wanted
        for ref in wanted:
            self._marked.add(ref)
            try:
                write_mark(self._area.run_directory, ref, self._area.rank)
            except (OSError, StagingError) as error:
                _log.warning("checkpoint of %s cannot be cancelled, and goes on: %s", ref, error)

    def _forget_mark(self, ref: CheckpointRef) -> None:
        with self._changed:
            self._unwanted.discard(ref)
        if ref in self._marked:
            self._marked.discard(ref)
            # The answer is there; a mark that stays means nothing for any other job.
            with contextlib.suppress(OSError, StagingError):
                remove_mark(self._area.run_directory, ref, self._area.rank)

    def _look_for_outcomes(self) -> None:
        for ref in list(self._awaited):
            event = self._answer(ref)
            if event is not None:
                self._forget_mark(ref)
                with self._changed:
                    del self._awaited[ref]
                    self._events.append(event)
                    self._changed.notify_all()

    def _answer(self, ref: CheckpointRef) -> Event | None:
        try:
            # The job first: once it is gone, its outcome has been there before.
            if _may_exist(self._job_path(ref)):
                return None
            path = self._outcome_path(ref)
            outcome = read_outcome(path)
            self._area.forget_outcome(path)
        except FileNotFoundError:
            error: Exception = StagingError(
                str(self._job_path(ref)),
                found="neither the job nor an outcome",
                expected="a staging area that nobody clears while training runs",
                next_step="see who removed it; the next checkpoint holds these rows too",
            )
            return Failed(ref=ref, error=error)
        except (FormatError, StagingError, OSError) as broken:
            return Failed(ref=ref, error=broken)
        if outcome.attempt != ref.attempt:
            found = f"an outcome for attempt {outcome.attempt}"
            error = StagingError(
                str(path), found=found, expected=str(ref), next_step="nothing: it is staged again"
            )
            return Failed(ref=ref, error=error)
        try:
            # What is kept of them is found by these numbers.
            check_quantizers(outcome.quantizers, len(self._awaited[ref].tables), self._ranks)
        except ValueError as broken:
            error = MalformedObject(
                str(path),
                found=f"quantizers of other tables than the job's ({broken})",
                expected=f"those of {ref}",
                next_step="see that agent and trainer are of one release; the next checkpoint "
                "holds these rows too",
            )
            return Failed(ref=ref, error=error)
        return Answered(ref=ref, outcome=outcome)

    def _job_path(self, ref: CheckpointRef) -> Path:
        return job_path(self._area.run_directory, ref.generation, ref.step, self._area.rank)

    def _outcome_path(self, ref: CheckpointRef) -> Path:
        return outcome_path(self._area.run_directory, ref.generation, ref.step, self._area.rank)


def _may_exist(path: Path) -> bool:
    """Whether the file is there, or the disk will not say: then it counts as there.

    While a job may be there, an agent may be reading its slot, which must not be written again.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
