"""Puts the commands together into one application."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from recpoint.cli import (
    follow,
    gc,
    host,
    import_source,
    inspect,
    repair,
    restore,
    seed,
    sinks,
    validate,
)
from recpoint.cli.inspect import info
from recpoint.cli.reporting import print_json

__all__ = ["app"]

#: Base class of all usage errors, found by name: its module depends on typer's version.
_UsageError: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError"
)


class _Commands(TyperGroup):
    """Runs a command; with `--json`, a usage error is one JSON object on stdout too."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command that `args` name, and exit with its code."""
        words = list(sys.argv[1:] if args is None else args)
        as_json = standalone_mode and "--json" in words
        try:
            code = super().main(
                words,
                prog_name,
                complete_var,
                standalone_mode and not as_json,
                windows_expand_args,
                **extra,
            )
        except _UsageError as error:
            if not as_json:
                raise
            print_json(_document(error, prog_name or "recpoint"))
            code = 2
        if as_json:
            sys.exit(code)
        return code


def _document(error: Any, program: str) -> dict[str, Any]:
    command = program if error.ctx is None else error.ctx.command_path
    return {
        "error": "UsageError",
        "subject": command,
        "found": error.format_message(),
        "expected": "options and arguments as in its help",
        "next_step": f"{command} --help",
    }


app = typer.Typer(
    name="recpoint",
    cls=_Commands,
    help="Cheap, frequent, proven recovery points for recommender training.",
    epilog="Exit codes: 0 fine; 1 damage found, or nothing to restore; 2 wrong usage or setting, "
    "or a function of yours that fails; 3 store not reachable, or access denied; 4 damaged, "
    "foreign or incompatible data; 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"recpoint {metadata.version('recpoint')}")
        raise typer.Exit


@app.callback()
def _before_all_commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


for name, function in (
    ("demo", host.demo),
    ("agent", host.agent),
    ("dashboard", host.serve_dashboard),
    ("list", inspect.list_checkpoints),
    ("show", inspect.show),
    ("check", inspect.check_run),
    ("lag", inspect.lag),
    ("validate", validate.validate_checkpoint),
    ("restore", restore.restore_to_file),
    ("bring-back", repair.bring_back_run),
    ("relink", repair.relink_generation),
    ("seed", seed.plan_seed),
    ("import", import_source.import_source),
    ("retain", gc.retain),
    ("pin", gc.pin),
    ("unpin", gc.unpin),
    ("metric", gc.record_metric),
    ("consolidate", gc.consolidate_run),
    ("follow", follow.follow),
    ("publish", follow.publish),
    ("publish-to", sinks.publish_to),
    ("sweep", gc.sweep_run),
    ("info", info),
):
    app.command(name)(function)
app.add_typer(host.server, name="server")
app.add_typer(host.deployments, name="deployments")
app.add_typer(host.automations, name="automations")
app.add_typer(sinks.sinks, name="sink")
app.add_typer(host.prometheus, name="prometheus")
