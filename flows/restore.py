"""Restores a checkpoint into safetensors files as a flow, with one task for each file.

The flow does what `catalog.restore.files.restore_shards` does, through the same functions. If it is
killed or fails, the next one writes the missing files, if it chooses the same checkpoint. So give
the step if the run is still training; if the next one refuses, its error names the step.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from functools import partial
from typing import Any

from prefect import State, flow, tags
from prefect.context import TagsContext
from prefect.runtime import flow_run
from prefect.states import Completed

from recpoint.catalog.restore.files import damaged_checkpoint, summary
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import RestoreReport
from recpoint.catalog.restore.shard_plan import DEFAULT_SHARD_BYTES, ShardPlan
from recpoint.catalog.restore.state_tensors import Include
from recpoint.catalog.run.chain import DAMAGE
from recpoint.catalog.run.leases import reading
from recpoint.catalog.store.store import open_store
from recpoint.flows.parameters import (
    NO_RESULTS,
    BatchCount,
    GenerationNumber,
    PartsAtOnce,
    RunUrl,
    ShardBytes,
    StepNumber,
    TargetUrl,
)
from recpoint.flows.task_runner import chosen_task_runner, each_part
from recpoint.format.naming import ManifestName
from recpoint.tasks.consolidate import open_run
from recpoint.tasks.job_name import run_tag
from recpoint.tasks.reports import TAG, run_title
from recpoint.tasks.restore import finish_restore, plan_restore, report_restore, restore_shard
from recpoint.tasks.run_tags import tag_flow_run
from recpoint.units import bytes_text

__all__ = ["restore", "run_restore"]

_LOG = logging.getLogger("recpoint.restore")


def _run_name() -> str:
    parameters = flow_run.get_parameters()
    step = f" step {parameters['step']}" if parameters.get("step") is not None else ""
    return f"restore {run_title(parameters['run_url'])}{step}"


@flow(
    name="restore",
    flow_run_name=_run_name,
    task_runner=chosen_task_runner(),
    timeout_seconds=24 * 3600,
    persist_result=False,
    result_storage=NO_RESULTS,
)
async def restore(
    run_url: RunUrl,
    target: TargetUrl,
    step: StepNumber | None = None,
    generation: GenerationNumber | None = None,
    validated_only: bool = False,
    validated_within: BatchCount | None = None,
    include: Include = "model",
    shard_bytes: ShardBytes = DEFAULT_SHARD_BYTES,
    parts_at_once: PartsAtOnce = 1,
) -> State[Any]:
    """Restore a checkpoint into safetensors files with an index; the model's code is not needed.

    Args:
        run_url: the run.
        target: a directory or URL that all workers of the task runner can reach; the index appears
            there last. Unrelated files are left alone; files of another checkpoint are refused.
        step: the checkpoint's step; the newest good checkpoint if None.
        generation: the generation of `step`; it may be off the live line.
        validated_only: without `step`: restore only a validated checkpoint.
        validated_within: without `step`: restore the newest validated checkpoint if it is at most
            this many batches older than the newest checkpoint; otherwise the newest.
        include: model: what `load_state_dict` takes, under its names. all: also the row states of
            tables, and the state of each rank.
        shard_bytes: largest size of a file in bytes; a larger table gets a file of its own.
        parts_at_once: number of files written at a time. Where it runs, each takes up to half a
            gigabyte of memory (or the size of the dense state, if that is more), and disk space for
            the file.

    Returns:
        Completed; its message says what was restored, and what was skipped.

    Raises:
        SettingsError: the target holds something else; or see `Selection`.
        RecpointError: as from `catalog.restore.files.restore_shards`, which says what is left.
    """
    selection = Selection(
        step=step,
        generation=generation,
        validated_only=validated_only,
        validated_within=validated_within,
    )
    await tag_flow_run(open_store(run_url).url)
    # Prefect takes a task's tags for names of concurrency limits and asks the server for each.
    with TagsContext(current_tags=set()):
        lease = ExitStack()
        own_lease = await asyncio.to_thread(
            lambda: lease.enter_context(reading(open_run(run_url), purpose="restore"))
        )
        try:
            plan, result, outcome = await _restore(
                run_url,
                target,
                selection,
                include,
                shard_bytes,
                parts_at_once,
                leased=own_lease is not None,
            )
        finally:
            await asyncio.to_thread(lease.close)
        reporting: Any = report_restore(run_url, target, plan, result, outcome, return_state=True)
        report_state: State[Any] = await reporting
        if not report_state.is_completed():
            _LOG.warning("restored, but its report task failed: %s", report_state.message)
    left_out = [f"skipped {name}: {error}" for name, error in result.skipped]
    left_out += [f"passed over {key}: {error}" for key, error in result.passed_over]
    words = (
        f"{outcome}: {result.restored} in {len(plan.shards)} files, {bytes_text(plan.size_bytes)}"
    )
    return Completed(message="; ".join([words, *left_out]))


async def _restore(
    run_url: str,
    target: str,
    selection: Selection,
    include: Include,
    shard_bytes: int,
    at_once: int,
    *,
    leased: bool,
) -> tuple[ShardPlan, RestoreReport, str]:
    """Restore the newest checkpoint whose files all prove undamaged."""
    damaged: dict[ManifestName, str] = {}
    instead_of: ShardPlan | None = None
    while True:
        plan, is_complete = await plan_restore(
            run_url, target, selection, include, damaged, shard_bytes, instead_of, leased
        )
        if is_complete:
            return plan, plan.report, "already"
        _LOG.info("%s into %d files of %s", plan.name, len(plan.shards), target)
        try:
            reports = await each_part(
                partial(restore_shard.submit, run_url, target, plan),
                range(len(plan.shards)),
                at_once,
            )
        except DAMAGE as error:
            find_damage = partial(damaged_checkpoint, run_url=run_url, named=selection.named)
            damaged |= await asyncio.to_thread(find_damage, open_store(target), plan, error)
            _LOG.warning("skipped %s: %s", plan.name, error)
            instead_of = plan  # its files may be replaced by those of the next plan
            continue
        await finish_restore(run_url, target, plan)
        return plan, summary(plan, [report for report in reports if report is not None]), "restored"


def run_restore(run_url: str, target: str, **settings: Any) -> State[Any]:
    """Run the flow, tagged with the run, and return its final state."""

    async def call() -> State[Any]:
        with tags(TAG, run_tag(run_url)):
            called: Any = restore(run_url, target, return_state=True, **settings)
            state: State[Any] = await called
            return state

    return asyncio.run(call())
