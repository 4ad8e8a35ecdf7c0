"""Rows and columns of tables out of a stored run, into a process that is not its trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recpoint.catalog.records.leases import reading
from recpoint.catalog.restoring.reshard import PartsTarget, TablePart
from recpoint.catalog.restoring.restore import RestoreReport, restore
from recpoint.catalog.restoring.selection import Selection
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.store import open_store

__all__ = ["restore_parts"]


def restore_parts(
    url: str,
    parts: Sequence[TablePart],
    *,
    step: int | None = None,
    generation: int | None = None,
    validated_only: bool = False,
    validated_within: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> RestoreReport:
    """Read parts of tables, however the run was sharded; only chunks that may hold them are read.

        part = TablePart(table="items", values=torch.empty(1_000_000, 64), first_row=5_000_000)
        restore_parts("s3://b/ranker", [part])

    Memory beyond the parts: as `catalog.restoring.restore.restore` says, for the rows that are
    wanted.

    Args:
        url: of the run.
        parts: any number, of any tables.
        step, generation, validated_only, validated_within: see `Selection`.
        on_progress: as for `catalog.restoring.restore.restore`.

    Raises:
        SettingsError: see `Selection`.
        IncompatibleModel: a part is none of the checkpoint; nothing has been written.
        RecpointError: as for `catalog.restoring.restore.restore`.
    """
    selection = Selection(
        step=step,
        generation=generation,
        validated_only=validated_only,
        validated_within=validated_within,
    )
    run = Run.open(open_store(url))
    with reading(run, purpose="restore") as lease:
        return restore(
            run,
            PartsTarget(parts),
            selection,
            leased=lease is not None,
            on_progress=on_progress,
        )
