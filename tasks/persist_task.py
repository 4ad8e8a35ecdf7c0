"""What the tasks of a persist have in common: when they run again, and what they are called."""

from __future__ import annotations

from typing import Any

from prefect.runtime import task_run

from recpoint.errors import RecpointError
from recpoint.tasks.job_name import job_name

__all__ = ["RETRIES", "may_heal", "run_name"]

#: Tries again of a task, after about 1, 1 and 2 seconds; what takes longer to heal is for the
#: agent, which keeps the job staged and starts the whole flow again, sooner for short intervals.
RETRIES: dict[str, Any] = {
    "retries": 3,
    "retry_delay_seconds": [1, 1, 2],
    "retry_jitter_factor": 0.5,
}


def may_heal(task: Any, run: Any, state: Any) -> bool:
    """Whether to run a failed task again: Prefect's `retry_condition_fn`."""
    error = state.data
    return isinstance(error, RecpointError) and error.retryable


def run_name() -> str:
    """A task run's name: what it does, to which group, of which checkpoint."""
    parameters = task_run.get_parameters()
    group = f" group {parameters['group']}" if "group" in parameters else ""
    return f"{task_run.get_task_name()}{group} of {job_name(str(parameters['job'].path))}"
