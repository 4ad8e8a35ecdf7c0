"""The command that merges a checkpoint's chain into fewer manifests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from recpoint.catalog.run_url import naming_run
from recpoint.cli.inspect import GenerationOption, UrlArgument, find_checkpoint, open_run
from recpoint.cli.reporting import JsonOption, Result, command, showing_bytes
from recpoint.dashboards import terminal
from recpoint.errors import NothingToRestore

if TYPE_CHECKING:  # torch takes longer to import than a plan to make
    from recpoint.catalog.consolidate import Consolidated
    from recpoint.catalog.consolidate_plan import ConsolidationPlan

__all__ = ["consolidate_run"]


@command
def consolidate_run(
    url: UrlArgument,
    step: Annotated[
        int | None, typer.Option(help="This checkpoint; default: the newest that counts.")
    ] = None,
    generation: GenerationOption = None,
    links: Annotated[
        int | None,
        typer.Option(help="Merge only so many of its newest links, into one increment.", min=2),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would read, write and free.")
    ] = False,
    json_output: JsonOption = False,
) -> Result:
    """Merge a checkpoint's chain, so that a restore reads less and old links may go."""
    from recpoint.catalog.consolidate_around import consolidate_around_damage
    from recpoint.catalog.consolidate_plan import plan_consolidation

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
        return Result(_document(plan, None, url, dry_run=True), _plan_table(plan, url))
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
        "passed_over": [
            {"key": key, "error": naming_run(error, url)} for key, error in plan.passed_over
        ],
        "outcome": None if done is None else done.outcome,
        "written_bytes": None if done is None else done.written_bytes,
        "seconds": None if done is None else done.seconds,
    }
