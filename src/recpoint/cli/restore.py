"""The command that restores a checkpoint, or one table of it, into a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from recpoint.catalog.restore.order import Selection, Skipped, skipped_lines
from recpoint.catalog.run.leases import reading
from recpoint.catalog.store.run_url import naming_run
from recpoint.cli.inspect import GenerationOption, UrlArgument, open_run
from recpoint.cli.reporting import JsonOption, Result, command, progress_console
from recpoint.dashboards import terminal

__all__ = ["restore_to_file"]


@command
def restore_to_file(
    url: UrlArgument,
    to: Annotated[
        Path,
        typer.Option(
            help="FILE.pt, FILE.safetensors, DIRECTORY.dcp for torch.distributed.checkpoint, or a "
            "directory that is there, for files of safetensors with an index; with --table "
            "FILE.parquet or FILE.csv."
        ),
    ],
    step: Annotated[
        int | None, typer.Option(help="This checkpoint; default: the newest good one.")
    ] = None,
    generation: GenerationOption = None,
    validated: Annotated[
        bool, typer.Option("--validated", help="Without a step: only one that was validated.")
    ] = False,
    validated_within: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="BATCHES",
            help="Without a step: a validated one goes first, if it is at most so much older.",
        ),
    ] = None,
    table: Annotated[str | None, typer.Option(help="Only this table.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    json_output: JsonOption = False,
) -> Result:
    """Restore a checkpoint into a file, without the model.

    Newest first; a failed validation rules one out; with --validated-within a validated one within
    so many batches goes first.
    """
    if step is not None and (validated or validated_within is not None):
        # Whoever asks for both may believe that a checkpoint without a validation is refused.
        option = "--validated" if validated else "--validated-within"
        raise typer.BadParameter("goes without --step", param_hint=option)
    from recpoint.catalog.restore.files import restore_shards
    from recpoint.catalog.restore.restore import MemoryTarget, restore
    from recpoint.catalog.store.local import LocalStore
    from recpoint.cli import export

    selection = Selection(
        step=step,
        generation=generation,
        validated_only=validated,
        validated_within=validated_within,
    )
    in_shards = export.is_for_shards(to, table=table, force=force)
    if not in_shards:
        write = export.writer(to, table=table)
        export.check_target(to, force=force)
    target = MemoryTarget(None if table is None else [table])
    console = progress_console()
    with Progress(
        TextColumn("restoring"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=json_output or not console.is_terminal,
    ) as progress:
        task = progress.add_task("restoring", total=None)
        run = open_run(url)
        restoring = (
            partial(restore_shards, run, LocalStore(to.absolute()))
            if in_shards
            else partial(restore, run, target)
        )
        with reading(run, purpose="restore") as lease:
            report = restoring(
                selection,
                leased=lease is not None,
                on_progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
    if not in_shards:
        with export.replacing(to, force=force) as temporary:
            write(temporary, target)
    skipped = [Skipped(name, naming_run(error, url)) for name, error in report.skipped]
    verdict = report.validation
    document = {
        "file": str(to),
        "step": report.restored.step,
        "generation": report.restored.generation,
        "attempt": report.restored.attempt,
        "validation": verdict._asdict() if verdict else None,
        "skipped": [
            {"step": name.step, "generation": name.generation, "error": error}
            for name, error in skipped
        ],
        "passed_over": [
            {"key": key, "error": naming_run(error, url)} for key, error in report.passed_over
        ],
        "chain_length": report.chain_length,
        "chunks_read": report.chunks_read,
        "bytes_read": report.bytes_read,
        "seconds": report.seconds,
    }
    views = [
        terminal.shown(f"skipped {line}", limit=2000, style="yellow")
        for line in skipped_lines(skipped)
    ]
    views += [
        terminal.shown(f"passed over {key}: {naming_run(error, url)}", limit=2000, style="yellow")
        for key, error in report.passed_over
    ]
    read = f"{terminal.bytes_text(report.bytes_read)} in {report.seconds:.1f} s"
    state = terminal.verdict_text(verdict)
    line = terminal.shown(f"{to}: {report.restored}, {state}, {read}", limit=2000)
    return Result(document, *views, line)
