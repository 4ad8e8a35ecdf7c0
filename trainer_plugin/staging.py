"""The trainer's side of the staging area: its directories, its lock, its slots (format §7)."""

from __future__ import annotations

import os
import shlex
import time
import warnings
from pathlib import Path

from recpoint.catalog import durable, host_lock, staged
from recpoint.errors import FormatError, StagingError
from recpoint.format.naming import parse_job_stem
from recpoint.trainer_plugin.slot import Slot

__all__ = ["SmallStagingArea", "StagingArea"]

_POLL_SECONDS = 0.05


class SmallStagingArea(RuntimeWarning):
    """The staging area cannot hold the checkpoints that it may have to hold."""


class StagingArea:
    """One run's part of a staging area, for the training process of one rank.

    Args:
        root: the staging area; it is created when it is not there.
        run_url: the run URL as its store spells it.
        rank: of this process.
    """

    def __init__(self, root: Path, run_url: str, *, rank: int = 0) -> None:
        self.root = root.absolute()  # a script may change its directory while it trains
        self.run_directory = staged.run_directory(self.root, run_url)
        self.rank = rank
        self._slots_directory = str(staged.slots_directory(self.run_directory))
        self._lock: int | None = None
        self._slots: dict[int, Slot] = {}
        self._foreign: dict[int, Path] = {}

    def create(self) -> None:
        """Make the directories that are missing.

        Raises:
            StagingError: that is not possible, or others may write to the staging area.
        """
        try:
            staged.make_root(self.root)
            # Other users of the host have no business with a model's weights, wherever they lie.
            durable.make_directory(self.run_directory, mode=0o700)
            for directory in (
                staged.slots_directory(self.run_directory),
                staged.jobs_directory(self.run_directory),
                staged.outcomes_directory(self.run_directory),
            ):
                durable.make_directory(directory)
        except OSError as error:
            raise self._unusable(error) from error

    def create_if_cleared(self) -> None:
        """`create`, when somebody has removed the place of the slots. Training waits for this.

        Raises:
            StagingError: as `create` does.
        """
        if not os.path.isdir(self._slots_directory):
            self.create()

    def lock(self) -> None:
        """Become the one training process of this run here; released when the process ends.

        Raises:
            StagingError: another process is; its number is in the message.
        """
        try:
            self._lock = host_lock.acquire(
                staged.trainer_lock_path(self.run_directory),
                expected="no other trainer of this run on this staging area",
                next_step="stop that process, or train under another run URL",
            )
        except OSError as error:
            raise self._unusable(error) from error

    def close(self) -> None:
        """Release lock and slots; what is staged stays."""
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        if self._lock is not None:
            host_lock.release(self._lock)
            self._lock = None

    def agent_is_running(self) -> bool:
        """Whether an agent serves this staging area now."""
        return host_lock.is_held(staged.agent_lock_path(self.root))

    def agent_command(self) -> str:
        """What starts the agent of this staging area."""
        if self.root == staged.default_staging_root().absolute():
            return "recpoint agent"
        return f"recpoint agent --staging {shlex.quote(str(self.root))}"

    def wait_until_drained(self, seconds: float) -> int:
        """Wait for the agent to finish what an earlier trainer staged; jobs that are left.

        Ends early when there is no agent: nothing would change.
        """
        deadline = time.monotonic() + seconds
        while self.jobs() and time.monotonic() < deadline and self.agent_is_running():
            time.sleep(_POLL_SECONDS)
        return len(self.jobs())

    def jobs(self) -> list[Path]:
        """Job files of this rank, oldest first."""
        return [
            path
            for path in staged.staged_jobs(self.run_directory)
            if (name := parse_job_stem(path.stem)) is not None and name[2] == self.rank
        ]

    def take_over(self, generation: int) -> None:
        """Deal with what trainers before `generation` left: they can commit nothing any more.

        Their outcomes are removed: nobody waits for them. Their jobs are removed when no agent
        runs; one that runs rejects them itself, and until then their slots are left alone.
        """
        agent = self.agent_is_running()
        for path in self.jobs():
            name = parse_job_stem(path.stem)
            if name is None or name[0] >= generation:
                continue
            if not agent:
                durable.remove(path)
                continue
            try:
                self._foreign[_slot_index(staged.read_job(path).slot)] = path
            except (FormatError, FileNotFoundError):
                continue  # it names no slot that anyone could read
        for path in staged.outcomes_directory(self.run_directory).glob("*.json"):
            name = parse_job_stem(path.stem)
            if name is not None and name[0] < generation and name[2] == self.rank:
                durable.remove(path)
        # A trainer killed while it wrote a job; this process has the lock, so none is writing now.
        jobs = staged.jobs_directory(self.run_directory)
        for path in jobs.glob(f"{durable.TEMPORARY_PREFIX}*"):
            durable.remove(path)

    def free_slot(self, busy: set[str]) -> Slot:
        """The first slot that no staged job uses.

        Args:
            busy: names of the slots of this trainer's own jobs.
        """
        index = 0
        while self._name(index) in busy or self._is_foreign(index):
            index += 1
        if index not in self._slots:
            self._slots[index] = Slot(staged.slot_path(self.run_directory, self.rank, index))
        return self._slots[index]

    def free_bytes(self) -> int | None:
        """Space that slots may take: what is free, and what slots have already; None: unknown."""
        place = self.run_directory
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            system = os.statvfs(place)
            slots = staged.slots_directory(self.run_directory).glob(f"r{self.rank:05d}-*.bin")
            return system.f_bavail * system.f_frsize + sum(path.stat().st_size for path in slots)
        except OSError:
            return None  # creating the area will say what is wrong with it

    def warn_if_small(self, bound_bytes: int) -> None:
        """Warn when `bound_bytes` do not fit: before training, while it is easy to change."""
        free = self.free_bytes()
        if free is not None and free < bound_bytes:
            warnings.warn(
                f"staging area {self.root}: {free} bytes are free, and staged checkpoints may take "
                f"{bound_bytes} bytes; those that do not fit are left out. "
                "Next: staging= or RECPOINT_STAGING with a larger directory",
                SmallStagingArea,
                stacklevel=3,
            )

    def _unusable(self, error: OSError) -> StagingError:
        return StagingError(
            str(error.filename or self.run_directory),
            found=error.strerror or str(error),
            expected="a directory that this process can create and write",
            next_step="give another directory: staging= or RECPOINT_STAGING",
        )

    def _name(self, index: int) -> str:
        return staged.slot_path(self.run_directory, self.rank, index).name

    def _is_foreign(self, index: int) -> bool:
        job = self._foreign.get(index)
        if job is not None and not job.exists():
            del self._foreign[index]
            job = None
        return job is not None


def _slot_index(name: str) -> int:
    return int(name.removesuffix(".bin").rpartition("-")[2])
