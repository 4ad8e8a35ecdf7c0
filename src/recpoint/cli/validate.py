"""Defines the command that validates a checkpoint."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from recpoint.catalog.run.leases import reading
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import LEVELS
from recpoint.cli.inspect import GenerationOption, UrlArgument, find_checkpoint, open_run
from recpoint.cli.reporting import JsonOption, Result, command, showing_bytes
from recpoint.dashboards import terminal
from recpoint.errors import NothingToRestore
from recpoint.format.naming import ManifestName
from recpoint.units import bytes_text, stripes_text

if TYPE_CHECKING:
    from recpoint.catalog.check.validate import Validation
    from recpoint.format.naming import ValidationLevel

__all__ = ["validate_checkpoint"]


@command
def validate_checkpoint(
    url: UrlArgument,
    step: Annotated[
        int | None, typer.Option(help="This checkpoint; default: the newest of the live line.")
    ] = None,
    generation: GenerationOption = None,
    level: Annotated[
        str,
        typer.Option(
            help="metadata: records and sizes; sample: every byte that this checkpoint wrote, "
            "and the rows its trainer recorded; full: every byte of its chain."
        ),
    ] = "sample",
    evaluate_with: Annotated[
        str,
        typer.Option(
            "--eval",
            metavar="MODULE:FUNCTION",
            help="Call this with the restored model's state, and record the metrics it returns.",
        ),
    ] = "",
    record: Annotated[
        bool, typer.Option("--record/--no-record", help="Keep the result in the catalog.")
    ] = True,
    json_output: JsonOption = False,
) -> Result:
    """Compare a checkpoint with what its trainer recorded; exit code 1 when they differ."""
    from recpoint.catalog.check import evaluate as evaluation
    from recpoint.catalog.check import validate as validation

    chosen = _level(level)
    function = None
    if evaluate_with:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
        function = evaluation.load_function(evaluate_with)
    run = open_run(url)
    name = _checkpoint(run, step, generation)
    metrics: dict[str, float] = {}
    with reading(run, purpose="validate") as lease:
        leased = lease is not None
        with showing_bytes("validating", quiet=json_output) as on_progress:
            verdict = validation.validate(
                run, name, level=chosen, leased=leased, on_progress=on_progress
            )
        if function is not None and verdict.passed:
            with showing_bytes("restoring", quiet=json_output) as on_progress:
                metrics = evaluation.evaluate(
                    run,
                    name,
                    function,
                    function_name=evaluate_with,
                    leased=leased,
                    on_progress=on_progress,
                )
    number = None
    if record:
        evaluation.record_metrics(run, verdict.checkpoint, metrics)
        evaluated_by = evaluate_with if metrics else ""
        number = validation.record(run, verdict, evaluated_by=evaluated_by).number
    return Result(
        _document(verdict, metrics, number),
        *_views(verdict, metrics, number),
        code=0 if verdict.passed else 1,
    )


def _level(text: str) -> ValidationLevel:
    for level in LEVELS:
        if text == level:
            return level
    levels = ", ".join(LEVELS)
    raise typer.BadParameter(f"{text!r} is none of {levels}", param_hint="--level")


def _checkpoint(run: Run, step: int | None, generation: int | None) -> ManifestName:
    if step is not None:
        return find_checkpoint(run, step, generation)
    if generation is not None:
        raise typer.BadParameter("needs --step", param_hint="--generation")
    live = run.live_line()
    if not live:
        raise NothingToRestore(
            run.url,
            found="no checkpoint on the live line",
            expected="at least one",
            next_step=f"recpoint list {run.url}",
        )
    return live[0]


def _document(verdict: Validation, metrics: dict[str, float], number: int | None) -> dict[str, Any]:
    return {
        "step": verdict.checkpoint.step,
        "generation": verdict.checkpoint.generation,
        "attempt": verdict.checkpoint.attempt,
        "level": verdict.level,
        "result": verdict.result,
        "record": number,
        "links_read": verdict.links_read,
        "chunks_read": verdict.chunks_read,
        "bytes_read": verdict.bytes_read,
        "rows_compared": verdict.rows_compared,
        "worst_of_bound": min(verdict.worst, 1e300),
        "stripes": None if verdict.stripes is None else verdict.stripes.model_dump(),
        "findings": [finding.model_dump(mode="json") for finding in verdict.findings],
        "notes": [finding.model_dump(mode="json") for finding in verdict.notes],
        "metrics": metrics,
        "seconds": (verdict.finished_ms - verdict.started_ms) / 1000,
    }


def _views(
    verdict: Validation, metrics: dict[str, float], number: int | None
) -> list[RenderableType]:
    views: list[RenderableType] = []
    if verdict.findings or verdict.notes:
        views.append(terminal.validation_table(verdict.findings, verdict.notes))
    fields: list[tuple[str, object]] = [
        ("checkpoint", verdict.checkpoint),
        ("level", verdict.level),
        ("read", f"{bytes_text(verdict.bytes_read)}, {verdict.chunks_read} chunks"),
        ("rows compared", f"{verdict.rows_compared:,}"),
        ("largest error", f"{min(verdict.worst, 1e300):.1%} of what is allowed"),
        *(
            []
            if verdict.stripes is None
            else [("stripes", stripes_text(verdict.stripes.fits, verdict.stripes.unknown))]
        ),
        *((name, f"{value:.9g}") for name, value in sorted(metrics.items())),
        ("recorded", "no" if number is None else f"as validation {number}"),
        ("result", terminal.result_text(verdict.result)),
    ]
    return [*views, terminal.fields_table(fields)]
