"""Merges a checkpoint's chain as a flow, with one task for each group of tables.

The flow does what `catalog.consolidate.consolidate` does, through the same functions. If it is
killed or fails anywhere, the next one continues under the same keys.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack
from typing import Any

from prefect import State, flow, tags
from prefect.context import TagsContext
from prefect.runtime import flow_run
from prefect.states import Completed

from recpoint.catalog.consolidate.consolidate import NOTHING_DONE, blamed_source, passed_over_words
from recpoint.catalog.consolidate.plan import ConsolidationPlan, ConsolidationTriggers
from recpoint.catalog.run.chain import DAMAGE, PassedOver
from recpoint.catalog.run.leases import reading
from recpoint.catalog.store.store import open_store
from recpoint.errors import RecpointError, SettingsError
from recpoint.flows.parameters import (
    NO_RESULTS,
    DeadShare,
    GenerationNumber,
    Links,
    PartsAtOnce,
    RestoreRatio,
    RunUrl,
    StepNumber,
)
from recpoint.flows.task_runner import chosen_task_runner, each_part
from recpoint.format.manifest import ChunkEntry
from recpoint.format.naming import ManifestName
from recpoint.tasks.consolidate import (
    commit_merge,
    merge_tables,
    open_run,
    plan_merge,
    report_merge,
)
from recpoint.tasks.job_name import run_tag
from recpoint.tasks.reports import TAG, emit, run_title
from recpoint.tasks.run_tags import tag_flow_run
from recpoint.units import bytes_text

__all__ = ["consolidate", "run_consolidate"]

_LOG = logging.getLogger("recpoint.consolidate")


def _run_name() -> str:
    parameters = flow_run.get_parameters()
    step = f" step {parameters['step']}" if parameters.get("step") is not None else ""
    return f"consolidate {run_title(parameters['run_url'])}{step}"


@flow(
    name="consolidate",
    flow_run_name=_run_name,
    task_runner=chosen_task_runner(),
    timeout_seconds=24 * 3600,
    persist_result=False,
    result_storage=NO_RESULTS,
)
async def consolidate(
    run_url: RunUrl,
    step: StepNumber | None = None,
    generation: GenerationNumber | None = None,
    links: Links | None = None,
    only_if_it_pays: bool = False,
    after_links: Links | None = None,
    after_ratio: RestoreRatio | None = None,
    after_dead_share: DeadShare | None = None,
    parts_at_once: PartsAtOnce = 1,
) -> State[Any]:
    """Merge a checkpoint's chain into one full checkpoint, or its newest links into one increment.

    A restore of the checkpoint then reads fewer files and bytes.

    Args:
        run_url: the run.
        step: the checkpoint's step; the newest checkpoint of the live line if None.
        generation: the checkpoint's generation; needed with `step`, and only with it.
        links: merge this many of the newest manifests into one increment; None: choose the merge
            that costs least for what it saves.
        only_if_it_pays: merge only if one of the three triggers below is reached.
        after_links: trigger: number of manifests in the chain; 16 if None.
        after_ratio: trigger: bytes that a restore reads, divided by the bytes that it needs; 1.5 if
            None.
        after_dead_share: trigger: share of the chain's rows that newer rows have replaced; 0.5 if
            None.
        parts_at_once: number of parts of the plan that run at a time; each takes up to half a
            gigabyte of memory where it runs.

    Returns:
        Completed; its message says what was done.

    Raises:
        SettingsError: `step` is given without `generation`, or the other way round.
        RecpointError: as from `recpoint.catalog.consolidate.consolidate`; nothing was committed.
    """
    if (step is None) != (generation is None):
        raise SettingsError(
            "step, generation", found="one of them", expected="both or none", next_step="give both"
        )
    name = None if step is None or generation is None else ManifestName(step, generation)
    triggers = ConsolidationTriggers.chosen(
        links=after_links, restore_ratio=after_ratio, dead_share=after_dead_share
    )
    await tag_flow_run(open_store(run_url).url)
    # Prefect takes a task's tags for names of concurrency limits and asks the server for each.
    with TagsContext(current_tags=set()):
        return await _consolidate(
            run_url, name, links, triggers, only_if_it_pays=only_if_it_pays, at_once=parts_at_once
        )


async def _consolidate(
    run_url: str,
    name: ManifestName | None,
    links: int | None,
    triggers: ConsolidationTriggers,
    *,
    only_if_it_pays: bool,
    at_once: int,
) -> State[Any]:
    """Merge by the cheapest chain that proves undamaged, like `consolidate_around_damage`."""
    avoid: tuple[PassedOver, ...] = ()
    first: RecpointError | None = None
    while True:
        try:
            plan = await plan_merge(run_url, name, links, triggers, avoid)
        except DAMAGE as error:
            raise first or error from None
        if plan is None:
            return Completed(message=f"{NOTHING_DONE}: there is no checkpoint")
        if not plan.needed or (only_if_it_pays and not plan.pays):
            reason = f"{plan.reason}{passed_over_words(plan)}"
            return Completed(message=f"{NOTHING_DONE}: {reason}")
        try:
            return await _merge(run_url, plan, at_once)
        except DAMAGE as error:
            first = first or error
            damaged_source = await asyncio.to_thread(blamed_source, open_run(run_url), plan, error)
            if damaged_source is None:
                raise first from None
            _LOG.warning(
                "%s is damaged; planning again without it: %s",
                damaged_source.key,
                damaged_source.error,
            )
            avoid, name = (*avoid, damaged_source), plan.target.name


async def _merge(run_url: str, plan: ConsolidationPlan, at_once: int) -> State[Any]:
    started = time.monotonic()
    _LOG.info("%s: %s", plan.target.key, plan.reason)
    lease = ExitStack()
    await asyncio.to_thread(_take_lease, lease, run_url, plan)
    try:
        entries = await _merge_parts(run_url, plan, at_once)
        outcome, manifest = await commit_merge(run_url, plan, entries)
    finally:
        await asyncio.to_thread(lease.close)
    seconds = time.monotonic() - started
    _LOG.info("%s: %s in %.1f s", plan.target.key, outcome, seconds)
    emit(
        "consolidated",
        manifest.run,
        run_url,
        step=manifest.step,
        generation=manifest.generation,
        outcome=outcome,
        kind=manifest.kind,
        chain_length=manifest.chain_length,
        stored_bytes=manifest.stored_bytes,
        seconds=seconds,
    )
    reporting: Any = report_merge(
        run_url, manifest.run, plan, outcome, manifest.stored_bytes, seconds, return_state=True
    )
    report_state: State[Any] = await reporting
    if not report_state.is_completed():
        _LOG.warning("consolidated, but its report task failed: %s", report_state.message)
    wrote = f"{bytes_text(manifest.stored_bytes)}{passed_over_words(plan)}"
    return Completed(message=f"{outcome}: {plan.target.key}, {wrote}")


async def _merge_parts(run_url: str, plan: ConsolidationPlan, at_once: int) -> list[ChunkEntry]:
    """Merge all parts as tasks; return their chunks."""
    merged = await each_part(
        lambda part: merge_tables.submit(run_url, plan, part),
        [part.index for part in plan.parts],
        at_once,
    )
    return [entry for entries in merged for entry in entries]


def _take_lease(lease: ExitStack, run_url: str, plan: ConsolidationPlan) -> None:
    """Take a lease, so that retention keeps the sources during the merge (format §6.6)."""
    run = open_run(run_url)
    ref = run.manifest(*plan.target.name).ref
    lease.enter_context(reading(run, purpose="consolidate", covers=[ref]))


def run_consolidate(run_url: str, **settings: Any) -> State[Any]:
    """Run the flow, tagged with the run.

    Args:
        run_url: the run.
        settings: the flow's other parameters.

    Returns:
        The flow run's final state.
    """

    async def call() -> State[Any]:
        with tags(TAG, run_tag(run_url)):
            called: Any = consolidate(run_url, return_state=True, **settings)
            state: State[Any] = await called
            return state

    return asyncio.run(call())
