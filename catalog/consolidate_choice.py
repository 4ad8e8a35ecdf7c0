"""What to consolidate of a checkpoint, if anything, when nobody has said."""

from __future__ import annotations

from collections.abc import Sequence

from recpoint.catalog.chain import PassedOver
from recpoint.catalog.consolidate_plan import (
    ConsolidationPlan,
    ConsolidationTriggers,
    plan_consolidation,
)
from recpoint.catalog.lineage import ManifestName
from recpoint.catalog.run import Run

__all__ = ["choose_consolidation", "newest_checkpoint"]


def newest_checkpoint(run: Run) -> ManifestName | None:
    """The newest checkpoint of the live line: the one whose chain a restore would read."""
    return next(iter(run.live_line()), None)


def choose_consolidation(
    run: Run,
    name: ManifestName,
    *,
    triggers: ConsolidationTriggers | None = None,
    avoid: Sequence[PassedOver] = (),
) -> ConsolidationPlan:
    """Plan the consolidation of a checkpoint that costs least for what it saves.

    The whole chain into a full where a restore reads much that is dead. Where the chain is long and
    nothing else, all of its increments into one: that bounds its links for a small part of the
    bytes of a full, as few dirty rows leave most of the full as it is.

    Args:
        run: the run.
        name: the checkpoint.
        triggers: from when on it pays; the defaults if None.
        avoid: manifests to do without; see `plan_consolidation`.

    Returns:
        a plan; `pays` says whether to follow it now.

    Raises:
        RecpointError: of `plan_consolidation`.
    """
    triggers = triggers or ConsolidationTriggers()
    whole = plan_consolidation(run, name, triggers=triggers, avoid=avoid)
    bytes_saved = whole.restore_bytes_before / max(1, whole.restore_bytes_after)
    much_is_dead = (
        bytes_saved >= triggers.restore_ratio or (whole.dead_share or 0.0) >= triggers.dead_share
    )
    if not whole.pays or much_is_dead or whole.links_before < 3:
        return whole
    links = whole.links_before - 1
    part = plan_consolidation(run, name, links=links, triggers=triggers, avoid=avoid)
    return part if part.pays else whole
