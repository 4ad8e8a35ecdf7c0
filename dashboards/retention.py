"""What people see of a retention: every manifest, what becomes of it, and why."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from recpoint.catalog.retention.prune_plan import PrunePlan
from recpoint.dashboards.terminal import bytes_text, plain_table, shown
from recpoint.format.naming import CONSOLIDATED_KEY

__all__ = ["retention_table"]

_STYLES = {"keep": "", "mark": "yellow", "wait": "yellow", "delete": "red"}


def retention_table(made: PrunePlan) -> Table:
    """The plan, for a terminal."""
    counts = {"keep": 0, "mark": 0, "wait": 0, "delete": 0}
    rows = list(made.rows())
    for row in rows:
        counts[row.action] += 1
    table = plain_table(", ".join(f"{count} to {action}" for action, count in counts.items()))
    for heading in ("step", "gen"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("merged", no_wrap=True)
    table.add_column("")
    table.add_column("stored", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in rows:
        table.add_row(
            str(row.step),
            str(row.generation),
            _merged(row.key),
            Text(row.action, style=_STYLES[row.action]),
            bytes_text(row.stored_bytes),
            shown(row.reason),
        )
    for key in made.stray_pins:
        table.add_row("", "", "", "", "", shown(f"{key} pins a checkpoint that is not there"))
    for who in made.held:
        table.add_row("", "", "", Text("held", style="yellow"), "", shown(who))
    return table


def _merged(key: str) -> str:
    """What tells the manifests of one checkpoint apart."""
    name = CONSOLIDATED_KEY.parse(key)
    if name is None:
        return ""
    return "into a full" if name.after is None else f"after {name.after}"
