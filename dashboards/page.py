"""The live page of `recpoint dashboard`: an overview of all runs, and one page a run.

Nothing on it waits for a store: it shows what `WatchedRuns` has seen, and how old that is.
"""

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
from starlette.middleware.trustedhost import TrustedHostMiddleware

from recpoint.dashboards import charts, run_texts
from recpoint.dashboards.page_parts import STYLE, Alerts, Chart, Fields, Table, heading, text
from recpoint.dashboards.watched_runs import Seen, WatchedRun, WatchedRuns
from recpoint.errors import SettingsError

__all__ = ["CHECKPOINTS_SHOWN", "serve"]

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
        run_texts.RUN_HEADINGS,
        links=1,
        long=(1, 2, 7, 8),
        empty="No run is watched.",
    )

    def fill() -> None:
        words = run_texts.summary_text(runs)
        if summary.text != words:
            summary.text = words
        _set_title(title, runs)
        table.fill(
            [run_texts.run_row(run, index) for index, run in enumerate(runs)],
            targets=[f"/run/{index}" for index in range(len(runs))],
            states=[_colour(run.seen) for run in runs],
        )

    return fill


def _run_page(run: WatchedRun) -> Callable[[], None]:
    text("a", "All runs", href="/")
    heading(1, run_texts.plain(run.name))
    state = text("p", classes="state", role="status")
    alerts = Alerts()
    fields = Fields(run_texts.FIELDS)
    with Element("div").classes("charts"):
        lag = Chart("Lag: what a crash would have cost")
        stall = Chart("Stall of each checkpoint")
        written = Chart("Bytes written")
    heading(2, "Newest checkpoints")
    checkpoints = Table(
        "What is staged on the trainer's host is not here: it is in no catalog yet",
        run_texts.CHECKPOINT_HEADINGS,
        long=(10,),
        empty="No checkpoint yet.",
    )
    heading(2, "Failures")
    failures = Table(
        "As far as the catalog holds them; what only has to wait is in the agent's log",
        run_texts.FAILURE_HEADINGS,
        long=(1, 2, 3),
        empty="None.",
    )
    heading(2, "Retention")
    rules = text("p")
    plan = Table(
        "The plan of the newest retention, as it was then",
        run_texts.PLAN_HEADINGS,
        long=(0, 2),
        empty="No plan.",
    )
    expiring = Table(
        "Manifests that retention has marked; they go after its grace unless something needs them",
        run_texts.EXPIRING_HEADINGS,
        long=(0, 1),
        empty="Nothing is marked.",
    )
    title, version = [""], [-1]

    def fill() -> None:
        seen = run.seen
        state.text = f"{run_texts.standing_text(seen)}; {_age_text(seen)}"
        state.classes(replace=f"state {_colour(seen)}".strip())
        alerts.fill(run_texts.alarm_texts(seen, time.monotonic()))
        _set_title(title, [run])
        if seen.overview is None or version[0] == seen.version:
            return
        version[0] = seen.version
        shown = seen.overview
        fields.fill(run_texts.field_texts(shown))
        lag.fill(*charts.lag_chart(shown.checkpoints))
        stall.fill(*charts.stall_chart(shown.checkpoints))
        written.fill(*charts.bytes_chart(shown.checkpoints))
        newest = shown.checkpoints[:CHECKPOINTS_SHOWN]
        checkpoints.fill([run_texts.checkpoint_row(one) for one in newest])
        words = run_texts.plan_text(shown.plan, shown.refreshed_ms)
        if rules.text != words:
            rules.text = words
        failures.fill([run_texts.failure_row(one) for one in shown.failures[:_ROWS_SHOWN]])
        plan.fill(run_texts.plan_rows(shown.plan, _ROWS_SHOWN))
        expiring.fill([run_texts.expiring_row(one) for one in shown.expiring[:_ROWS_SHOWN]])

    return fill


def _age_text(seen: Seen) -> str:
    age = seen.age_seconds()
    return "not read yet" if age is None else f"as it was {run_texts.duration_text(age)} ago"


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
