"""The table of `recpoint lag`: what each run would lose now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from recpoint.catalog.overview.overview import RunOverview, alarms
from recpoint.dashboards.terminal import plain_table, shown, verdict_text
from recpoint.dashboards.texts import duration_text
from recpoint.errors import RecpointError

__all__ = ["RunLag", "lag_table"]


class RunLag(NamedTuple):
    """A run, what its catalog says or why it cannot be read, and whether that is too much."""

    url: str
    found: RunOverview | RecpointError
    above: bool = False


def lag_table(runs: Sequence[RunLag]) -> Table:
    """One line a run."""
    table = plain_table("")
    for name in ("run", "training", "newest", "would be lost", "", "interval", "chain", "stall"):
        left = name in ("run", "training")
        # A URL is copied from here: it may take several lines, and is never cut.
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    table.add_column("validated")
    table.add_column("trouble", overflow="fold")
    for run in runs:
        if isinstance(run.found, RecpointError):
            blank = [""] * 8
            said = f"{type(run.found).__name__}: {run.found}"
            trouble = shown(said, limit=2000, style="red")
            table.add_row(shown(run.url), *blank, trouble)
        else:
            table.add_row(shown(run.url), *_cells(run, run.found))
    return table


def _cells(run: RunLag, seen: RunOverview) -> list[Text | str]:
    lag, newest, restore = seen.lag, seen.newest, seen.restore
    batches = lag.at_risk_batches
    validated = seen.last_validated
    state = "not started" if seen.generation is None else "going on"
    if seen.ended is not None:
        state = seen.ended.reason
    return [
        shown(state),
        "none" if newest is None else str(newest.step),
        Text(duration_text(lag.at_risk_seconds), style="red" if run.above else ""),
        "" if batches is None else f"{batches} batches",
        "" if lag.interval_seconds is None else duration_text(lag.interval_seconds),
        "" if restore is None else str(restore.manifests_to_read),
        "" if newest is None else f"{newest.stall_seconds * 1000:.1f} ms",
        Text("never") if validated is None else verdict_text(validated.verdict),
        shown("; ".join(alarm.text for alarm in alarms(seen)), style="red"),
    ]
