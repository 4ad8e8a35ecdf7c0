"""Merges a checkpoint's chain into fewer manifests by moving stored rows (format §6.8).

The steps are functions of a run and plain values, so that a workflow engine can run each as a task:
`plan_consolidation`, then `merge_part` for each part of the plan, one after another because each
needs its share of memory, then `commit_consolidation`. Meanwhile the caller holds a lease
(`leases`). `consolidate` does all of this by itself. A step, or the whole, may be killed and called
again: keys and bytes follow from the sources.

`consolidate_around_damage` avoids damaged objects, as a restore does (format §6.8, consolidation
order, rule 3). Plans are made from manifests alone, so a damaged chunk is found only when it is
read; by then half of the plan may be done. If another chain of the checkpoint does not need the
manifest that names the chunk, a new plan uses that chain. The chunks written for the old plan
become orphans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from recpoint.catalog.consolidate.commit import commit_consolidation, committed_manifest, has_gap
from recpoint.catalog.consolidate.merge import merge_part
from recpoint.catalog.consolidate.plan import ConsolidationPlan
from recpoint.catalog.run.chain import DAMAGE, PassedOver, has_chunk_of
from recpoint.catalog.run.leases import reading
from recpoint.catalog.run.run import Run
from recpoint.errors import RecpointError
from recpoint.format.manifest import ChunkEntry

__all__ = [
    "Consolidated",
    "NOTHING_DONE",
    "blamed_source",
    "consolidate",
    "consolidate_around_damage",
    "passed_over_words",
]


Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Consolidated:
    """The outcome of a consolidation.

    Attributes:
        outcome: `"created"`: this call created the manifest; `"already"`: an earlier call did;
            `"not_needed"`: a full already restores the checkpoint.
        key: key of the consolidated manifest; empty if there is none.
        read_bytes: bytes read from the sources' chunks.
        written_bytes, chunks: bytes and number of the chunks that the manifest names.
        seconds: time that it took.
    """

    outcome: Literal["created", "already", "not_needed"]
    key: str
    read_bytes: int
    written_bytes: int
    chunks: int
    seconds: float


def consolidate(
    run: Run, plan: ConsolidationPlan, *, on_progress: Progress | None = None
) -> Consolidated:
    """Run all steps of a plan.

    Memory: less than 512 MB, whatever the size of the tables and the number of ranks; beside that,
    one whole manifest, and for each source the entries of its chunks of one part's tables.
    Persists, restores, sweeps and other consolidations may run at the same time. After a kill, a
    call with the same plan, or with a new plan of the same sources, continues with the same keys.

    Args:
        run: the run.
        plan: from `plan_consolidation`.
        on_progress: called with bytes read so far and bytes to read, in this thread.

    Raises:
        ObjectNotFound, ChainError, FormatError: a source is damaged, or was deleted after the plan
            was made; nothing is committed.
        CommitConflict: the key has another manifest.
        StoreError: the store cannot be reached or refuses.
    """
    started = time.monotonic()
    if not plan.needed:
        return Consolidated(
            outcome="not_needed", key="", read_bytes=0, written_bytes=0, chunks=0, seconds=0.0
        )
    manifest = committed_manifest(run, plan)
    if manifest is None or has_gap(run, plan, manifest):
        entries: list[ChunkEntry] = []
        read = 0

        def account(bytes_read: int) -> None:
            nonlocal read
            read += bytes_read
            if on_progress is not None:
                on_progress(read, plan.read_bytes)

        # The lease protects the sources from a retention that may have begun (format §6.6).
        with reading(run, purpose="consolidate", covers=[run.manifest(*plan.target.name).ref]):
            for part in plan.parts:
                entries += merge_part(run, plan, part, on_read=account)
            outcome, manifest = commit_consolidation(run, plan, entries)
    else:
        outcome, read = "already", 0
    return Consolidated(
        outcome=outcome,
        key=plan.target.key,
        read_bytes=read + plan.state_bytes if read else 0,
        written_bytes=manifest.stored_bytes,
        chunks=len(manifest.chunks),
        seconds=time.monotonic() - started,
    )


#: The beginning of a report if there was nothing to merge.
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
        make_plan: makes a plan that avoids the given manifests; called with none at first.
        only_if_it_pays: do nothing before a trigger is reached.
        on_plan: called with each plan that is begun.
        on_progress: see `consolidate`.

    Returns:
        The last plan, whose `passed_over` says what is damaged; and the outcome, None if nothing
        was done.

    Raises:
        ObjectNotFound, ChainError, FormatError: the first plan failed, and no other plan avoids the
            damaged manifest or chunk; nothing is committed.
        RecpointError: other errors of `make_plan` and `consolidate`.
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
            damaged_source = blamed_source(run, plan, error)
            if damaged_source is None:
                raise first from None
            avoid = (*avoid, damaged_source)


def blamed_source(run: Run, plan: ConsolidationPlan, error: RecpointError) -> PassedOver | None:
    """Return the plan's source that is damaged or names the damaged chunk; None if none of them.

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
            continue  # deleted meanwhile, or damaged in another way; the next plan finds out
        if is_of_it:
            return PassedOver.of(source.key, error)
    return None


def passed_over_words(plan: ConsolidationPlan) -> str:
    """Return what a plan passed over, as text to append to the outcome; empty if nothing."""
    return "".join(f"; passed over {key}: {error}" for key, error in plan.passed_over)
