"""Giving back the memory of slots that nobody will use any more (format §6.5).

A slot has the size of a full checkpoint, in memory by default, and waits for the next trainer of
its run: where none will come, only this gives it back.

Why it is safe. Only the process that holds a rank's trainer lock writes its slots or names one in
a new job, and it takes the lock before it opens a slot: so while the lock is held here, no job can
appear, and a slot that no job names is nobody's. Jobs that are being persisted name theirs until
they are answered. What jobs name is read before, and under the lock only their names and times are
compared. So a trainer that starts meanwhile waits for the lock for longer than it is held
here: the file is unlinked under it, which takes no time since it is open, and its memory is freed
afterwards. Killed anywhere, the kernel releases the lock, and each slot is whole or gone.
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

from recpoint.catalog.run.run import Run, read_end
from recpoint.catalog.staging import locks, owned
from recpoint.catalog.staging.area import (
    jobs_directory,
    outcomes_directory,
    read_job,
    read_note,
    slots_directory,
    staged_jobs,
    trainer_lock_path,
    trainer_state,
)
from recpoint.catalog.store import durable
from recpoint.errors import FormatError, StagingError, StagingRefused
from recpoint.format.naming import parse_job_stem

__all__ = [
    "FreeSlot",
    "RankJobs",
    "free_slots",
    "free_slots_of_ended",
    "has_ended",
    "read_rank_jobs",
    "remove_unnamed",
    "slots_by_rank",
]


_SLOT_NAME = re.compile(r"r([0-9]{5})-[0-9]{1,4}\.bin\Z")


class FreeSlot(NamedTuple):
    """A slot that was, or would be, removed, its size, and why nobody will use it."""

    slot: str
    size_bytes: int
    reason: str


def free_slots(
    run_dir: Path,
    *,
    ended: bool,
    grace_seconds: float,
    besides: Collection[str] = (),
    dry_run: bool = False,
) -> list[FreeSlot]:
    """Remove the slots that no job names, of ranks that no process trains here.

    Args:
        run_dir: the run's directory in a staging area of this host, whether it is there or not.
        ended: training has ended by itself, or the run is gone: nobody is expected to go on.
        grace_seconds: else those stay that were in use less long ago: a trainer that was killed
            may be started again, and is quicker with the slots it had.
        besides: names of jobs that will be done with by then; for a dry run.
        dry_run: only say which.

    Raises:
        StagingRefused: something in the run's directory is not this user's own.
        OSError: the staging area cannot be read or written.
    """
    found: list[FreeSlot] = []
    slots = slots_by_rank(run_dir)
    if not slots:
        return found
    idle_seconds = _idle_seconds(run_dir)
    for rank, paths in sorted(slots.items()):
        old = [
            path
            for path in paths
            if ended or min(idle_seconds, _age_seconds(path)) >= grace_seconds
        ]
        reason = "training has ended" if ended else f"unused for more than {grace_seconds:g} s"
        if dry_run:
            lock = trainer_lock_path(run_dir, rank)
            if not locks.is_held(lock, root=run_dir.parent):
                found += [
                    FreeSlot(path.name, path.stat().st_size, reason)
                    for path in read_rank_jobs(run_dir, rank, besides).unnamed(old)
                ]
            continue
        jobs = read_rank_jobs(run_dir, rank)
        # So the lock is taken where there is something to remove alone.
        if jobs.unnamed(old):
            found += [FreeSlot(*freed, reason) for freed in _remove(jobs, old)]
    return found


def has_ended(run: Run, run_dir: Path) -> bool:
    """Whether the newest trainer of a run said goodbye, in the store or in the staging area here.

    Raises:
        StoreError: the store cannot be read.
    """
    if trainer_state(run_dir, read_note(run_dir)) == "ended":
        return True
    newest = max(run.generation_numbers(), default=0)
    try:
        return newest > 0 and read_end(run, newest) is not None
    except FormatError:
        return False


def free_slots_of_ended(run_dir: Path) -> list[FreeSlot]:
    """`free_slots`, once training has ended and all that it staged is answered; cheap otherwise.

    Raises:
        StagingRefused: something in the run's directory is not this user's own.
        OSError: the staging area cannot be read or written.
    """
    if not slots_by_rank(run_dir) or staged_jobs(run_dir):
        return []
    if trainer_state(run_dir, read_note(run_dir)) != "ended":
        return []
    return free_slots(run_dir, ended=True, grace_seconds=0.0)


@dataclass(frozen=True, kw_only=True)
class RankJobs:
    """The jobs of one rank when they were read, and the slots that they name.

    Attributes:
        run_dir: the run's directory.
        rank: whose.
        files: inode, time of the last change in ns and size of each job file, by its name.
        slots: names of their slots; None: one cannot be read, and may name any slot of the rank.
    """

    run_dir: Path
    rank: int
    files: Mapping[str, tuple[int, int, int]]
    slots: frozenset[str] | None

    def unnamed(self, slots: Iterable[Path]) -> list[Path]:
        """Those of `slots` that no job names; none while it is not known what one names."""
        named = self.slots
        return [] if named is None else [path for path in slots if path.name not in named]

    def hold(self) -> bool:
        """Whether there is no other job now, and none that has changed; nothing is read for it."""
        try:
            found = {path.name: _identity(path) for path in _jobs_of(self.run_dir, self.rank)}
        except FileNotFoundError:
            return False  # answered just now: asked again the next time
        return found.items() <= self.files.items()


def read_rank_jobs(run_dir: Path, rank: int, besides: Collection[str] = ()) -> RankJobs:
    """Read which slots the jobs of a rank name, `besides` those that will be done with by then.

    Before its trainer lock is taken: to parse a job of many tables takes longer than a trainer
    that starts waits for that lock.
    """
    files: dict[str, tuple[int, int, int]] = {}
    slots: set[str] | None = set()
    for path in _jobs_of(run_dir, rank):
        if path.stem in besides:
            continue
        try:
            files[path.name] = _identity(path)  # first: what replaces it then is seen by it
            if slots is not None:
                slots.add(read_job(path).slot)
        except FileNotFoundError:
            continue  # answered since
        except (FormatError, StagingRefused):
            slots = None
    named = None if slots is None else frozenset(slots)
    return RankJobs(run_dir=run_dir, rank=rank, files=files, slots=named)


def slots_by_rank(run_dir: Path) -> dict[int, list[Path]]:
    """Slot files of a run by rank, by name; links are not followed."""
    slots: dict[int, list[Path]] = {}
    directory = slots_directory(run_dir)
    try:
        with owned.directory(run_dir.parent, directory) as opened:
            for name in sorted(os.listdir(opened)):
                match = _SLOT_NAME.match(name)
                if match and _is_plain(name, opened):
                    slots.setdefault(int(match[1]), []).append(directory / name)
    except (FileNotFoundError, NotADirectoryError):
        return slots
    return slots


def remove_unnamed(
    jobs: RankJobs, slots: Iterable[Path], afterwards: ExitStack
) -> list[tuple[str, int]]:
    """Remove those of `slots` that no job names; only while the rank's trainer lock is held.

    Nothing, if there are other jobs than when they were read.

    Args:
        jobs: of the rank; read before the lock was taken.
        slots: of the rank.
        afterwards: to be closed once the lock is given back: it frees the memory of what was
            removed, which takes long.

    Returns:
        Names and sizes of what was removed.
    """
    removed: list[tuple[str, int]] = []
    if not jobs.hold():
        return removed
    area = jobs.run_dir.parent
    for path in jobs.unnamed(slots):
        try:
            descriptor = owned.open_file(area, path)
        except FileNotFoundError:
            continue  # a trainer has come and gone since
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
            trainer_lock_path(jobs.run_dir, jobs.rank),
            expected="no trainer of this rank",
            next_step="nothing: its slots are its own",
            root=jobs.run_dir.parent,
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
        return False  # removed since
    return stat.S_ISREG(status.st_mode)


def _jobs_of(run_dir: Path, rank: int) -> list[Path]:
    return [
        path
        for path in staged_jobs(run_dir)
        if (name := parse_job_stem(path.stem)) is not None and name[2] == rank
    ]


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _idle_seconds(run_dir: Path) -> float:
    """Since something was staged or answered. A slot in memory does not tell when it was used."""
    directories = (jobs_directory(run_dir), outcomes_directory(run_dir))
    return min(map(_age_seconds, directories))


def _age_seconds(path: Path) -> float:
    """Since it was changed, by this host's clock; what is not there is old."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
