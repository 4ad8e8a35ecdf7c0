"""Hands snapshots over to the agent, in a background thread, and reports the answers (format §7).

The thread makes a snapshot durable, writes its job file, and waits for the agent's answer (rules 3,
4 and 8 of the staging order). It reports events, which the training thread fetches, and changes
nothing that training uses. It also shows every few seconds that this process lives.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from recpoint.catalog.staging.cancels import remove_mark, write_mark
from recpoint.catalog.staging.job_files import read_outcome
from recpoint.catalog.staging.trainer_note import BEAT_SECONDS
from recpoint.embeddings.server.served_part import ServedPart
from recpoint.errors import FormatError, MalformedObject, StagingError
from recpoint.format.job import Outcome
from recpoint.format.manifest import check_quantizers
from recpoint.format.records import CheckpointRef, pack_record
from recpoint.trainer_plugin.snapshot.seal import Snapshot, seal
from recpoint.trainer_plugin.snapshot.staging import StagingArea

__all__ = ["Answered", "Event", "Failed", "Handoff", "Staged"]


_log = logging.getLogger("recpoint")

_POLL_SECONDS = 0.05
#: How often embedding servers are asked about parts that they have staged.
_ASK_SERVERS_SECONDS = 2.0
#: How long they wait for rows of other ranks once training is over.
_END_SECONDS = 30.0
#: An agent that is started together with the trainer runs by then.
_AGENT_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Reports that the job file exists: the checkpoint survives this process."""

    ref: CheckpointRef


@dataclass(frozen=True, kw_only=True)
class Answered:
    """Reports that the agent is done with a checkpoint, and its slot is free."""

    ref: CheckpointRef
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Reports that a snapshot will never become a checkpoint; no job names its slot."""

    ref: CheckpointRef
    error: BaseException


Event = Staged | Answered | Failed


class Handoff:
    """Hands snapshots over one after another.

    Args:
        area: the staging area.
        run: id of the run, for the job files.
        run_url: URL of the run as the store spells it.
        ranks: number of ranks of the job.
        jobs: how many checkpoints may be staged at the same time.
        ranks_seconds: how long embedding servers that stage rows wait for those of other ranks.
        tells: whether to log that no agent runs; for one rank of each host.

    Attributes:
        broken: why the thread could not be started at the last attempt; None: it could.
    """

    def __init__(
        self,
        area: StagingArea,
        *,
        run: str,
        run_url: str,
        ranks: int = 1,
        jobs: int = 1,
        ranks_seconds: float = 60.0,
        tells: bool = True,
    ) -> None:
        self._area = area
        self._run = run
        self._run_url = run_url
        self._ranks = ranks
        self._jobs = jobs
        self._ranks_seconds = ranks_seconds
        self._ask_servers_at = 0.0  # monotonic time
        self._changed = threading.Condition()
        self._queue: deque[Snapshot] = deque()
        self._current: Snapshot | None = None
        self._awaited: dict[CheckpointRef, Snapshot] = {}
        self._unwanted: set[CheckpointRef] = set()  # the agent must still be asked to drop these
        self._marked: set[CheckpointRef] = set()  # the agent has been asked to drop these
        self._events: deque[Event] = deque()
        self._closing = False
        # When to look for an agent, in monotonic time; infinity: that has been done.
        self._look_at = time.monotonic() + _AGENT_SECONDS if tells else math.inf
        self._thread: threading.Thread | None = None
        self.broken: StagingError | None = None
        self._process = os.getpid()
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        # At exit, Python ends a daemon thread even in the middle of a call into torch, which aborts
        # the process: a training that never closed its Checkpointer would count as failed. A forked
        # child has no thread to end, and its locks may be held by threads that do not exist there.
        if os.getpid() == self._process:
            self.close()

    def submit(self, snapshot: Snapshot) -> None:
        """Queue a snapshot to be staged."""
        with self._changed:
            self._queue.append(snapshot)
            self._changed.notify_all()
        self.ensure_alive()

    def cancel(self, ref: CheckpointRef) -> None:
        """Ask the agent to drop a checkpoint; its answer is reported as an event, as always."""
        with self._changed:
            self._unwanted.add(ref)
            self._changed.notify_all()
        self.ensure_alive()

    def ensure_alive(self) -> bool:
        """Start the thread if it does not run. Never raises, because training waits here.

        The snapshot that a dead thread was staging is reported as failed. If the thread cannot be
        started, all submitted snapshots are reported as failed, and `broken` says why.

        Returns:
            Whether the thread had died.
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
                found="the background thread died while it was staging the checkpoint",
                expected="a thread that lives as long as training",
                next_step="see the log; the next checkpoint also holds these rows",
            )
            self._note_staged(lost, error)
        self._thread = None
        thread = threading.Thread(target=self._run_thread, name="recpoint", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:  # from Python: "can't start new thread"
            self._give_up(error)
            return died
        self._thread, self.broken = thread, None
        return died

    def _give_up(self, error: Exception) -> None:
        """Report all submitted snapshots as failed, so that their rows become dirty again."""
        self.broken = StagingError(
            "recpoint's background thread",
            found=str(error) or type(error).__name__,
            expected="one more thread in this process",
            next_step="see how many threads this user or container may have (ulimit -u, pids.max); "
            "each checkpoint tries again, and also holds these rows",
        )
        with self._changed:
            unsent = list(self._queue)
            self._queue.clear()
        for snapshot in unsent:
            self._note_staged(snapshot, self.broken)

    def has_events(self) -> bool:
        """Whether `events` would return something; takes no lock."""
        return bool(self._events)

    def events(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def is_staging(self) -> bool:
        """Whether a submitted snapshot is not staged yet."""
        with self._changed:
            return bool(self._queue) or self._current is not None

    def wait_for_event(self, seconds: float) -> None:
        """Wait until there is an event, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events), timeout=seconds)

    def close(self) -> None:
        """End the thread after it has staged all snapshots; staged jobs stay for the agent."""
        atexit.unregister(self._at_exit)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run_thread(self) -> None:
        beat = time.monotonic()
        while True:
            if time.monotonic() >= beat:
                self._area.beat()
                self._look_for_agent()
                beat = time.monotonic() + BEAT_SECONDS
            with self._changed:
                if not self._queue and not self._to_mark():
                    if self._closing:
                        return
                    self._changed.wait(_POLL_SECONDS if self._awaited else BEAT_SECONDS)
                if self._queue:
                    self._current = self._queue.popleft()
            if self._current is not None:
                self._stage_current(self._current)
            self._look_at_servers()
            self._mark_unwanted()
            self._look_for_outcomes()

    def _look_for_agent(self) -> None:
        """Log once, some time after the start, if no agent stores what this process stages."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = math.inf
        if not self._area.agent_is_running():
            _log.warning(
                "no agent is running on this host, so checkpoints of %s wait in %s and are not "
                "stored. Next: %s",
                self._run_url,
                self._area.staged_run,
                self._area.agent_command(),
            )

    def _stage_current(self, snapshot: Snapshot) -> None:
        failure: Exception | None = None
        try:
            self._stage(snapshot)
        except Exception as error:
            # This thread must survive any error of the disk, the driver or a library. The error is
            # not lost: the training thread counts and logs it, and makes the rows dirty again.
            failure = error
        self._note_staged(snapshot, failure)

    def _note_staged(self, snapshot: Snapshot, failure: Exception | None) -> None:
        ref = snapshot.ref
        if failure is not None:
            snapshot.device.release()
            _drop_at_servers(snapshot)
        # A failure after the rename, for instance of the last fsync, may leave the agent with the
        # job, so the slot must not be written again before the agent has answered.
        may_be_staged = _may_exist(self._job_path(ref)) or _may_exist(self._outcome_path(ref))
        with self._changed:
            if failure is None or may_be_staged:
                self._awaited[ref] = snapshot
                self._events.append(Staged(ref=ref))
            else:
                self._unwanted.discard(ref)
                self._events.append(Failed(ref=ref, error=failure))
            self._current = None
            self._changed.notify_all()

    def _stage(self, snapshot: Snapshot) -> None:
        ref, rank = snapshot.ref, self._area.rank
        job = seal(
            snapshot,
            run=self._run,
            run_url=self._run_url,
            rank=rank,
            ranks=self._ranks,
            root=self._area.root,
            jobs=self._jobs,
            # At the end, another rank may be gone.
            ranks_seconds=lambda: min(
                self._ranks_seconds, _END_SECONDS if self._closing else math.inf
            ),
        )
        # Somebody may have cleared the area. It is created again here and not in the stall.
        self._area.create()
        # Otherwise, an answer to an earlier attempt at this step would count for this attempt.
        self._area.forget_outcome(self._outcome_path(ref))
        self._area.write_job(self._job_path(ref), pack_record(job))

    def _look_at_servers(self) -> None:
        """Drop checkpoints of which a part that an embedding server staged will never come."""
        if time.monotonic() < self._ask_servers_at:
            return
        for ref, snapshot in list(self._awaited.items()):
            served = snapshot.served
            if served is None or ref in self._marked:
                continue
            reason = _lost_at_servers(served.part, ref, self._ranks_seconds)
            if reason is not None:
                _log.warning("checkpoint of %s is dropped: %s", ref, reason)
                self.cancel(ref)
        # After the answers, for which a server that hangs may have us wait.
        self._ask_servers_at = time.monotonic() + _ASK_SERVERS_SECONDS

    def _to_mark(self) -> set[CheckpointRef]:
        """Return the unwanted checkpoints that are staged; the agent can only drop staged jobs."""
        return self._unwanted & self._awaited.keys()

    def _mark_unwanted(self) -> None:
        with self._changed:
            marked_refs = self._to_mark()
            self._unwanted -= marked_refs
        for ref in marked_refs:
            self._marked.add(ref)
            _drop_at_servers(self._awaited[ref])
            try:
                write_mark(self._area.staged_run, ref, self._area.rank)
            except (OSError, StagingError) as error:
                _log.warning(
                    "checkpoint of %s cannot be cancelled, so it will be stored: %s", ref, error
                )

    def _forget_mark(self, ref: CheckpointRef) -> None:
        with self._changed:
            self._unwanted.discard(ref)
        if ref in self._marked:
            self._marked.discard(ref)
            # A mark that stays does no harm: the job is answered, and it concerns no other job.
            with contextlib.suppress(OSError, StagingError):
                remove_mark(self._area.staged_run, ref, self._area.rank)

    def _look_for_outcomes(self) -> None:
        for ref in list(self._awaited):
            event = self._answer(ref)
            if event is not None:
                if not isinstance(event, Answered) or event.outcome.result != "committed":
                    _drop_at_servers(self._awaited[ref])
                self._forget_mark(ref)
                with self._changed:
                    del self._awaited[ref]
                    self._events.append(event)
                    self._changed.notify_all()

    def _answer(self, ref: CheckpointRef) -> Event | None:
        try:
            # Look for the job first: it is removed only after its outcome was written.
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
                next_step="find out who removed it; the next checkpoint also holds these rows",
            )
            return Failed(ref=ref, error=error)
        except (FormatError, StagingError, OSError) as broken:
            return Failed(ref=ref, error=broken)
        if outcome.attempt != ref.attempt:
            attempt_text = f"an outcome for attempt {outcome.attempt}"
            error = StagingError(
                str(path),
                found=attempt_text,
                expected=str(ref),
                next_step="nothing to do; the next checkpoint also holds these rows",
            )
            return Failed(ref=ref, error=error)
        try:
            # The cutter finds its tables by the numbers in the quantizers.
            check_quantizers(outcome.quantizers, len(self._awaited[ref].tables), self._ranks)
        except ValueError as broken:
            error = MalformedObject(
                str(path),
                found=f"quantizers of other tables than the job's ({broken})",
                expected=f"quantizers of the tables of {ref}",
                next_step="make sure that agent and trainer are of the same release; the next "
                "checkpoint also holds these rows",
            )
            return Failed(ref=ref, error=error)
        return Answered(ref=ref, outcome=outcome)

    def _job_path(self, ref: CheckpointRef) -> Path:
        return self._area.staged_run.job_path(ref.generation, ref.step, self._area.rank)

    def _outcome_path(self, ref: CheckpointRef) -> Path:
        return self._area.staged_run.outcome_path(ref.generation, ref.step, self._area.rank)


def _lost_at_servers(part: ServedPart, ref: CheckpointRef, patience_seconds: float) -> str | None:
    """Return why a part of embedding servers will never come; None: it may. Never raises."""
    try:
        return part.lost(patience_seconds)
    except Exception as error:
        _log.warning("parts of %s at servers are not looked at: %s", ref, error)
        return None


def _drop_at_servers(snapshot: Snapshot) -> None:
    """Have embedding servers drop their parts. Never raises: this thread must live."""
    if snapshot.served is not None:
        try:
            snapshot.served.part.drop()
        except Exception as error:
            _log.warning("parts of %s stay staged at servers: %s", snapshot.ref, error)


def _may_exist(path: Path) -> bool:
    """Whether the file exists; True also if the disk gives no answer.

    If a job may exist, an agent may be reading its slot, which must not be written again.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
