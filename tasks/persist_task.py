"""What the tasks of a persist have in common: when they run again, and what they are called."""

from __future__ import annotations

import logging
import re
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from prefect.runtime import task_run
from prefect.tasks import exponential_backoff

from recpoint.errors import RecpointError
from recpoint.format.naming import parse_job_stem

__all__ = ["JobName", "RETRIES", "job_log", "job_name", "may_heal", "run_name"]

#: Tries again of a task, after about 1, 2 and 4 seconds; what takes longer to heal is for the
#: agent, which keeps the job staged and starts the whole flow again.
RETRIES: dict[str, Any] = {
    "retries": 3,
    "retry_delay_seconds": exponential_backoff(backoff_factor=1),
    "retry_jitter_factor": 0.5,
}

#: The hash at the end of a run's directory, which tells runs of one name apart but nobody reads.
_HASH = re.compile(r"-[0-9a-f]{12}\Z")


class JobName(NamedTuple):
    """What a job file's path says about it."""

    run: str
    generation: int
    step: int
    rank: int

    @property
    def slug(self) -> str:
        """The run's name in lower-case letters, digits and single dashes, as artifact keys are."""
        return re.sub(r"[^a-z0-9]+", "-", self.run.lower()).strip("-")[:80] or "run"

    def __str__(self) -> str:
        return f"{self.run} step {self.step} rank {self.rank}"


def job_name(job_path: str) -> JobName:
    """The name of the job in `job_path`; it need not exist (any more)."""
    path = Path(job_path)
    named = parse_job_stem(path.stem)
    if named is None:
        raise ValueError(f"{path.name!r} is not the name of a job file")
    return JobName(_HASH.sub("", path.parent.parent.name), *named)


def may_heal(task: Any, run: Any, state: Any) -> bool:
    """Whether to run a failed task again: Prefect's `retry_condition_fn`."""
    error = state.data
    return isinstance(error, RecpointError) and error.retryable


def run_name() -> str:
    """A task run's name: what it does, to which group, of which checkpoint."""
    parameters = task_run.get_parameters()
    group = f" group {parameters['group']}" if "group" in parameters else ""
    return f"{task_run.get_task_name()}{group} of {job_name(parameters['job_path'])}"


class _JobLog(logging.LoggerAdapter[logging.Logger]):
    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return f"[{self.extra['job'] if self.extra else ''}] {msg}", kwargs


def job_log(job_path: str) -> logging.LoggerAdapter[logging.Logger]:
    """A logger whose lines carry run, step and rank."""
    return _JobLog(logging.getLogger("recpoint.persist"), {"job": job_name(job_path)})
