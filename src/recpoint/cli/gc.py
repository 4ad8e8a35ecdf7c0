"""Defines commands that free space or say what is kept: consolidate, retain, pin, metric, sweep."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.console import RenderableType
from rich.table import Table

from recpoint.catalog.retention.discard_staged import discard_staged, staged_losses, there_is_a_run
from recpoint.catalog.retention.grace import require_grace
from recpoint.catalog.retention.plan import PrunePlan, plan_prune
from recpoint.catalog.retention.prune import PruneResult, execute
from recpoint.catalog.retention.rules import BestBy, RetentionPolicy
from recpoint.catalog.retention.sweep import GRACE_NEEDED, spared_words
from recpoint.catalog.retention.sweep_here import SweptHere, sweep_here
from recpoint.catalog.run import metrics, pins
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import area, job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.free import free_slots
from recpoint.catalog.store.run_url import naming_run
from recpoint.catalog.store.store import Store, open_store
from recpoint.cli.inspect import GenerationOption, UrlArgument, find_checkpoint, open_run
from recpoint.cli.reporting import JsonOption, Result, command, showing_bytes, showing_steps
from recpoint.dashboards import terminal
from recpoint.dashboards.terminal import discard_table, retention_table, slots_views, staged_views
from recpoint.errors import NothingToRestore, RunRecordLost, SettingsError, StagingError
from recpoint.format.naming import MAX_STEP, ManifestName, is_label
from recpoint.units import bytes_text

if TYPE_CHECKING:
    from recpoint.catalog.consolidate.choice import WeighedMerge
    from recpoint.catalog.consolidate.consolidate import Consolidated
    from recpoint.catalog.consolidate.plan import ConsolidationPlan

__all__ = [
    "StagingOption",
    "consolidate_run",
    "pin",
    "record_metric",
    "retain",
    "seconds_of",
    "sweep_run",
    "unpin",
]


#: How many merges of a chain the table shows; `--json` has all.
_SHOWN_MERGES: Final = 20


@command
def consolidate_run(
    url: UrlArgument,
    step: Annotated[
        int | None, typer.Option(help="This checkpoint; default: the newest of the live line.")
    ] = None,
    generation: GenerationOption = None,
    links: Annotated[
        int | None,
        typer.Option(
            help="Merge only this many of its newest links, into one increment; if the chain has "
            "no more, all of them into a full. Default: all into a full. An agent and the flow "
            "weigh all merges and may choose another.",
            min=2,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only say what it would read, write and free, and what an agent would choose.",
        ),
    ] = False,
    json_output: JsonOption = False,
) -> Result:
    """Merge a checkpoint's chain: a restore then reads less, and retention can drop old links."""
    from recpoint.catalog.consolidate.consolidate import consolidate_around_damage
    from recpoint.catalog.consolidate.plan import plan_consolidation

    run = open_run(url)
    if step is None:
        if generation is not None:
            raise typer.BadParameter("a generation needs its --step", param_hint="--generation")
        live = run.live_line()
        if not live:
            raise NothingToRestore(
                run.url,
                found="no checkpoint on the live line",
                expected="at least one",
                next_step="let a trainer write one",
            )
        name = live[0]
    else:
        name = find_checkpoint(run, step, generation)
    if dry_run:
        plan = plan_consolidation(run, name, links=links)
        views = [_plan_table(plan, url), *([_weighed_table(plan)] if plan.needed else [])]
        return Result(_consolidation_document(plan, None, url, dry_run=True), *views)
    with showing_bytes("merging", quiet=json_output) as on_progress:
        plan, outcome = consolidate_around_damage(
            run,
            lambda avoid: plan_consolidation(run, name, links=links, avoid=avoid),
            on_progress=on_progress,
        )
    if outcome is None or not plan.needed:
        return Result(_consolidation_document(plan, None, url), _plan_table(plan, url))
    summary = terminal.shown(_said(outcome), limit=2000)
    return Result(_consolidation_document(plan, outcome, url), _plan_table(plan, url), summary)


def _said(outcome: Consolidated) -> str:
    if outcome.outcome == "already":
        return f"{outcome.key}: there already"
    written = bytes_text(outcome.written_bytes)
    return f"{outcome.key}: {written} in {outcome.chunks} chunks, {outcome.seconds:.1f} s"


def _plan_table(plan: ConsolidationPlan, url: str) -> Table:
    fields = [
        *_plan_fields(plan),
        *(("passed over", f"{key}: {naming_run(error, url)}") for key, error in plan.passed_over),
    ]
    return terminal.fields_table(fields, title=f"{plan.target.name}")


def _plan_fields(plan: ConsolidationPlan) -> list[tuple[str, object]]:
    if not plan.needed:
        return [("nothing to do", plan.reason)]
    size = bytes_text
    most = "" if plan.target.form == "full" else "at most "
    dead = "not known before reading"
    if plan.dead_rows is not None and plan.dead_share is not None:
        dead = f"{plan.dead_rows:,} of {plan.stored_rows:,} stored ({plan.dead_share:.0%})"
    return [
        ("makes", plan.target.key),
        ("merges", f"{len(plan.sources)} manifests"),
        ("reads", size(plan.read_bytes)),
        ("writes", f"{most}{size(plan.write_bytes)}"),
        ("frees", f"{size(plan.frees_bytes)}, once retention deletes the merged manifests"),
        ("dead rows", dead),
        (
            "a restore reads",
            f"{size(plan.restore_bytes_before)} in {plan.links_before} manifests now, "
            f"{most}{size(plan.restore_bytes_after)} in {plan.links_after} afterwards",
        ),
        ("pays", f"{'yes' if plan.pays else 'not yet'}: {plan.reason}"),
    ]


def _weighed(plan: ConsolidationPlan) -> tuple[tuple[WeighedMerge, ...], WeighedMerge | None]:
    """Return all merges of the plan's chain, and the one an agent would choose by default."""
    from recpoint.catalog.consolidate.choice import cheapest, weigh
    from recpoint.catalog.consolidate.plan import ConsolidationTriggers

    weighed = weigh(plan.merges, ConsolidationTriggers())
    return weighed, cheapest(weighed)


def _weighed_table(plan: ConsolidationPlan) -> Table:
    weighed, chosen = _weighed(plan)
    by_cost = sorted(
        weighed, key=lambda merge: math.inf if merge.cost_bytes is None else merge.cost_bytes
    )
    cheapest = by_cost[:_SHOWN_MERGES]
    left_out = len(weighed) - len(cheapest)
    table = terminal.plain_table(
        "What an agent weighs, with its default triggers"
        + (f"; {left_out} more with --json" if left_out else "")
    )
    table.add_column("merges")
    for heading in ("reads", "writes", "restored", "manifests"):
        table.add_column(heading, justify="right")
    table.add_column("cost")
    size = bytes_text
    for merge in weighed:
        if merge not in cheapest:
            continue
        sizes = merge.sizes
        merges = "all, into a full" if sizes.into_full else f"the newest {sizes.merged}"
        cost = merge.why_not if merge.cost_bytes is None else size(round(merge.cost_bytes))
        table.add_row(
            merges,
            size(sizes.read_bytes),
            size(sizes.write_bytes),
            size(sizes.restore_bytes_after),
            str(sizes.links_after),
            f"{cost}, chosen" if merge is chosen else cost,
        )
    return table


def _weighed_documents(plan: ConsolidationPlan) -> list[dict[str, Any]]:
    weighed, chosen = _weighed(plan)
    return [
        {
            "links": merge.sizes.merged,
            "into": "full" if merge.sizes.into_full else "increment",
            "read_bytes": merge.sizes.read_bytes,
            "write_bytes": merge.sizes.write_bytes,
            "restore_bytes_after": merge.sizes.restore_bytes_after,
            "links_after": merge.sizes.links_after,
            "cost_bytes": merge.cost_bytes,
            "why_not": merge.why_not or None,
            "chosen": merge is chosen,
        }
        for merge in weighed
    ]


def _consolidation_document(
    plan: ConsolidationPlan, outcome: Consolidated | None, url: str, *, dry_run: bool = False
) -> dict[str, Any]:
    name = plan.target.name
    return {
        "dry_run": dry_run,
        "step": name.step,
        "generation": name.generation,
        "needed": plan.needed,
        "key": plan.target.key if plan.needed else None,
        "sources": [source.key for source in plan.sources],
        "read_bytes": plan.read_bytes,
        "write_bytes": plan.write_bytes,
        "frees_bytes": plan.frees_bytes,
        "restore_bytes_before": plan.restore_bytes_before,
        "restore_bytes_after": plan.restore_bytes_after,
        "links_before": plan.links_before,
        "links_after": plan.links_after,
        "stored_rows": plan.stored_rows,
        "dead_rows": plan.dead_rows,
        "pays": plan.pays,
        "reason": plan.reason,
        "weighed": _weighed_documents(plan),
        "passed_over": [
            {"key": key, "error": naming_run(error, url)} for key, error in plan.passed_over
        ],
        "outcome": None if outcome is None else outcome.outcome,
        "written_bytes": None if outcome is None else outcome.written_bytes,
        "seconds": None if outcome is None else outcome.seconds,
    }


_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(s|m|h|d)?\Z")
_UNIT_SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

StagingOption = Annotated[
    Path | None,
    typer.Option(help="The staging area; default: RECPOINT_STAGING, else one in memory."),
]


@command
def sweep_run(
    url: UrlArgument,
    grace: Annotated[
        str, typer.Option(help="Keep what is younger: a number and s, m, h or d; at least 1h.")
    ] = "24h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    include_newest: Annotated[
        bool,
        typer.Option(
            "--include-newest",
            help="Also remove what only the newest trainer could still commit. Use it only when no "
            "host has that staged any more.",
        ),
    ] = False,
    discard: Annotated[
        bool,
        typer.Option(
            "--discard-staged",
            help="Discard what is staged here for a run that is gone for good.",
        ),
    ] = False,
    staging: StagingOption = None,
    json_output: JsonOption = False,
) -> Result:
    """Finish what is staged here, then remove chunks that no manifest names and unfinished files.

    Only the trainer's own host knows what is staged and will still be committed. On other hosts,
    what the newest trainer uploaded after its last checkpoint stays, whatever its age. If an agent
    serves the staging area, staged jobs are left to it.
    """
    grace_seconds = seconds_of(grace)
    require_grace(grace_seconds, why=GRACE_NEEDED)
    store = open_store(url)
    staged_run = _staged_run(store.url, staging)
    if discard:
        return _discard(store, staged_run, dry_run=dry_run)
    with showing_steps(quiet=json_output) as on_step:
        swept = sweep_here(
            store,
            staged_run,
            grace_seconds=grace_seconds,
            include_newest=include_newest,
            dry_run=dry_run,
            on_step=on_step,
        )
    views: list[RenderableType] = [
        *staged_views(swept.work, url),
        *slots_views(swept.slots, dry_run=dry_run),
        terminal.sweep_table(swept.plan),
    ]
    if swept.result is not None:
        freed = bytes_text(swept.result.removed_bytes)
        spared = spared_words(swept.result.spared)
        text = f"removed {len(swept.result.removed)} objects, {freed}{spared}"
        views.append(terminal.shown(text))
    return Result(_sweep_document(swept, url), *views)


def _discard(store: Store, staged_run: StagedRun, *, dry_run: bool) -> Result:
    try:
        run = Run.open(store)
    except RunRecordLost:
        raise  # the run exists: only its record is lost, and can be written again
    except NothingToRestore:
        pass
    else:
        raise there_is_a_run(run.url)
    losses = staged_losses(staged_run) if dry_run else discard_staged(staged_run)
    jobs = [loss.job for loss in losses]
    slots = free_slots(staged_run, ended=True, grace_seconds=0.0, besides=jobs, dry_run=dry_run)
    document = {
        "dry_run": dry_run,
        "discarded": [loss._asdict() for loss in losses],
        "slots": [slot._asdict() for slot in slots],
    }
    views = [discard_table(losses, dry_run=dry_run), *slots_views(slots, dry_run=dry_run)]
    return Result(document, *views)


def staged_here(run: Run, staging: Path | None) -> StagedRun:
    """Return the run's directory in this host's staging area; it may not exist."""
    return _staged_run(run.url, staging)


def _staged_run(run_url: str, staging: Path | None) -> StagedRun:
    root = Path(staging or area.default_staging_root())
    if root.exists() and not root.is_dir():
        raise StagingError(
            str(root),
            found="a file",
            expected="the staging area of this host, a directory",
            next_step="give the directory: --staging or RECPOINT_STAGING",
        )
    return StagedRun.of(root, run_url)


def seconds_of(text: str, *, option: str = "--grace") -> float:
    """Return the seconds that `text` means, such as `90`, `90s`, `1.5h` or `2d`."""
    match = _DURATION.match(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number and s, m, h or d", param_hint=option)
    return float(match[1]) * _UNIT_SECONDS[match[2]]


def _sweep_document(swept: SweptHere, url: str) -> dict[str, Any]:
    plan, result = swept.plan, swept.result
    return {
        "dry_run": result is None,
        "staged": [{**job._asdict(), "why": naming_run(job.why, url)} for job in swept.work.jobs],
        "slots": [slot._asdict() for slot in swept.slots],
        "planned": [planned._asdict() for planned in plan.objects + plan.unfinished],
        "planned_bytes": plan.size_bytes,
        "kept": [prefix._asdict() for prefix in plan.kept],
        "unrecognised": list(plan.unrecognised),
        "blocked": list(plan.blocked),
        "removed": [] if result is None else [info.key for info in result.removed],
        "removed_bytes": 0 if result is None else result.removed_bytes,
    }


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
            help="Drop nothing unless a validated checkpoint stays.",
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

    The rules for hours, days, weeks and months are applied twice: to the trainers' time stamps and
    to the store's. What either keeps is kept, so --keep-hourly 24 may keep up to 48. One wrong
    clock therefore deletes nothing, unless both are the same clock (as for a directory on the
    trainer's host).
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
        plan = plan_prune(
            run,
            policy,
            grace_seconds=seconds_of(grace),
            keep=job_files.staged_attempts(staged_here(run, staging)),
            ask_store=not dry_run,
            on_step=on_step,
        )
    views = [retention_table(plan), terminal.sweep_table(plan.orphans)]
    if dry_run:
        return Result(_retention_document(run.url, plan, None), *views)
    with showing_steps(quiet=json_output) as on_step:
        result = execute(run, plan, on_step=on_step)
    text = (
        f"marked {len(result.marked)}, deleted {len(result.deleted)} manifests and "
        f"{len(result.swept.removed)} other objects, {bytes_text(result.removed_bytes)}"
        f"{spared_words(result.spared)}"
    )
    return Result(_retention_document(run.url, plan, result), *views, terminal.shown(text))


def _best(text: str) -> BestBy:
    match = _BEST.match(text)
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is not max:METRIC or min:METRIC, and :N for more than one",
            param_hint="--best-by",
        )
    direction: Literal["max", "min"] = "max" if match[1] == "max" else "min"
    return BestBy(match[2], direction, int(match[3] or 1))


def _retention_document(url: str, plan: PrunePlan, result: PruneResult | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "url": url,
        "dry_run": result is None,
        "grace_seconds": plan.grace_seconds,
        "manifests": [row._asdict() for row in plan.rows()],
        "dropped_bytes": plan.retention.dropped_bytes,
        "held_by": list(plan.held),
        "unfinished": list(plan.unfinished),
        "stray_pins": list(plan.stray_pins),
        "orphans": [swept._asdict() for swept in plan.orphans.objects + plan.orphans.unfinished],
        "unrecognised": list(plan.orphans.unrecognised),
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
    why: Annotated[str, typer.Option(help="The reason, kept with the pin.")] = "",
    json_output: JsonOption = False,
) -> Result:
    """Keep a checkpoint, and all it needs, whatever retention's rules say."""
    _require_label(name, "--name")
    run = open_run(url)
    pinned = pins.pin(run, find_checkpoint(run, step, generation), label=name, why=why)
    document = {**_named(pinned.checkpoint.step, pinned.checkpoint.generation), "name": pinned.name}
    document |= {"who": pinned.who, "why": pinned.why, "created_ms": pinned.created_ms}
    return Result(document, terminal.shown(f"{pinned.checkpoint} is pinned as {pinned.name}"))


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
    name_at = _pinned_at(run, step, generation, name)
    pins.unpin(run, name_at, label=name)
    document = {**_named(*name_at), "name": name}
    return Result(document, terminal.shown(f"{name_at} is no longer pinned as {name}"))


def _pinned_at(run: Run, step: int, generation: int | None, name: str) -> ManifestName:
    """Return the checkpoint with this pin; it may be superseded by now, or gone."""
    if generation is None:
        candidates = [
            checkpoint
            for checkpoint, names in pins.pinned(run).items()
            if checkpoint.step == step and name in names
        ]
        if len(candidates) == 1:
            return candidates[0]
    return find_checkpoint(run, step, generation)


@command
def record_metric(
    url: UrlArgument,
    step: StepArgument,
    metric: Annotated[str, typer.Argument(help="NAME=NUMBER, such as auc=0.81.")],
    generation: GenerationOption = None,
    json_output: JsonOption = False,
) -> Result:
    """Record a metric that was measured for a checkpoint, for retain --best-by."""
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
    checkpoint = find_checkpoint(run, step, generation)
    metrics.record_metric(run, checkpoint, name, value)
    document = {**_named(*checkpoint), "name": name, "value": value}
    return Result(document, terminal.shown(f"{name} of {checkpoint} is {value:g}"))


def _require_label(name: str, option: str) -> None:
    """Refuse a name that a key cannot hold; `option` names where it was given."""
    if not is_label(name):
        raise typer.BadParameter(
            f"{name[:80]!r} is no name of 1 to 64 of a-z, 0-9, _, ., -, "
            "the first a letter or digit",
            param_hint=option,
        )


def _named(step: int, generation: int) -> dict[str, Any]:
    return {"step": step, "generation": generation}
