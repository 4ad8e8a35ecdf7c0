"""Shows what a checkpoint of another tool holds, and writes a run of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from recpoint.cli.reporting import JsonOption, Result, command
from recpoint.dashboards import terminal
from recpoint.errors import SettingsError
from recpoint.units import bytes_text, counted

if TYPE_CHECKING:
    from recpoint.catalog.foreign.contents import ForeignCheckpoint
    from recpoint.cli.imported_run import PlannedRun

__all__ = ["import_source"]


@command
def import_source(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A directory of torch.distributed.checkpoint, a file of torch.save or Lightning, "
            "a safetensors file, or a directory with an index of such files.",
        ),
    ],
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="URL of a run to write, which has no checkpoint."),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="OLD=NEW",
            help="Rename entries: a name, or a pattern with one *. A run gets only entries that "
            "one of these matches.",
        ),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With RUN: a table, without .weight, or a pattern."),
    ] = None,
    scratch: Annotated[
        Path, typer.Option(help="With RUN: a directory with room for the tensors twice.")
    ] = Path(),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With RUN: print the plan, and write nothing.")
    ] = False,
    json_output: JsonOption = False,
) -> Result:
    """List what a checkpoint of another tool holds, or write a run of its tensors.

    Without RUN it prints the line for a script, whose trainer takes the parts: only its model has
    an optimizer and a reader. With RUN it writes one checkpoint of tables and dense tensors, for
    followers, for recpoint restore, and for Seed(RUN). Nothing that a pickle names is imported or
    called.
    """
    from recpoint.catalog.foreign.recognize import open_foreign  # imports torch

    renames = _renames(rename or [])
    with open_foreign(source) as checkpoint:
        entries = _entries(checkpoint, renames)
        _require_matches(source, entries, renames)
        if run is not None:
            return _imported(source, checkpoint, run, renames, table or [], scratch, dry_run)
        if table or dry_run:
            raise SettingsError(
                "--table, --dry-run",
                found="no RUN",
                expected="the URL of a run to write",
                next_step=f"recpoint import {source} RUN --table NAME --dry-run",
            )
        return _listed(source, checkpoint, entries, renames)


def _require_matches(source: str, entries: list[dict[str, Any]], renames: dict[str, str]) -> None:
    from recpoint.catalog.foreign.names import renamed  # imports torch

    unmatched = [
        old for old in renames if all(renamed(e["name"], {old: ""}) is None for e in entries)
    ]
    if unmatched:
        raise SettingsError(
            "--map",
            found=f"no entry for {', '.join(map(repr, unmatched))}",
            expected="names or patterns of entries",
            next_step=f"recpoint import {source} lists them",
        )


def _listed(
    source: str,
    checkpoint: ForeignCheckpoint,
    entries: list[dict[str, Any]],
    renames: dict[str, str],
) -> Result:
    size_bytes = sum(entry["bytes"] for entry in entries)
    shown = terminal.plain_table(
        f"{checkpoint.form}: {counted(len(entries), 'tensor')}, {bytes_text(size_bytes)}"
    )
    for heading in ("name", "becomes", "shape", "dtype"):
        shown.add_column(heading, overflow="fold")
    for entry in entries:
        becomes = "" if entry["as"] == entry["name"] else entry["as"]
        cells = (entry["name"], becomes, str(entry["shape"]), entry["dtype"])
        shown.add_row(*map(terminal.shown, cells))
    script = _script(source, renames)
    views: list[Any] = [
        shown,
        *_left_out([f"{name}: {what}" for name, what in checkpoint.left_out.items()]),
        terminal.shown(script, limit=4000),
    ]
    document = {
        "source": source,
        "form": checkpoint.form,
        "entries": entries,
        "scalars": dict(checkpoint.scalars),
        "left_out": dict(checkpoint.left_out),
        "script": script,
    }
    return Result(document, *views)


def _left_out(lines: Sequence[str]) -> list[Text]:
    return [terminal.shown(f"left out: {line}", style="yellow") for line in lines]


def _imported(
    source: str,
    checkpoint: ForeignCheckpoint,
    run: str,
    renames: dict[str, str],
    table_patterns: list[str],
    scratch: Path,
    dry_run: bool,
) -> Result:
    from recpoint.cli.imported_run import planned_run, write_run

    planned = planned_run(checkpoint, renames, table_patterns)
    name = None if dry_run else write_run(source, run, planned, scratch)
    verb = "would hold" if name is None else f"checkpoint {name} holds"
    shown = terminal.plain_table(
        f"{run}: {verb} {counted(len(planned.tables), 'table')} and "
        f"{counted(len(planned.dense), 'dense tensor')}"
    )
    for heading in ("name", "kind", "from", "tensor"):
        shown.add_column(heading, overflow="fold")
    parts = _parts(planned)
    for part in parts:
        cells = (part["name"], part["kind"], part["from"], f"{part['dtype']}{part['shape']}")
        shown.add_row(*map(terminal.shown, cells))
    document = {
        "source": source,
        "form": checkpoint.form,
        "run": run,
        "checkpoint": name,
        "parts": parts,
        "left_out": list(planned.left_out),
    }
    return Result(document, shown, *_left_out(planned.left_out))


def _parts(planned: PlannedRun) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "kind": kind,
            "from": entry.name,
            "shape": list(entry.shape),
            "dtype": str(entry.dtype).removeprefix("torch."),
        }
        for kind, entries in (("table", planned.tables), ("dense", planned.dense))
        for name, entry in entries.items()
    ]


def _renames(words: list[str]) -> dict[str, str]:
    renames: dict[str, str] = {}
    for word in words:
        old, sign, new = word.partition("=")
        if not (sign and old and new) or old.count("*") != new.count("*") or old.count("*") > 1:
            raise SettingsError(
                f"--map {word}",
                found=f"{old.count('*')} * in {old!r} and {new.count('*')} * in {new!r}"
                if sign and old and new
                else "no OLD=NEW",
                expected="OLD=NEW, with one * in both (old.*=new.*) or in none (old=new)",
                next_step="quote it: --map 'old.*=new.*'",
            )
        renames[old] = new
    return renames


def _entries(checkpoint: ForeignCheckpoint, renames: dict[str, str]) -> list[dict[str, Any]]:
    from recpoint.catalog.foreign.names import renamed  # imports torch

    entries = []
    for entry in checkpoint.entries.values():
        new = renamed(entry.name, renames)
        entries.append(
            {
                "name": entry.name,
                "as": entry.name if new is None else new,
                "shape": list(entry.shape),
                "dtype": str(entry.dtype).removeprefix("torch."),
                "bytes": entry.size_bytes,
            }
        )
    return entries


def _script(source: str, renames: dict[str, str]) -> str:
    names = f", names={renames!r}" if renames else ""
    return f"ckpt.restore(seed=recpoint.Seed({source!r}, tables=['*'], dense=['*']{names}))"
