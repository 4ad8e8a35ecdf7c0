"""The command that serves the live page: `recpoint dashboard URL...`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from recpoint.catalog.overview.overview import INTERVALS_OF_SILENCE
from recpoint.cli.reporting import JsonOption, Result, command, progress_console
from recpoint.errors import SettingsError

__all__ = ["serve_dashboard"]


@command
def serve_dashboard(
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL...", help="Runs: local paths, s3://bucket/prefix, …"),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.2, max=3600.0, help="Seconds between two looks at a run.")
    ] = 5.0,
    alarm_after: Annotated[
        float,
        typer.Option(
            min=1.0,
            metavar="INTERVALS",
            help="Alarm when so many of a run's intervals pass without a commit.",
        ),
    ] = INTERVALS_OF_SILENCE,
    host: Annotated[
        str, typer.Option(help="Address to listen on; whoever reaches it may look.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8470,
    json_output: JsonOption = False,
) -> Result:
    """Serve a page that shows runs live, from their catalogs alone, until SIGTERM or SIGINT."""
    if find_spec("nicegui") is None:
        raise SettingsError(
            "recpoint dashboard",
            found="no nicegui installed",
            expected="nicegui, which serves the page",
            next_step="pip install 'recpoint[dashboard]'",
        )
    from recpoint.dashboards.page import serve
    from recpoint.dashboards.watched_runs import WatchedRuns

    def ready(address: str) -> None:
        progress_console().print(f"the page is at {address}", soft_wrap=True)

    runs = WatchedRuns(urls or [], interval_seconds=interval, intervals=alarm_after)
    serve(runs, host=host, port=port, on_ready=ready)
    return Result({"runs": len(runs.runs)})
