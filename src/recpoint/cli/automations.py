"""The commands for what Prefect watches: `recpoint automations apply|list|remove`."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Annotated

import typer

from recpoint.cli.host import require_flows
from recpoint.cli.reporting import JsonOption, Result, command
from recpoint.cli.sweep import seconds_of
from recpoint.dashboards import terminal
from recpoint.dashboards.run_texts import duration_text

__all__ = ["automations"]

automations = typer.Typer(
    help="Alerts of the Prefect server: no commit, failed validation, rejected checkpoint.",
    no_args_is_help=True,
)


@automations.command("apply")
@command
def apply_automations(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[URL]...",
            help="Runs that alert after --intervals of their own, read from their catalogs now.",
        ),
    ] = None,
    intervals: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Alert when one of these runs commits nothing for N of its intervals; as before "
            "if not given, or 3. Apply again when an interval was changed.",
        ),
    ] = None,
    no_commit: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Alert when any run commits nothing for so long, a number and s, m, h or d. As "
            "before if not given, or 30m. It is for all runs, and raised to the longest time of "
            "a run that has --intervals; when that one is gone or shorter, it falls again only "
            "with --no-commit.",
        ),
    ] = None,
    notify: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE/NAME|none",
            help="A notification block of Prefect's, such as slack-webhook/training; none: alerts "
            "are only in the event feed. As before if not given.",
        ),
    ] = None,
    no_heartbeat: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Call a flow run of ours crashed when its process gave no sign of life for so "
            "long: three heartbeats. As before if not given, or 10m.",
        ),
    ] = None,
    publish: Annotated[
        str | None,
        typer.Option(
            metavar="committed|validated",
            help="Have each checkpoint published as soon as it is that; needs the deployment of "
            "the flow publish. As before if not given.",
        ),
    ] = None,
    json_output: JsonOption = False,
) -> Result:
    """Create the alerts, or bring them up to date: what is not given stays as it is there."""
    if publish not in (None, "committed", "validated"):
        raise typer.BadParameter(
            f"{publish!r} is neither committed nor validated", param_hint="--publish"
        )
    if intervals is not None and not urls:
        raise typer.BadParameter(
            "name the runs whose intervals count; --no-commit is for all",
            param_hint="--intervals",
        )
    flows = _flows("apply")
    settings = flows.AlertSettings(
        no_commit_seconds=_seconds_of(no_commit, option="--no-commit"),
        runs=tuple(dict.fromkeys(urls or ())),
        no_commit_intervals=intervals,
        no_heartbeat_seconds=_seconds_of(no_heartbeat, option="--no-heartbeat"),
        notify=notify,
        publish=publish,
    )
    done = flows.apply(settings)
    return Result(
        {"automations": [one._asdict() for one in done]},
        *(terminal.shown(_words(**one._asdict())) for one in done),
    )


def _seconds_of(text: str | None, *, option: str) -> float | None:
    return None if text is None else seconds_of(text, option=option)


def _words(
    name: str,
    result: str,
    after_seconds: float | None,
    notifies: str | None,
    kept: tuple[str, ...],
) -> str:
    text = f"{result}: {name}"
    if after_seconds is not None:
        text += f", after {duration_text(after_seconds)}{' as before' * ('time' in kept)}"
    if notifies is not None:
        text += f", notifies {notifies}{' as before' * ('notification' in kept)}"
    return text


@automations.command("list")
@command
def list_automations(json_output: JsonOption = False) -> Result:
    """The alerts that the server has."""
    found = _flows("list").find_ours()
    return Result(
        {"automations": [one._asdict() for one in found]},
        *(
            terminal.shown(f"{one.name}{'' if one.enabled else ' (disabled)'}: {one.description}")
            for one in found
        ),
    )


@automations.command("remove")
@command
def remove_automations(json_output: JsonOption = False) -> Result:
    """Remove them."""
    removed = _flows("remove").remove_ours()
    return Result({"removed": removed}, *(terminal.shown(f"removed: {name}") for name in removed))


def _flows(name: str) -> ModuleType:
    """The module that does it, with the API that is configured, else the local server's."""
    require_flows(f"recpoint automations {name}")
    from recpoint.flows import prefect_server

    if prefect_server.configured_url() is None:
        local = prefect_server.running_server()
        if local is not None:
            # Prefect reads its settings once, when it is imported.
            os.environ["PREFECT_API_URL"] = local.url
            os.environ.setdefault("PREFECT_HOME", str(prefect_server.server_directory()))
    for variable, value in prefect_server.OFFLINE.items():
        os.environ.setdefault(variable, value)
    from recpoint.flows import automations as module

    return module
