"""Defines the command that restores a checkpoint, or one table of it, into a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from recpoint.catalog.restore.order import Selection, Skipped, skipped_lines
from recpoint.catalog.run.leases import reading
from recpoint.catalog.store.run_url import naming_run
from recpoint.cli import export_target
from recpoint.cli.inspect import GenerationOption, UrlArgument, open_run
from recpoint.cli.reporting import JsonOption, Result, command, progress_console
from recpoint.dashboards import terminal
from recpoint.units import bytes_text

__all__ = ["restore_to_file"]


@command
def restore_to_file(
    url: UrlArgument,
    to: Annotated[
        Path,
        typer.Option(
            help="FILE.pt, FILE.safetensors, DIRECTORY.dcp for torch.distributed.checkpoint, or an "
            "existing directory, for safetensors files with an index; with --table FILE.parquet or "
            "FILE.csv."
        ),
    ],
    include: Annotated[
        Literal["model", "all"] | None,
        typer.Option(
            help="model (the default): what load_state_dict takes; all: everything that is "
            "stored, also the optimizer's rows and the state of each rank."
        ),
    ] = None,
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
            help="Without a step: prefer a validated one that is at most this much older.",
        ),
    ] = None,
    table: Annotated[
        str | None, typer.Option(help="Only this table, with the optimizer's rows.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    json_output: JsonOption = False,
) -> Result:
    """Restore a checkpoint into a file, without the model.

    The newest good checkpoint is taken; a failed validation rules a checkpoint out. With
    --validated-within, a validated one within so many batches goes first.

    \b
    Load the file in plain torch, into the model that was trained:
      FILE.safetensors  model.load_state_dict(safetensors.torch.load_file(FILE))
      FILE.pt           model.load_state_dict(torch.load(FILE))
      DIRECTORY.dcp     torch.distributed.checkpoint.load(
                            {"model": model.state_dict()}, checkpoint_id=DIRECTORY)

    With --include all these names begin with model/ in safetensors, and a .pt file has them under
    "model".
    """
    if step is not None and (validated or validated_within is not None):
        # Whoever asks for both may believe that a checkpoint without a validation is refused.
        option = "--validated" if validated else "--validated-within"
        raise typer.BadParameter("goes without --step", param_hint=option)
    if table is not None and include is not None:
        raise typer.BadParameter(
            "goes without --table, which always writes the table's values and row states",
            param_hint="--include",
        )
    selection = Selection(
        step=step,
        generation=generation,
        validated_only=validated,
        validated_within=validated_within,
    )
    in_shards = export_target.is_for_shards(to, table=table, force=force)
    if not in_shards:
        export_target.check_ending(to, table=table)
        export_target.check_place(to, force=force)
    # Imports torch, which takes seconds.
    from recpoint.catalog.restore.files import restore_shards
    from recpoint.catalog.restore.restore import MemoryTarget, restore
    from recpoint.catalog.store.local import LocalStore
    from recpoint.cli import export

    chosen = include or "model"
    target = MemoryTarget(
        None if table is None else [table], row_states=table is not None or chosen == "all"
    )
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
            partial(restore_shards, run, LocalStore(to.absolute()), include=chosen)
            if in_shards
            else partial(restore, run, target)
        )
        with reading(run, purpose="restore") as lease:
            report = restoring(
                selection,
                leased=lease is not None,
                on_progress=lambda done_bytes, total: progress.update(
                    task, completed=done_bytes, total=total
                ),
            )
    if not in_shards:
        with export_target.replacing(to, force=force) as temporary:
            export.write(temporary, target, chosen)
    file_bytes = export.size_bytes(to)
    tensors_only = to.suffix in (".safetensors", ".dcp")
    left_out = export.only_in_torch_files(target) if tensors_only else []
    skipped = [Skipped(name, naming_run(error, url)) for name, error in report.skipped]
    verdict = report.validation
    document = {
        "file": str(to),
        "file_bytes": file_bytes,
        "left_out": left_out,
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
    views += [
        terminal.shown(
            f"left out {name}, which is no tensor: only a .pt file has it",
            limit=2000,
            style="yellow",
        )
        for name in left_out
    ]
    written = f"{bytes_text(file_bytes)} in {report.seconds:.1f} s"
    state = terminal.verdict_text(verdict)
    line = terminal.shown(f"{to}: {report.restored}, {state}, {written}", limit=2000)
    return Result(document, *views, line)
