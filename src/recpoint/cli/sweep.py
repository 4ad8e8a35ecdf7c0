"""The command that removes what killed writers have left in a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from recpoint.catalog.retention.grace import require_grace
from recpoint.catalog.runs.run import Run
from recpoint.catalog.staging import staged
from recpoint.catalog.staging.free_slots import free_slots
from recpoint.catalog.stores.run_url import naming_run
from recpoint.catalog.stores.store import Store, open_store
from recpoint.catalog.sweeping.discard_staged import discard_staged, staged_losses, there_is_a_run
from recpoint.catalog.sweeping.sweep import GRACE_NEEDED
from recpoint.catalog.sweeping.sweep_here import SweptHere, sweep_here
from recpoint.cli.inspect import UrlArgument
from recpoint.cli.reporting import JsonOption, Result, command, showing_steps
from recpoint.dashboards import terminal
from recpoint.dashboards.staged_jobs import discard_table, slots_views, staged_views
from recpoint.errors import NothingToRestore, RunRecordLost, StagingError

__all__ = ["StagingOption", "seconds_of", "staged_here", "sweep_run"]

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
            help="Also what only the newest trainer could still commit: when no host has it staged "
            "any more.",
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

    Only the trainer's own host knows what is staged and will still be committed. Anywhere else,
    what the newest trainer uploaded after its last checkpoint stays, however old. Where an agent
    serves the staging area, staged jobs are left to it.
    """
    grace_seconds = seconds_of(grace)
    require_grace(grace_seconds, why=GRACE_NEEDED)
    store = open_store(url)
    here = _directory(store.url, staging)
    if discard:
        return _discard(store, here, dry_run=dry_run)
    with showing_steps(quiet=json_output) as on_step:
        swept = sweep_here(
            store,
            here,
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
        freed = terminal.bytes_text(swept.result.removed_bytes)
        views.append(terminal.shown(f"removed {len(swept.result.removed)} objects, {freed}"))
    return Result(_document(swept, url), *views)


def _discard(store: Store, here: Path, *, dry_run: bool) -> Result:
    try:
        run = Run.open(store)
    except RunRecordLost:
        raise  # what it has left can be brought back
    except NothingToRestore:
        pass
    else:
        raise there_is_a_run(run.url)
    losses = staged_losses(here) if dry_run else discard_staged(here)
    jobs = [loss.job for loss in losses]
    slots = free_slots(here, ended=True, grace_seconds=0.0, besides=jobs, dry_run=dry_run)
    document = {
        "dry_run": dry_run,
        "discarded": [loss._asdict() for loss in losses],
        "slots": [slot._asdict() for slot in slots],
    }
    views = [discard_table(losses, dry_run=dry_run), *slots_views(slots, dry_run=dry_run)]
    return Result(document, *views)


def staged_here(run: Run, staging: Path | None) -> Path:
    """The run's directory in the staging area of this host, whether it is there or not."""
    return _directory(run.url, staging)


def _directory(run_url: str, staging: Path | None) -> Path:
    root = Path(staging or staged.default_staging_root())
    if root.exists() and not root.is_dir():
        raise StagingError(
            str(root),
            found="a file",
            expected="the staging area of this host, a directory",
            next_step="give the directory: --staging or RECPOINT_STAGING",
        )
    return staged.run_directory(root, run_url)


def seconds_of(text: str, *, option: str = "--grace") -> float:
    """Seconds that `text` names, as `90`, `90s`, `1.5h` or `2d`."""
    match = _DURATION.match(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number and s, m, h or d", param_hint=option)
    return float(match[1]) * _UNIT_SECONDS[match[2]]


def _document(swept: SweptHere, url: str) -> dict[str, Any]:
    plan, result = swept.plan, swept.result
    return {
        "dry_run": result is None,
        "staged": [{**job._asdict(), "why": naming_run(job.why, url)} for job in swept.work.jobs],
        "slots": [slot._asdict() for slot in swept.slots],
        "planned": [planned._asdict() for planned in plan.objects + plan.unfinished],
        "planned_bytes": plan.size_bytes,
        "kept": [kept._asdict() for kept in plan.kept],
        "unrecognised": list(plan.unrecognised),
        "blocked": list(plan.blocked),
        "removed": [] if result is None else [one.key for one in result.removed],
        "removed_bytes": 0 if result is None else result.removed_bytes,
    }
