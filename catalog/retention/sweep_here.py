"""Sweeps a run from a host: finishes its staged jobs, frees its slots, then sweeps the store."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import partial
from typing import Final

from recpoint.catalog.retention.discard_staged import run_is_gone
from recpoint.catalog.retention.staged import StagedWork, left_to
from recpoint.catalog.retention.sweep import (
    SweepPlan,
    SweepResult,
    execute,
    plan_sweep,
    spared_words,
)
from recpoint.catalog.run.facts import OnStep, unwatched
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.agent_lock import at_work
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.free import FreeSlot, free_slots, has_ended
from recpoint.catalog.store.contract import Store
from recpoint.errors import FormatError, NothingToRestore, RunRecordLost

__all__ = ["NOTHING_LEFT", "SweptHere", "knows_what_is_staged", "sweep_here", "swept_words"]


def knows_what_is_staged(run: Run, staged_run: StagedRun) -> bool:
    """Tell whether the newest trainer of a run stages its checkpoints in `staged_run`.

    This is so if that trainer was started on this host and the directory is in use: its trainer or
    an agent is running, or jobs are staged. A directory that an earlier trainer has left is no
    sign; nor is a sweep or drain, because anybody may start one anywhere.

    Args:
        run: the run.
        staged_run: the run's directory in a staging area of this host; it need not exist.

    Raises:
        StoreError: the store cannot be read.
    """
    other = at_work(staged_run.staging)
    in_use = staged_run.exists() and (
        staged_run.trainer_is_running()
        or (other is not None and not other.ends_by_itself)
        or bool(staged_run.staged_jobs())
    )
    numbers = run.generation_numbers() if in_use else []
    named = max((name.generation for name in run.manifest_names()), default=0) if numbers else 0
    if not numbers or numbers[-1] < named:
        return False  # the newest generation's record is lost, so its host is unknown
    try:
        return run.generation(numbers[-1]).host == socket.gethostname()[:255]
    except FormatError:
        return False  # the record is damaged, so its host is unknown


#: The end of a sweep's report if a later sweep has nothing to do until something is written.
NOTHING_LEFT: Final = "nothing is left for a later one"


@dataclass(frozen=True, kw_only=True)
class SweptHere:
    """What a sweep has done, or would do.

    Attributes:
        run: the run that was swept.
        work: what became, or would become, of the staged jobs.
        slots: slots that were, or would be, removed.
        plan: the plan for the store.
        result: the outcome of the plan; None for a dry run.
    """

    run: Run
    work: StagedWork
    slots: tuple[FreeSlot, ...]
    plan: SweepPlan
    result: SweepResult | None

    @property
    def nothing_left(self) -> bool:
        """Whether nothing was removed or spared, and nothing may become removable with time."""
        plan, result = self.plan, self.result
        later = plan.kept or plan.blocked or plan.young or self.work.jobs or self.slots
        return result is not None and not (result.removed or result.spared or later)


def sweep_here(
    store: Store,
    staged_run: StagedRun,
    *,
    grace_seconds: float,
    include_newest: bool = False,
    dry_run: bool = False,
    on_step: OnStep = unwatched,
) -> SweptHere:
    """Finish the jobs staged here, unless an agent does; then remove objects that nobody will need.

    If it is killed, the next sweep does the rest.

    Args:
        store: the store of the run.
        staged_run: the run's directory in the staging area of this host; it need not exist.
        grace_seconds: see `plan_sweep`.
        include_newest: also remove attempts that only the newest trainer could still commit; for
            use when no host has them staged any more.
        dry_run: only report what would be done; nothing is written.
        on_step: called after each step, in this thread.

    Raises:
        NothingToRestore: there is no run; the message says what is staged for it here.
        FormatError: a staged job cannot be read, but an agent is running that will reject it.
        StagingError, OSError: the staging area cannot be used.
        StoreError: the store cannot be read, or refuses.
    """
    try:
        run = Run.open(store)
    except RunRecordLost:
        raise
    except NothingToRestore as error:
        raise run_is_gone(error, staged_run) from None
    # Before jobs are finished, because staged jobs show that the newest trainer stages here.
    knows = knows_what_is_staged(run, staged_run)
    work = _staged_work(run, staged_run, dry_run, on_step)
    slots = free_slots(
        staged_run,
        ended=has_ended(run, staged_run),
        grace_seconds=grace_seconds,
        besides=work.would_go,
        dry_run=dry_run,
    )
    plan = plan_sweep(
        run,
        grace_seconds=grace_seconds,
        keep=partial(job_files.staged_attempts, staged_run, besides=work.unreadable),
        spare_newest=not (include_newest or knows),
        ask_store=not dry_run,
        on_step=on_step,
    )
    result = None if dry_run else execute(run, plan, on_step=on_step)
    return SweptHere(run=run, work=work, slots=tuple(slots), plan=plan, result=result)


def swept_words(swept: SweptHere) -> str:
    """Return one line of what a sweep removed and kept, and what a person has to do about it."""
    plan, result = swept.plan, swept.result
    assert result is not None
    removed = f"Removed {len(result.removed)} objects, {result.removed_bytes} bytes"
    said = [removed + spared_words(result.spared)]
    if plan.lost:
        more = f" (and {len(plan.lost) - 1} more)" if len(plan.lost) > 1 else ""
        said.append(f"chunks were kept, since {plan.lost[0]}{more}: recpoint check {swept.run.url}")
    if swept.nothing_left:
        said.append(NOTHING_LEFT)
    return "; ".join(said)


def _staged_work(run: Run, staged_run: StagedRun, dry_run: bool, on_step: OnStep) -> StagedWork:
    if not staged_run.exists():
        return StagedWork()
    if (worker := at_work(staged_run.staging)) is not None:  # as in the daily sweep of an agent
        return left_to(worker, staged_run)
    # Imported only if jobs may be finished here, because it imports torch, which takes long.
    from recpoint.catalog.retention.finish_staged import finish_staged, foresee_staged

    return (
        foresee_staged(run, staged_run) if dry_run else finish_staged(staged_run, on_step=on_step)
    )
