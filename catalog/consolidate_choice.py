"""What to consolidate of a checkpoint, if anything, when nobody has said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from recpoint.catalog.chain import PassedOver
from recpoint.catalog.consolidate_plan import (
    ConsolidationPlan,
    ConsolidationTriggers,
    plan_consolidation,
)
from recpoint.catalog.lineage import ManifestName
from recpoint.catalog.run import Run

__all__ = ["choose_consolidation", "chosen", "newest_checkpoint"]

#: Of the way to a trigger, how much may be gone right after the increments were merged. With less
#: left, the full would be written a few checkpoints later all the same.
_LEFT: Final = 0.5


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

    Either the whole chain into a full, or all of its increments into one, which leaves most of the
    full as it is. Where the chain is long and nothing else, its increments: that bounds its links
    for a small part of the bytes of a full. Where a restore reads much that is dead, its increments
    if they are known to share their rows (`live_rows`), so that one of them costs fewer bytes, read
    and written, for each byte that it saves, and if the next trigger is then far away.

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
    if not whole.pays or whole.links_before < 3:
        return whole
    links = whole.links_before - 1
    part = plan_consolidation(run, name, links=links, triggers=triggers, avoid=avoid)
    return chosen(whole, part, triggers)


def chosen(
    whole: ConsolidationPlan, part: ConsolidationPlan, triggers: ConsolidationTriggers
) -> ConsolidationPlan:
    """Which of two plans of one checkpoint to follow.

    Args:
        whole: its chain into a full; it pays.
        part: its increments into one.
        triggers: that the plans were made with.
    """
    ratio = whole.restore_bytes_before / max(1, whole.restore_bytes_after)
    share = whole.dead_share or 0.0
    if ratio < triggers.restore_ratio and share < triggers.dead_share:
        return part if part.pays else whole
    # All rows of the one increment are dead in the full below it.
    left_ratio = part.restore_bytes_after / max(1, whole.restore_bytes_after)
    left_share = part.write_rows / max(1, whole.write_rows + part.write_rows)
    leaves_little = (
        left_ratio - 1 <= (triggers.restore_ratio - 1) * _LEFT
        and left_share <= triggers.dead_share * _LEFT
        and part.links_after < triggers.links
    )
    if not leaves_little or _cost(part) >= _cost(whole):
        return whole
    # What is reached by the chain as a whole need not be by its increments alone.
    return part if part.pays else replace(part, pays=True, reason=whole.reason)


def _cost(plan: ConsolidationPlan) -> float:
    """Bytes read and written for each byte that a restore reads less; at most."""
    saved = plan.restore_bytes_before - plan.restore_bytes_after
    return (plan.read_bytes + plan.write_bytes) / saved if saved > 0 else math.inf
