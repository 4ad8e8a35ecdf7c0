"""Tasks of a consolidation: plan it, move rows of some tables, commit it, report it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from prefect import task
from prefect.artifacts import Artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from recpoint.catalog.consolidate.choice import choose_consolidation
from recpoint.catalog.consolidate.commit import commit_consolidation
from recpoint.catalog.consolidate.merge import merge_part
from recpoint.catalog.consolidate.plan import (
    ConsolidationPlan,
    ConsolidationTriggers,
    newest_checkpoint,
    plan_consolidation,
)
from recpoint.catalog.run.chain import PassedOver
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.naming import ManifestName
from recpoint.tasks.persist import RETRIES, may_heal
from recpoint.tasks.reports import ProgressBar, artifact_key, run_title
from recpoint.units import bytes_text, duration_text

__all__ = ["commit_merge", "merge_tables", "open_run", "plan_merge", "report_merge"]


def open_run(run_url: str) -> Run:
    """Open a run through a store of its own, so that a retry begins with new connections."""
    return Run.open(open_store(run_url))


def task_name() -> str:
    """Return a task run's name: the task, the part, the run and the step."""
    parameters = task_run.get_parameters()
    plan: ConsolidationPlan | None = parameters.get("plan")
    part = f" part {parameters['part']}" if "part" in parameters else ""
    step = f" step {plan.target.name.step}" if plan is not None else ""
    return f"{task_run.get_task_name()}{part} of {run_title(parameters['run_url'])}{step}"


@task(
    task_run_name=task_name,
    retry_condition_fn=may_heal,
    timeout_seconds=600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def plan_merge(
    run_url: str,
    name: ManifestName | None,
    links: int | None,
    triggers: ConsolidationTriggers,
    avoid: Sequence[PassedOver] = (),
) -> ConsolidationPlan | None:
    """Plan a consolidation from manifests alone; None: the run has no checkpoint."""
    return await asyncio.to_thread(_plan, run_url, name, links, triggers, avoid)


def _plan(
    run_url: str,
    name: ManifestName | None,
    links: int | None,
    triggers: ConsolidationTriggers,
    avoid: Sequence[PassedOver],
) -> ConsolidationPlan | None:
    run = open_run(run_url)
    name = name or newest_checkpoint(run)
    if name is None:
        return None
    if links is not None:
        return plan_consolidation(run, name, links=links, triggers=triggers, avoid=avoid)
    return choose_consolidation(run, name, triggers=triggers, avoid=avoid)


@task(
    task_run_name=task_name,
    retry_condition_fn=may_heal,
    timeout_seconds=12 * 3600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def merge_tables(run_url: str, plan: ConsolidationPlan, part: int) -> tuple[ChunkEntry, ...]:
    """Merge one part of a plan; return its chunks, which are durable."""
    return await asyncio.to_thread(_merge, run_url, plan, part)


def _merge(run_url: str, plan: ConsolidationPlan, part: int) -> tuple[ChunkEntry, ...]:
    run = open_run(run_url)
    step, generation = plan.target.name
    bar = ProgressBar(
        artifact_key(
            run_url, run.id, f"consolidation-g{generation}-step-{step}-part-{part}-progress"
        ),
        f"Part {part + 1} of {len(plan.parts)} of step {step}: bytes read for a consolidation",
    )
    read = 0

    def account(bytes_read: int) -> None:
        nonlocal read
        read += bytes_read
        bar.show(read, plan.parts[part].read_bytes)

    entries = merge_part(run, plan, plan.parts[part], on_read=account)
    bar.finish()
    return entries


@task(
    task_run_name=task_name,
    retry_condition_fn=may_heal,
    timeout_seconds=3600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def commit_merge(
    run_url: str, plan: ConsolidationPlan, entries: list[ChunkEntry]
) -> tuple[Literal["created", "already"], Manifest]:
    """Copy the state and commit; return whether this call did it, and the manifest there now."""
    return await asyncio.to_thread(_commit, run_url, plan, entries)


def _commit(
    run_url: str, plan: ConsolidationPlan, entries: list[ChunkEntry]
) -> tuple[Literal["created", "already"], Manifest]:
    return commit_consolidation(open_run(run_url), plan, entries)


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
        description=f"Step {step} consolidated ({outcome}): `{url}`",
        data=[
            {"what": label, "value": value}
            for label, value in merge_rows(plan, outcome, written_bytes, seconds)
        ],
    ).acreate()


def merge_rows(
    plan: ConsolidationPlan, outcome: str, written_bytes: int, seconds: float
) -> list[tuple[str, str]]:
    """Return the table of a consolidation: what, value."""
    dead = "not known before reading" if plan.dead_share is None else f"{plan.dead_share:.1%}"
    return [
        ("outcome", outcome),
        ("why", plan.reason),
        ("makes", plan.target.key),
        ("manifests a restore reads", f"{plan.links_before} before, {plan.links_after} after"),
        (
            "a restore reads",
            f"{bytes_text(plan.restore_bytes_before)} before, "
            f"about {bytes_text(plan.restore_bytes_after)} after",
        ),
        ("dead rows", dead),
        ("read", bytes_text(plan.read_bytes)),
        ("written", f"{bytes_text(written_bytes)}, {bytes_text(plan.write_bytes)} planned"),
        ("freed once retention lets the sources go", bytes_text(plan.frees_bytes)),
        ("took", duration_text(seconds)),
        *(("passed over", f"{key}: {error}") for key, error in plan.passed_over),
    ]
