"""The commands, put together."""

from __future__ import annotations

import typer

from recpoint.cli import host, inspect, restore, sweep

__all__ = ["app"]

app = typer.Typer(
    name="recpoint",
    help="Cheap, frequent, proven recovery points for recommender training.",
    epilog="Exit codes: 0 fine; 1 damage found, or nothing to restore; 2 wrong usage or setting; "
    "3 store not reachable, or access denied; 4 damaged, foreign or incompatible data; "
    "130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for name, function in (
    ("demo", host.demo),
    ("agent", host.agent),
    ("list", inspect.list_checkpoints),
    ("show", inspect.show),
    ("check", inspect.check_run),
    ("restore", restore.restore_to_file),
    ("sweep", sweep.sweep_run),
    ("info", host.info),
):
    app.command(name)(function)
app.add_typer(host.server, name="server")
