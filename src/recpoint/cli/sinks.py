"""Defines the commands that publish versions into stores that serving reads, and compare these."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recpoint.catalog.store.run_url import naming_run, parse_run_url
from recpoint.cli.following import (
    ChannelOption,
    LookResult,
    PollOption,
    TablesOption,
    channel_named,
    keep_looking,
)
from recpoint.cli.inspect import UrlArgument, open_run
from recpoint.cli.reporting import (
    JsonOption,
    MetricsAddressOption,
    MetricsPortOption,
    Result,
    command,
    progress_console,
    showing_bytes,
)
from recpoint.dashboards import terminal
from recpoint.dashboards.metrics.samples import require_prometheus
from recpoint.errors import RecpointError, SettingsError
from recpoint.units import bytes_of, bytes_text, counted, duration_text

if TYPE_CHECKING:
    from recpoint.dashboards.metrics.sink import SinkMetrics
    from recpoint.serving.sinks.publisher import Budget, SinkPublisher
    from recpoint.serving.sinks.records import CommittedVersion
    from recpoint.serving.sinks.verification import Comparison

__all__ = ["publish_to", "sinks"]

SinkArgument = Annotated[
    str, typer.Argument(metavar="SINK", help="redis://HOST/DATABASE, sqlite:PATH or parquet:PATH.")
]

sinks = typer.Typer(
    help="Stores that serving reads, and that recpoint publish-to fills.", no_args_is_help=True
)


@command
def publish_to(
    sink: SinkArgument,
    url: UrlArgument,
    follow: Annotated[
        bool, typer.Option("--follow", help="Publish each new version until interrupted.")
    ] = False,
    channel: ChannelOption = "newest",
    table: TablesOption = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Take a sink that holds another run.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Publish the rows that changed most, so many bytes of each checkpoint: 64MB.",
        ),
    ] = None,
    most_versions: Annotated[
        int | None,
        typer.Option(help="With --budget: no row is so many versions behind. Default: 16."),
    ] = None,
    poll_seconds: PollOption = 5.0,
    metrics_port: MetricsPortOption = None,
    metrics_address: MetricsAddressOption = "127.0.0.1",
    json_output: JsonOption = False,
) -> Result:
    """Bring a store that serving reads to the newest checkpoint, whole and exactly once.

    The store itself records where it stands. So the command may be killed at any time, and run
    again anywhere. Readers see one version, whole, and never the rows of the next one.

    With a budget, a version leaves its least changed rows as they were, and says which these are.
    The rest follows with later checkpoints, or all of it without a budget.
    """
    from recpoint.serving.sinks.opening import open_sink
    from recpoint.serving.sinks.publisher import SinkPublisher

    if metrics_port is not None:
        require_prometheus("recpoint publish-to --metrics-port")
        if not follow:
            raise typer.BadParameter("it needs --follow", param_hint="--metrics-port")
    with open_sink(sink) as opened:
        publisher = SinkPublisher(
            url,
            opened,
            tables=table or None,
            channel=channel_named(channel),
            replace=replace,
            budget=_budget(budget, most_versions),
        )
        if follow:
            metrics = None
            if metrics_port is not None:
                from recpoint.dashboards.metrics.sink import SinkMetrics

                metrics = SinkMetrics(
                    publisher,
                    run=parse_run_url(url).url,
                    sink=opened.url,
                    port=metrics_port,
                    address=metrics_address,
                )
                progress_console().print(f"metrics: {metrics.url}", soft_wrap=True)
            keep_looking(
                lambda: _look(publisher, url, metrics),
                poll_seconds=poll_seconds,
                as_json=json_output,
            )
        with showing_bytes("publishing", quiet=json_output) as on_progress:
            committed = publisher.poll(on_progress=on_progress)
        return Result(_document(committed), terminal.shown(_line(committed), limit=2000))


def _budget(size: str | None, most_versions: int | None) -> Budget | None:
    """Return the budget that the options say."""
    from recpoint.serving.sinks.publisher import Budget

    if size is None:
        if most_versions is not None:
            raise typer.BadParameter("it needs --budget", param_hint="--most-versions")
        return None
    try:
        size_bytes = bytes_of(size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--budget") from None
    return Budget(size_bytes) if most_versions is None else Budget(size_bytes, most_versions)


def _look(publisher: SinkPublisher, url: str, metrics: SinkMetrics | None) -> LookResult:
    """Publish once."""
    try:
        committed = publisher.poll()
    except SettingsError:
        raise
    except RecpointError as error:
        if metrics is not None:
            metrics.note_failure(error)
        text = naming_run(f"{type(error).__name__}: {error}", url)
        return LookResult(text, {"error": text}, [terminal.shown(text, limit=2000, style="red")])
    text = _line(committed)  # which says how long ago it was
    return LookResult(committed or text, _document(committed), [terminal.shown(text, limit=2000)])


def _document(committed: CommittedVersion | None) -> dict[str, Any]:
    return {} if committed is None else committed.model_dump(mode="json")


def _line(committed: CommittedVersion | None) -> str:
    if committed is None:
        return "nothing to publish yet"
    rows = sum(change.rows_put for change in committed.changes)
    source = "all rows" if committed.parent is None else f"changes of step {committed.parent.step}"
    age = duration_text(max(0.0, time.time() - committed.committed_ms / 1000))
    return (
        f"{committed.version.checkpoint} is version {committed.number} of the sink, since {age}: "
        f"{counted(rows, 'row')} ({source}){_deferred_text(committed)}"
    )


def _deferred_text(committed: CommittedVersion) -> str:
    """Say how many rows are deferred, after what is said of a version; nothing if none is."""
    deferred = committed.deferred
    if deferred is None:
        return ""
    return (
        f"; {counted(deferred.rows, 'row')} ({bytes_text(deferred.size_bytes)}) deferred, the "
        f"oldest at {deferred.oldest}"
    )


@sinks.command("verify")
@command
def verify_sink(sink: SinkArgument, url: UrlArgument, json_output: JsonOption = False) -> Result:
    """Compare every row of a store with its checkpoint; exit code 1 when they differ.

    Rows that the store says are deferred are compared with the older checkpoint that they stand at.
    """
    from recpoint.serving.sinks.opening import open_sink
    from recpoint.serving.sinks.verification import verify

    run = open_run(url)
    with open_sink(sink) as opened, showing_bytes("comparing", quiet=json_output) as on_progress:
        comparison = verify(run, opened, on_progress=on_progress)
    return Result(
        _comparison_document(comparison),
        *(terminal.shown(text, limit=2000, style=style) for text, style in _findings(comparison)),
        code=1 if comparison.differences else 0,
    )


def _comparison_document(comparison: Comparison) -> dict[str, Any]:
    return {
        **_document(comparison.version),
        "rows_compared": comparison.rows,
        "rows_of_older_checkpoints": comparison.older_rows,
        "equal": not comparison.differences and not comparison.older_rows,
        "differences": comparison.differences,
        "more_differences": comparison.more_differences,
    }


def _findings(comparison: Comparison) -> list[tuple[str, str]]:
    version = comparison.version.version
    row_bytes = sum(table.rows * table.row_bytes for table in version.tables)
    what = f"{counted(comparison.rows, 'row')} of {version.checkpoint}, {bytes_text(row_bytes)}"
    deferred = _deferred_text(comparison.version)
    if not comparison.differences and not deferred:
        return [(f"equal: {what}, and its dense layers", "")]
    if not comparison.differences:
        older = counted(comparison.older_rows, "row")
        proof = f"{older} equal to the older checkpoints that they stand at, all others to this one"
        return [(f"as the sink says: {what}, and its dense layers{deferred}: {proof}", "")]
    lines = [(text, "red") for text in comparison.differences]
    if comparison.more_differences:
        lines.append((f"and {comparison.more_differences} more", "red"))
    return [*lines, (f"not equal: {what}", "red")]
