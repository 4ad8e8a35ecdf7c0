"""Compares a checkpoint with what its trainer recorded, and keeps the result, as a task."""

from __future__ import annotations

import asyncio

from prefect import task
from prefect.cache_policies import NO_CACHE

from recpoint.catalog.check import evaluate as evaluation
from recpoint.catalog.check import validate as validation
from recpoint.catalog.check.validate import Validation
from recpoint.catalog.run.leases import reading
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.naming import ManifestName, ValidationLevel
from recpoint.tasks.persist import RETRIES, may_heal
from recpoint.tasks.reports import ProgressBar, artifact_key

__all__ = ["evaluate", "validate_checkpoint"]


@task(
    task_run_name="validate step {step} of {run_url}",
    retry_condition_fn=may_heal,
    timeout_seconds=8 * 3600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def validate_checkpoint(
    run_url: str, step: int, generation: int, level: ValidationLevel
) -> Validation:
    """What a validation found; nothing is recorded yet."""
    return await asyncio.to_thread(_validate, run_url, ManifestName(step, generation), level)


@task(
    task_run_name="evaluate step {step} of {run_url}",
    retry_condition_fn=may_heal,
    timeout_seconds=8 * 3600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def evaluate(run_url: str, step: int, generation: int, function: str) -> dict[str, float]:
    """The metrics that the user's function gives for the restored model."""
    return await asyncio.to_thread(_evaluate, run_url, ManifestName(step, generation), function)


def _validate(run_url: str, name: ManifestName, level: ValidationLevel) -> Validation:
    run = Run.open(open_store(run_url))
    bar = _bar(run, name, f"validation-{level}")
    with reading(run, purpose="validate") as lease:
        verdict = validation.validate(
            run, name, level=level, leased=lease is not None, on_progress=bar.show
        )
    bar.finish()
    return verdict


def _evaluate(run_url: str, name: ManifestName, function: str) -> dict[str, float]:
    loaded = evaluation.load_function(function)
    run = Run.open(open_store(run_url))
    bar = _bar(run, name, "evaluation")
    with reading(run, purpose="validate") as lease:
        metrics = evaluation.evaluate(
            run,
            name,
            loaded,
            function_name=function,
            leased=lease is not None,
            on_progress=bar.show,
        )
    bar.finish()
    return metrics


def _bar(run: Run, name: ManifestName, kind: str) -> ProgressBar:
    key = artifact_key(run.url, run.id, f"g{name.generation}-step-{name.step}-{kind}-progress")
    return ProgressBar(key, f"Step {name.step}: bytes read for the {kind.partition('-')[0]}")
