"""Giving back the memory of slots that nobody will use any more (format §6.5).

A slot has the size of a full checkpoint, in memory by default, and waits for the next trainer of
its run: where none will come, only this gives it back.

Why it is safe. Only the process that holds a rank's trainer lock writes its slots or names one in
a new job, and it takes the lock before it opens a slot: so while the lock is held here, no job can
appear, and a slot that no job names is nobody's. Jobs that are being persisted name theirs until
they are answered. A trainer that starts meanwhile waits for the lock for longer than it is held
here: the file is unlinked under it, which takes no time since it is open, and its memory is freed
afterwards. Killed anywhere, the kernel releases the lock, and each slot is whole or gone.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from recpoint.catalog import durable, host_lock, staged
from recpoint.catalog.run import Run
from recpoint.catalog.run_end import read_end
from recpoint.catalog.trainer_note import read_note, trainer_state
from recpoint.errors import FormatError, StagingError
from recpoint.format.naming import parse_job_stem

__all__ = ["FreeSlot", "free_slots", "free_slots_of_ended", "has_ended"]

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
        OSError: the staging area cannot be read or written.
    """
    found: list[FreeSlot] = []
    slots = _slots(run_dir)
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
            if not host_lock.is_held(staged.trainer_lock_path(run_dir, rank)):
                found += [
                    FreeSlot(path.name, path.stat().st_size, reason)
                    for path in _unnamed(run_dir, rank, old, besides)
                ]
        # Before the lock as well, so that it is taken where there is something to remove alone.
        elif _unnamed(run_dir, rank, old):
            found += [FreeSlot(*freed, reason) for freed in _remove(run_dir, rank, old)]
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
        OSError: the staging area cannot be read or written.
    """
    if not _slots(run_dir) or staged.staged_jobs(run_dir):
        return []
    if trainer_state(run_dir, read_note(run_dir)) != "ended":
        return []
    return free_slots(run_dir, ended=True, grace_seconds=0.0)


def _slots(run_dir: Path) -> dict[int, list[Path]]:
    """Slot files by rank."""
    slots: dict[int, list[Path]] = {}
    try:
        entries = sorted(os.scandir(staged.slots_directory(run_dir)), key=lambda one: one.name)
    except (FileNotFoundError, NotADirectoryError):
        return slots
    for entry in entries:
        name = _SLOT_NAME.match(entry.name)
        if name and entry.is_file(follow_symlinks=False):
            slots.setdefault(int(name[1]), []).append(Path(entry.path))
    return slots


def _unnamed(
    run_dir: Path, rank: int, paths: list[Path], besides: Collection[str] = ()
) -> list[Path]:
    """Those of `paths` that no job of the rank names; none while it is not known what one names."""
    named = set()
    for path in staged.staged_jobs(run_dir):
        name = parse_job_stem(path.stem)
        if name is None or name[2] != rank or path.stem in besides:
            continue
        try:
            named.add(staged.read_job(path).slot)
        except FileNotFoundError:
            continue  # answered since
        except FormatError:
            return []
    return [path for path in paths if path.name not in named]


def _remove(run_dir: Path, rank: int, paths: list[Path]) -> list[tuple[str, int]]:
    try:
        lock = host_lock.acquire(
            staged.trainer_lock_path(run_dir, rank),
            expected="no trainer of this rank",
            next_step="nothing: its slots are its own",
        )
    except StagingError:
        return []
    removed: list[tuple[str, int]] = []
    opened: list[int] = []
    try:
        for path in _unnamed(run_dir, rank, paths):
            try:
                opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
            except FileNotFoundError:
                continue  # a trainer has come and gone since
            size_bytes = os.fstat(opened[-1]).st_size
            durable.step(f"unlink {path.name}")
            path.unlink(missing_ok=True)
            removed.append((path.name, size_bytes))
    finally:
        host_lock.release(lock)
        for descriptor in opened:
            os.close(descriptor)
    return removed


def _idle_seconds(run_dir: Path) -> float:
    """Since something was staged or answered. A slot in memory does not tell when it was used."""
    directories = (staged.jobs_directory(run_dir), staged.outcomes_directory(run_dir))
    return min(map(_age_seconds, directories))


def _age_seconds(path: Path) -> float:
    """Since it was changed, by this host's clock; what is not there is old."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
