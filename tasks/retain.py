"""Plans a run's retention and carries it out, as a task."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from prefect import task
from prefect.cache_policies import NO_CACHE

from recpoint.catalog.retention.plan import PrunePlan, plan_prune
from recpoint.catalog.retention.prune import execute
from recpoint.catalog.retention.rules import RetentionPolicy
from recpoint.catalog.retention.sweep import spared_words
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import NothingValidated
from recpoint.tasks.persist import RETRIES, may_heal
from recpoint.units import bytes_text

__all__ = ["Retained", "retain_store"]


class Retained(NamedTuple):
    """What a retention found and did.

    Attributes:
        run: the run's id.
        summary: a line.
        rows: one for each manifest.
        refused: why its own policy drops nothing yet; empty: it does not refuse.
    """

    run: str
    summary: str
    rows: list[dict[str, str | int]]
    refused: str = ""


@task(
    task_run_name="retain {run_url}",
    retry_condition_fn=may_heal,
    timeout_seconds=8 * 3600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def retain_store(
    run_url: str, policy: RetentionPolicy, grace_seconds: float, keep: list[str], dry_run: bool
) -> Retained:
    """Plan and, unless it is a dry run, execute; safe to run again after any failure."""
    return await asyncio.to_thread(_retain, run_url, policy, grace_seconds, keep, dry_run)


def _retain(
    run_url: str, policy: RetentionPolicy, grace_seconds: float, keep: list[str], dry_run: bool
) -> Retained:
    run = Run.open(open_store(run_url))
    try:
        plan = plan_prune(
            run, policy, grace_seconds=grace_seconds, keep=keep, ask_store=not dry_run
        )
    except NothingValidated as error:
        return Retained(run.id, "nothing marked, nothing deleted", [], refused=str(error))
    rows = _rows(plan)
    if dry_run:
        return Retained(run.id, f"{len(plan.mark)} to mark, {len(plan.delete)} to delete", rows)
    result = execute(run, plan)
    summary = (
        f"{len(result.marked)} marked, {len(result.deleted)} manifests deleted, "
        f"{bytes_text(result.removed_bytes)} freed{spared_words(result.spared)}"
    )
    held_text = f"; nothing deleted while {plan.held[0]} reads" if plan.held else ""
    return Retained(run.id, summary + held_text, rows)


def _rows(plan: PrunePlan) -> list[dict[str, str | int]]:
    return [
        {
            "step": row.step,
            "generation": row.generation,
            "action": row.action,
            "bytes": row.stored_bytes,
            "reason": row.reason,
            "manifest": row.key,
        }
        for row in plan.rows()
    ]
