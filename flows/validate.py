"""Validates a checkpoint as a flow, records the result in the catalog, and shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from prefect import State, flow
from prefect.artifacts import Artifact
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from recpoint.catalog.check import evaluate as evaluation
from recpoint.catalog.check import validate as validation
from recpoint.catalog.check.validate import Validation
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import LEVELS, verdict_of
from recpoint.catalog.store.store import open_store
from recpoint.errors import NothingToRestore
from recpoint.flows.parameters import NO_RESULTS, GenerationNumber, RunUrl, StepNumber
from recpoint.format.naming import ManifestName, ValidationLevel
from recpoint.tasks.reports import CheckpointEvent, artifact_key, emit
from recpoint.tasks.run_tags import tag_flow_run
from recpoint.tasks.validate import evaluate, validate_checkpoint
from recpoint.units import stripes_text

__all__ = ["validate"]

#: Rows of the table that people see; Prefect refuses artifacts of megabytes.
_MOST_ROWS = 200


def _run_name() -> str:
    parameters = flow_run.get_parameters()
    step = parameters["step"]
    return f"validate {'newest' if step is None else f'step {step}'} of {parameters['run_url']}"


@flow(
    name="validate",
    flow_run_name=_run_name,
    timeout_seconds=18 * 3600,
    persist_result=False,
    result_storage=NO_RESULTS,
)
async def validate(
    run_url: RunUrl,
    step: StepNumber | None = None,
    generation: GenerationNumber | None = None,
    level: ValidationLevel = "sample",
    evaluate_with: str | None = None,
) -> State[Any]:
    """Compare a checkpoint with what its trainer recorded at the cut.

    Args:
        run_url: the run.
        step: the checkpoint's step; the newest checkpoint of the live line if None.
        generation: the generation of `step`; it may be off the live line.
        level: metadata: check records and sizes. sample: check every byte that this checkpoint
            wrote. full: check every byte of its chain.
        evaluate_with: `module:function`, called with the restored model's state if the checkpoint
            passes; its metrics are recorded.

    Returns:
        Completed if it passed, Failed if not; the result is in the catalog in both cases.

    Raises:
        NothingToRestore: there is no such checkpoint.
        RecpointError: the store cannot be read, or the function failed; nothing is recorded.
    """
    store = open_store(run_url)
    await tag_flow_run(store.url)
    run = await asyncio.to_thread(Run.open, store)
    name = await asyncio.to_thread(_checkpoint, run, step, generation)
    verdict = await validate_checkpoint(run_url, *name, level)
    metrics: dict[str, float] = {}
    if evaluate_with is not None and verdict.passed:
        metrics = await evaluate(run_url, *name, evaluate_with)
    number = await asyncio.to_thread(_record, run, verdict, metrics, evaluate_with or "")
    event = await asyncio.to_thread(_event, run, verdict)
    if event is not None:
        emit(
            event,
            run.id,
            run.url,
            step=name.step,
            generation=name.generation,
            level=verdict.level,
            result=verdict.result,
            number=number,
            findings=len(verdict.findings),
            first_finding=verdict.findings[0].model_dump_json() if verdict.findings else "",
            metrics=dict(metrics),
        )
    await _show(run, name, verdict, metrics)
    text = f"validation {number} of {name}: {verdict.result} ({verdict.level})"
    return Completed(message=text) if verdict.passed else Failed(message=text)


def _checkpoint(run: Run, step: int | None, generation: int | None) -> ManifestName:
    if step is not None and generation is not None:
        return ManifestName(step, generation)
    live = run.live_line()
    for name in live:
        if step in (None, name.step):
            return name
    raise NothingToRestore(
        run.url,
        found="no checkpoint on the live line" if step is None else f"none of step {step}",
        expected="a checkpoint to validate",
        next_step=f"recpoint list {run.url}",
    )


def _event(run: Run, verdict: Validation) -> CheckpointEvent | None:
    """Return the event to send; None: it passed, but does not count as validated."""
    if not verdict.passed:
        return "validation_failed"
    if LEVELS.index(verdict.level) < LEVELS.index("sample"):
        return None  # no byte of it was compared
    stored_verdict = verdict_of(
        run, ManifestName(verdict.checkpoint.step, verdict.checkpoint.generation)
    )
    # A failed validation of a higher level outweighs this one.
    return "validated" if stored_verdict is not None and stored_verdict.passed("sample") else None


def _record(run: Run, verdict: Validation, metrics: Mapping[str, float], function: str) -> int:
    evaluation.record_metrics(run, verdict.checkpoint, metrics)
    return validation.record(run, verdict, evaluated_by=function if metrics else "").number


async def _show(
    run: Run, name: ManifestName, verdict: Validation, metrics: Mapping[str, float]
) -> None:
    """Show findings, notes and figures as a table."""
    url = run.url.replace("`", "'")  # a backtick would end the code span
    marked = [("error", finding) for finding in verdict.findings]
    marked += [("note", finding) for finding in verdict.notes]
    rows: list[dict[str, Any]] = [
        {"": word, **finding.model_dump(mode="json")} for word, finding in marked[:_MOST_ROWS]
    ]
    figures = {
        "bytes read": verdict.bytes_read,
        "rows compared": verdict.rows_compared,
        "largest error, of what is allowed": round(min(verdict.worst, 1e300), 4),
        **(
            {}
            if verdict.stripes is None
            else {"stripes": stripes_text(verdict.stripes.fits, verdict.stripes.unknown)}
        ),
        **metrics,
    }
    rows += [{"": "figure", "what": label, "found": value} for label, value in figures.items()]
    more = f", {len(marked) - _MOST_ROWS} more findings" if len(marked) > _MOST_ROWS else ""
    await Artifact(
        type="table",
        key=artifact_key(run.url, run.id, f"g{name.generation}-step-{name.step}-validation"),
        description=f"Step {name.step} **{verdict.result}** ({verdict.level}{more}): `{url}`",
        data=rows,
    ).acreate()
