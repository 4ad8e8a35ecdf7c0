"""Defines a host's staging area, which trainer and agent share: where a run's files lie (§7)."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from recpoint.catalog.staging import owned
from recpoint.catalog.staging.locks import holder
from recpoint.catalog.store import durable
from recpoint.errors import StagingRefused
from recpoint.format.naming import MAX_RANK, job_stem, parse_job_stem
from recpoint.format.records import CheckpointRef

__all__ = ["SERVER_WORDS", "StagedRun", "default_staging_root", "slot_name", "staged_runs"]

#: How an embedding server describes itself in the lock of its part.
SERVER_WORDS: Final = "embedding server"

_MAX_SLOT = 9_999

_RUN_DIRECTORY = re.compile(r"-[0-9a-f]{12}\Z")
_TRAINER_LOCK = re.compile(r"trainer(-r[0-9]{5})?\.lock\Z")
#: Names of the temporary files of `durable` and of the status note.
_HALF_WRITTEN = re.compile(rf"{re.escape(durable.TEMPORARY_PREFIX)}([0-9a-f]{{32}}|status-\d+)\Z")


def default_staging_root() -> Path:
    """Return `RECPOINT_STAGING`, else a path in memory (`/dev/shm`) or a temporary directory."""
    chosen = os.environ.get("RECPOINT_STAGING")
    if chosen:
        return Path(chosen)
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return parent / f"recpoint-{os.getuid()}"


def slot_name(rank: int, index: int) -> str:
    """Return the file name of slot `index` of `rank`."""
    if not (0 <= rank <= MAX_RANK and 0 <= index <= _MAX_SLOT):
        raise ValueError(f"rank {rank}, slot {index}: outside 0 … {MAX_RANK}, 0 … {_MAX_SLOT}")
    return f"r{rank:05d}-{index}.bin"


@dataclass(frozen=True)
class StagedRun:
    """The directory of a run in a staging area; it need not exist.

    Attributes:
        path: the directory.
    """

    path: Path

    @classmethod
    def of(cls, staging: Path | str, run_url: str) -> Self:
        """Return the run's directory in the staging area `staging`; no two runs share one."""
        name = run_url.rstrip("/").rpartition("/")[2]
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100] or "run"
        digest = hashlib.sha256(run_url.encode("utf-8", errors="surrogatepass")).hexdigest()
        return cls(Path(staging) / f"{safe}-{digest[:12]}")

    @classmethod
    def of_job(cls, job_file: Path) -> Self:
        """Return the run whose job or outcome this is: `<run>` in `<area>/<run>/jobs/<name>`."""
        return cls(job_file.parent.parent)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """Its name in the staging area."""
        return self.path.name

    @property
    def staging(self) -> Path:
        """The staging area."""
        return self.path.parent

    @property
    def slots_directory(self) -> Path:
        """The directory of the trainer's slots."""
        return self.path / "slots"

    @property
    def jobs_directory(self) -> Path:
        """The directory of the job files."""
        return self.path / "jobs"

    @property
    def outcomes_directory(self) -> Path:
        """The directory of the agent's answers."""
        return self.path / "outcomes"

    @property
    def cancels_directory(self) -> Path:
        """The directory of the cancel marks."""
        return self.path / "cancels"

    @property
    def spool_directory(self) -> Path:
        """The directory in which the agent keeps encoded parts on their way to the store."""
        return self.path / "spool"

    @property
    def bases_directory(self) -> Path:
        """The directory in which the agent keeps the rows of fulls, for residuals to them."""
        return self.path / "bases"

    @property
    def status_path(self) -> Path:
        """The agent's status file for this run, which is for people."""
        return self.path / "status.json"

    def slot_path(self, rank: int, index: int) -> Path:
        """Return the path of slot `index` of `rank`."""
        return self.slots_directory / slot_name(rank, index)

    def job_path(self, generation: int, step: int, rank: int) -> Path:
        """Return the path of the job file of one snapshot."""
        return self.jobs_directory / f"{job_stem(generation, step, rank)}.json"

    def outcome_path(self, generation: int, step: int, rank: int) -> Path:
        """Return the path of the outcome file that answers the job of the same name."""
        return self.outcomes_directory / f"{job_stem(generation, step, rank)}.json"

    def cancel_path(self, ref: CheckpointRef, rank: int) -> Path:
        """Return the path of the cancel mark for the job of one snapshot."""
        return self.cancels_directory / f"{job_stem(ref.generation, ref.step, rank)}.json"

    def trainer_lock_path(self, rank: int = 0) -> Path:
        """Return the path of the file that the training process of a rank locks."""
        return self.path / ("trainer.lock" if rank == 0 else f"trainer-r{rank:05d}.lock")

    def exists(self) -> bool:
        """Tell whether the directory exists."""
        return self.path.is_dir()

    def make_directories(self) -> None:
        """Make the directories for what is staged that are missing.

        Each is private: other users of the host must not read a model's weights.

        Raises:
            StagingRefused: a directory belongs to another user, is a link, or is open to other
                users.
            OSError: a directory cannot be made.
        """
        owned.make_root(self.staging)
        for directory in (self.slots_directory, self.jobs_directory, self.outcomes_directory):
            owned.make_directory(self.staging, directory)

    def trainer_is_running(self) -> bool:
        """Tell whether a training process of any rank holds its lock.

        An embedding server that has staged rows holds one, too, and may outlive its training.

        Raises:
            StagingRefused: the directory, or a lock in it, is not this user's own.
            OSError: the file system does not say.
        """
        names = owned.names(self.staging, self.path)
        locks = [name for name in names if _TRAINER_LOCK.match(name)]
        holders = (holder(self.path / name, root=self.staging) for name in locks)
        return any(process is not None and process.words != SERVER_WORDS for process in holders)

    def staged_jobs(self) -> list[Path]:
        """Return the job files in the order in which they must be committed.

        Raises:
            StagingRefused: their directory, or the run's, is not this user's own.
            OSError: it cannot be read.
        """
        names = owned.names(self.staging, self.jobs_directory)
        named = [
            (stem, name)
            for name in names
            if name.endswith(".json") and (stem := parse_job_stem(name.removesuffix(".json")))
        ]
        return [self.jobs_directory / name for _, name in sorted(named)]

    def clean(self) -> None:
        """Empty the spool and remove half-written outcomes and notes; only while no agent works.

        A trainer's notes are left alone, because their temporary files have other names.

        Raises:
            StagingRefused: one of the directories is not this user's own.
            OSError: something cannot be removed.
        """
        with suppress(OSError):
            owned.remove_tree(self.staging, self.spool_directory, ignore_errors=True)
        for directory in (self.outcomes_directory, self.path):
            with suppress(FileNotFoundError), owned.directory(self.staging, directory) as opened:
                for name in os.listdir(opened):
                    if _HALF_WRITTEN.match(name):
                        with suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=opened)


def staged_runs(
    staging: Path | str, *, refused: Callable[[StagedRun, StagingRefused], None] | None = None
) -> list[StagedRun]:
    """Return the runs staged here, sorted by name; follows no links.

    Directories of other users are left out, because in a directory where everybody may write,
    anybody can make them.

    Args:
        staging: the staging area.
        refused: called with each run whose directory is left out, and the error.

    Raises:
        StagingRefused: the staging area itself is another user's.
        OSError: it cannot be read.
    """
    root, runs = Path(staging), []
    for name in sorted(owned.names(root, root)):
        if not _RUN_DIRECTORY.search(name):
            continue
        staged_run = StagedRun(root / name)
        try:
            status = owned.require_own(root, staged_run.path)
        except StagingRefused as error:
            if not staged_run.path.is_symlink() and refused is not None:
                refused(staged_run, error)
            continue
        if status is not None and stat.S_ISDIR(status.st_mode):
            runs.append(staged_run)
    return runs
