"""Defines the commands that put lost records back: bring-back and relink."""

from __future__ import annotations

from typing import Annotated

import typer

from recpoint.catalog.run.relink import relink
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.run_record import remake_run_record
from recpoint.catalog.store.store import open_store
from recpoint.cli.inspect import UrlArgument, open_run
from recpoint.cli.reporting import JsonOption, Result, command
from recpoint.dashboards import terminal
from recpoint.errors import NothingToRestore
from recpoint.format.naming import MAX_GENERATION, MAX_STEP, RUN_KEY, ManifestName

__all__ = ["bring_back_run", "relink_generation"]


@command
def bring_back_run(url: UrlArgument, json_output: JsonOption = False) -> Result:
    """Write a lost run.json again, with the id that all other records of the run have.

    If there is a copy of the object, put the copy back instead.
    """
    store = open_store(url)
    record, told_by = remake_run_record(store)
    document = {"url": store.url, "run": record.run, "told_by": told_by}
    text = f"{store.url}/{RUN_KEY} is there again: run {record.run}, as {told_by} records say"
    return Result(document, terminal.shown(text, limit=2000))


@command
def relink_generation(
    url: UrlArgument,
    lost: Annotated[
        int,
        typer.Argument(
            metavar="GENERATION", min=1, max=MAX_GENERATION, help="The one with the lost record."
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_STEP, help="Step of the checkpoint its trainer went on from."),
    ] = None,
    generation: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_GENERATION,
            help="Generation of that checkpoint. Default: of the one at this step that counted "
            "before the lost generation.",
        ),
    ] = None,
    from_nothing: Annotated[
        bool, typer.Option("--from-nothing", help="Its trainer went on from no checkpoint.")
    ] = False,
    never_committed: Annotated[
        bool,
        typer.Option(
            "--never-committed",
            help="The generation was lost before its first checkpoint, so nothing in the store "
            "names it. Trainers of earlier generations can then commit no more.",
        ),
    ] = False,
    json_output: JsonOption = False,
) -> Result:
    """Write a lost generation record again: say which checkpoint its trainer went on from.

    This decides which checkpoints count: take it from that trainer's log, do not guess. If there is
    a copy of the object, put the copy back instead.
    """
    if from_nothing == (step is not None):
        raise typer.BadParameter("give one of the two", param_hint="--step, --from-nothing")
    if from_nothing and generation is not None:
        raise typer.BadParameter("needs --step", param_hint="--generation")
    run = open_run(url)
    restored = None if step is None else _restored(run, lost, step, generation)
    record = relink(run, lost, restored, never_committed=never_committed)
    went_on = "nothing" if record.restored is None else str(record.restored)
    document = {
        "generation": record.generation,
        "restored": None if record.restored is None else record.restored.model_dump(),
    }
    text = f"generation {record.generation} has a record again: it went on from {went_on}"
    return Result(document, terminal.shown(text))


def _restored(run: Run, lost: int, step: int, generation: int | None) -> ManifestName:
    if generation is not None:
        return ManifestName(step, generation)
    for name in run.live_line(before=lost):
        if name.step == step:
            return name
    raise NothingToRestore(
        f"{run.url}, step {step}",
        found=f"no checkpoint of this step that counted before generation {lost}",
        expected="the one that its trainer went on from",
        next_step="name its generation too; recpoint list URL --all",
    )
