"""Tasks: choose a checkpoint and divide it into files, restore one of them, and finish."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from prefect import task
from prefect.artifacts import Artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from recpoint.catalog.restore.files import write_shard
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import RestoreReport
from recpoint.catalog.restore.shard_place import (
    check_place,
    finish_shards,
    remove_unfinished,
    take_back,
)
from recpoint.catalog.restore.shard_plan import ShardPlan, plan_shards
from recpoint.catalog.restore.state_tensors import Include
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.naming import ManifestName
from recpoint.tasks.consolidate import open_run
from recpoint.tasks.persist import RETRIES, may_heal
from recpoint.tasks.reports import ProgressBar, artifact_key, run_title
from recpoint.units import bytes_text, counted, duration_text

__all__ = ["finish_restore", "plan_restore", "report_restore", "restore_shard"]


def _task_name() -> str:
    parameters = task_run.get_parameters()
    plan: ShardPlan | None = parameters.get("plan")
    part = f" {plan.shards[parameters['part']].file}" if plan and "part" in parameters else ""
    step = f" step {plan.name.step}" if plan else ""
    return f"{task_run.get_task_name()}{part} of {run_title(parameters['run_url'])}{step}"


@task(
    task_run_name=_task_name,
    retry_condition_fn=may_heal,
    timeout_seconds=3600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def plan_restore(
    run_url: str,
    target_url: str,
    selection: Selection,
    include: Include,
    damaged: Mapping[ManifestName, str],
    shard_bytes: int,
    instead_of: ShardPlan | None = None,
    leased: bool = False,
) -> tuple[ShardPlan, bool]:
    """Choose a checkpoint; return the plan of its files, and whether all are in place already.

    Once it is chosen, the files of `instead_of` are removed, because that checkpoint is damaged.
    """

    def plan() -> tuple[ShardPlan, bool]:
        plan = plan_shards(
            open_run(run_url),
            selection,
            include=include,
            damaged=damaged,
            leased=leased,
            shard_bytes=shard_bytes,
        )
        target = open_store(target_url)
        if instead_of is not None:
            take_back(target, instead_of)
        complete = check_place(target, plan)
        remove_unfinished(target, plan)
        return plan, complete

    return await asyncio.to_thread(plan)


@task(
    task_run_name=_task_name,
    retry_condition_fn=may_heal,
    timeout_seconds=12 * 3600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def restore_shard(
    run_url: str, target_url: str, plan: ShardPlan, part: int
) -> RestoreReport | None:
    """Restore one file of a plan; None: the file was already there."""
    return await asyncio.to_thread(_restore, run_url, target_url, plan, part)


def _restore(run_url: str, target_url: str, plan: ShardPlan, part: int) -> RestoreReport | None:
    run, shard = open_run(run_url), plan.shards[part]
    bar = ProgressBar(_key(run, plan, f"restore-part-{part}-progress"), f"{shard.file}: bytes read")
    report = write_shard(run, open_store(target_url), plan, shard, on_progress=bar.show)
    bar.finish()
    return report


@task(
    task_run_name=_task_name,
    retry_condition_fn=may_heal,
    timeout_seconds=3600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def finish_restore(run_url: str, target_url: str, plan: ShardPlan) -> None:
    """Write the index; from then on the files count."""
    await asyncio.to_thread(lambda: finish_shards(open_store(target_url), plan))


@task(task_run_name=_task_name, timeout_seconds=20, cache_policy=NO_CACHE, persist_result=False)
async def report_restore(
    run_url: str, target_url: str, plan: ShardPlan, report: RestoreReport, outcome: str
) -> None:
    """Show as a table what was restored, and what was not."""
    # A backtick would end the code span.
    url, target = (url_text.replace("`", "'") for url_text in (run_url, target_url))
    verdict = report.validation
    rows = [
        ("outcome", outcome),
        ("checkpoint", str(report.restored)),
        ("validation", verdict.in_words if verdict else "never validated"),
        *((f"skipped {name}", error) for name, error in report.skipped),
        *((f"passed over {key}", error) for key, error in report.passed_over),
        ("files", f"{len(plan.shards)}, {bytes_text(plan.size_bytes)} together"),
        ("read", f"{bytes_text(report.bytes_read)}, {counted(report.chunks_read, 'chunk')}"),
        ("took, all parts together", duration_text(report.seconds)),
    ]
    await Artifact(
        type="table",
        key=artifact_key(
            run_url, plan.run, f"restore-g{plan.name.generation}-step-{plan.name.step}"
        ),
        description=f"Step {plan.name.step} restored into `{target}` ({outcome}): `{url}`",
        data=[{"what": label, "value": value} for label, value in rows],
    ).acreate()


def _key(run: Run, plan: ShardPlan, kind: str) -> str:
    return artifact_key(run.url, run.id, f"g{plan.name.generation}-step-{plan.name.step}-{kind}")
