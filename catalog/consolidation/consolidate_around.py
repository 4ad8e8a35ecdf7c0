"""A consolidation that goes around what is damaged, as a restore does (format §6.8 C3).

Plans are made from manifests alone, so that a damaged chunk is found when it is read: by then half
a plan may be done. A new plan then does without the manifest that names the chunk, where another
chain of the checkpoint does; what was written for the old one are orphans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recpoint.catalog.consolidation.consolidate import Consolidated, Progress, consolidate
from recpoint.catalog.consolidation.consolidate_plan import ConsolidationPlan
from recpoint.catalog.runs.chain import DAMAGE, PassedOver, has_chunk_of
from recpoint.catalog.runs.run import Run
from recpoint.errors import RecpointError

__all__ = ["NOTHING_DONE", "blamed_source", "consolidate_around_damage", "passed_over_words"]

#: How a report begins where there was nothing to merge.
NOTHING_DONE = "nothing done"


def consolidate_around_damage(
    run: Run,
    make_plan: Callable[[Sequence[PassedOver]], ConsolidationPlan],
    *,
    only_if_it_pays: bool = False,
    on_plan: Callable[[ConsolidationPlan], None] | None = None,
    on_progress: Progress | None = None,
) -> tuple[ConsolidationPlan, Consolidated | None]:
    """Consolidate a checkpoint by the cheapest of its chains that turns out to be good.

    Args:
        run: the run.
        make_plan: plans it without the manifests it is given, which are none at first.
        only_if_it_pays: do nothing before a trigger is reached.
        on_plan: called with each plan that is begun.
        on_progress: see `consolidate`.

    Returns:
        the last plan, whose `passed_over` says what is damaged; and what was done, None if nothing.

    Raises:
        ObjectNotFound, ChainError, FormatError: what was wrong with the first plan, when no other
            does without the damaged manifest or chunk; nothing is committed.
        RecpointError: others, of `make_plan` and `consolidate`.
    """
    avoid: tuple[PassedOver, ...] = ()
    first: RecpointError | None = None
    while True:
        try:
            plan = make_plan(avoid)
        except DAMAGE as error:
            raise first or error from None
        if only_if_it_pays and not plan.pays:
            return plan, None
        if on_plan is not None:
            on_plan(plan)
        try:
            return plan, consolidate(run, plan, on_progress=on_progress)
        except DAMAGE as error:
            first = first or error
            found = blamed_source(run, plan, error)
            if found is None:
                raise first from None
            avoid = (*avoid, found)


def blamed_source(run: Run, plan: ConsolidationPlan, error: RecpointError) -> PassedOver | None:
    """Which of a plan's sources is damaged, or names what is; None: the error is of none of them.

    Raises:
        StoreError: the store cannot be reached.
    """
    for source in plan.sources:
        if source.key in error.subject:
            return PassedOver.of(source.key, error)
    for source in plan.sources:
        try:
            is_of_it = has_chunk_of(run.read_manifest(source), error)
        except DAMAGE:
            continue  # gone since, or another damage, which the next plan will find
        if is_of_it:
            return PassedOver.of(source.key, error)
    return None


def passed_over_words(plan: ConsolidationPlan) -> str:
    """What a plan passes over, to be put after what was done; empty if nothing."""
    return "".join(f"; passed over {key}: {error}" for key, error in plan.passed_over)
