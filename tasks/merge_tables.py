"""Task: move the rows of some tables of a chain into chunks of a consolidation."""

from __future__ import annotations

import asyncio

from prefect import task
from prefect.cache_policies import NO_CACHE

from recpoint.catalog.consolidation.consolidate_plan import ConsolidationPlan
from recpoint.catalog.consolidation.consolidate_rows import merge_part
from recpoint.format.manifest import ChunkEntry
from recpoint.tasks.artifact_key import artifact_key
from recpoint.tasks.consolidation_task import open_run, task_name
from recpoint.tasks.persist_task import RETRIES, may_heal
from recpoint.tasks.progress import ProgressBar

__all__ = ["merge_tables"]


@task(
    task_run_name=task_name,
    retry_condition_fn=may_heal,
    timeout_seconds=12 * 3600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def merge_tables(run_url: str, plan: ConsolidationPlan, part: int) -> tuple[ChunkEntry, ...]:
    """Merge one part of a plan; its chunks, durable."""
    return await asyncio.to_thread(_merge, run_url, plan, part)


def _merge(run_url: str, plan: ConsolidationPlan, part: int) -> tuple[ChunkEntry, ...]:
    run = open_run(run_url)
    step, generation = plan.target.name
    bar = ProgressBar(
        artifact_key(
            run_url, run.id, f"consolidation-g{generation}-step-{step}-part-{part}-progress"
        ),
        f"Bytes read of part {part + 1} of {len(plan.parts)}",
    )
    read = 0

    def account(bytes_read: int) -> None:
        nonlocal read
        read += bytes_read
        bar.show(read, plan.parts[part].read_bytes)

    entries = merge_part(run, plan, plan.parts[part], on_read=account)
    bar.finish()
    return entries
