"""The command that restores a checkpoint, or one table of it, into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from recpoint.cli.inspect import GenerationOption, UrlArgument, open_run
from recpoint.cli.reporting import JsonOption, Result, command, naming_run, progress_console
from recpoint.dashboards import terminal

__all__ = ["restore_to_file"]


@command
def restore_to_file(
    url: UrlArgument,
    to: Annotated[
        Path,
        typer.Option(help="FILE.pt or FILE.safetensors; with --table FILE.parquet or FILE.csv."),
    ],
    step: Annotated[
        int | None, typer.Option(help="This checkpoint; default: the newest good one.")
    ] = None,
    generation: GenerationOption = None,
    table: Annotated[str | None, typer.Option(help="Only this table.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    json_output: JsonOption = False,
) -> Result:
    """Restore a checkpoint into a file, without the model."""
    from recpoint.catalog.restore import MemoryTarget, restore
    from recpoint.cli import export

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
        report = restore(
            open_run(url),
            target,
            step=step,
            generation=generation,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    with export.replacing(to, force=force) as temporary:
        write(temporary, target)
    skipped = [(name, naming_run(error, url)) for name, error in report.skipped]
    document = {
        "file": str(to),
        "step": report.restored.step,
        "generation": report.restored.generation,
        "attempt": report.restored.attempt,
        "skipped": [
            {"step": name.step, "generation": name.generation, "error": error}
            for name, error in skipped
        ],
        "chain_length": report.chain_length,
        "chunks_read": report.chunks_read,
        "bytes_read": report.bytes_read,
        "seconds": report.seconds,
    }
    views = [
        terminal.shown(f"skipped {name}: {error}", limit=2000, style="yellow")
        for name, error in skipped
    ]
    read = f"{terminal.bytes_text(report.bytes_read)} in {report.seconds:.1f} s"
    return Result(document, *views, terminal.shown(f"{to}: {report.restored}, {read}", limit=2000))
