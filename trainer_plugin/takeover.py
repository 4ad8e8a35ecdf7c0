"""A trainer's start on a run: what it restores, and taking the run over (format §6.1, W1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recpoint.catalog.restore import RestoreReport, restore
from recpoint.catalog.run import Run
from recpoint.format.records import CheckpointRef
from recpoint.trainer_plugin import rng_state
from recpoint.trainer_plugin.policy import Tip
from recpoint.trainer_plugin.restore_target import ModelTarget, PartialTarget, tip_of
from recpoint.trainer_plugin.tables import Table
from recpoint.trainer_plugin.training_state import TrainingState

__all__ = ["Start", "start_fresh", "start_from_parts", "start_restored"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where training starts.

    Attributes:
        generation: of this trainer; every earlier one is fenced off.
        batches_done: whose updates the model holds.
        tip: the chain that checkpoints may go on with; None: the first is a full.
        report: of the restore, when there was one.
    """

    generation: int
    batches_done: int = 0
    tip: Tip | None = None
    report: RestoreReport | None = None


def start_restored(run: Run, make: Callable[[], ModelTarget], *, step: int | None) -> Start:
    """Restore the newest checkpoint, or that of `step`, and go on from it.

    With nothing to restore, training starts from nothing. With checkpoints that are all damaged
    it does not: nobody should train for days before noticing.

    Raises:
        NothingToRestore: `step` is not there, or every checkpoint is damaged.
        IncompatibleModel: it does not fit; the model is untouched.
        StoreError: the store cannot be read or written.
    """
    last: list[tuple[ModelTarget, RestoreReport, dict[str, Any]]] = []

    def restore_newest(before: int | None) -> CheckpointRef | None:
        if step is None and not run.live_line(before=before):
            return None
        target = make()
        report = restore(run, target, step=step, before=before)
        last[:] = [(target, report, rng_state.capture())]
        return report.restored

    if step is None:
        record = run.claim_from_newest(restore_newest)
    else:
        record = run.claim(restore_newest(None))
    if not last:
        return Start(generation=record.generation)
    target, report, generators = last[0]
    # The client of an object store draws from python's generator; claiming came after restoring.
    rng_state.restore(generators)
    assert target.manifest is not None  # restore has finished it
    return Start(
        generation=record.generation,
        batches_done=target.batches_done,
        tip=tip_of(target.manifest),
        report=report,
    )


def start_from_parts(
    run: Run,
    tables: Sequence[Table],
    state: TrainingState,
    wanted: Mapping[str, Sequence[str]],
    *,
    step: int | None,
) -> Start:
    """Load parts of a checkpoint, and start a line of checkpoints of its own from there."""
    report = restore(run, PartialTarget(tables, state, wanted), step=step)
    return Start(generation=run.claim(None).generation, report=report)


def start_fresh(run: Run) -> Start:
    """Start from nothing, also when the run has checkpoints: they are superseded."""
    return Start(generation=run.claim(None).generation)
