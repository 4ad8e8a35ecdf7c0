"""Shows what a new run can take from another run, and how its script asks for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recpoint.catalog.restore.order import Selection, skipped_lines
from recpoint.catalog.run.leases import reading
from recpoint.catalog.store.run_url import naming_run
from recpoint.cli.inspect import GenerationOption, UrlArgument, open_run
from recpoint.cli.reporting import JsonOption, Result, command
from recpoint.dashboards import terminal
from recpoint.errors import IncompatibleModel, SettingsError
from recpoint.units import counted

if TYPE_CHECKING:
    from recpoint.catalog.restore.restore import MemoryTarget
    from recpoint.trainer_plugin.restore.parts import Seed

__all__ = ["plan_seed"]


@command
def plan_seed(
    url: UrlArgument,
    table: Annotated[
        list[str] | None,
        typer.Option(metavar="[NEW=]NAME", help="Take this table, as NEW in the new model."),
    ] = None,
    dense: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Take dense parameters and buffers with matching names."
        ),
    ] = None,
    optimizer_states: Annotated[
        str, typer.Option(help="drop, or carry: take those of the parts too.")
    ] = "drop",
    step: Annotated[
        int | None, typer.Option(help="This checkpoint; default: the newest good one.")
    ] = None,
    generation: GenerationOption = None,
    json_output: JsonOption = False,
) -> Result:
    """Print what a new run would take from a checkpoint of another, and the line for its script.

    Nothing is written: the new run's trainer takes the parts, because only its model has the rest.
    """
    from recpoint.catalog.restore.restore import MemoryTarget, restore
    from recpoint.catalog.restore.rows import logical_tables

    _require_known(optimizer_states)
    selection = Selection(step=step, generation=generation)
    target = MemoryTarget([])
    run = open_run(url)
    with reading(run, purpose="restore") as lease:
        report = restore(run, target, selection, leased=lease is not None)
    assert target.manifest is not None  # it was restored
    named = _tables(table or [], logical_tables(target.manifest.tables))
    seed = _seed(url, named, dense or [], optimizer_states, step, generation)
    parts = _parts(target, seed)
    views: list[Any] = [
        terminal.shown(f"skipped {naming_run(line, url)}", limit=2000, style="yellow")
        for line in skipped_lines(report.skipped)
    ]
    exact = "some of it quantized" if report.quantized else "all of it exact"
    shown = terminal.plain_table(
        f"{report.restored}: {counted(report.chain_length, 'manifest')}, {exact}"
    )
    for heading in ("name", "taken as", "shape", "dtype", "row states"):
        shown.add_column(heading, overflow="fold")
    for part in parts:
        cells = (part["name"], part["as"] or "left out", part["shape"], part["dtype"])
        shown.add_row(*(terminal.shown(_text(cell)) for cell in (*cells, part["row_states"])))
    script = None if seed is None else _script(seed)
    choose = f"choose: recpoint seed {url} --table NEW=NAME --dense PATTERN"
    views += [shown, terminal.shown(script or choose, limit=4000)]
    document = {
        "url": run.url,
        "step": report.restored.step,
        "generation": report.restored.generation,
        "chain_length": report.chain_length,
        "quantized": report.quantized,
        "optimizer_states": optimizer_states,
        "parts": parts,
        "script": script,
    }
    return Result(document, *views)


def _require_known(optimizer_states: str) -> None:
    if optimizer_states not in ("drop", "carry"):
        raise SettingsError(
            "--optimizer-states",
            found=optimizer_states,
            expected="drop or carry",
            next_step="choose one of the two",
        )


def _tables(words: list[str], names: Collection[str]) -> dict[str, str]:
    """Return, by name of a new table, the name of the checkpoint's table it is taken from.

    Names may contain `=`; NEW=NAME is split so that NAME is a table of the checkpoint.

    Raises:
        SettingsError: several splits are possible, or one new table is taken from two.
    """
    named: dict[str, str] = {}
    for word in words:
        ends = [split_at for split_at, sign in enumerate(word) if sign == "="]
        read = {word: word} if word in names else {}
        read |= {
            word[:split_at] or word[1:]: word[split_at + 1 :]
            for split_at in ends
            if word[split_at + 1 :] in names
        }
        if len(read) > 1:
            raise SettingsError(
                f"--table {word}",
                found="; ".join(f"{old!r} taken as {new!r}" for new, old in read.items()),
                expected="one way to read it",
                next_step="ask for the other parts, and write this table into the script's "
                "Seed(tables={NEW: NAME})",
            )
        if not read:
            new, _, old = word.rpartition("=")
            read = {new or old: old}
        for new, old in read.items():
            if named.setdefault(new, old) != old:
                raise SettingsError(
                    f"--table {new}",
                    found=f"taken from {named[new]!r} and from {old!r}",
                    expected="one source for each table of the new model",
                    next_step="leave one out, or take it under another name: --table NEW=NAME",
                )
    return named


def _seed(
    url: str,
    tables: dict[str, str],
    dense: list[str],
    optimizer_states: str,
    step: int | None,
    generation: int | None,
) -> Seed | None:
    """Return what was asked for; None if nothing was: everything is then listed as left out."""
    from recpoint.trainer_plugin.restore.parts import Seed

    if not tables and not dense:
        return None
    return Seed(
        url,
        tables=tables,
        dense=dense,
        optimizer_states="carry" if optimizer_states == "carry" else "drop",
        step=step,
        generation=generation,
    )


def _parts(target: MemoryTarget, seed: Seed | None) -> list[dict[str, Any]]:
    """Return everything that the checkpoint holds, with the names under which it is taken.

    Raises:
        IncompatibleModel: the checkpoint does not hold what was asked for.
    """
    from recpoint.catalog.restore.restore import model_tensors
    from recpoint.catalog.restore.rows import logical_tables
    from recpoint.trainer_plugin.restore.parts import Parts, near, resolve_dense

    assert target.manifest is not None  # it was restored
    parts = Parts() if seed is None else seed.parts
    tables = logical_tables(target.manifest.tables)
    tensors = model_tensors(target)
    restored, missing = resolve_dense(parts.dense, tensors, tensors)
    missing += [
        f"table {name!r} is not in it{near(name, tables)}"
        for name in parts.tables.values()
        if name not in tables
    ]
    if missing:
        raise IncompatibleModel(
            f"checkpoint of {target.manifest.ref}",
            found="; ".join(missing),
            expected="parts that it holds",
            next_step="leave out --table and --dense to list everything it holds",
        )
    return [
        {
            "kind": "table",
            "name": name,
            "as": [new for new, old in parts.tables.items() if old == name],
            "shape": [spec.rows, spec.dim],
            "dtype": spec.dtype,
            "row_states": [state.name for state in spec.row_states],
        }
        for name, spec in tables.items()
    ] + [
        {
            "kind": "dense",
            "name": name,
            "as": [name] if name in restored else [],
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "row_states": [],
        }
        for name, tensor in sorted(tensors.items())
    ]


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _script(seed: Seed) -> str:
    """Return the line for a training script."""
    settings: Mapping[str, object] = {
        "tables": seed.tables or None,
        "dense": seed.dense or None,
        "optimizer_states": "carry" if seed.optimizer_states == "carry" else None,
        "step": seed.step,
        "generation": seed.generation,
    }
    named = [f"{name}={value!r}" for name, value in settings.items() if value is not None]
    return f"ckpt.restore(seed=recpoint.Seed({', '.join([repr(seed.url), *named])}))"
