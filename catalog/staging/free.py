"""Frees the memory of slots that nobody will use any more (format §6.5).

A slot has the size of a full checkpoint, is in memory by default, and waits for the next trainer of
its run. If no trainer comes, only this module frees it.

Why this is safe: only the holder of a rank's trainer lock writes the rank's slots or names a slot
in a new job, and it takes the lock before it opens a slot. So while this module holds the lock, no
job can appear, and nobody uses a slot that no job names. A job that is being persisted names its
slot until it is answered.

The lock is held only shortly, for less time than a starting trainer waits for it. Jobs are read
before the lock is taken; under the lock only their names and times are compared, and the slot's
file is unlinked. The file is open, so unlinking takes no time; its memory is freed afterwards. If
this process is killed at any point, the kernel releases the lock, and each slot is whole or gone.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from recpoint.catalog.run.ends import read_end
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import locks, owned
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.catalog.staging.job_files import read_job
from recpoint.catalog.staging.trainer_note import read_trainer_note, trainer_state
from recpoint.catalog.store import durable
from recpoint.errors import FormatError, StagingError, StagingRefused
from recpoint.format.naming import parse_job_stem
from recpoint.units import bytes_text

__all__ = [
    "FreeSlot",
    "LeftBehind",
    "RankJobs",
    "free_slots",
    "free_slots_of_ended",
    "has_ended",
    "left_behind",
    "read_rank_jobs",
    "remove_unnamed",
    "slots_by_rank",
]


_SLOT_NAME = re.compile(r"r([0-9]{5})-[0-9]{1,4}\.bin\Z")


class FreeSlot(NamedTuple):
    """A slot that was removed, or would be in a dry run, its size, and why nobody will use it.

    A file with rows of a full, which the agent keeps for residuals, counts as one.
    """

    slot: str
    size_bytes: int
    reason: str


def free_slots(
    staged_run: StagedRun,
    *,
    ended: bool,
    grace_seconds: float,
    besides: Collection[str] = (),
    dry_run: bool = False,
) -> list[FreeSlot]:
    """Remove the slots that no job names, of ranks that no process on this host trains.

    Args:
        staged_run: the run's directory in a staging area of this host; it need not exist.
        ended: training has ended by itself, or the run is gone, so no trainer is expected.
        grace_seconds: without `ended`, slots that were in use less than this ago stay: a killed
            trainer may be started again, and starts faster with its old slots.
        besides: stems of jobs to ignore because they will be answered by then; for a dry run.
        dry_run: only return what would be removed.

    Raises:
        StagingRefused: something in the run's directory is not this user's own.
        OSError: the staging area cannot be read or written.
    """
    found: list[FreeSlot] = []
    slots, bases = slots_by_rank(staged_run), _bases(staged_run)
    if not slots and not bases:
        return found
    idle_seconds = _idle_seconds(staged_run)
    reason = "training has ended" if ended else f"unused for more than {grace_seconds:g} s"
    for path, size_bytes in bases if ended or idle_seconds >= grace_seconds else []:
        # An agent that needs such a file after all reads the store again.
        if not dry_run:
            owned.remove(staged_run.staging, path)
        found.append(FreeSlot(path.name, size_bytes, reason))
    for rank, paths in sorted(slots.items()):
        old = [
            path
            for path in paths
            if ended or min(idle_seconds, _age_seconds(path)) >= grace_seconds
        ]
        if dry_run:
            lock = staged_run.trainer_lock_path(rank)
            if not locks.is_held(lock, root=staged_run.staging):
                found += [
                    FreeSlot(path.name, path.stat().st_size, reason)
                    for path in read_rank_jobs(staged_run, rank, besides).unnamed(old)
                ]
            continue
        jobs = read_rank_jobs(staged_run, rank)
        # Checked first, so that the lock is taken only if there is something to remove.
        if jobs.unnamed(old):
            found += [FreeSlot(*freed, reason) for freed in _remove(jobs, old)]
    return found


def has_ended(run: Run, staged_run: StagedRun) -> bool:
    """Say whether the newest trainer of a run said, in the store or in staging, that it ended.

    Raises:
        StoreError: the store cannot be read.
    """
    if trainer_state(staged_run, read_trainer_note(staged_run)) == "ended":
        return True
    newest = max(run.generation_numbers(), default=0)
    try:
        return newest > 0 and read_end(run, newest) is not None
    except FormatError:
        return False


def free_slots_of_ended(staged_run: StagedRun) -> list[FreeSlot]:
    """As `free_slots`, if training has ended and all its jobs are answered; otherwise does little.

    Raises:
        StagingRefused: something in the run's directory is not this user's own.
        OSError: the staging area cannot be read or written.
    """
    has_files = bool(slots_by_rank(staged_run) or _bases(staged_run))
    if not has_files or staged_run.staged_jobs():
        return []
    if trainer_state(staged_run, read_trainer_note(staged_run)) != "ended":
        return []
    return free_slots(staged_run, ended=True, grace_seconds=0.0)


class LeftBehind(NamedTuple):
    """A run whose trainer is gone without having said that it ended, and the bytes of its slots."""

    run_url: str
    size_bytes: int

    def __str__(self) -> str:
        return (
            f"{bytes_text(self.size_bytes)} of slots wait for a new start of {self.run_url}, whose "
            f"trainer is gone: recpoint sweep {self.run_url} --grace 1h frees what was unused for "
            f"an hour; if the run is deleted, recpoint sweep {self.run_url} --discard-staged frees "
            "all"
        )


def left_behind(staging: Path) -> list[LeftBehind]:
    """Return the runs of a staging area whose trainers left slots and are gone, largest first.

    What cannot be read is left out.
    """
    found: list[LeftBehind] = []
    found_runs: list[StagedRun] = []
    with suppress(OSError, StagingRefused):
        found_runs = staged_runs(staging)
    for staged_run in found_runs:
        with suppress(OSError, StagingRefused):
            note = read_trainer_note(staged_run)
            if note is None or trainer_state(staged_run, note) != "lost":
                continue
            slots = [path for paths in slots_by_rank(staged_run).values() for path in paths]
            size_bytes = sum(path.stat().st_size for path in slots)
            size_bytes += sum(size for _, size in _bases(staged_run))
            if size_bytes:
                found.append(LeftBehind(note.run_url, size_bytes))
    return sorted(found, key=lambda one: -one.size_bytes)


@dataclass(frozen=True, kw_only=True)
class RankJobs:
    """The jobs of one rank when they were read, and the slots that they name.

    Attributes:
        staged_run: the run's directory.
        rank: the rank.
        files: (inode, time of the last change in ns, size in bytes) of each job file, by its name.
        slots: names of the slots; None: a job cannot be read, and may name any slot of the rank.
    """

    staged_run: StagedRun
    rank: int
    files: Mapping[str, tuple[int, int, int]]
    slots: frozenset[str] | None

    def unnamed(self, slots: Iterable[Path]) -> list[Path]:
        """Return those of `slots` that no job names; none if a job cannot be read."""
        named = self.slots
        return [] if named is None else [path for path in slots if path.name not in named]

    def hold(self) -> bool:
        """Say whether no job is new or changed, by names and times, without reading a job."""
        try:
            found = {path.name: _identity(path) for path in _jobs_of(self.staged_run, self.rank)}
        except FileNotFoundError:
            return False  # a job was answered just now; the next call will see it
        return found.items() <= self.files.items()


def read_rank_jobs(staged_run: StagedRun, rank: int, besides: Collection[str] = ()) -> RankJobs:
    """Read which slots the jobs of a rank name, except the jobs whose stems are in `besides`.

    Call this before taking the rank's trainer lock, because parsing a job of many tables takes
    longer than a starting trainer waits for that lock.
    """
    files: dict[str, tuple[int, int, int]] = {}
    slots: set[str] | None = set()
    for path in _jobs_of(staged_run, rank):
        if path.stem in besides:
            continue
        try:
            files[path.name] = _identity(path)  # before the read, so that `hold` sees a replacement
            if slots is not None:
                slots.add(read_job(path).slot)
        except FileNotFoundError:
            continue  # answered meanwhile
        except (FormatError, StagingRefused):
            slots = None
    named = None if slots is None else frozenset(slots)
    return RankJobs(staged_run=staged_run, rank=rank, files=files, slots=named)


def slots_by_rank(staged_run: StagedRun) -> dict[int, list[Path]]:
    """Return the slot files of a run by rank, sorted by name; follow no links."""
    slots: dict[int, list[Path]] = {}
    directory = staged_run.slots_directory
    try:
        with owned.directory(staged_run.staging, directory) as opened:
            for name in sorted(os.listdir(opened)):
                match = _SLOT_NAME.match(name)
                if match and _is_plain(name, opened):
                    slots.setdefault(int(match[1]), []).append(directory / name)
    except (FileNotFoundError, NotADirectoryError):
        return slots
    return slots


def _bases(staged_run: StagedRun) -> list[tuple[Path, int]]:
    """Return the files with rows of fulls, and their sizes in bytes, sorted by name."""
    directory = staged_run.bases_directory
    files = []
    for name in sorted(owned.names(staged_run.staging, directory)):
        with suppress(FileNotFoundError):
            status = owned.file_status(staged_run.staging, directory / name)
            files.append((directory / name, status.st_size))
    return files


def remove_unnamed(
    jobs: RankJobs, slots: Iterable[Path], afterwards: ExitStack
) -> list[tuple[str, int]]:
    """Remove those of `slots` that no job names; the caller must hold the rank's trainer lock.

    Removes nothing if a job is new or changed since `jobs` was read.

    Args:
        jobs: the jobs of the rank, read before the lock was taken.
        slots: slots of the rank.
        afterwards: the caller closes it after releasing the lock. Closing frees the memory of the
            removed slots, which takes long.

    Returns:
        Names and sizes in bytes of the removed slots.
    """
    removed: list[tuple[str, int]] = []
    if not jobs.hold():
        return removed
    area = jobs.staged_run.staging
    for path in jobs.unnamed(slots):
        try:
            descriptor = owned.open_file(area, path)
        except FileNotFoundError:
            continue  # meanwhile a trainer has come and removed it
        afterwards.callback(os.close, descriptor)
        size_bytes = os.fstat(descriptor).st_size
        durable.step(f"unlink {path.name}")
        with owned.directory(area, path.parent) as opened, suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=opened)
        removed.append((path.name, size_bytes))
    return removed


def _remove(jobs: RankJobs, slots: list[Path]) -> list[tuple[str, int]]:
    try:
        lock = locks.acquire(
            jobs.staged_run.trainer_lock_path(jobs.rank),
            expected="no trainer of this rank",
            next_step="nothing: its slots stay while it trains",
            root=jobs.staged_run.staging,
        )
    except StagingRefused:
        raise
    except StagingError:
        return []
    with ExitStack() as afterwards:
        try:
            return remove_unnamed(jobs, slots, afterwards)
        finally:
            locks.release(lock)


def _is_plain(name: str, directory: int) -> bool:
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False  # removed meanwhile
    return stat.S_ISREG(status.st_mode)


def _jobs_of(staged_run: StagedRun, rank: int) -> list[Path]:
    return [
        path
        for path in staged_run.staged_jobs()
        if (name := parse_job_stem(path.stem)) is not None and name[2] == rank
    ]


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _idle_seconds(staged_run: StagedRun) -> float:
    """Return the seconds since a job was staged or answered.

    The time of a slot does not show its last use, because writes through mapped memory may not
    change it.
    """
    directories = (staged_run.jobs_directory, staged_run.outcomes_directory)
    return min(map(_age_seconds, directories))


def _age_seconds(path: Path) -> float:
    """Return the seconds since `path` was changed, by this host's clock; infinity if missing."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
