"""Sweeps from a host: its staged jobs and slots first, then the store."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from recpoint.catalog.retention.staged import StagedWork, run_is_gone
from recpoint.catalog.retention.sweep import SweepPlan, SweepResult, execute, plan_sweep
from recpoint.catalog.run.facts import OnStep, unwatched
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import area
from recpoint.catalog.staging.agent import at_work
from recpoint.catalog.staging.free import FreeSlot, free_slots, has_ended
from recpoint.catalog.store.contract import Store
from recpoint.errors import FormatError, NothingToRestore, RunRecordLost

__all__ = ["NOTHING_LEFT", "SweptHere", "knows_what_is_staged", "sweep_here", "swept_words"]


# What a sweep knows of staged jobs, which only the trainer's own host can know (format §6.5).


def knows_what_is_staged(run: Run, run_dir: Path) -> bool:
    """Whether `run_dir` is where the newest trainer of a run stages its checkpoints.

    That trainer was started on this host, and the directory is in use: its trainer or an agent is
    running, or jobs are staged. A directory that an earlier trainer has left behind is no sign, nor
    is a sweep or drain: anybody may begin one anywhere.

    Args:
        run: the run.
        run_dir: its directory in a staging area of this host, whether it is there or not.

    Raises:
        StoreError: the store cannot be read.
    """
    other = at_work(run_dir.parent)
    in_use = run_dir.is_dir() and (
        area.trainer_is_running(run_dir)
        or (other is not None and not other.ends_by_itself)
        or bool(area.staged_jobs(run_dir))
    )
    numbers = run.generation_numbers() if in_use else []
    named = max((name.generation for name in run.manifest_names()), default=0) if numbers else 0
    if not numbers or numbers[-1] < named:
        return False  # nobody can tell whose a generation is whose record is lost
    try:
        return run.generation(numbers[-1]).host == socket.gethostname()[:255]
    except FormatError:
        return False  # damaged: nobody can tell whose it is


# A whole sweep from a host: what is staged there, the slots of its trainers, and the store.


#: Ends what is said of a sweep after which no other is worth while, until something is written.
NOTHING_LEFT: Final = "nothing is left for a later one"


@dataclass(frozen=True, kw_only=True)
class SweptHere:
    """What a sweep has done, or would do.

    Attributes:
        run: that was swept.
        work: what became, or would become, of staged jobs.
        slots: that were, or would be, removed.
        plan: for the store.
        result: what was done of it; None: a dry run.
    """

    run: Run
    work: StagedWork
    slots: tuple[FreeSlot, ...]
    plan: SweepPlan
    result: SweepResult | None

    @property
    def nothing_left(self) -> bool:
        """Whether nothing was to be done, and nothing of what is there comes to be, with time."""
        plan, result = self.plan, self.result
        later = plan.kept or plan.blocked or plan.young or self.work.jobs or self.slots
        return result is not None and not (result.removed or result.spared or later)


def sweep_here(
    store: Store,
    run_dir: Path,
    *,
    grace_seconds: float,
    include_newest: bool = False,
    dry_run: bool = False,
    on_step: OnStep = unwatched,
) -> SweptHere:
    """Finish what is staged here, unless an agent does; then remove what nobody will ever need.

    Killed anywhere, the next one does the rest.

    Args:
        store: of the run.
        run_dir: the run's directory in the staging area of this host, whether it is there or not.
        grace_seconds: see `plan_sweep`.
        include_newest: remove also what only the newest trainer could still commit: when no host
            has it staged any more.
        dry_run: only say what would be done; nothing is written.
        on_step: called after each step, from this thread.

    Raises:
        NothingToRestore: there is no run; the message says what is staged for it here.
        FormatError: a staged job cannot be read, and an agent is there to reject it.
        StagingError, OSError: the staging area cannot be used.
        StoreError: the store cannot be read, or refuses.
    """
    try:
        run = Run.open(store)
    except RunRecordLost:
        raise
    except NothingToRestore as error:
        raise run_is_gone(error, run_dir) from None
    # Before anything is finished: what was staged is a sign of who the newest trainer is.
    knows = knows_what_is_staged(run, run_dir)
    work = _staged_work(run, run_dir, dry_run, on_step)
    slots = free_slots(
        run_dir,
        ended=has_ended(run, run_dir),
        grace_seconds=grace_seconds,
        besides=work.would_go,
        dry_run=dry_run,
    )
    plan = plan_sweep(
        run,
        grace_seconds=grace_seconds,
        keep=partial(area.staged_attempts, run_dir, besides=work.unreadable),
        spare_newest=not (include_newest or knows),
        ask_store=not dry_run,
        on_step=on_step,
    )
    result = None if dry_run else execute(run, plan, on_step=on_step)
    return SweptHere(run=run, work=work, slots=tuple(slots), plan=plan, result=result)


def swept_words(swept: SweptHere) -> str:
    """What a sweep has done, in a line: what it removed, and what a person has to do about it."""
    plan, result = swept.plan, swept.result
    assert result is not None
    said = [
        f"Removed {len(result.removed)} objects, {result.removed_bytes} bytes",
        f"{len(result.spared)} turned out to be needed",
    ]
    if plan.lost:
        more = f" (and {len(plan.lost) - 1} more)" if len(plan.lost) > 1 else ""
        said.append(f"chunks were kept, since {plan.lost[0]}{more}: recpoint check {swept.run.url}")
    if swept.nothing_left:
        said.append(NOTHING_LEFT)
    return "; ".join(said)


def _staged_work(run: Run, run_dir: Path, dry_run: bool, on_step: OnStep) -> StagedWork:
    if not run_dir.is_dir():
        return StagedWork()
    # Persisting imports torch, which takes longer than to say that nothing is staged here.
    from recpoint.catalog.retention.finish_staged import finish_staged, foresee_staged

    return foresee_staged(run, run_dir) if dry_run else finish_staged(run_dir, on_step=on_step)
