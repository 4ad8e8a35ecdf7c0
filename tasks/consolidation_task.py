"""What the tasks of a consolidation share: how a run is opened, and what they are called."""

from __future__ import annotations

from prefect.runtime import task_run

from recpoint.catalog.consolidation.consolidate_plan import ConsolidationPlan
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.store import open_store
from recpoint.tasks.artifact_key import run_title

__all__ = ["open_run", "task_name"]


def open_run(run_url: str) -> Run:
    """The run of a URL, through a store of its own: a retry begins with new connections."""
    return Run.open(open_store(run_url))


def task_name() -> str:
    """A task run's name: what it does, to which part, of which checkpoint."""
    parameters = task_run.get_parameters()
    plan: ConsolidationPlan | None = parameters.get("plan")
    part = f" part {parameters['part']}" if "part" in parameters else ""
    step = f" step {plan.target.name.step}" if plan is not None else ""
    return f"{task_run.get_task_name()}{part} of {run_title(parameters['run_url'])}{step}"
