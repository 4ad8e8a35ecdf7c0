"""Sweeps a run as a flow: finishes this host's staged jobs, then removes what dead writers left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import State, flow, tags, task
from prefect.artifacts import Artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from prefect.states import Completed

from recpoint.catalog.retention.grace import require_grace
from recpoint.catalog.retention.staged import StagedWork
from recpoint.catalog.retention.sweep import GRACE_NEEDED, SweepPlan
from recpoint.catalog.retention.sweep_here import sweep_here, swept_words
from recpoint.catalog.staging import area
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.free import FreeSlot
from recpoint.catalog.store.store import open_store
from recpoint.flows.parameters import NO_RESULTS, GraceSeconds, RunUrl, StagingArea
from recpoint.tasks.job_name import run_tag
from recpoint.tasks.persist import RETRIES, may_heal
from recpoint.tasks.reports import TAG, artifact_key
from recpoint.tasks.run_tags import tag_flow_run
from recpoint.units import bytes_text, counted

__all__ = ["run_sweep", "sweep"]


def _run_name() -> str:
    return f"sweep {flow_run.get_parameters()['run_url']}"


@task(
    task_run_name="sweep store of {run_url}",
    retry_condition_fn=may_heal,
    timeout_seconds=4 * 3600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def sweep_store(
    run_url: str, grace_seconds: float, staged_run: StagedRun, include_newest: bool, dry_run: bool
) -> tuple[str, str]:
    """Plan a sweep and, unless it is a dry run, execute it; return the run's id and a report."""
    return await asyncio.to_thread(
        _sweep_store, run_url, grace_seconds, staged_run, include_newest, dry_run
    )


@flow(
    name="sweep",
    flow_run_name=_run_name,
    timeout_seconds=5 * 3600,
    persist_result=False,
    result_storage=NO_RESULTS,
)
async def sweep(
    run_url: RunUrl,
    staging: StagingArea | None = None,
    grace_seconds: GraceSeconds = 24 * 3600.0,
    include_newest: bool = False,
    dry_run: bool = False,
) -> State[Any]:
    """Finish the jobs staged here, then remove chunks no manifest names and unfinished uploads.

    Run it on the trainer's own host, because only that host knows which jobs are staged and will
    still be committed. If an agent serves the staging area, the flow leaves the jobs to it.

    Args:
        run_url: the run.
        staging: the staging area of this host; the default one if None. The chunks of jobs staged
            there are kept. If the newest trainer does not use it, everything that this trainer
            uploaded after its last checkpoint is kept too, however old.
        grace_seconds: objects younger than this many seconds are kept, because they may belong to a
            checkpoint that is being written; at least an hour.
        include_newest: also remove what only the newest trainer could still commit. Set it only if
            no host has such a job staged any more.
        dry_run: only report what would be done.

    Returns:
        Completed; its message says how much was removed.

    Raises:
        SettingsError: the grace is less than an hour.
        FormatError: a staged job cannot be read, so it is unknown which chunks it needs, and an
            agent is there to reject it.
        RecpointError: as from `recpoint.catalog.retention.sweep`.
    """
    require_grace(grace_seconds, why=GRACE_NEEDED)
    root = area.default_staging_root() if staging is None else Path(staging)
    store_url = open_store(run_url).url
    await tag_flow_run(store_url)
    staged_run = StagedRun.of(root, store_url)
    run_id, report_text = await sweep_store(
        run_url, grace_seconds, staged_run, include_newest, dry_run
    )
    message = report_text.partition("\n")[0]
    url = run_url.replace("`", "'")  # a backtick would end the code span
    await Artifact(
        type="markdown",
        key=artifact_key(run_url, run_id, "sweep"),
        description=f"{message.rstrip('.:')}: `{url}`",
        data=report_text,
    ).acreate()
    return Completed(message=message)


def run_sweep(run_url: str, **settings: Any) -> State[Any]:
    """Run the flow, tagged with the run, and return its final state."""

    async def call() -> State[Any]:
        with tags(TAG, run_tag(run_url)):
            called: Any = sweep(run_url, return_state=True, **settings)
            state: State[Any] = await called
            return state

    return asyncio.run(call())


def _sweep_store(
    run_url: str, grace_seconds: float, staged_run: StagedRun, include_newest: bool, dry_run: bool
) -> tuple[str, str]:
    swept = sweep_here(
        open_store(run_url),
        staged_run,
        grace_seconds=grace_seconds,
        include_newest=include_newest,
        dry_run=dry_run,
    )
    lines = _lines(swept.plan) + _staged_lines(swept.work) + _slot_lines(swept.slots)
    if swept.result is None:
        objects = len(swept.plan.objects) + len(swept.plan.unfinished)
        return swept.run.id, f"Would remove {counted(objects, 'object')}:\n\n{lines}"
    return swept.run.id, f"{swept_words(swept)}.\n\n{lines}"


def _lines(plan: SweepPlan) -> str:
    swept = [f"- `{item.key}`: {item.reason}" for item in plan.objects + plan.unfinished]
    kept_lines = [f"- kept `{item.prefix}`: {item.reason}" for item in plan.kept]
    unknown = [f"- not ours, left alone: `{key.replace('`', '')}`" for key in plan.unrecognised]
    blocked = [f"- unreadable, so no chunk is removed: `{key}`" for key in plan.blocked]
    lines = swept + kept_lines + unknown + blocked
    more = [f"- and {len(lines) - 200} more"] if len(lines) > 200 else []
    return "\n".join([*lines[:200], *more]) or "- nothing"


def _staged_lines(work: StagedWork) -> str:
    if not work.jobs:
        return "\n\nNothing is staged here."
    lines = (
        f"- {fate}: `{job}`"
        + (f": `{' '.join(reason.replace('`', '').split())}`" if reason else "")
        for job, fate, reason in work.jobs
    )
    return "\n\nStaged here:\n\n" + "\n".join(lines)


def _slot_lines(slots: Sequence[FreeSlot]) -> str:
    if not slots:
        return ""
    lines = (
        f"- slot `{slot.slot}`, {bytes_text(slot.size_bytes)}: {slot.reason}" for slot in slots
    )
    return "\n\nSlots of this host:\n\n" + "\n".join(lines)
