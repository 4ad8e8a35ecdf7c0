"""Chooses the merge of a chain that costs least for what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from recpoint.catalog.consolidate.merge_sizes import MergeSizes
from recpoint.catalog.consolidate.plan import (
    ConsolidationPlan,
    ConsolidationTriggers,
    chain_to_merge,
    plan_merge_of,
)
from recpoint.catalog.run.chain import PassedOver
from recpoint.catalog.run.run import Run
from recpoint.format import paging
from recpoint.format.naming import ManifestName

__all__ = [
    "WeighedMerge",
    "cheapest",
    "choose_consolidation",
    "weigh",
]


#: After a merge into an increment, at most this share of the way to a trigger may be used up.
#: Otherwise the next merge would be due a few checkpoints later.
_LEFT: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class WeighedMerge:
    """A merge that a chain allows, and its cost as `weigh` computes it.

    Attributes:
        sizes: what it reads, writes and leaves.
        cost_bytes: bytes read and written, divided by the share of the excess that the merge
            removes; None if the merge must not be chosen.
        why_not: why it must not be chosen; empty if it has a cost.
    """

    sizes: MergeSizes
    cost_bytes: float | None
    why_not: str = ""


def choose_consolidation(
    run: Run,
    name: ManifestName,
    *,
    triggers: ConsolidationTriggers | None = None,
    avoid: Sequence[PassedOver] = (),
) -> ConsolidationPlan:
    """Plan the merge of a checkpoint's chain that costs least for what it saves, by `weigh`.

    It chooses between a merge of the whole chain into a full, and a merge of the newest k links
    into one increment for each k. Before the chain has reached a trigger, or if any merge may have
    too large a manifest, the plan is of a full and does not pay.

    Args:
        run: the run.
        name: the checkpoint.
        triggers: the thresholds at which it pays; None: the defaults.
        avoid: manifests not to use; see `plan_consolidation`.

    Returns:
        A plan; `pays` says whether to follow it now.

    Raises:
        RecpointError: the errors of `plan_consolidation`.
    """
    triggers = triggers or ConsolidationTriggers()
    chain = chain_to_merge(run, name, avoid=avoid)
    whole = plan_merge_of(run, chain, links=None, triggers=triggers)
    best = cheapest(weigh(whole.merges, triggers))
    if whole.pays and best is None:
        size_bytes = whole.merges[-1].most_manifest_bytes
        return replace(
            whole,
            pays=False,
            is_held_back=True,
            reason=f"{whole.reason}, but no merge is sure to have a manifest that readers accept: "
            f"that of a full may have {size_bytes:,} bytes of {paging.MAX_MANIFEST_BYTES:,}",
        )
    if best is None or best.sizes is whole.merges[-1]:
        return whole
    part = plan_merge_of(run, chain, links=best.sizes.merged, triggers=triggers)
    # The whole chain has reached a trigger, even if these links alone have not.
    return part if part.pays else replace(part, pays=True, reason=whole.reason)


def weigh(
    merges: Sequence[MergeSizes], triggers: ConsolidationTriggers
) -> tuple[WeighedMerge, ...]:
    """Return the cost of each merge of a chain in relation to what it saves.

    The cost is the bytes read and written, divided by the share of the chain's excess over a full
    that the merge removes. If the chain has too many links, the excess is the manifests beyond the
    one of a full. If a restore reads too many bytes, or too many rows are dead, it is the bytes
    that a restore reads beyond those of a full. If both apply, the smaller share counts. A chain
    that keeps growing at the same rate reaches its trigger again after a time proportional to that
    share, so the cost is proportional to the bytes moved over time to stay below the trigger. A
    merge into a full removes all of the excess, but moves the bytes of everything. A merge of fewer
    links leaves alone rows that were merged before, or that the newest links rarely change.

    A merge whose manifest may be larger than readers accept is not allowed. A merge into an
    increment is allowed only if it leaves at least half of the way to each trigger
    that was reached. Its savings are those known without reading chunks (`LiveRows`).

    Args:
        merges: from `merge_sizes`; the last is into a full, or of all increments.
        triggers: the thresholds at which it pays; before one is reached no merge has a cost.
    """
    if not merges:
        return ()
    whole = merges[-1]
    reached = triggers.reached(whole)
    too_long, too_large = "links" in reached, bool(reached.keys() - {"links"})
    weighed = []
    for merge in merges:
        why_not, shares = "", [1.0] * (merge is whole)
        if not reached:
            why_not = "no trigger is reached"
        elif merge.may_be_too_large:
            why_not = "may have too large a manifest"
        elif merge is not whole:
            if too_long:
                shares.append((merge.links_before - merge.links_after) / (merge.links_before - 1))
                if merge.links_after - 1 > (triggers.links - 1) * _LEFT:
                    why_not = "leaves many manifests"
            if too_large:
                shares.append(_saved_bytes(merge) / max(1, _saved_bytes(whole)))
                if shares[-1] <= 0 or _leaves_much(merge, whole, triggers):
                    why_not = "may leave many dead rows"
        moved = merge.read_bytes + merge.write_bytes
        cost = None if why_not else moved / min(shares)
        weighed.append(WeighedMerge(sizes=merge, cost_bytes=cost, why_not=why_not))
    return tuple(weighed)


def cheapest(weighed: Sequence[WeighedMerge]) -> WeighedMerge | None:
    """Return the merge of the lowest cost, and among equals of the most links; None if none."""
    costs = [
        (merge.cost_bytes, -merge.sizes.merged, merge)
        for merge in weighed
        if merge.cost_bytes is not None
    ]
    return min(costs, key=lambda cost: cost[:2])[2] if costs else None


def _saved_bytes(merge: MergeSizes) -> int:
    """Return by how many bytes less a restore reads, at least."""
    return merge.restore_bytes_before - merge.restore_bytes_after


def _leaves_much(merge: MergeSizes, whole: MergeSizes, triggers: ConsolidationTriggers) -> bool:
    """Tell whether a restore may afterwards be past half of the way to a trigger."""
    ratio = merge.restore_bytes_after / max(1, whole.restore_bytes_after)
    rows = merge.restore_rows_after
    dead_share = (rows - whole.restore_rows_after) / max(1, rows)
    return (
        ratio - 1 > (triggers.restore_ratio - 1) * _LEFT or dead_share > triggers.dead_share * _LEFT
    )
