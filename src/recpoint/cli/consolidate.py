"""The command that merges a checkpoint's chain into fewer manifests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table

from recpoint.catalog.stores.run_url import naming_run
from recpoint.cli.inspect import GenerationOption, UrlArgument, find_checkpoint, open_run
from recpoint.cli.reporting import JsonOption, Result, command, showing_bytes
from recpoint.dashboards import terminal
from recpoint.errors import NothingToRestore

if TYPE_CHECKING:  # torch takes longer to import than a plan to make
    from recpoint.catalog.consolidation.consolidate import Consolidated
    from recpoint.catalog.consolidation.consolidate_choice import WeighedMerge
    from recpoint.catalog.consolidation.consolidate_plan import ConsolidationPlan

__all__ = ["consolidate_run"]

#: Merges of a chain that are shown to people; `--json` has all.
_SHOWN_MERGES: Final = 20


@command
def consolidate_run(
    url: UrlArgument,
    step: Annotated[
        int | None, typer.Option(help="This checkpoint; default: the newest that counts.")
    ] = None,
    generation: GenerationOption = None,
    links: Annotated[
        int | None,
        typer.Option(
            help="Merge only so many of its newest links, into one increment; where there are no "
            "more, all of them into a full. Default: all into a full, also where an agent, or the "
            "flow, which weigh all merges, would choose another.",
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
    """Merge a checkpoint's chain, so that a restore reads less and old links may go."""
    from recpoint.catalog.consolidation.consolidate_around import consolidate_around_damage
    from recpoint.catalog.consolidation.consolidate_plan import plan_consolidation

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
        return Result(_document(plan, None, url, dry_run=True), *views)
    with showing_bytes("merging", quiet=json_output) as on_progress:
        plan, done = consolidate_around_damage(
            run,
            lambda avoid: plan_consolidation(run, name, links=links, avoid=avoid),
            on_progress=on_progress,
        )
    if done is None or not plan.needed:
        return Result(_document(plan, None, url), _plan_table(plan, url))
    said = terminal.shown(_said(done), limit=2000)
    return Result(_document(plan, done, url), _plan_table(plan, url), said)


def _said(done: Consolidated) -> str:
    if done.outcome == "already":
        return f"{done.key}: there already"
    written = terminal.bytes_text(done.written_bytes)
    return f"{done.key}: {written} in {done.chunks} chunks, {done.seconds:.1f} s"


def _plan_table(plan: ConsolidationPlan, url: str) -> Table:
    fields = [
        *_plan_fields(plan),
        *(("passed over", f"{key}: {naming_run(error, url)}") for key, error in plan.passed_over),
    ]
    return terminal.fields_table(fields, title=f"{plan.target.name}")


def _plan_fields(plan: ConsolidationPlan) -> list[tuple[str, object]]:
    if not plan.needed:
        return [("nothing to do", plan.reason)]
    size = terminal.bytes_text
    most = "" if plan.target.form == "full" else "at most "
    dead = "not known before reading"
    if plan.dead_rows is not None and plan.dead_share is not None:
        dead = f"{plan.dead_rows:,} of {plan.stored_rows:,} stored ({plan.dead_share:.0%})"
    return [
        ("makes", plan.target.key),
        ("merges", f"{len(plan.sources)} manifests"),
        ("reads", size(plan.read_bytes)),
        ("writes", f"{most}{size(plan.write_bytes)}"),
        ("frees", f"{size(plan.frees_bytes)}, once retention lets go of what it merges"),
        ("dead rows", dead),
        (
            "a restore reads",
            f"{size(plan.restore_bytes_before)} in {plan.links_before} manifests now, "
            f"{most}{size(plan.restore_bytes_after)} in {plan.links_after} afterwards",
        ),
        ("pays", f"{'yes' if plan.pays else 'not yet'}: {plan.reason}"),
    ]


def _weighed(plan: ConsolidationPlan) -> tuple[tuple[WeighedMerge, ...], WeighedMerge | None]:
    """All merges of the plan's chain, and the one that an agent of default triggers chooses."""
    from recpoint.catalog.consolidation.consolidate_choice import cheapest, weigh
    from recpoint.catalog.consolidation.consolidate_plan import ConsolidationTriggers

    weighed = weigh(plan.merges, ConsolidationTriggers())
    return weighed, cheapest(weighed)


def _weighed_table(plan: ConsolidationPlan) -> Table:
    weighed, chosen = _weighed(plan)
    by_cost = sorted(
        weighed, key=lambda one: math.inf if one.cost_bytes is None else one.cost_bytes
    )
    kept = by_cost[:_SHOWN_MERGES]
    left_out = len(weighed) - len(kept)
    table = terminal.plain_table(
        "What an agent weighs, with its default triggers"
        + (f"; {left_out} more with --json" if left_out else "")
    )
    table.add_column("merges")
    for heading in ("reads", "writes", "restored", "manifests"):
        table.add_column(heading, justify="right")
    table.add_column("cost")
    size = terminal.bytes_text
    for one in weighed:
        if one not in kept:
            continue
        sizes = one.sizes
        merges = "all, into a full" if sizes.into_full else f"the newest {sizes.merged}"
        cost = one.why_not if one.cost_bytes is None else size(round(one.cost_bytes))
        table.add_row(
            merges,
            size(sizes.read_bytes),
            size(sizes.write_bytes),
            size(sizes.restore_bytes_after),
            str(sizes.links_after),
            f"{cost}, chosen" if one is chosen else cost,
        )
    return table


def _weighed_documents(plan: ConsolidationPlan) -> list[dict[str, Any]]:
    weighed, chosen = _weighed(plan)
    return [
        {
            "links": one.sizes.merged,
            "into": "full" if one.sizes.into_full else "increment",
            "read_bytes": one.sizes.read_bytes,
            "write_bytes": one.sizes.write_bytes,
            "restore_bytes_after": one.sizes.restore_bytes_after,
            "links_after": one.sizes.links_after,
            "cost_bytes": one.cost_bytes,
            "why_not": one.why_not or None,
            "chosen": one is chosen,
        }
        for one in weighed
    ]


def _document(
    plan: ConsolidationPlan, done: Consolidated | None, url: str, *, dry_run: bool = False
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
        "outcome": None if done is None else done.outcome,
        "written_bytes": None if done is None else done.written_bytes,
        "seconds": None if done is None else done.seconds,
    }
