"""Makes the table of `recpoint lag`: what each run would lose if its host died now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import RenderableType
from rich.text import Text

from recpoint.catalog.overview.alarms import alarms
from recpoint.catalog.overview.overview import RunOverview
from recpoint.dashboards.terminal import FittedColumn, FittedTable, shown, verdict_text
from recpoint.dashboards.texts import NONE, risk_text, staged_text
from recpoint.errors import RecpointError
from recpoint.units import duration_text

__all__ = ["RunLag", "lag_views"]


class RunLag(NamedTuple):
    """One run of the table.

    Attributes:
        url: of the run.
        found: its overview, or why it cannot be read.
        above: whether the run would lose more than the caller allows; shown in red.
    """

    url: str
    found: RunOverview | RecpointError
    above: bool = False


_COLUMNS = (
    FittedColumn("run", drop=5, own_line=True),  # people copy the URL from here: it is never cut
    FittedColumn("training"),
    FittedColumn("newest", right=True),
    FittedColumn("would be lost"),
    FittedColumn("interval", right=True, drop=2),
    FittedColumn("chain", right=True, drop=4),
    FittedColumn("stall", right=True, drop=3),
    FittedColumn("validated", drop=1),
)


def lag_views(runs: Sequence[RunLag]) -> list[RenderableType]:
    """Return a table with a line for each readable run, then lines.

    They are what is staged, and each error and alarm.
    """
    views: list[RenderableType] = []
    rows = [
        ([shown(run.url, limit=2000), *_cells(run, run.found)], Text())
        for run in runs
        if isinstance(run.found, RunOverview)
    ]
    if rows:
        views.append(FittedTable("", _COLUMNS, rows))
    for run in runs:
        if isinstance(run.found, RunOverview) and run.found.staged is not None:
            views.append(shown(f"{run.url}: {staged_text(run.found)}", limit=2000))
    for run in runs:
        if isinstance(run.found, RecpointError):
            texts = [f"{type(run.found).__name__}: {run.found}"]
        else:
            texts = [f"{alarm.text}. Next: {alarm.next_step}" for alarm in alarms(run.found)]
        url = f"{run.url}: " if run.url else ""
        views += [shown(f"{url}{text}", limit=2000, style="red") for text in texts]
    return views


def _cells(run: RunLag, view: RunOverview) -> list[Text]:
    lag, newest, restore = view.lag, view.newest, view.restore
    validated = view.last_validated
    state = "not started" if view.generation is None else "going on"
    if view.ended is not None:
        state = view.ended.reason
    elif view.trainer_gone:
        state = "gone"
    elif lag.overdue:
        state = "overdue"
    interval = NONE if lag.interval_seconds is None else duration_text(lag.interval_seconds)
    return [
        Text(state),
        Text("none" if newest is None else str(newest.step)),
        Text(risk_text(view), style="red" if run.above else ""),
        Text(interval),
        Text(NONE if restore is None else str(restore.manifests_to_read)),
        Text(NONE if newest is None else f"{newest.stall_seconds * 1000:.1f} ms"),
        Text("never") if validated is None else verdict_text(validated.verdict),
    ]
