"""What Prometheus and Grafana load: `recpoint prometheus rules|dashboard`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.text import Text

from recpoint.cli.reporting import JsonOption, Result, command
from recpoint.dashboards.alert_rules import alert_rules, grafana_dashboard

__all__ = ["prometheus"]

prometheus = typer.Typer(
    help="Alert rules and a Grafana dashboard for the metrics of trainers and agents.",
    no_args_is_help=True,
)


@prometheus.command("rules")
@command
def print_rules(
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Another value for a parameter; may be repeated."
        ),
    ] = None,
    json_output: JsonOption = False,
) -> Result:
    """Print the alert rules, a file for rule_files of Prometheus; its head has the parameters."""
    given = {}
    for text in values or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--set")
        given[name] = value
    rules = alert_rules(given)
    return Result({"rules": rules}, Text(rules.rstrip("\n")))


@prometheus.command("dashboard")
@command
def print_dashboard(json_output: JsonOption = False) -> Result:
    """Print the dashboard, a file that Grafana imports."""
    dashboard = grafana_dashboard()
    return Result({"dashboard": json.loads(dashboard)}, Text(dashboard.rstrip("\n")))
