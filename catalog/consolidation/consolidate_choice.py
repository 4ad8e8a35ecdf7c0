"""What to consolidate of a checkpoint, if anything, when nobody has said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from recpoint.catalog.consolidation.consolidate_plan import (
    ConsolidationPlan,
    ConsolidationTriggers,
    chain_to_merge,
    plan_merge_of,
)
from recpoint.catalog.consolidation.merge_sizes import MergeSizes
from recpoint.catalog.runs.chain import PassedOver
from recpoint.catalog.runs.run import Run
from recpoint.format.naming import ManifestName

__all__ = ["WeighedMerge", "choose_consolidation", "cheapest", "newest_checkpoint", "weigh"]

#: Of the way to a trigger that was reached, how much may be gone right after an increment was made.
#: With less left, the next merge would be due a few checkpoints later all the same.
_LEFT: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class WeighedMerge:
    """A merge that a chain allows, and what it costs by the measure of `weigh`.

    Attributes:
        sizes: what it reads, writes and leaves.
        cost_bytes: read and written, over the share of the way back; None: it is not to be chosen.
        why_not: why that is so; empty where it has a cost.
    """

    sizes: MergeSizes
    cost_bytes: float | None
    why_not: str = ""


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
    """Plan the consolidation of a checkpoint that costs least for what it saves, by `weigh`.

    Of the whole chain into a full, and of its newest k links into one increment for each k. Only
    once the chain has reached a trigger: until then, the plan is of a full, and does not pay.

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
    chain = chain_to_merge(run, name, avoid=avoid)
    whole = plan_merge_of(run, chain, links=None, triggers=triggers)
    best = cheapest(weigh(whole.merges, triggers))
    if best is None or best.sizes.into_full:
        return whole
    part = plan_merge_of(run, chain, links=best.sizes.merged, triggers=triggers)
    # What is reached by the chain as a whole need not be by these links alone.
    return part if part.pays else replace(part, pays=True, reason=whole.reason)


def weigh(
    merges: Sequence[MergeSizes], triggers: ConsolidationTriggers
) -> tuple[WeighedMerge, ...]:
    """What each merge of a chain costs for what it saves.

    The cost is the bytes read and written, over the share of the way back that they buy: of the
    manifests beyond the one of a full, where the chain is too long, and of the bytes that a restore
    reads beyond those of a full, where these are too many, or too many rows dead; of the smaller
    share where it is both. A chain that goes on growing as it did comes to its trigger again after
    a time in proportion to that share, so that the cost is what keeping it below takes over time. A
    full takes it all the way back, for the bytes of everything; merging fewer links leaves alone
    what was merged before, or what has little in common with the newest.

    An increment counts only if it leaves at least half of the way to each trigger that was reached.
    What it saves is what is known without reading chunks (`live_rows`).

    Args:
        merges: of `merge_sizes`; the last is into a full.
        triggers: from when on it pays. Before that nothing has a cost.
    """
    if not merges:
        return ()
    whole = merges[-1]
    reached = triggers.reached(whole)
    too_long, too_large = "links" in reached, bool(reached.keys() - {"links"})
    weighed = []
    for merge in merges:
        why_not, shares = "", [1.0] * merge.into_full
        if not reached:
            why_not = "no trigger is reached"
        elif not merge.into_full:
            if too_long:
                shares.append((merge.links_before - merge.links_after) / (merge.links_before - 1))
                if merge.links_after - 1 > (triggers.links - 1) * _LEFT:
                    why_not = "leaves many manifests"
            if too_large:
                shares.append(_saved_bytes(merge) / max(1, _saved_bytes(whole)))
                if shares[-1] <= 0 or _leaves_much(merge, whole, triggers):
                    why_not = "may leave much dead"
        moved = merge.read_bytes + merge.write_bytes
        cost = None if why_not else moved / min(shares)
        weighed.append(WeighedMerge(sizes=merge, cost_bytes=cost, why_not=why_not))
    return tuple(weighed)


def cheapest(weighed: Sequence[WeighedMerge]) -> WeighedMerge | None:
    """The one to follow: of the lowest cost, and of those the one of most links; None: none."""
    costs = [
        (one.cost_bytes, -one.sizes.merged, one) for one in weighed if one.cost_bytes is not None
    ]
    return min(costs, key=lambda cost: cost[:2])[2] if costs else None


def _saved_bytes(merge: MergeSizes) -> int:
    """That a restore reads less; at least."""
    return merge.restore_bytes_before - merge.restore_bytes_after


def _leaves_much(merge: MergeSizes, whole: MergeSizes, triggers: ConsolidationTriggers) -> bool:
    """Whether a restore may afterwards read more than half of what a trigger allows."""
    ratio = merge.restore_bytes_after / max(1, whole.restore_bytes_after)
    rows = merge.restore_rows_after
    dead_share = (rows - whole.write_rows) / max(1, rows)
    return (
        ratio - 1 > (triggers.restore_ratio - 1) * _LEFT or dead_share > triggers.dead_share * _LEFT
    )
