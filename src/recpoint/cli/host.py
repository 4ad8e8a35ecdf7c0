"""Defines the commands that run things on this host and set up its Prefect server."""

from __future__ import annotations

import copy
import json
import logging
import os
import time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import typer
from rich.text import Text

from recpoint import flows
from recpoint.catalog.overview.alarms import INTERVALS_OF_SILENCE
from recpoint.cli.gc import StagingOption, seconds_of
from recpoint.cli.reporting import (
    JsonOption,
    MetricsAddressOption,
    MetricsPortOption,
    Result,
    command,
    output_console,
    progress_console,
)
from recpoint.dashboards import terminal
from recpoint.dashboards.alert_rules import alert_rules, grafana_dashboard
from recpoint.dashboards.metrics.samples import require_prometheus
from recpoint.errors import RecpointError, SettingsError
from recpoint.flows.repeated_lines import is_repeated
from recpoint.installation import install_command
from recpoint.units import duration_text

__all__ = [
    "LogFormat",
    "agent",
    "automations",
    "demo",
    "deployments",
    "prometheus",
    "serve_dashboard",
    "server",
    "worth_showing",
]


@command
def serve_dashboard(
    urls: Annotated[
        list[str],
        typer.Argument(metavar="URL", help="Runs: local paths, s3://bucket/prefix, …"),
    ],
    sink: Annotated[
        list[str] | None,
        typer.Option(
            "--sink", metavar="SINK", help="A store that publish-to fills; may be repeated."
        ),
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
        str, typer.Option(help="Address to listen on; whoever can reach it sees the page.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8470,
    json_output: JsonOption = False,
) -> Result:
    """Serve a page that shows runs live, from their catalogs alone, until SIGTERM or SIGINT.

    Of each sink the page shows which checkpoint its readers see, as the sink itself says.
    """
    if find_spec("nicegui") is None:
        raise SettingsError(
            "recpoint dashboard",
            found="no nicegui installed",
            expected="nicegui, which serves the page",
            next_step=install_command("dashboard"),
        )
    from recpoint.dashboards.page import serve
    from recpoint.dashboards.watched_runs import WatchedRuns
    from recpoint.dashboards.watched_sinks import WatchedSink

    def ready(address: str) -> None:
        progress_console().print(f"the page is at {address}", soft_wrap=True)

    runs = WatchedRuns(urls, interval_seconds=interval, intervals=alarm_after)
    sinks = [WatchedSink(url, interval_seconds=interval) for url in dict.fromkeys(sink or ())]
    serve(runs, sinks, host=host, port=port, on_ready=ready)
    return Result({"runs": len(runs.runs), "sinks": len(sinks)})


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
    """Print the alert rules, a file for Prometheus' rule_files; it begins with the parameters."""
    value_of = {}
    for text in values or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--set")
        value_of[name] = value
    rules = alert_rules(value_of)
    return Result({"rules": rules}, Text(rules.rstrip("\n")))


@prometheus.command("dashboard")
@command
def print_dashboard(json_output: JsonOption = False) -> Result:
    """Print the dashboard, a file that Grafana imports."""
    dashboard = grafana_dashboard()
    return Result({"dashboard": json.loads(dashboard)}, Text(dashboard.rstrip("\n")))


_UP_SECONDS = 120.0
#: How long a server on a busy machine may take to answer.
_PATIENCE_SECONDS = 10.0
_DEMO_DIRECTORY = Path(".recpoint") / "demo"

server = typer.Typer(help="The local Prefect server that the agent keeps.", no_args_is_help=True)


@command
def agent(
    staging: StagingOption = None,
    once: Annotated[bool, typer.Option("--once", help="End when nothing is left to do.")] = False,
    prefect: Annotated[
        str, typer.Option(help="auto: run flows when an API answers; off: never.")
    ] = "auto",
    consolidate: Annotated[
        str,
        typer.Option(
            help="Merge chains in the background: auto (runs of policy continuous), all, off."
        ),
    ] = "auto",
    consolidate_after: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="LINKS",
            help="Merge a chain when a restore reads this many manifests. Each of the two options "
            "below also causes a merge.",
            show_default="16",
        ),
    ] = None,
    consolidate_ratio: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="RATIO",
            help="Merge a chain when a restore reads this many times the bytes that it needs.",
            show_default="1.5",
        ),
    ] = None,
    consolidate_dead: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="Merge a chain when this share of its stored rows was replaced by newer ones.",
            show_default="0.5",
        ),
    ] = None,
    name_ranks_after: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="After this time, name the ranks that a checkpoint of several ranks waits for.",
        ),
    ] = 60.0,
    sweep_every: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="Sweep each run of this host so often, in the background: a number and s, m, h or "
            "d; off: never.",
        ),
    ] = "24h",
    upload_streams: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=32,
            metavar="N",
            help="Upload at most N chunks at once. The agent finds how many are fastest; each may "
            "take 100 MB of memory. Without this, at most 32, of 128 MiB together.",
        ),
    ] = None,
    metrics_port: MetricsPortOption = None,
    metrics_address: MetricsAddressOption = "127.0.0.1",
    metrics_refresh: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Read the catalogs' metrics from stores this often."
        ),
    ] = 60.0,
    json_output: JsonOption = False,
) -> Result:
    """Persist what trainers on this host stage, until SIGTERM or SIGINT."""
    mode: Literal["auto", "all", "off"]
    mode = "all" if consolidate == "all" else "off" if consolidate == "off" else "auto"
    if consolidate != mode:
        raise typer.BadParameter(
            f"{consolidate!r} is none of auto, all, off", param_hint="--consolidate"
        )
    chosen: Literal["auto", "off"] = "off" if prefect == "off" else "auto"
    if prefect != chosen:
        raise typer.BadParameter(f"{prefect!r} is neither auto nor off", param_hint="--prefect")
    interval_seconds = (
        None if sweep_every == "off" else seconds_of(sweep_every, option="--sweep-every")
    )
    if chosen == "auto":
        require_flows("recpoint agent", otherwise=", or --prefect off")
    if metrics_port is not None:
        require_prometheus("recpoint agent --metrics-port")
    from recpoint.catalog.consolidate.plan import ConsolidationTriggers
    from recpoint.flows.agent.agent import run_agent

    if upload_streams is not None:
        from recpoint.catalog.persist.upload import bound_uploads

        bound_uploads(upload_streams)
    shown = logging.StreamHandler()
    shown.addFilter(worth_showing)
    shown.setFormatter(LogFormat("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[shown])
    watch = None
    if metrics_port is not None:
        from recpoint.dashboards.metrics.agent import agent_metrics

        watch = agent_metrics(
            port=metrics_port, address=metrics_address, refresh_seconds=metrics_refresh
        )
    staged = run_agent(
        staging,
        once=once,
        prefect=chosen,
        consolidate=mode,
        consolidate_when=ConsolidationTriggers.chosen(
            links=consolidate_after, restore_ratio=consolidate_ratio, dead_share=consolidate_dead
        ),
        name_ranks_after=name_ranks_after,
        sweep_every=interval_seconds,
        watch=watch,
    )
    text = f"{staged} checkpoint{'' if staged == 1 else 's'} still staged"
    return Result({"still_staged": staged}, terminal.shown(text))


class LogFormat(logging.Formatter):
    """Leaves out the traceback of recpoint's own errors: their messages say what to do."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        if record.exc_info and isinstance(record.exc_info[1], RecpointError):
            record = copy.copy(record)  # Prefect's own handlers still need the traceback
            record.exc_info = record.exc_text = None
        return super().format(record)


def worth_showing(record: logging.LogRecord) -> bool:
    """Return whether the agent's log shows a record: recpoint's own, and warnings of others.

    A flow's own lines are in the Prefect UI. In the agent's log a dozen lines a checkpoint, or a
    flow run's copy of an error that recpoint logs, would bury the line that counts. This is a
    filter of a handler, because a logger's level would keep the lines from the UI as well.
    """
    if is_repeated(record):
        return False
    return record.levelno >= logging.WARNING or record.name.split(".")[0] == "recpoint"


def require_flows(command: str, *, otherwise: str = "") -> None:
    """Raise SettingsError if Prefect is not installed."""
    if find_spec("prefect") is None:
        raise SettingsError(
            command,
            found="no prefect installed",
            expected=f"prefect{otherwise}",
            next_step=install_command("flows"),
        )


@server.command("start")
@command
def start_server(json_output: JsonOption = False) -> Result:
    """Start the local Prefect server, unless it runs, and wait until it answers."""
    require_flows("recpoint server start")
    from recpoint.flows import prefect_server

    local = prefect_server.start_server()
    deadline = time.monotonic() + _UP_SECONDS
    while not (up := prefect_server.is_healthy(local.url)) and time.monotonic() < deadline:
        if prefect_server.running_server() is None:
            break
        time.sleep(0.2)
    document = {
        "running": up,
        "pid": local.pid,
        "ui": prefect_server.ui_url(local.url),
        "api": local.url,
    }
    if not up:
        log = prefect_server.server_directory() / "server.log"
        text = terminal.shown(f"the server does not answer; see {log}", style="red")
        return Result(document, text, code=1)
    return Result(document, terminal.shown(f"up: {document['ui']} (process {local.pid})"))


@server.command("stop")
@command
def stop_server(json_output: JsonOption = False) -> Result:
    """Stop the local Prefect server."""
    from recpoint.flows import prefect_server

    stopped = prefect_server.stop_server()
    text = "stopped" if stopped else "there was none"
    return Result({"stopped": stopped}, terminal.shown(text))


@server.command("env")
@command
def server_environment(json_output: JsonOption = False) -> Result:
    """Print the variable that has Prefect's commands use this server.

    In a shell: eval "$(recpoint server env)".
    """
    from recpoint.flows import prefect_server

    local = prefect_server.running_server()
    if local is None:
        raise SettingsError(
            "recpoint server env",
            found="no local Prefect server",
            expected="the one that an agent starts if no Prefect API is configured",
            next_step="recpoint server start",
        )
    line = f"export PREFECT_API_URL={local.url}"
    return Result({"PREFECT_API_URL": local.url}, terminal.shown(line))


@server.command("status")
@command
def server_status(json_output: JsonOption = False) -> Result:
    """Say whether the local Prefect server runs and answers, and where."""
    from recpoint.flows import prefect_server

    local = prefect_server.running_server()
    if local is None:
        return Result({"running": False, "answers": False}, terminal.shown("not running"))
    answers = prefect_server.is_healthy(local.url, timeout_seconds=_PATIENCE_SECONDS)
    ui = prefect_server.ui_url(local.url)
    document = {
        "running": True,
        "answers": answers,
        "pid": local.pid,
        "ui": ui,
        "api": local.url,
    }
    state = "up" if answers else "starting, or hanging"
    return Result(document, terminal.shown(f"{state}: {ui} (process {local.pid})"))


@command
def demo(
    directory: Annotated[
        Path, typer.Option("--dir", help="For the run and the logs; the next demo empties it.")
    ] = _DEMO_DIRECTORY,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Store the run below this URL instead.")
    ] = None,
    bits: Annotated[str, typer.Option(help="Bits a value: lossless, 8, 4, 3 or 2.")] = "lossless",
    interval: Annotated[int, typer.Option(help="Batches between checkpoints.")] = 200,
    steps: Annotated[int, typer.Option(help="Batches to train.")] = 2000,
    ranks: Annotated[
        int, typer.Option(help="Processes that train together, started by torchrun.")
    ] = 1,
    lookahead: Annotated[
        bool, typer.Option("--lookahead", help="Read ahead: rows are copied before the stall.")
    ] = False,
    home: Annotated[
        Path | None,
        typer.Option(help="Keep rows in files in this directory, and those in use in a cache."),
    ] = None,
    servers: Annotated[
        int,
        typer.Option(
            help="Keep rows in so many server processes, which ranks share; kill one first, too."
        ),
    ] = 0,
    keyed: Annotated[
        bool,
        typer.Option("--keyed", help="Look raw customers and product codes up by key."),
    ] = False,
    parity: Annotated[
        str,
        typer.Option(
            metavar="K+R",
            help="K rows on these servers share R parity rows: training goes on without the killed "
            "one.",
        ),
    ] = "",
    stop: Annotated[
        bool, typer.Option("--stop-server", help="Stop the local Prefect server at the end.")
    ] = False,
    json_output: JsonOption = False,
) -> Result:
    """Train on real purchases, kill the trainer with SIGKILL, restore, prove the result."""
    require_flows("recpoint demo")
    from recpoint.dashboards.demo.demo import report_views, run_demo
    from recpoint.dashboards.demo.settings import DemoSettings
    from recpoint.flows import prefect_server

    settings = DemoSettings(
        directory=directory,
        store=store,
        steps=steps,
        interval=interval,
        bits=bits,
        ranks=ranks,
        lookahead=lookahead,
        home=home,
        servers=servers,
        parity=parity,
        keyed=keyed,
    )
    console = progress_console() if json_output else output_console()
    try:
        result = run_demo(settings, console)
    finally:
        if stop:
            prefect_server.stop_server()
    last_line = Text(json.dumps(result.document, ensure_ascii=True, allow_nan=False))
    views = report_views(result, server_stopped=stop)
    return Result(result.document, *views, last_line, code=0 if result.ok else 1)


_DEPLOYMENTS = "prefect.yaml"

deployments = typer.Typer(
    help="Deployments of the flows on a Prefect server: retention, validation and the others.",
    no_args_is_help=True,
)


@deployments.command("init")
@command
def write_deployments(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIRECTORY]", help="Where to write it; made if missing.")
    ] = Path(),
    json_output: JsonOption = False,
) -> Result:
    """Write a prefect.yaml to start from, for `prefect deploy --all`; never replace one."""
    shipped = Path(flows.__file__).with_name(_DEPLOYMENTS).read_bytes()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _DEPLOYMENTS
    try:
        with path.open("xb") as file:
            file.write(shipped)
    except FileExistsError:
        raise SettingsError(
            str(path),
            found="a file that is there already",
            expected="a directory without a prefect.yaml",
            next_step=f"name another directory, or move {path} away",
        ) from None
    text = f"wrote {path}: set your runs and schedules in it; its first lines say how to deploy it"
    return Result({"written": str(path)}, terminal.shown(text))


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
            help="Runs that get an alert of their own, after --intervals of the run's checkpoint "
            "interval, which is read from its catalog now.",
        ),
    ] = None,
    intervals: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Alert when one of these runs commits nothing for N of its intervals. If not "
            "given: as before, else 3. Apply again after an interval changes.",
        ),
    ] = None,
    no_commit: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Alert when any run commits nothing for this long: a number and s, m, h or d. If "
            "not given: as before, else 30m. It covers all runs, so it is raised to the longest "
            "time of a run that has --intervals. When that alert is gone or its time is shorter, "
            "give --no-commit to lower this time again.",
        ),
    ] = None,
    notify: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE/NAME|none",
            help="A notification block of Prefect's, such as slack-webhook/training; none: alerts "
            "are only in the event feed. If not given: as before.",
        ),
    ] = None,
    no_heartbeat: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Mark a flow run of recpoint as crashed when its process gave no sign of life for "
            "this long; give at least three heartbeats. If not given: as before, else 10m.",
        ),
    ] = None,
    publish: Annotated[
        str | None,
        typer.Option(
            metavar="committed|validated",
            help="Publish each checkpoint as soon as it is committed, or validated; needs the "
            "deployment of the flow publish. If not given: as before.",
        ),
    ] = None,
    json_output: JsonOption = False,
) -> Result:
    """Create the alerts, or update them: what is not given stays as the server has it."""
    if publish not in (None, "committed", "validated"):
        raise typer.BadParameter(
            f"{publish!r} is neither committed nor validated", param_hint="--publish"
        )
    if intervals is not None and not urls:
        raise typer.BadParameter(
            "name the runs whose intervals count; --no-commit is for all",
            param_hint="--intervals",
        )
    alerts = _automations("apply")
    settings = alerts.AlertSettings(
        no_commit_seconds=_seconds_of(no_commit, option="--no-commit"),
        runs=tuple(dict.fromkeys(urls or ())),
        no_commit_intervals=intervals,
        no_heartbeat_seconds=_seconds_of(no_heartbeat, option="--no-heartbeat"),
        notify=notify,
        publish=publish,
    )
    applied = alerts.apply(settings)
    return Result(
        {"automations": [automation._asdict() for automation in applied]},
        *(terminal.shown(_words(**automation._asdict())) for automation in applied),
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
    """List the alerts that the server has."""
    ours_found = _automations("list").find_ours()
    if not ours_found:
        text = "the server has no automations of recpoint; recpoint automations apply makes them"
        return Result({"automations": []}, terminal.shown(text))
    return Result(
        {"automations": [automation._asdict() for automation in ours_found]},
        *(
            terminal.shown(
                f"{automation.name}{'' if automation.enabled else ' (disabled)'}: "
                f"{automation.description}"
            )
            for automation in ours_found
        ),
    )


@automations.command("remove")
@command
def remove_automations(json_output: JsonOption = False) -> Result:
    """Remove these alerts from the server."""
    removed = _automations("remove").remove_ours()
    texts = [f"removed: {name}" for name in removed] or ["the server has none of recpoint"]
    return Result({"removed": removed}, *map(terminal.shown, texts))


def _automations(name: str) -> ModuleType:
    """Return the module `automations`, set up for the configured API, else the local server's."""
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
