"""What became, or would become, of the jobs that were staged for a run, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from recpoint.catalog.staging.free_slots import FreeSlot
from recpoint.catalog.stores.run_url import naming_run
from recpoint.catalog.sweeping.discard_staged import StagedLoss
from recpoint.catalog.sweeping.staged_work import Fate, StagedWork
from recpoint.dashboards.terminal import bytes_text, plain_table, shown, time_text

__all__ = ["discard_table", "slots_views", "staged_views"]

_STYLES: dict[Fate, str] = {"rejected": "red", "would be rejected": "red", "stays": "yellow"}


def staged_views(work: StagedWork, run_url: str) -> list[Table]:
    """A table of the jobs; none where nothing is staged."""
    if not work.jobs:
        return []
    table = plain_table(f"staged here: {len(work.jobs)} job{'' if len(work.jobs) == 1 else 's'}")
    for name in ("", "job", "why"):
        table.add_column(name, overflow="fold")
    for job, fate, why in work.jobs:
        said = shown(naming_run(why, run_url), limit=1000)
        table.add_row(Text(fate, style=_STYLES.get(fate, "")), shown(job), said)
    return [table]


def discard_table(losses: Sequence[StagedLoss], *, dry_run: bool) -> Table:
    """What is lost with each job of a run that is gone."""
    count = f"{len(losses)} job{'' if len(losses) == 1 else 's'} of a run that is gone"
    table = plain_table(f"to discard: {count}" if dry_run else f"discarded {count}")
    table.show_header = bool(losses)
    for name in ("job", "what is lost with it"):
        table.add_column(name, overflow="fold")
    for loss in losses:
        text = "it cannot be read"
        if loss.kind:
            text = (
                f"{loss.kind} of step {loss.step}: {loss.rows:,} rows, "
                f"{bytes_text(loss.bytes)}, cut {time_text(loss.snapshot_ms)}"
            )
        table.add_row(shown(loss.job), shown(text))
    return table


def slots_views(slots: Sequence[FreeSlot], *, dry_run: bool) -> list[Table]:
    """A table of the slots; none where none is free."""
    if not slots:
        return []
    size = bytes_text(sum(slot.size_bytes for slot in slots))
    count = f"{len(slots)} slot{'' if len(slots) == 1 else 's'}, {size}"
    table = plain_table(f"to remove: {count}" if dry_run else f"removed {count}")
    for name in ("slot", "bytes", "why"):
        table.add_column(name, overflow="fold")
    for slot in slots:
        table.add_row(shown(slot.slot), f"{slot.size_bytes:,}", shown(slot.reason))
    return [table]
