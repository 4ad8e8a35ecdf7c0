"""Serves the live page of `recpoint dashboard`: all runs, and one page with charts for each run.

The charts of one run as options of ECharts, and what they show in words. Pure.

The live page of `recpoint dashboard`: an overview of all runs, and one page a run. Nothing on it
waits for a store: it shows what `WatchedRuns` has seen, and how old that is.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import uvicorn
from fastapi import FastAPI
from nicegui import ui
from nicegui.element import Element
from starlette.middleware.trustedhost import TrustedHostMiddleware

from recpoint.catalog.overview.overview import CheckpointFacts, RunOverview
from recpoint.dashboards import server_texts, sink_texts, texts
from recpoint.dashboards.page_elements import (
    STYLE,
    Alerts,
    Chart,
    Fields,
    Figures,
    PageTable,
    heading,
    section,
    set_state,
    text,
)
from recpoint.dashboards.watched_runs import RunView, WatchedRun, WatchedRuns
from recpoint.dashboards.watched_sinks import WatchedSink
from recpoint.errors import SettingsError
from recpoint.units import bytes_text, copied_text, counted, duration_text

__all__ = ["WINDOWS", "bytes_chart", "drawn", "lag_chart", "serve", "stall_chart"]


#: So many of the newest checkpoints are drawn if no window of time is asked for.
NEWEST = 200

#: Colours are variables of page.css, which follow the colour scheme. Series are told apart
#: without colour too, by their form.
_BLUE, _RED, _GREY = "var(--blue)", "var(--red)", "var(--grey)"
_TEXT, _SOFT, _LINE, _GROUND = "var(--text)", "var(--soft)", "var(--line)", "var(--ground)"


class TimeWindow(NamedTuple):
    """A window of time that charts show. `seconds` None: the newest checkpoints decide it."""

    name: str
    seconds: int | None


#: By their names in the page's address.
WINDOWS = {
    "1h": TimeWindow("last hour", 3600),
    "6h": TimeWindow("last 6 h", 6 * 3600),
    "24h": TimeWindow("last 24 h", 24 * 3600),
    "all": TimeWindow(f"newest {NEWEST}", None),
}


class Drawn(NamedTuple):
    """What charts draw: checkpoints, oldest first, and where their time axis begins and ends.

    Attributes:
        of: says in words which checkpoints these are, for instance "of the last hour".
        newest: whether older checkpoints of the window are not drawn.
    """

    checkpoints: list[CheckpointFacts]
    first_ms: int
    last_ms: int
    of: str
    newest: bool

    def counted(self, count: int, noun: str) -> str:
        """So many of these, in words."""
        return f"{'newest ' if self.newest else ''}{counted(count, noun)}{self.of}"


def drawn(overview: RunOverview, window: TimeWindow) -> Drawn:
    """What the charts of a run draw."""
    readable = [checkpoint for checkpoint in overview.checkpoints if checkpoint.error is None]
    newest_ms = max(
        (checkpoint.committed_ms for checkpoint in readable), default=overview.refreshed_ms
    )
    if window.seconds is None:
        visible = [
            checkpoint
            for checkpoint in reversed(overview.checkpoints[:NEWEST])
            if checkpoint.error is None
        ]
        first_ms = min((checkpoint.committed_ms for checkpoint in visible), default=newest_ms)
        # Half of the first and of the last bar lies beyond its commit.
        margin_ms = max((newest_ms - first_ms) // 50, 1000)
        return Drawn(visible, first_ms - margin_ms, newest_ms + margin_ms, "", True)
    # A trainer's clock may be ahead of this host's.
    last_ms = max(overview.refreshed_ms, newest_ms)
    first_ms = last_ms - 1000 * window.seconds
    visible = [
        checkpoint for checkpoint in reversed(readable) if checkpoint.committed_ms >= first_ms
    ]
    more = len(overview.checkpoints) < overview.live_checkpoints
    return Drawn(
        visible, first_ms, last_ms, f" of the {window.name}", more and visible == readable[::-1]
    )


def lag_chart(shown: Drawn) -> tuple[dict[str, Any], str]:
    """What a crash right before each commit would have cost, in seconds and in batches."""
    measured = [
        checkpoint for checkpoint in shown.checkpoints if checkpoint.at_risk_seconds is not None
    ]
    seconds = [
        [checkpoint.committed_ms, round(checkpoint.at_risk_seconds or 0.0, 3)]
        for checkpoint in measured
    ]
    batches = [[checkpoint.committed_ms, checkpoint.at_risk_batches] for checkpoint in measured]
    persist = [
        [checkpoint.committed_ms, round(checkpoint.lag_seconds, 3)] for checkpoint in measured
    ]
    options = _time_axes(
        shown,
        [_axis("seconds"), _axis("batches", right=True)],
        [
            _series("at risk, s", "line", seconds, _RED, symbol="circle"),
            _series("cut to commit, s", "line", persist, _BLUE, dashed=True),
            _series("at risk, batches", "scatter", batches, _GREY, symbol="triangle", axis=1),
        ],
    )
    if not shown.checkpoints:
        return options, _nothing(shown)
    if not measured:
        return options, "No history yet: it takes a checkpoint with a known one before it."
    worst = max(measured, key=lambda checkpoint: checkpoint.at_risk_seconds or 0.0)
    text = (
        f"Lost by a crash right before each of the {shown.counted(len(measured), 'commit')}: at "
        "most "
        f"{duration_text(worst.at_risk_seconds or 0.0)} and "
        f"{counted(worst.at_risk_batches or 0, 'batch')}, before step {worst.step:,}."
    )
    return options, text


def stall_chart(shown: Drawn) -> tuple[dict[str, Any], str]:
    """How long training waited for each checkpoint."""
    checkpoints = shown.checkpoints
    stalls = [
        [checkpoint.committed_ms, round(1000 * checkpoint.stall_seconds, 3)]
        for checkpoint in checkpoints
    ]
    series = [_series("stall, ms", "bar", stalls, _BLUE)]
    options = _time_axes(shown, [_axis("milliseconds")], series)
    if not checkpoints:
        return options, _nothing(shown)
    worst = max(checkpoints, key=lambda checkpoint: checkpoint.stall_seconds)
    text = (
        f"Stall of each of the {shown.counted(len(checkpoints), 'checkpoint')}: at most "
        f"{duration_text(worst.stall_seconds)}, at step {worst.step:,}."
    )
    ahead = [
        checkpoint.copied_ahead for checkpoint in checkpoints if checkpoint.copied_ahead is not None
    ]
    if ahead:
        rows = copied_text(
            sum(rows.rows_before for rows in ahead), sum(rows.rows_in_stall for rows in ahead)
        )
        text += f" {counted(len(ahead), 'checkpoint')} read ahead: {rows}."
    return options, text


def bytes_chart(shown: Drawn) -> tuple[dict[str, Any], str]:
    """Bytes of each checkpoint beside the bytes of a full one in fp32."""
    checkpoints = shown.checkpoints
    stored = [
        [checkpoint.committed_ms, checkpoint.stored_bytes / 1e6] for checkpoint in checkpoints
    ]
    full = [[checkpoint.committed_ms, checkpoint.full_bytes / 1e6] for checkpoint in checkpoints]
    series = [
        _series("stored, MB", "bar", stored, _BLUE),
        _series("full fp32, MB", "line", full, _RED, dashed=True),
    ]
    options = _time_axes(shown, [_axis("MB")], series)
    if not checkpoints:
        return options, _nothing(shown)
    written = sum(checkpoint.stored_bytes for checkpoint in checkpoints)
    whole = sum(checkpoint.full_bytes for checkpoint in checkpoints)
    share = f" ({written / whole:.1%})" if whole else ""
    text = (
        f"The {shown.counted(len(checkpoints), 'checkpoint')} took {bytes_text(written)}; "
        f"full fp32 checkpoints would have taken {bytes_text(whole)}{share}."
    )
    return options, text


def _nothing(shown: Drawn) -> str:
    return f"No checkpoint{shown.of or ' that can be read'}."


def _axis(name: str, *, right: bool = False) -> dict[str, Any]:
    return {
        "type": "value",
        "name": name,
        "min": 0,
        "position": "right" if right else "left",
        "nameTextStyle": {"color": _SOFT},
        "axisLabel": {"color": _SOFT},
        "splitLine": {"show": not right, "lineStyle": {"color": _LINE}},
    }


def _series(
    name: str,
    kind: str,
    data: list[list[Any]],
    colour: str,
    *,
    dashed: bool = False,
    symbol: str = "none",
    axis: int = 0,
) -> dict[str, Any]:
    return {
        "name": name,
        "type": kind,
        "data": data,
        "symbol": symbol,
        "yAxisIndex": axis,
        "barMaxWidth": 12,
        "itemStyle": {"color": colour},
        "lineStyle": {"color": colour, "type": "dashed" if dashed else "solid"},
        # ECharts cannot lighten a colour that is a variable.
        "emphasis": {"disabled": True},
    }


def _time_axes(
    shown: Drawn, axes: list[dict[str, Any]], series: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "animation": False,
        "useUTC": True,
        "aria": {"enabled": True},
        "grid": {"left": 60, "right": 50 if len(axes) > 1 else 15, "top": 55, "bottom": 30},
        "legend": {"top": 0, "textStyle": {"color": _TEXT}, "inactiveColor": _SOFT},
        "tooltip": {
            "trigger": "axis",
            "confine": True,
            "backgroundColor": _GROUND,
            "borderColor": _SOFT,
            "textStyle": {"color": _TEXT},
            "axisPointer": {"lineStyle": {"color": _SOFT}},
        },
        "xAxis": {
            "type": "time",
            "min": shown.first_ms,
            "max": shown.last_ms,
            "axisLabel": {"hideOverlap": True, "color": _SOFT},
            "axisLine": {"lineStyle": {"color": _SOFT}},
            "axisTick": {"lineStyle": {"color": _SOFT}},
        },
        "yAxis": axes,
        "series": series,
    }


#: So many of the newest checkpoints are in a run's table.
CHECKPOINTS_SHOWN = 20

#: Rows of what is expiring and of failures that anybody will read.
_ROWS_SHOWN = 50

#: How often a page looks whether there is something new; ages are counted on meanwhile.
_TICK_SECONDS = 1.0

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    runs: WatchedRuns,
    sinks: Sequence[WatchedSink] = (),
    *,
    host: str,
    port: int,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the page until SIGINT or SIGTERM.

    Args:
        runs: what it shows; looked at from here on.
        sinks: stores that serving reads; looked at from here on.
        host: address to listen on; anybody who reaches it may read, and nobody may write.
        port: 0: any that is free.
        on_ready: called with the page's address once it can be opened.

    Raises:
        SettingsError: the address cannot be listened on.
    """
    listener = _listen(host, port)
    address = f"http://{_in_url(host)}:{listener.getsockname()[1]}/"

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> Any:
        runs.start()
        for sink in sinks:
            sink.start()
        try:
            yield
        finally:
            runs.stop()
            for sink in sinks:
                sink.stop()

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    if host in _LOOPBACK:
        # A page of somebody else's that a browser has open must not reach this one by a name of
        # its own that leads to this address.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"])
    _add_pages(runs, sinks)
    ui.run_with(app, title="recpoint", language="en-US", show_welcome_message=False)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    asyncio.run(_serve(server, listener, lambda: on_ready(address) if on_ready else None))


async def _serve(
    server: uvicorn.Server, listener: socket.socket, on_ready: Callable[[], None]
) -> None:
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.02)
    if not serving.done():
        on_ready()
    await serving


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"{host}:{port}",
            found=error.strerror or str(error),
            expected="an address of this host and a free port",
            next_step="choose another --port, or 0 for any that is free",
        ) from error
    return listener


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _add_pages(runs: WatchedRuns, sinks: Sequence[WatchedSink]) -> None:
    @ui.page("/")
    def overview() -> None:
        _page(lambda: _overview_page(runs.runs, sinks))

    @ui.page("/run/{index}")
    def one_run(index: int, window: str = "all") -> None:
        if not 0 <= index < len(runs.runs):
            _page(lambda: _unknown_page(len(runs.runs)))
            return
        chosen = window if window in WINDOWS else "all"
        _page(lambda: _run_page(runs.runs[index], chosen))


def _page(build: Callable[[], Callable[[], None]]) -> None:
    """A page: its parts, and filling them now and again."""
    ui.add_head_html(f"<style>{STYLE}</style>")
    with Element("div").classes("page"):
        fill = build()
    fill()
    ui.timer(_TICK_SECONDS, fill)


def _unknown_page(count: int) -> Callable[[], None]:
    heading(1, "No such run")
    text("p", f"{count} runs are watched.")
    text("a", "All runs", href="/")
    return lambda: None


def _overview_page(runs: Sequence[WatchedRun], sinks: Sequence[WatchedSink]) -> Callable[[], None]:
    """All runs in one table; those in trouble come first, each with its cause below its row.

    Sinks are in a table below it.
    """
    heading(1, "recpoint: runs")
    summary = text("p", role="status")
    title = [""]
    table = PageTable(
        "What a crash would cost each run, and what its checkpoints cost",
        texts.RUN_HEADINGS,
        links=1,
        long=(1, 7, 8),
        lines=(2,),
        numbers=(2, 3, 4, 5, 6, 7, 9),
        remarks=True,
    )
    fill_sinks = _sinks_part(sinks, runs)

    def fill() -> None:
        fill_sinks()
        words = texts.summary_text(runs)
        summary.fill(words)
        _set_title(title, runs)
        ordered = sorted(
            enumerate(runs), key=lambda numbered: _ORDER.get(numbered[1].seen.standing, 2)
        )
        now = time.monotonic()
        table.fill(
            [texts.run_row(run) for _, run in ordered],
            targets=[f"/run/{index}" for index, _ in ordered],
            states=[_colour(run.seen) for _, run in ordered],
            remarks=[texts.trouble(run.seen, now) for _, run in ordered],
        )

    return fill


def _sinks_part(sinks: Sequence[WatchedSink], runs: Sequence[WatchedRun]) -> Callable[[], None]:
    """All sinks in one table, in the order in which they were given; nothing if there are none."""
    with section("Stores that serving reads") as box:
        table = PageTable(
            "What readers see, and since when they have lacked the newest checkpoint",
            sink_texts.SINK_HEADINGS,
            long=(1, 2),
            numbers=(3, 4, 5),
            remarks=True,
        )
    box.set_visibility(bool(sinks))
    return lambda: table.fill(
        [sink_texts.sink_row(sink, runs) for sink in sinks],
        states=[sink_texts.sink_state(sink, runs) for sink in sinks],
        remarks=[sink_texts.sink_trouble(sink) for sink in sinks],
    )


#: Which runs come first; the others stand in the order in which they were given.
_ORDER = {"alarm": 0, "no answer": 1}


def _run_page(run: WatchedRun, chosen: str) -> Callable[[], None]:
    text("a", "All runs", href="/")
    heading(1, texts.plain(run.name))
    state = text("p", classes="state", role="status")
    alerts = Alerts()
    expectation = text("p")
    lost = text("p", classes="state")
    figures = Figures(texts.FIGURES)
    with section("Charts") as charts:
        _window_links(chosen)
        with Element("div").classes("charts"):
            lag = Chart("Lag: what a crash would have cost")
            stall = Chart("Stall of each checkpoint")
            written = Chart("Bytes written")
    with section("Embedding servers") as served:
        redundancy = text("p")
        servers = PageTable(
            "As the trainer of rank 0 sees them; pages on its host show them",
            server_texts.SERVER_HEADINGS,
            long=(7,),
            numbers=(0, 2, 3, 6),
        )
    with section("This run") as facts:
        fields = Fields(texts.FIELDS)
    with section("Newest checkpoints") as newest:
        checkpoints = PageTable(
            "What is staged on the trainer's host is not here: it is in no catalog yet",
            texts.CHECKPOINT_HEADINGS,
            long=(10,),
            numbers=(0, 3, 4, 5, 6, 7, 8),
        )
    with section("Failures") as failed:
        failures = PageTable(
            "As far as the catalog holds them; what only has to wait is in the agent's log",
            texts.FAILURE_HEADINGS,
            long=(1, 2, 3),
        )
    with section("Retention") as planned:
        rules = text("p")
        plan = PageTable(
            "The plan of the newest retention, as it was then", texts.PLAN_HEADINGS, long=(0, 2)
        )
    with section("Expiring") as marked:
        expiring = PageTable(
            "Manifests that retention has marked; they go after its grace unless something needs "
            "them",
            texts.EXPIRING_HEADINGS,
            long=(0, 1),
            numbers=(2,),
        )
    title, version = [""], [-1]
    for box in (charts, served, facts, newest, failed, planned, marked):
        box.set_visibility(False)
    figures.fill({})

    def fill() -> None:
        view = run.seen
        state.fill(f"{texts.standing_text(view)}; {_age_text(view)}")
        set_state(state, _colour(view))
        alerts.fill(texts.alerts(view, time.monotonic()))
        _set_title(title, [run])
        if view.overview is None or version[0] == view.version:
            return
        version[0] = view.version
        shown = view.overview
        figures.fill(texts.figures(shown))
        expectation.fill(texts.expectation_text(shown))
        lost.fill(server_texts.lost_servers_text(shown))
        for box, content in (
            (charts, shown.checkpoints),
            (served, shown.servers),
            (facts, True),
            (newest, shown.checkpoints),
            (failed, shown.failures),
            (planned, shown.plan),
            (marked, shown.expiring),
        ):
            box.set_visibility(bool(content))
        visible = drawn(shown, WINDOWS[chosen])
        lag.fill(*lag_chart(visible))
        stall.fill(*stall_chart(visible))
        written.fill(*bytes_chart(visible))
        if shown.servers is not None:
            redundancy.fill(server_texts.servers_text(shown))
            all_servers = shown.servers.servers
            servers.fill(
                []
                if all_servers is None
                else [
                    server_texts.server_row(server, all_servers.parity)
                    for server in all_servers.each
                ]
            )
        fields.fill(texts.field_texts(shown))
        checkpoints.fill(
            [
                texts.checkpoint_row(checkpoint)
                for checkpoint in shown.checkpoints[:CHECKPOINTS_SHOWN]
            ]
        )
        failures.fill([texts.failure_row(failure) for failure in shown.failures[:_ROWS_SHOWN]])
        rules.fill(texts.plan_text(shown.plan, shown.refreshed_ms))
        plan.fill(texts.plan_rows(shown.plan, _ROWS_SHOWN))
        expiring.fill(
            [texts.expiring_row(checkpoint) for checkpoint in shown.expiring[:_ROWS_SHOWN]]
        )

    return fill


def _window_links(chosen: str) -> None:
    """Links to the same page with another window of time."""
    with Element("nav").classes("windows") as box:
        box.props["aria-label"] = "Window of time that the charts show"
        for key, window in WINDOWS.items():
            link = text("a", window.name, href=f"?window={key}")
            if key == chosen:
                link.props["aria-current"] = "true"
        text("span", "times in UTC", "unit")


def _age_text(view: RunView) -> str:
    age = view.age_seconds()
    return "not read yet" if age is None else f"as it was {duration_text(age)} ago"


def _colour(view: RunView) -> str:
    return {"alarm": "bad", "no answer": "bad", "fine": "good", "ended": "good"}.get(
        view.standing, ""
    )


def _set_title(shown: list[str], runs: Sequence[WatchedRun]) -> None:
    """The browser's tab says how many runs are in trouble."""
    bad = sum(run.seen.standing in ("alarm", "no answer") for run in runs)
    words = f"({bad}) recpoint" if bad else "recpoint"
    if shown[0] != words:
        shown[0] = words
        ui.page_title(words)
