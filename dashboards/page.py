"""Serves the live page of `recpoint dashboard`: all runs, and one page with charts for each run."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement
from starlette.middleware.trustedhost import TrustedHostMiddleware

from recpoint.catalog.overview.overview import CheckpointFacts
from recpoint.dashboards import texts
from recpoint.dashboards.watched_runs import Seen, WatchedRun, WatchedRuns
from recpoint.errors import SettingsError
from recpoint.units import bytes_text, duration_text

__all__ = ["bytes_chart", "lag_chart", "serve", "stall_chart"]


# The charts of one run as options of ECharts, and what they show in words. Pure.


#: So many of the newest checkpoints are drawn.
NEWEST = 200

# Told apart without colour too: by their form. Contrast with white at least 4.5.
_BLUE, _RED, _GREY = "#1f4e8c", "#a1260d", "#5c5c5c"


def lag_chart(checkpoints: Sequence[CheckpointFacts]) -> tuple[dict[str, Any], str]:
    """What a crash right before each commit would have cost, in seconds and in batches."""
    drawn = [one for one in _drawn(checkpoints) if one.at_risk_seconds is not None]
    seconds = [[one.committed_ms, round(one.at_risk_seconds or 0.0, 3)] for one in drawn]
    batches = [[one.committed_ms, one.at_risk_batches] for one in drawn]
    persist = [[one.committed_ms, round(one.lag_seconds, 3)] for one in drawn]
    options = _time_axes(
        [_axis("seconds"), _axis("batches", right=True)],
        [
            _series("at risk, s", "line", seconds, _RED, symbol="circle"),
            _series("cut to commit, s", "line", persist, _BLUE, dashed=True),
            _series("at risk, batches", "scatter", batches, _GREY, symbol="triangle", axis=1),
        ],
    )
    if not drawn:
        return options, "No history yet: it takes a checkpoint with a known one before it."
    worst = max(drawn, key=lambda one: one.at_risk_seconds or 0.0)
    text = (
        f"Lost by a crash right before each of the newest {len(drawn)} commits: at most "
        f"{duration_text(worst.at_risk_seconds or 0.0)} and {worst.at_risk_batches:,} batches, "
        f"before step {worst.step:,}."
    )
    return options, text


def stall_chart(checkpoints: Sequence[CheckpointFacts]) -> tuple[dict[str, Any], str]:
    """How long training waited for each checkpoint."""
    drawn = _drawn(checkpoints)
    stalls = [[one.committed_ms, round(1000 * one.stall_seconds, 3)] for one in drawn]
    series = [_series("stall, ms", "bar", stalls, _BLUE)]
    options = _time_axes([_axis("milliseconds")], series)
    if not drawn:
        return options, "No checkpoint yet."
    worst = max(drawn, key=lambda one: one.stall_seconds)
    text = (
        f"Stall of each of the newest {len(drawn)} checkpoints: at most "
        f"{duration_text(worst.stall_seconds)}, at step {worst.step:,}."
    )
    return options, text


def bytes_chart(checkpoints: Sequence[CheckpointFacts]) -> tuple[dict[str, Any], str]:
    """Bytes of each checkpoint beside those of a full one in fp32."""
    drawn = _drawn(checkpoints)
    stored = [[one.committed_ms, one.stored_bytes / 1e6] for one in drawn]
    full = [[one.committed_ms, one.full_bytes / 1e6] for one in drawn]
    series = [
        _series("stored, MB", "bar", stored, _BLUE),
        _series("full fp32, MB", "line", full, _RED, dashed=True),
    ]
    options = _time_axes([_axis("MB")], series)
    if not drawn:
        return options, "No checkpoint yet."
    written = sum(one.stored_bytes for one in drawn)
    whole = sum(one.full_bytes for one in drawn)
    share = f" ({written / whole:.1%})" if whole else ""
    text = (
        f"The newest {len(drawn)} checkpoints took {bytes_text(written)}, "
        f"full fp32 ones would have taken {bytes_text(whole)}{share}."
    )
    return options, text


def _drawn(checkpoints: Sequence[CheckpointFacts]) -> list[CheckpointFacts]:
    """Those to draw, oldest first."""
    return [one for one in reversed(checkpoints[:NEWEST]) if one.error is None]


def _axis(name: str, *, right: bool = False) -> dict[str, Any]:
    return {
        "type": "value",
        "name": name,
        "min": 0,
        "position": "right" if right else "left",
        "splitLine": {"show": not right},
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
    }


def _time_axes(axes: list[dict[str, Any]], series: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "animation": False,
        "useUTC": True,
        "aria": {"enabled": True},
        "grid": {"left": 70, "right": 60, "top": 50, "bottom": 30},
        "legend": {"top": 0},
        "tooltip": {"trigger": "axis"},
        "xAxis": {"type": "time", "axisLabel": {"hideOverlap": True}},
        "yAxis": axes,
        "series": series,
    }


# Pieces of a page that are filled again and again: only what has changed goes to the browser.


#: Contrast of every text with its ground is at least 7 to 1; states differ in words, not colour.
STYLE = """
<style>
  body { font-family: system-ui, sans-serif; color: #1a1a1a; background: #fff; }
  .page { padding: 1rem 1.5rem; width: 100%; box-sizing: border-box; }
  .nicegui-content { padding: 0; }
  h1 { font-size: 1.5rem; line-height: 2rem; font-weight: 600; }
  h2 { font-size: 1.15rem; line-height: 1.6rem; font-weight: 600; margin: 1.2rem 0 .4rem; }
  table { border-collapse: collapse; width: 100%; font-size: .875rem; }
  caption { text-align: left; color: #404040; padding-bottom: .3rem; }
  th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #c4c4c4;
           vertical-align: top; white-space: nowrap; font-variant-numeric: tabular-nums; }
  th { font-weight: 600; }
  thead th { border-bottom: 2px solid #595959; white-space: normal; }
  td.long { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
  td.long a { display: inline-block; min-width: 12rem; }
  .scroll { overflow-x: auto; width: 100%; }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; margin: .4rem 0; }
  dt { color: #404040; } dd { margin: 0; font-variant-numeric: tabular-nums; }
  .state { font-weight: 600; }
  .bad { color: #fff; background: #8f1d0a; padding: .1rem .4rem; border-radius: .2rem; }
  .good { color: #0b4f1e; }
  .alerts p { border-left: .4rem solid #8f1d0a; background: #fdeeeb; color: #4d0f05;
              padding: .4rem .8rem; margin: .3rem 0; overflow-wrap: anywhere; }
  figure { margin: .4rem 0; } figcaption { color: #404040; font-size: .875rem; }
  .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr));
            gap: 1rem; width: 100%; }
  a { color: #0b3d91; text-decoration: underline; }
  a:focus-visible { outline: 3px solid #0b3d91; outline-offset: 2px; }
</style>
"""


def text(tag: str, words: str = "", classes: str = "", **props: str) -> TextElement:
    """An element that holds nothing but text, which is never read as markup."""
    element = TextElement(tag=tag, text=words)
    if classes:
        element.classes(classes)
    for name, value in props.items():
        element.props[name.replace("_", "-")] = value
    return element


def heading(level: int, words: str) -> TextElement:
    """A heading."""
    return text(f"h{level}", words)


class Table:
    """A table whose rows may be replaced; the first cell of a row is its header.

    Args:
        caption: what it shows.
        headings: of its columns.
        links: column of links, whose targets `fill` is given; None: there is none.
        long: columns whose texts may take several lines.
        empty: what stands in place of rows when there are none.
    """

    def __init__(
        self,
        caption: str,
        headings: Sequence[str],
        *,
        links: int | None = None,
        long: Sequence[int] = (),
        empty: str = "",
    ) -> None:
        self._links = links
        self._long = frozenset(long)
        self._rows: list[tuple[Element, list[TextElement]]] = []
        with Element("div").classes("scroll"), Element("table"):
            text("caption", caption)
            with Element("thead"), Element("tr"):
                for name in headings:
                    text("th", name, scope="col")
            self._body = Element("tbody")
            with self._body, Element("tr") as self._nothing:
                text("td", empty, colspan=str(len(headings)))

    def fill(
        self,
        rows: Sequence[Sequence[str]],
        *,
        targets: Sequence[str] = (),
        states: Sequence[str] = (),
    ) -> None:
        """Show these rows.

        Args:
            rows: their texts.
            targets: of each row's link.
            states: `good`, `bad` or nothing, for the first cell of each row.
        """
        while len(self._rows) < len(rows):
            self._add(len(rows[0]))
        self._nothing.set_visibility(not rows)
        for position, (line, cells) in enumerate(self._rows):
            line.set_visibility(position < len(rows))
            if position >= len(rows):
                continue
            for cell, words in zip(cells, rows[position], strict=True):
                if cell.text != words:
                    cell.text = words
            if self._links is not None:
                _set_prop(cells[self._links], "href", targets[position])
            if states:
                _set_state(cells[0], states[position])

    def _add(self, columns: int) -> None:
        with self._body, Element("tr") as line:
            cells = []
            for column in range(columns):
                cell = Element("th" if column == 0 else "td")
                if column == 0:
                    cell.props["scope"] = "row"
                if column in self._long:
                    cell.classes("long")
                with cell:
                    cells.append(text("a" if column == self._links else "span"))
            self._rows.append((line, cells))


class Fields:
    """Names and their values."""

    def __init__(self, names: Sequence[str]) -> None:
        self._values: dict[str, TextElement] = {}
        with Element("dl"):
            for name in names:
                text("dt", name)
                self._values[name] = text("dd")

    def fill(self, values: dict[str, str]) -> None:
        """Show these values."""
        for name, words in values.items():
            if self._values[name].text != words:
                self._values[name].text = words


class Alerts:
    """Sentences that somebody has to read; a screen reader says them when they come."""

    def __init__(self) -> None:
        self._lines: list[TextElement] = []
        self._box = Element("div").classes("alerts")
        self._box.props["role"] = "alert"

    def fill(self, sentences: Sequence[str]) -> None:
        """Show these."""
        while len(self._lines) < len(sentences):
            with self._box:
                self._lines.append(text("p"))
        for position, line in enumerate(self._lines):
            line.set_visibility(position < len(sentences))
            words = sentences[position] if position < len(sentences) else ""
            if line.text != words:
                line.text = words


class Chart:
    """A chart, with what it shows in words below it."""

    def __init__(self, title: str) -> None:
        self._shown: dict[str, Any] = {}
        with Element("figure"):
            heading(2, title)
            self._chart = ui.echart({"series": []}).style("height: 15rem; width: 100%")
            self._caption = text("figcaption")

    def fill(self, options: dict[str, Any], words: str) -> None:
        """Draw this."""
        if options == self._shown:
            return
        self._shown = options
        self._caption.text = words
        self._chart.options.clear()
        self._chart.options.update(options)
        self._chart.update()


def _set_prop(element: TextElement, name: str, value: str) -> None:
    if element.props.get(name) != value:
        element.props[name] = value
        element.update()


def _set_state(element: TextElement, state: str) -> None:
    element.classes(replace=f"state {state}".strip())


# The live page of `recpoint dashboard`: an overview of all runs, and one page a run.
#
# Nothing on it waits for a store: it shows what `WatchedRuns` has seen, and how old that is.


#: So many of the newest checkpoints are in a run's table.
CHECKPOINTS_SHOWN = 20

#: Rows of what is expiring and of failures that anybody will read.
_ROWS_SHOWN = 50

#: How often a page looks whether there is something new; ages are counted on meanwhile.
_TICK_SECONDS = 1.0

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    runs: WatchedRuns, *, host: str, port: int, on_ready: Callable[[str], None] | None = None
) -> None:
    """Serve the page until SIGINT or SIGTERM.

    Args:
        runs: what it shows; looked at from here on.
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
        try:
            yield
        finally:
            runs.stop()

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    if host in _LOOPBACK:
        # A page of somebody else's that a browser has open must not reach this one by a name of
        # its own that leads to this address.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"])
    _add_pages(runs)
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


def _add_pages(runs: WatchedRuns) -> None:
    @ui.page("/")
    def overview() -> None:
        _page(lambda: _overview_page(runs.runs))

    @ui.page("/run/{index}")
    def one_run(index: int) -> None:
        if not 0 <= index < len(runs.runs):
            _page(lambda: _unknown_page(len(runs.runs)))
            return
        _page(lambda: _run_page(runs.runs[index]))


def _page(build: Callable[[], Callable[[], None]]) -> None:
    """A page: its parts, and filling them now and again."""
    ui.add_head_html(STYLE)
    with Element("div").classes("page"):
        fill = build()
    fill()
    ui.timer(_TICK_SECONDS, fill)


def _unknown_page(count: int) -> Callable[[], None]:
    heading(1, "No such run")
    text("p", f"{count} runs are watched.")
    text("a", "All runs", href="/")
    return lambda: None


def _overview_page(runs: Sequence[WatchedRun]) -> Callable[[], None]:
    heading(1, "recpoint: runs")
    summary = text("p", role="status")
    title = [""]
    table = Table(
        "What a crash would cost each run, and what its checkpoints cost",
        texts.RUN_HEADINGS,
        links=1,
        long=(1, 2, 7, 8),
    )

    def fill() -> None:
        words = texts.summary_text(runs)
        if summary.text != words:
            summary.text = words
        _set_title(title, runs)
        table.fill(
            [texts.run_row(run, index) for index, run in enumerate(runs)],
            targets=[f"/run/{index}" for index in range(len(runs))],
            states=[_colour(run.seen) for run in runs],
        )

    return fill


def _run_page(run: WatchedRun) -> Callable[[], None]:
    text("a", "All runs", href="/")
    heading(1, texts.plain(run.name))
    state = text("p", classes="state", role="status")
    alerts = Alerts()
    fields = Fields(texts.FIELDS)
    with Element("div").classes("charts"):
        lag = Chart("Lag: what a crash would have cost")
        stall = Chart("Stall of each checkpoint")
        written = Chart("Bytes written")
    heading(2, "Newest checkpoints")
    checkpoints = Table(
        "What is staged on the trainer's host is not here: it is in no catalog yet",
        texts.CHECKPOINT_HEADINGS,
        long=(10,),
        empty="No checkpoint yet.",
    )
    heading(2, "Failures")
    failures = Table(
        "As far as the catalog holds them; what only has to wait is in the agent's log",
        texts.FAILURE_HEADINGS,
        long=(1, 2, 3),
        empty="None.",
    )
    heading(2, "Retention")
    rules = text("p")
    plan = Table(
        "The plan of the newest retention, as it was then",
        texts.PLAN_HEADINGS,
        long=(0, 2),
        empty="No plan.",
    )
    expiring = Table(
        "Manifests that retention has marked; they go after its grace unless something needs them",
        texts.EXPIRING_HEADINGS,
        long=(0, 1),
        empty="Nothing is marked.",
    )
    title, version = [""], [-1]

    def fill() -> None:
        seen = run.seen
        state.text = f"{texts.standing_text(seen)}; {_age_text(seen)}"
        state.classes(replace=f"state {_colour(seen)}".strip())
        alerts.fill(texts.alarm_texts(seen, time.monotonic()))
        _set_title(title, [run])
        if seen.overview is None or version[0] == seen.version:
            return
        version[0] = seen.version
        shown = seen.overview
        fields.fill(texts.field_texts(shown))
        lag.fill(*lag_chart(shown.checkpoints))
        stall.fill(*stall_chart(shown.checkpoints))
        written.fill(*bytes_chart(shown.checkpoints))
        newest = shown.checkpoints[:CHECKPOINTS_SHOWN]
        checkpoints.fill([texts.checkpoint_row(one) for one in newest])
        words = texts.plan_text(shown.plan, shown.refreshed_ms)
        if rules.text != words:
            rules.text = words
        failures.fill([texts.failure_row(one) for one in shown.failures[:_ROWS_SHOWN]])
        plan.fill(texts.plan_rows(shown.plan, _ROWS_SHOWN))
        expiring.fill([texts.expiring_row(one) for one in shown.expiring[:_ROWS_SHOWN]])

    return fill


def _age_text(seen: Seen) -> str:
    age = seen.age_seconds()
    return "not read yet" if age is None else f"as it was {duration_text(age)} ago"


def _colour(seen: Seen) -> str:
    return {"alarm": "bad", "no answer": "bad", "fine": "good", "ended": "good"}.get(
        seen.standing, ""
    )


def _set_title(shown: list[str], runs: Sequence[WatchedRun]) -> None:
    """The browser's tab says how many runs are in trouble."""
    bad = sum(run.seen.standing in ("alarm", "no answer") for run in runs)
    words = f"({bad}) recpoint" if bad else "recpoint"
    if shown[0] != words:
        shown[0] = words
        ui.page_title(words)
