"""Keeps the trainer's side of the staging area: its directories, its lock and its slots.

Large pages for large tables: they save the look-up of the page for each row that is read. The rows
that a snapshot gathers lie far apart. In a table of gigabytes, nearly each of them lies on another
page of 4 KiB, which the processor must look up in memory. Pages of 2 MiB are so few that the
processor keeps them in its cache. Contents, addresses and the table's memory stay the same.

The trainer's side of the staging area: its directories, its lock, its slots (format §7).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import math
import mmap
import os
import shlex
import socket
import sys
import time
import warnings
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from recpoint.catalog.staging import area, job_files, locks, owned
from recpoint.catalog.staging.agent_lock import agent_lock_path, at_work
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.free import read_rank_jobs, remove_unnamed, slots_by_rank
from recpoint.catalog.staging.servers import write_servers
from recpoint.catalog.staging.slot import Slot
from recpoint.catalog.staging.trainer_note import NoteState, beat, write_trainer_note
from recpoint.catalog.store import durable
from recpoint.catalog.store.contract import Clocks, now_ms
from recpoint.errors import FormatError, SettingsError, StagingError, StagingRefused
from recpoint.format.naming import parse_job_stem
from recpoint.format.servers import AllServers, ServersRecord
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.snapshot.host_memory import HostMemory, host_memory, is_in_memory

__all__ = [
    "HostShare",
    "SMALLEST_BYTES",
    "SmallStagingArea",
    "StagingArea",
    "advise",
    "host_share",
    "policy",
    "share_of",
]


class HostShare(NamedTuple):
    """The ranks whose staging areas lie on one file system of one host, and what they take.

    Attributes:
        ranks: these ranks, ascending.
        bound_bytes: the most bytes that their slots take together.
    """

    ranks: tuple[int, ...]
    bound_bytes: int


def host_share(ranks: Ranks, root: Path, bound_bytes: int) -> HostShare:
    """Return the share of this rank's host. Collective: one exchange.

    Args:
        ranks: the ranks of the job.
        root: this rank's staging area; it need not exist yet.
        bound_bytes: the most bytes that the slots of this rank take.
    """
    return share_of(ranks.rank, ranks.exchange("the memory of hosts", [*_place(root), bound_bytes]))


def share_of(rank: int, answers: Sequence[Sequence[int]]) -> HostShare:
    """Return the share of the ranks that have the same host and file system as `rank`.

    Args:
        rank: one of these ranks.
        answers: for each rank: its host, its file system, and the most bytes that it takes.
    """
    place = answers[rank][:2]
    together = {rank: answer[2] for rank, answer in enumerate(answers) if answer[:2] == place}
    return HostShare(tuple(together), sum(together.values()))


def _place(root: Path) -> tuple[int, int]:
    """Return numbers of this host's boot and of the file system; containers may have their own."""
    existing = root
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    host = Clocks.read().boot or socket.gethostname()
    digest = hashlib.sha256(host.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True), os.stat(existing).st_dev


_log = logging.getLogger("recpoint")

#: Smaller tables are not moved: the processor can cache the addresses of their pages.
SMALLEST_BYTES = 32 << 20

_PAGE_BYTES = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1; not in Python's mmap module
_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def advise(tensors: Iterable[Tensor], *, smallest_bytes: int = SMALLEST_BYTES) -> int:
    """Have the memory of large CPU tensors moved to large pages, if the system offers them.

    Takes about the time of a copy of the tensors. Nothing changes if the administrator has turned
    large pages off (`never`), on systems other than Linux, or for shared memory.

    Args:
        tensors: tensors of any dtype, on any device.
        smallest_bytes: smaller tensors are not moved.

    Returns:
        Number of bytes that were moved.
    """
    if not _offered():
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for tensor in tensors:
        if not tensor.is_cpu or tensor.nbytes < smallest_bytes or tensor.is_shared():
            continue
        if not tensor.is_contiguous():
            continue
        # Only whole pages inside the tensor: memory around it belongs to other objects.
        first = -(-tensor.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // _PAGE_BYTES * _PAGE_BYTES
        if end <= first or madvise(first, end - first, mmap.MADV_HUGEPAGE) != 0:
            continue
        # The advice applies to future pages, but the table's pages exist already, so collapse them.
        # If the kernel cannot collapse or has no free large pages, its background thread moves them
        # later.
        if madvise(first, end - first, _COLLAPSE) == 0:
            moved += end - first
    if moved:
        _log.debug("%d bytes of tables are on large pages", moved)
    return moved


def policy() -> str:
    """Return the administrator's setting: always, madvise or never; "none" if there is none."""
    if sys.platform != "linux":
        return "none"
    try:
        text = _POLICY.read_text(encoding="ascii")
    except OSError:
        return "none"
    return text.partition("[")[2].partition("]")[0] or "none"


def _offered() -> bool:
    return policy() in ("always", "madvise")


_POLL_SECONDS = 0.05


class SmallStagingArea(RuntimeWarning):
    """Warns of a staging area that is too small for the checkpoints that may be staged there."""


class _AreaMemory(NamedTuple):
    """The room of a staging area.

    Attributes:
        size_bytes: size of its file system; 0: a tmpfs without a limit.
        unused_bytes: what the file system has free.
        memory: the memory that holds the files; None: they are on a disk, or it is unknown.
    """

    size_bytes: int
    unused_bytes: int
    memory: HostMemory | None

    @property
    def most_bytes(self) -> float:
        """The bytes that files could take there if nothing else took any."""
        size = self.size_bytes or math.inf
        return size if self.memory is None else min(size, self.memory.size_bytes)

    @property
    def free_bytes(self) -> int:
        """The bytes that files can take there now."""
        if self.memory is None:
            return self.unused_bytes
        if self.size_bytes == 0:
            return self.memory.free_bytes
        return min(self.unused_bytes, self.memory.free_bytes)


class StagingArea:
    """One run's part of a staging area, for the training process of one rank.

    Args:
        root: directory of the staging area; it is created if it does not exist.
        run_url: the run URL as its store spells it.
        rank: rank of this process.
    """

    def __init__(self, root: Path, run_url: str, *, rank: int = 0) -> None:
        self.root = root.absolute()  # a script may change its working directory while it trains
        self.run_url = run_url
        self.staged_run = StagedRun.of(self.root, run_url)
        self.rank = rank
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

    def free_bytes(self, *, all_ranks: bool = False) -> int | None:
        """Return the bytes that slots may take: free room plus present slots; None: unknown.

        Free room is that of the file system, and if that is in memory, at most the free memory.

        Args:
            all_ranks: count the slots of all ranks of this run here; otherwise only this rank's.
        """
        room = self._room()
        if room is None:
            return None
        try:
            whose = "r*-*.bin" if all_ranks else f"r{self.rank:05d}-*.bin"
            slots = self.staged_run.slots_directory.glob(whose)
            return room.free_bytes + sum(path.stat().st_size for path in slots)
        except OSError:
            return None  # `create` reports what is wrong with the area

    def _room(self) -> _AreaMemory | None:
        """Return the room of the staging area, which need not exist yet. None: unknown."""
        place = self.staged_run.path
        try:
            while not place.exists() and place != place.parent:
                place = place.parent
            system = os.statvfs(place)
        except OSError:
            return None  # `create` reports what is wrong with the area
        memory = host_memory() if is_in_memory(place) else None
        unit = system.f_frsize
        return _AreaMemory(system.f_blocks * unit, system.f_bavail * unit, memory)

    def refuse_if_small(self, share: HostShare, *, jobs: int) -> None:
        """Refuse a file system, or memory, that is too small for even the first snapshots.

        Only the whole size counts, because what fills it now may be removed.

        Args:
            share: share of the ranks on this file system.
            jobs: number of staged jobs for which the share of each rank has room.

        Raises:
            SettingsError: it is too small.
        """
        room = self._room()
        needed_bytes = share.bound_bytes // jobs
        if room is None or needed_bytes <= room.most_bytes:
            return
        several = f"s of {len(share.ranks)} ranks" if len(share.ranks) > 1 else ""
        raise SettingsError(
            f"staging area {self.root}",
            found=f"a file system of {room.size_bytes} bytes"
            + ("" if room.memory is None else f" in memory of {room.memory.size_bytes} bytes"),
            expected=f"at least {needed_bytes} bytes, which the first snapshot{several} may take",
            next_step="set staging= or RECPOINT_STAGING to a directory of a larger file system, "
            "also for the agent; in a container enlarge /dev/shm, as docker run --shm-size does",
        )

    def warn_if_small(self, share: HostShare) -> None:
        """Warn of a `shortage` before training starts, while it is easy to correct."""
        shortage = self.shortage(share)
        if shortage is not None:
            warnings.warn(shortage, SmallStagingArea, stacklevel=3)

    def shortage(self, share: HostShare) -> str | None:
        """Return a message if the slots of this host may not fit; only its first rank gets one."""
        free, room = self.free_bytes(all_ranks=True), self._room()
        if free is None or room is None or free >= share.bound_bytes:
            return None
        if self.rank != share.ranks[0]:
            return None
        several = f" of {len(share.ranks)} ranks" if len(share.ranks) > 1 else ""
        needed = f"staged checkpoints{several} may take {share.bound_bytes} bytes"
        memory = room.memory
        if memory is not None and room.free_bytes < room.unused_bytes:
            return (
                f"staging area {self.root} is in memory: its file system has {room.unused_bytes} "
                f"free bytes, but only {memory.free_bytes} bytes of memory are free, and {needed}; "
                "the system may kill a process for want of memory. Next: set staging= or "
                "RECPOINT_STAGING to a directory on a disk, or free memory: recpoint info names "
                "slots that were left behind"
            )
        return (
            f"staging area {self.root}: {free} bytes are free, and {needed}; checkpoints that do "
            "not fit are skipped. Next: set staging= or RECPOINT_STAGING to a larger directory"
        )

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
