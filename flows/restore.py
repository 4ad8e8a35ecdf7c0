"""Flow: restore a checkpoint into files of safetensors, a task for each file.

It does what `catalog.restore.files.restore_shards` does, through the same functions. Killed or
failed anywhere, the next one goes on with the files that are missing, if it chooses the same
checkpoint: of a run that trains meanwhile, name the step. An error that refuses says which.
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

from recpoint.catalog.restore.files import (
    DEFAULT_SHARD_BYTES,
    Include,
    ShardPlan,
    damaged_checkpoint,
    summary,
)
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import RestoreReport
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
    """Restore a checkpoint into files of safetensors with an index, without the model.

    Args:
        run_url: the run.
        target: a directory or another URL, which all workers of the task runner reach; the index
            appears there last. Other files are left alone, another checkpoint's are refused.
        step: of the checkpoint; the newest good one if None.
        generation: with a step: also one that is not on the live line.
        validated_only: without a step: only one that was validated.
        validated_within: without a step: the newest that was validated, if it is at most so many
            batches older than the newest; else the newest.
        include: model: what `load_state_dict` takes, under its names. all: also the row states of
            tables, and the state of each rank.
        shard_bytes: of a file; a table that is larger has one of its own.
        parts_at_once: files that the task runner has at a time; each takes up to half a gigabyte of
            memory where it runs, or the dense state if that is more, and disk for the file.

    Returns:
        Completed; its message says what was restored, and what was skipped.

    Raises:
        SettingsError: something else is in the target; or see `Selection`.
        RecpointError: of `catalog.restore.files.restore_shards`, which says what is left then.
    """
    selection = Selection(
        step=step,
        generation=generation,
        validated_only=validated_only,
        validated_within=validated_within,
    )
    # The tags of a task are names of concurrency limits, which the server would be asked for.
    with TagsContext(current_tags=set()):
        lease = ExitStack()
        held = await asyncio.to_thread(
            lambda: lease.enter_context(reading(open_run(run_url), purpose="restore"))
        )
        try:
            plan, done, outcome = await _restore(
                run_url,
                target,
                selection,
                include,
                shard_bytes,
                parts_at_once,
                leased=held is not None,
            )
        finally:
            await asyncio.to_thread(lease.close)
        reporting: Any = report_restore(run_url, target, plan, done, outcome, return_state=True)
        told: State[Any] = await reporting
        if not told.is_completed():
            _LOG.warning("restored, but not reported: %s", told.message)
    left_out = [f"skipped {name}: {error}" for name, error in done.skipped]
    left_out += [f"passed over {key}: {error}" for key, error in done.passed_over]
    words = f"{outcome}: {done.restored} in {len(plan.shards)} files, {bytes_text(plan.size_bytes)}"
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
    """The newest checkpoint of which every file turns out to be good."""
    damaged: dict[ManifestName, str] = {}
    instead_of: ShardPlan | None = None
    while True:
        plan, there = await plan_restore(
            run_url, target, selection, include, damaged, shard_bytes, instead_of, leased
        )
        if there:
            return plan, plan.report, "already"
        _LOG.info("%s into %d files of %s", plan.name, len(plan.shards), target)
        try:
            reports = await each_part(
                partial(restore_shard.submit, run_url, target, plan),
                range(len(plan.shards)),
                at_once,
            )
        except DAMAGE as error:
            found = partial(damaged_checkpoint, run_url=run_url, named=selection.named)
            damaged |= await asyncio.to_thread(found, open_store(target), plan, error)
            _LOG.warning("skipped %s: %s", plan.name, error)
            instead_of = plan  # its files are progress until there is another one
            continue
        await finish_restore(run_url, target, plan)
        return plan, summary(plan, [one for one in reports if one is not None]), "restored"


def run_restore(run_url: str, target: str, **settings: Any) -> State[Any]:
    """Call the flow, tagged with the run, and wait for its final state."""

    async def call() -> State[Any]:
        with tags(TAG, run_tag(run_url)):
            called: Any = restore(run_url, target, return_state=True, **settings)
            state: State[Any] = await called
            return state

    return asyncio.run(call())
