"""Task: what a person sees of a consolidation in Prefect's UI."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import Artifact
from prefect.cache_policies import NO_CACHE

from recpoint.catalog.consolidation.consolidate_plan import ConsolidationPlan
from recpoint.tasks.artifact_key import artifact_key
from recpoint.tasks.consolidation_task import task_name

__all__ = ["merge_rows", "report_merge"]


@task(task_run_name=task_name, timeout_seconds=20, cache_policy=NO_CACHE, persist_result=False)
async def report_merge(
    run_url: str,
    run_id: str,
    plan: ConsolidationPlan,
    outcome: str,
    written_bytes: int,
    seconds: float,
) -> None:
    """Show plan and result as a table."""
    url = run_url.replace("`", "'")  # a backtick would end the code span
    step, generation = plan.target.name
    await Artifact(
        type="table",
        key=artifact_key(run_url, run_id, f"consolidation-g{generation}-step-{step}"),
        description=f"Consolidation of checkpoint {step} of `{url}`",
        data=[
            {"what": what, "value": value}
            for what, value in merge_rows(plan, outcome, written_bytes, seconds)
        ],
    ).acreate()


def merge_rows(
    plan: ConsolidationPlan, outcome: str, written_bytes: int, seconds: float
) -> list[tuple[str, str]]:
    """The table of a consolidation: what, value."""
    dead = "not known before reading" if plan.dead_share is None else f"{plan.dead_share:.1%}"
    return [
        ("outcome", outcome),
        ("why", plan.reason),
        ("makes", plan.target.key),
        ("manifests a restore reads", f"{plan.links_before} before, {plan.links_after} after"),
        (
            "bytes a restore reads",
            f"{plan.restore_bytes_before} before, about {plan.restore_bytes_after} after",
        ),
        ("dead rows", dead),
        ("read", f"{plan.read_bytes} bytes"),
        ("written", f"{written_bytes} bytes, {plan.write_bytes} planned"),
        ("freed once retention lets the sources go", f"{plan.frees_bytes} bytes"),
        ("took", f"{seconds:.1f} s"),
        *(("passed over", f"{key}: {error}") for key, error in plan.passed_over),
    ]
