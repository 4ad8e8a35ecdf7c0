"""The command that removes what killed writers have left in a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from recpoint.catalog import staged
from recpoint.catalog.discard_staged import (
    discard_staged,
    run_is_gone,
    staged_losses,
    there_is_a_run,
)
from recpoint.catalog.free_slots import FreeSlot, free_slots, has_ended
from recpoint.catalog.grace import require_grace
from recpoint.catalog.run import Run
from recpoint.catalog.run_url import naming_run
from recpoint.catalog.staged_work import StagedWork
from recpoint.catalog.store import open_store
from recpoint.catalog.sweep import GRACE_NEEDED, SweepPlan, SweptObject, execute, plan_sweep
from recpoint.catalog.sweep_beside import knows_what_is_staged
from recpoint.cli.inspect import UrlArgument
from recpoint.cli.reporting import JsonOption, Result, command, showing_steps
from recpoint.dashboards import terminal
from recpoint.dashboards.staged_jobs import discard_table, slots_views, staged_views
from recpoint.errors import NothingToRestore, StagingError

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
    try:
        run = Run.open(store)
    except NothingToRestore as error:
        if not discard:
            raise run_is_gone(error, here) from None
        return _discard(here, dry_run=dry_run)
    if discard:
        raise there_is_a_run(run.url)
    # Before anything is finished: what was staged is a sign of who the newest trainer is.
    knows = knows_what_is_staged(run, here)
    work = _staged_work(run, here, dry_run=dry_run, quiet=json_output)
    plan = plan_sweep(
        run,
        grace_seconds=grace_seconds,
        keep=partial(staged.staged_attempts, here, besides=work.unreadable),
        spare_newest=not (include_newest or knows),
        ask_store=not dry_run,
    )
    freed_slots = free_slots(
        here,
        ended=has_ended(run, here),
        grace_seconds=grace_seconds,
        besides=work.would_go,
        dry_run=dry_run,
    )
    views = [
        *staged_views(work, url),
        *slots_views(freed_slots, dry_run=dry_run),
        terminal.sweep_table(plan),
    ]
    if dry_run:
        return Result(_document(plan, work, freed_slots, url, removed=None), *views)
    with showing_steps(quiet=json_output) as on_step:
        result = execute(run, plan, on_step=on_step)
    freed = terminal.bytes_text(result.removed_bytes)
    text = terminal.shown(f"removed {len(result.removed)} objects, {freed}")
    return Result(_document(plan, work, freed_slots, url, removed=result.removed), *views, text)


def _staged_work(run: Run, here: Path, *, dry_run: bool, quiet: bool) -> StagedWork:
    if not here.is_dir():
        return StagedWork()
    # Persisting imports torch, which takes longer than to say that nothing is staged here.
    from recpoint.catalog.finish_staged import finish_staged, foresee_staged

    if dry_run:
        return foresee_staged(run, here)
    with showing_steps(quiet=quiet) as on_step:
        return finish_staged(here, on_step=on_step)


def _discard(here: Path, *, dry_run: bool) -> Result:
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


def _document(
    plan: SweepPlan,
    work: StagedWork,
    slots: Sequence[FreeSlot],
    url: str,
    *,
    removed: tuple[SweptObject, ...] | None,
) -> dict[str, Any]:
    return {
        "dry_run": removed is None,
        "staged": [{**job._asdict(), "why": naming_run(job.why, url)} for job in work.jobs],
        "slots": [slot._asdict() for slot in slots],
        "planned": [swept._asdict() for swept in plan.objects + plan.unfinished],
        "planned_bytes": plan.size_bytes,
        "kept": [kept._asdict() for kept in plan.kept],
        "unrecognised": list(plan.unrecognised),
        "blocked": list(plan.blocked),
        "removed": [swept.key for swept in removed or ()],
        "removed_bytes": sum(swept.size_bytes for swept in removed or ()),
    }
