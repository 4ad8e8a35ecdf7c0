"""Task: find out what a consolidation would do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from recpoint.catalog.consolidation.consolidate_choice import (
    choose_consolidation,
    newest_checkpoint,
)
from recpoint.catalog.consolidation.consolidate_plan import (
    ConsolidationPlan,
    ConsolidationTriggers,
    plan_consolidation,
)
from recpoint.catalog.runs.chain import PassedOver
from recpoint.format.naming import ManifestName
from recpoint.tasks.consolidation_task import open_run, task_name
from recpoint.tasks.persist_task import RETRIES, may_heal

__all__ = ["plan_merge"]


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
    """Plan it, from manifests alone; None: the run has no checkpoint."""
    return await asyncio.to_thread(_plan, run_url, name, links, triggers, avoid)


def _plan(
    run_url: str,
    name: ManifestName | None,
    links: int | None,
    triggers: ConsolidationTriggers,
    avoid: Sequence[PassedOver] = (),
) -> ConsolidationPlan | None:
    run = open_run(run_url)
    name = name or newest_checkpoint(run)
    if name is None:
        return None
    if links is not None:
        return plan_consolidation(run, name, links=links, triggers=triggers, avoid=avoid)
    return choose_consolidation(run, name, triggers=triggers, avoid=avoid)
