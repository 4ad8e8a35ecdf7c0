"""The command that removes what killed writers have left in a run."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from recpoint.catalog import staged
from recpoint.catalog.grace import require_grace
from recpoint.catalog.run import Run
from recpoint.catalog.sweep import GRACE_NEEDED, SweepPlan, SweptObject, execute, plan_sweep
from recpoint.catalog.sweep_beside import knows_what_is_staged
from recpoint.cli.inspect import UrlArgument, open_run
from recpoint.cli.reporting import JsonOption, Result, command, showing_steps
from recpoint.dashboards import terminal
from recpoint.errors import StagingError

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
    staging: StagingOption = None,
    json_output: JsonOption = False,
) -> Result:
    """Remove chunks that no manifest names and files that were never finished.

    Only the trainer's own host knows what is staged and will still be committed. Anywhere else,
    what the newest trainer uploaded after its last checkpoint stays, however old.
    """
    grace_seconds = seconds_of(grace)
    require_grace(grace_seconds, why=GRACE_NEEDED)
    run = open_run(url)
    here = staged_here(run, staging)
    plan = plan_sweep(
        run,
        grace_seconds=grace_seconds,
        keep=partial(staged.staged_attempts, here),
        spare_newest=not (include_newest or knows_what_is_staged(run, here)),
        ask_store=not dry_run,
    )
    views = [terminal.sweep_table(plan)]
    if dry_run:
        return Result(_document(plan, removed=None), *views)
    with showing_steps(quiet=json_output) as on_step:
        result = execute(run, plan, on_step=on_step)
    freed = terminal.bytes_text(result.removed_bytes)
    text = terminal.shown(f"removed {len(result.removed)} objects, {freed}")
    return Result(_document(plan, removed=result.removed), *views, text)


def staged_here(run: Run, staging: Path | None) -> Path:
    """The run's directory in the staging area of this host, whether it is there or not."""
    root = Path(staging or staged.default_staging_root())
    if root.exists() and not root.is_dir():
        raise StagingError(
            str(root),
            found="a file",
            expected="the staging area of this host, a directory",
            next_step="give the directory: --staging or RECPOINT_STAGING",
        )
    return staged.run_directory(root, run.url)


def seconds_of(text: str, *, option: str = "--grace") -> float:
    """Seconds that `text` names, as `90`, `90s`, `1.5h` or `2d`."""
    match = _DURATION.match(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number and s, m, h or d", param_hint=option)
    return float(match[1]) * _UNIT_SECONDS[match[2]]


def _document(plan: SweepPlan, *, removed: tuple[SweptObject, ...] | None) -> dict[str, Any]:
    return {
        "dry_run": removed is None,
        "planned": [swept._asdict() for swept in plan.objects + plan.unfinished],
        "planned_bytes": plan.size_bytes,
        "kept": [kept._asdict() for kept in plan.kept],
        "unrecognised": list(plan.unrecognised),
        "blocked": list(plan.blocked),
        "removed": [swept.key for swept in removed or ()],
        "removed_bytes": sum(swept.size_bytes for swept in removed or ()),
    }
