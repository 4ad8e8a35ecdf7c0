"""Jobs of ranks on one run, as torchrun starts them: processes that meet, train and end."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.format.job import Job
from tests.fault.lives import begin
from tests.fault.rank_lives import rank_life

__all__ = ["WAITING", "Life", "RankJob", "require_same_end"]

#: More than a rank waits for others, and then for its own checkpoint.
_PATIENCE_SECONDS = 600.0

#: No checkpoint is skipped because the agent was slow.
WAITING = {"when_busy": "wait", "busy_wait_seconds": 60.0}


class Life(NamedTuple):
    """What a rank told, None if it told nothing; and how it ended."""

    told: dict[str, Any]
    exit_code: int | None


class RankJob:
    """Jobs of ranks on one run, one after another.

    Args:
        place: for all that is no run and no staging area.
        url: of the run; None: in `place`.
        hosts: the staging area of each rank, where they are on hosts of their own.
        environment: of each rank.
    """

    def __init__(
        self,
        place: Path,
        *,
        url: str | None = None,
        hosts: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.place, self._hosts, self._environment = place, list(hosts), dict(environment or {})
        self.url, self.staging = url or str(place / "run"), place / "staging"
        self._jobs = 0

    def train(
        self, ranks: int, until_batch: int, *, only: int | None = None, **one: Any
    ) -> list[Life]:
        """Run a job to its end; `one`: more arguments, for the rank `only`, or for all;
        `settings` and `hosted` are for all."""
        self._jobs += 1
        told = [self.place / f"told-{self._jobs}-{rank}" for rank in range(ranks)]
        common = {key: one.pop(key, None) for key in ("settings", "hosted")}
        processes = []
        for rank in range(ranks):
            arguments: dict[str, Any] = {
                "url": self.url,
                "staging": str(self._hosts[rank] if self._hosts else self.staging),
                "meeting": str(self.place / f"meeting-{self._jobs}"),
                "rank": rank,
                "ranks": ranks,
                "until_batch": until_batch,
                "told": str(told[rank]),
                **common,
                **(one if only in (None, rank) else {}),
            }
            processes.append(begin(rank_life, self._environment, **arguments))
        hangs = processes[only] if only is not None and one.get("by") == signal.SIGSTOP else None
        for process in processes:
            if process is not hangs:
                process.join(_PATIENCE_SECONDS)
                assert not process.is_alive(), "a rank hangs"
        if hangs is not None:
            hangs.kill()
            hangs.join()
        return [
            Life(json.loads(path.read_text()) if path.exists() else {}, process.exitcode)
            for path, process in zip(told, processes, strict=True)
        ]

    def staged_jobs(self) -> list[Job]:
        """What is staged, by step and rank."""
        (run,) = [run.path for run in staged_runs(self.staging)]
        found = [job_files.read_job(path) for path in StagedRun(run).staged_jobs()]
        return sorted(found, key=lambda job: (job.step, job.rank))


def require_same_end(lives: Sequence[Life], expected: Sequence[Life]) -> None:
    """That all ranks ended well, in the state in which those of another job did."""
    for life, other in zip(lives, expected, strict=True):
        assert life.exit_code == 0
        for what in ("state", "drawn", "position"):
            assert life.told[what] == other.told[what], what
