"""Keeps the trainer's side of the staging area: directories, lock and slots (format §7)."""

from __future__ import annotations

import contextlib
import logging
import shlex
import time
from collections.abc import Collection
from pathlib import Path

from recpoint.catalog.staging import area, job_files, locks, owned
from recpoint.catalog.staging.agent_lock import agent_lock_path, at_work
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.free import read_rank_jobs, remove_unnamed, slots_by_rank
from recpoint.catalog.staging.servers import write_servers
from recpoint.catalog.staging.slot import Slot
from recpoint.catalog.staging.trainer_note import NoteState, beat, write_trainer_note
from recpoint.catalog.store import durable
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import FormatError, StagingError, StagingRefused
from recpoint.format.naming import parse_job_stem
from recpoint.format.servers import AllServers, ServersRecord
from recpoint.trainer_plugin.snapshot.area_room import AreaRoom

__all__ = ["StagingArea"]

_log = logging.getLogger("recpoint")

_POLL_SECONDS = 0.05


class StagingArea:
    """One run's part of a staging area, for the training process of one rank.

    Args:
        root: directory of the staging area; it is created if it does not exist.
        run_url: the run URL as its store spells it.
        rank: rank of this process.

    Attributes:
        room: the room for slots.
    """

    def __init__(self, root: Path, run_url: str, *, rank: int = 0) -> None:
        self.root = root.absolute()  # a script may change its working directory while it trains
        self.run_url = run_url
        self.staged_run = StagedRun.of(self.root, run_url)
        self.rank = rank
        self.room = AreaRoom(self.root, self.staged_run, rank)
        self._slots_directory = self.staged_run.slots_directory
        self._lock: int | None = None
        self._lock_path = self.staged_run.trainer_lock_path(rank)
        # Assumed until the first answer, so that files that an agent may read are left alone.
        self._agent_seen = True
        self._told_unanswered = False
        self._slots: dict[int, Slot] = {}
        self._foreign: dict[int, Path] = {}

    def create(self) -> None:
        """Make the directories that are missing.

        Raises:
            StagingRefused: a directory or the agent's lock belongs to another user, is a link, or
                is open to other users.
            StagingError: a directory cannot be made.
        """
        try:
            self.staged_run.make_directories()
            # If another user owns the lock, no agent of this user could take it, and training would
            # wait for the other user's agent.
            owned.require_own(self.root, agent_lock_path(self.root))
        except OSError as error:
            raise self._unusable(error) from error

    def create_if_cleared(self) -> None:
        """Repeat `create` and `lock` if somebody removed what they made. Training waits for this.

        Raises:
            StagingError: for the reasons of `create` and `lock`: another process may write to the
                slots now, or another user has made the directories anew.
        """
        try:
            with owned.directory(self.root, self._slots_directory):
                pass
        except FileNotFoundError:
            self.create()
        except OSError as error:
            raise self._unusable(error) from error
        self._keep_lock()

    def _keep_lock(self) -> None:
        lost = self._lock
        if lost is not None and locks.is_lost(lost, self._lock_path):
            self.lock()
            self._release(lost)

    def lock(self) -> None:
        """Take the lock of the only training process of this rank here.

        The lock is released at the latest when the process ends.

        Raises:
            StagingError: another process has the lock; the message names its number.
        """
        try:
            self._lock = locks.acquire(
                self._lock_path,
                expected="no other trainer of this run on this staging area",
                next_step="stop that process, or train under another run URL",
                here="call close() of the other Checkpointer in this process first, or train "
                "under another run URL",
                root=self.root,
            )
        except OSError as error:
            raise self._unusable(error) from error

    def close(self) -> None:
        """Release lock and slots; staged checkpoints stay. Never raises: training is over."""
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        lock, self._lock = self._lock, None
        if lock is not None:
            self._release(lock)

    def _release(self, lock: int) -> None:
        try:
            locks.release(lock)
        except OSError as error:
            # The file is closed all the same, which frees the lock if the file's host is reachable.
            _log.warning("%s: %s when released", self._lock_path, error.strerror or error)

    def agent_is_running(self) -> bool:
        """Whether an agent, a drain or a sweep is finishing jobs of this run now.

        Training calls it, so it never raises. If the file system gives no answer, that is logged
        once, and the last answer counts.
        """
        try:
            worker = at_work(self.root)
        except (OSError, StagingRefused) as error:
            self._tell_unanswered(error)
        else:
            self._agent_seen = worker is not None and worker.serves(self.staged_run)
            self._told_unanswered = False
        return self._agent_seen

    def _tell_unanswered(self, error: OSError | StagingRefused) -> None:
        if self._told_unanswered:
            return  # agent_is_running is called several times a second; log once
        self._told_unanswered = True
        expected_agent = "an agent" if self._agent_seen else "no agent"
        if isinstance(error, StagingRefused):
            _log.warning(
                "%s. Training goes on as if there were %s, as before", error, expected_agent
            )
            return
        unknown = StagingError(
            str(error.filename or agent_lock_path(self.root)),
            found=error.strerror or str(error),
            expected="an answer whether an agent holds this lock",
            next_step="make sure that flock works there (on NFS: its lock daemon), or set a "
            "directory of this host: staging= or RECPOINT_STAGING",
        )
        _log.warning("%s. Training goes on as if there were %s, as before", unknown, expected_agent)

    def agent_command(self) -> str:
        """Return the shell command that starts the agent of this staging area."""
        if self._is_default():
            return "recpoint agent"
        return f"recpoint agent --staging {shlex.quote(str(self.root))}"

    def _is_default(self) -> bool:
        try:
            return self.root == area.default_staging_root().absolute()
        except OSError:  # the working directory was removed, or there is no temporary directory
            return False

    def parts_here(self) -> dict[tuple[int, int], dict[int, int]]:
        """Return the checkpoints of which this host has parts, staged or answered by an agent.

        Returns:
            (generation, step) -> rank -> number of ranks that take part; 0: unknown.
        """
        parts: dict[tuple[int, int], dict[int, int]] = {}
        answered = self._files(self.staged_run.outcomes_directory, ".json")
        for path in [*answered, *self.staged_run.staged_jobs()]:
            name = parse_job_stem(path.stem)
            if name is None:
                continue
            ranks = 0
            if path.parent.name == "jobs":
                with contextlib.suppress(FormatError, OSError):
                    ranks = job_files.read_job(path).ranks
            parts.setdefault((name[0], name[1]), {})[name[2]] = ranks
        return parts

    def wait_until_drained(
        self, seconds: float, incomplete: Collection[tuple[int, int]] = ()
    ) -> int:
        """Wait for the agent to finish what an earlier trainer staged.

        Ends early if no agent runs, because nothing would change.

        Args:
            seconds: the longest wait.
            incomplete: (generation, step) of checkpoints that no agent can finish, because a rank
                never staged its part.

        Returns:
            Number of jobs that are left, without incomplete checkpoints.
        """

        def left() -> int:
            names = [parse_job_stem(path.stem) for path in self.jobs()]
            return sum(name is not None and name[:2] not in incomplete for name in names)

        deadline = time.monotonic() + seconds
        while left() and time.monotonic() < deadline and self.agent_is_running():
            time.sleep(_POLL_SECONDS)
        return left()

    def withdraw_cancels(self) -> None:
        """Remove the cancel marks of an earlier trainer, and its half-written marks.

        That trainer can no longer take the newer checkpoint, so the checkpoint that it wanted
        dropped is better than none.

        Raises:
            StagingError: a file cannot be removed.
        """
        try:
            for path in self._files(self.staged_run.cancels_directory, ".json"):
                name = parse_job_stem(path.stem)
                if name is not None and name[2] == self.rank:
                    owned.remove(self.root, path)
            for path in self._half_written(self.staged_run.cancels_directory):
                owned.remove(self.root, path)
        except OSError as error:
            raise self._unusable(error) from error

    def jobs(self, rank: int | None = None) -> list[Path]:
        """Return the job files of a rank, oldest first; None: of this rank."""
        whose = self.rank if rank is None else rank
        return [
            path
            for path in self.staged_run.staged_jobs()
            if (name := parse_job_stem(path.stem)) is not None and name[2] == whose
        ]

    def take_over(self, generation: int) -> None:
        """Clean up what trainers before `generation` left; they can no longer commit anything.

        Their outcomes are removed, because nobody waits for them. If no agent runs, their jobs are
        removed, with a line in the log for each. A running agent rejects the jobs itself; until
        then their slots are left alone. To keep a job would only keep its slot busy: a commit of an
        earlier generation after the claim of a later one is on no line (format §5).
        """
        agent = self.agent_is_running()
        for path in self.jobs():
            name = parse_job_stem(path.stem)
            if name is None or name[0] >= generation:
                continue
            if not agent:
                self._remove_job(path, generation)
                continue
            try:
                self._foreign[_slot_index(job_files.read_job(path).slot)] = path
            except (FormatError, FileNotFoundError):
                continue  # an unreadable or removed job names no slot that anyone could read
        self._remove_outcomes(self.rank, generation)
        # Left by a trainer that was killed while it wrote a job. No trainer of this rank is writing
        # now, because this process has the lock. Other ranks of this job write jobs only after all
        # ranks have passed this point.
        jobs = self.staged_run.jobs_directory
        for path in self._half_written(jobs):
            owned.remove(self.root, path)
        self._note("training")

    def clear_other_ranks(self, ranks: Collection[int], generation: int) -> None:
        """Remove the files of ranks that are no longer on this host, because nobody else would.

        Removes their jobs and outcomes of trainers before `generation`, as `take_over` does, and
        the slots that no job names any more. Files of a rank with a training process here are kept.

        Args:
            ranks: ranks of this job that share this host.
            generation: generation of this job.
        """
        try:
            for rank, slots in slots_by_rank(self.staged_run).items():
                if rank not in ranks:
                    self._clear_rank(rank, slots, generation)
        except (OSError, StagingRefused) as error:
            _log.warning("slots of ranks that have left this host could not be removed: %s", error)

    def _clear_rank(self, rank: int, slots: list[Path], generation: int) -> None:
        agent = self.agent_is_running()
        old = [
            path
            for path in self.jobs(rank)
            if not agent and (name := parse_job_stem(path.stem)) and name[0] < generation
        ]
        jobs = read_rank_jobs(self.staged_run, rank, besides={path.stem for path in old})
        try:
            lock = locks.acquire(
                self.staged_run.trainer_lock_path(rank),
                expected=f"no trainer of rank {rank}, which this job does not have on this host",
                next_step="stop that process",
                root=self.root,
            )
        except StagingRefused:
            raise
        except StagingError:
            return  # the rank is training, or another rank of this job is cleaning up already
        with contextlib.ExitStack() as afterwards:
            try:
                for path in old:
                    self._remove_job(path, generation)
                self._remove_outcomes(rank, generation)
                remove_unnamed(jobs, slots, afterwards)
            finally:
                locks.release(lock)

    def _remove_job(self, path: Path, generation: int) -> None:
        """Remove the job of an earlier generation, and log what is lost with it."""
        owned.remove(self.root, path)
        name = parse_job_stem(path.stem)
        assert name is not None  # it was chosen by its name
        _log.warning(
            "%s: removed. It was the checkpoint of step %d (generation %d, rank %d), which nobody "
            "had stored; generation %d has taken over the run, and earlier generations can no "
            "longer commit. Batches after the newest committed checkpoint are trained again. Next: "
            "start the agent before the trainer, which then waits for it: %s",
            path,
            name[1],
            name[0],
            name[2],
            generation,
            self.agent_command(),
        )

    def _remove_outcomes(self, rank: int, generation: int) -> None:
        for path in self._files(self.staged_run.outcomes_directory, ".json"):
            name = parse_job_stem(path.stem)
            if name is not None and name[0] < generation and name[2] == rank:
                owned.remove(self.root, path)

    def _files(self, directory: Path, suffix: str) -> list[Path]:
        """Return the files in a directory whose names end in `suffix`."""
        names = owned.names(self.root, directory)
        return [directory / name for name in names if name.endswith(suffix)]

    def _half_written(self, directory: Path) -> list[Path]:
        names = owned.names(self.root, directory)
        return [directory / name for name in names if name.startswith(durable.TEMPORARY_PREFIX)]

    def write_job(self, path: Path, data: bytes) -> None:
        """Write a staged job's file (format §7, staging order, rule 4), after `forget_outcome`.

        Raises:
            StagingRefused: its directory does not belong to this user alone.
            OSError: the write failed; the file may exist all the same.
        """
        owned.write_atomically(self.root, path, data)

    def forget_outcome(self, path: Path) -> None:
        """Remove an outcome that the agent wrote, so that the slot may be written again.

        Raises:
            StagingRefused: its directory does not belong to this user alone.
            OSError: it could not be removed.
        """
        owned.remove(self.root, path)

    def say_ended(self) -> None:
        """Note for the agent that training has ended and was not killed, if the lock is still held.

        Without the lock, another process may train here. If that process were killed, this note
        would say that it had ended.
        """
        try:
            self._keep_lock()
        except StagingError as error:
            _log.warning("no note for the agent that training has ended was written: %s", error)
            return
        if self._lock is not None:
            self._note("ended")

    def free_slot(self, busy: set[str]) -> Slot:
        """Return the first slot that no staged job uses.

        Args:
            busy: names of the slots that this trainer's own jobs use.
        """
        index = 0
        while self._name(index) in busy or self._is_foreign(index):
            index += 1
        if index not in self._slots:
            self._slots[index] = Slot(self.staged_run.slot_path(self.rank, index))
        return self._slots[index]

    def beat(self) -> None:
        """Show that this process lives. Never raises: only what people are told depends on it."""
        if self._lock is not None:
            with contextlib.suppress(OSError, StagingRefused):
                beat(self.staged_run)

    def tell_servers(self, servers: AllServers, *, generation: int) -> None:
        """Say how the embedding servers are, if the lock is still held.

        Raises:
            StagingRefused: the directory is not this user's own.
            OSError: it cannot be written.
        """
        if self._lock is not None:
            record = ServersRecord(
                run_url=self.run_url, generation=generation, at_ms=now_ms(), servers=servers
            )
            write_servers(self.staged_run, record)

    def _note(self, state: NoteState) -> None:
        try:
            write_trainer_note(self.staged_run, self.run_url, state)
        except (OSError, StagingRefused) as error:
            # Only what people are told depends on the note.
            _log.warning("%s: no note for the agent could be written: %s", self.staged_run, error)

    def _unusable(self, error: OSError) -> StagingError:
        return StagingError(
            str(error.filename or self.staged_run),
            found=error.strerror or str(error),
            expected="a directory that this process can create and write",
            next_step="set another directory: staging= or RECPOINT_STAGING",
        )

    def _name(self, index: int) -> str:
        return area.slot_name(self.rank, index)

    def _is_foreign(self, index: int) -> bool:
        job = self._foreign.get(index)
        if job is not None and not job.exists():
            del self._foreign[index]
            job = None
        return job is not None


def _slot_index(name: str) -> int:
    return int(name.removesuffix(".bin").rpartition("-")[2])
