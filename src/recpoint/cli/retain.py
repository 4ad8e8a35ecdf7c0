"""The commands that say what is kept: retain, pin, unpin, metric."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

import typer

from recpoint.catalog.records import pins
from recpoint.catalog.retention.prune import PruneResult, execute
from recpoint.catalog.retention.prune_plan import PrunePlan, plan_prune
from recpoint.catalog.retention.retention_rules import BestBy, RetentionPolicy
from recpoint.catalog.runs.run import Run
from recpoint.catalog.staging import staged
from recpoint.cli.inspect import GenerationOption, UrlArgument, find_checkpoint, open_run
from recpoint.cli.reporting import JsonOption, Result, command, showing_steps
from recpoint.cli.sweep import StagingOption, seconds_of, staged_here
from recpoint.dashboards import terminal
from recpoint.dashboards.retention import retention_table
from recpoint.errors import SettingsError
from recpoint.format.naming import MAX_STEP, ManifestName, is_label

__all__ = ["pin", "record_metric", "retain", "unpin"]

_BEST = re.compile(r"(max|min):([^:]+)(?::([0-9]{1,9}))?\Z")

StepArgument = Annotated[int, typer.Argument(min=0, max=MAX_STEP, help="Step of the checkpoint.")]
LabelOption = Annotated[
    str, typer.Option("--name", help="The pin's name; a checkpoint may have several.")
]


@command
def retain(
    url: UrlArgument,
    keep_last: Annotated[int, typer.Option(help="Keep the newest N.")] = 0,
    keep_within: Annotated[
        str, typer.Option(help="Keep what is at most so much older than the newest: 7d, 12h, …")
    ] = "0",
    keep_hourly: Annotated[int, typer.Option(help="Keep one of each of the last N hours.")] = 0,
    keep_daily: Annotated[int, typer.Option(help="Keep one of each of the last N days.")] = 0,
    keep_weekly: Annotated[int, typer.Option(help="Keep one of each of the last N weeks.")] = 0,
    keep_monthly: Annotated[int, typer.Option(help="Keep one of each of the last N months.")] = 0,
    best_by: Annotated[
        list[str] | None,
        typer.Option(help="Keep the best by a metric: max:auc, min:loss:3; may be repeated."),
    ] = None,
    require_validated: Annotated[
        bool,
        typer.Option(
            "--require-validated/--no-require-validated",
            help="Drop nothing unless a validated one stays.",
        ),
    ] = True,
    grace: Annotated[
        str, typer.Option(help="Time between marking and deleting, at least 1h.")
    ] = "24h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    staging: StagingOption = None,
    json_output: JsonOption = False,
) -> Result:
    """Keep what a rule or a pin keeps; mark the rest, and delete it after the grace.

    Hours, days, weeks and months are those of trainers' stamps, and again those of the store's
    times: what either keeps is kept, so that one wrong clock never deletes where each has its own
    (a directory of the trainer's host has the trainer's), and --keep-hourly 24 may keep up to 48.
    """
    try:
        policy = RetentionPolicy(
            keep_last=keep_last,
            keep_within_seconds=seconds_of(keep_within, option="--keep-within"),
            keep_hourly=keep_hourly,
            keep_daily=keep_daily,
            keep_weekly=keep_weekly,
            keep_monthly=keep_monthly,
            best_by=tuple(_best(text) for text in best_by or ()),
            require_validated=require_validated,
        )
    except SettingsError as error:
        error.next_step = f"recpoint retain {url} --keep-last 10 --dry-run"
        raise
    run = open_run(url)
    with showing_steps(quiet=json_output) as on_step:
        made = plan_prune(
            run,
            policy,
            grace_seconds=seconds_of(grace),
            keep=staged.staged_attempts(staged_here(run, staging)),
            ask_store=not dry_run,
            on_step=on_step,
        )
    views = [retention_table(made), terminal.sweep_table(made.orphans)]
    if dry_run:
        return Result(_document(run.url, made, None), *views)
    with showing_steps(quiet=json_output) as on_step:
        result = execute(run, made, on_step=on_step)
    text = (
        f"marked {len(result.marked)}, deleted {len(result.deleted)} manifests and "
        f"{len(result.swept.removed)} other objects, {terminal.bytes_text(result.removed_bytes)}"
    )
    return Result(_document(run.url, made, result), *views, terminal.shown(text))


def _best(text: str) -> BestBy:
    match = _BEST.match(text)
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is not max:METRIC or min:METRIC, and :N for more than one",
            param_hint="--best-by",
        )
    direction: Literal["max", "min"] = "max" if match[1] == "max" else "min"
    return BestBy(match[2], direction, int(match[3] or 1))


def _document(url: str, made: PrunePlan, result: PruneResult | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "url": url,
        "dry_run": result is None,
        "grace_seconds": made.grace_seconds,
        "manifests": [row._asdict() for row in made.rows()],
        "dropped_bytes": made.retention.dropped_bytes,
        "held_by": list(made.held),
        "unfinished": list(made.unfinished),
        "stray_pins": list(made.stray_pins),
        "orphans": [swept._asdict() for swept in made.orphans.objects + made.orphans.unfinished],
        "unrecognised": list(made.orphans.unrecognised),
    }
    if result is not None:
        document.update(
            marked=list(result.marked),
            unmarked=list(result.unmarked),
            deleted=list(result.deleted),
            spared=[{"key": key, "reason": reason} for key, reason in result.spared],
            removed=[swept.key for swept in result.swept.removed],
            removed_bytes=result.removed_bytes,
        )
    return document


@command
def pin(
    url: UrlArgument,
    step: StepArgument,
    generation: GenerationOption = None,
    name: LabelOption = pins.DEFAULT_NAME,
    why: Annotated[str, typer.Option(help="For whoever wonders later.")] = "",
    json_output: JsonOption = False,
) -> Result:
    """Keep a checkpoint, and all it needs, whatever retention's rules say."""
    _require_label(name, "--name")
    run = open_run(url)
    made = pins.pin(run, find_checkpoint(run, step, generation), label=name, why=why)
    document = {**_named(made.checkpoint.step, made.checkpoint.generation), "name": made.name}
    document |= {"who": made.who, "why": made.why, "created_ms": made.created_ms}
    return Result(document, terminal.shown(f"{made.checkpoint} is pinned as {made.name}"))


@command
def unpin(
    url: UrlArgument,
    step: StepArgument,
    generation: GenerationOption = None,
    name: LabelOption = pins.DEFAULT_NAME,
    json_output: JsonOption = False,
) -> Result:
    """Remove a pin; retention's rules decide from then on."""
    _require_label(name, "--name")
    run = open_run(url)
    at = _pinned_at(run, step, generation, name)
    pins.unpin(run, at, label=name)
    document = {**_named(*at), "name": name}
    return Result(document, terminal.shown(f"{at} is no longer pinned as {name}"))


def _pinned_at(run: Run, step: int, generation: int | None, name: str) -> ManifestName:
    """The checkpoint with this pin: it may be superseded by now, or gone."""
    if generation is None:
        there = [at for at, names in pins.pinned(run).items() if at.step == step and name in names]
        if len(there) == 1:
            return there[0]
    return find_checkpoint(run, step, generation)


@command
def record_metric(
    url: UrlArgument,
    step: StepArgument,
    metric: Annotated[str, typer.Argument(help="For instance auc=0.81.")],
    generation: GenerationOption = None,
    json_output: JsonOption = False,
) -> Result:
    """Record what was measured of a checkpoint, for --best-by."""
    name, equals, text = metric.partition("=")
    try:
        value = float(text) if equals else None
    except ValueError:
        value = None
    if value is None or not math.isfinite(value):
        raise typer.BadParameter(
            f"{metric!r} is not NAME=NUMBER, with a finite number", param_hint="METRIC"
        )
    _require_label(name, "METRIC")
    run = open_run(url)
    at = find_checkpoint(run, step, generation)
    pins.record_metric(run, at, name, value)
    document = {**_named(*at), "name": name, "value": value}
    return Result(document, terminal.shown(f"{name} of {at} is {value:g}"))


def _require_label(name: str, option: str) -> None:
    """That a key can hold a name; `option` is how it was given."""
    if not is_label(name):
        raise typer.BadParameter(
            f"{name[:80]!r} is no name of 1 to 64 of a-z, 0-9, _, ., -, "
            "the first a letter or digit",
            param_hint=option,
        )


def _named(step: int, generation: int) -> dict[str, Any]:
    return {"step": step, "generation": generation}
