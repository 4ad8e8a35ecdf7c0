"""A trainer's start on a run: what it restores, and taking the run over (format §6.1, W1)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from recpoint.catalog.records.leases import reading
from recpoint.catalog.restoring.restore import RestoreReport, restore
from recpoint.catalog.restoring.selection import Selection
from recpoint.catalog.runs.run import Run
from recpoint.catalog.runs.superseded import line_to_go_on
from recpoint.catalog.stores.io_scheduler import ReadScheduler
from recpoint.catalog.stores.run_url import naming_errors
from recpoint.catalog.stores.store import S3Timeouts, open_store
from recpoint.catalog.stores.store_contract import Store
from recpoint.embeddings.tables import Table
from recpoint.errors import FormatError, ObjectNotFound, SettingsError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from recpoint.format.records import CheckpointRef, GenerationRecord
from recpoint.trainer_plugin import rng_state
from recpoint.trainer_plugin.base_history import BaseHistory
from recpoint.trainer_plugin.failures import Past
from recpoint.trainer_plugin.parts import Seed, parts_of
from recpoint.trainer_plugin.past import left_behind, past_of, with_left_behind
from recpoint.trainer_plugin.policy import Policy, Tip
from recpoint.trainer_plugin.rank_agreement import incomplete_parts
from recpoint.trainer_plugin.rank_restore import claim_together, restore_together
from recpoint.trainer_plugin.ranks import Ranks
from recpoint.trainer_plugin.restore_target import ModelTarget, PartialTarget, tip_of
from recpoint.trainer_plugin.staging import StagingArea
from recpoint.trainer_plugin.start_log import tell_left, tell_restored
from recpoint.trainer_plugin.training_state import TrainingState
from recpoint.trainer_plugin.wanted_start import Wanted

__all__ = ["Job", "Start", "open_run", "start", "store_of", "take_area"]

_log = logging.getLogger("recpoint")

#: A start tries again when the store refuses a call. Later calls through this store do so too.
_TIMEOUTS: Final = S3Timeouts(refused_seconds=30.0)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where training starts.

    Attributes:
        generation: of this trainer; every earlier one is fenced off.
        batches_done: whose updates the model holds.
        tip: the chain that checkpoints may go on with; None: the first is a full.
        base_history: of what stands on the base of the tip.
        changed: `Table.key` -> rows that differ from the tip, a dirty bitmap; not given: none.
        report: of the restore, when there was one.
        resumed: whether training goes on where it was, random generators included.
        left: how many checkpoints are left behind, where training goes back; rank 0 knows.
        past: what the state has been through.
        token: of the generation's record.
    """

    generation: int
    token: str = ""
    batches_done: int = 0
    tip: Tip | None = None
    base_history: BaseHistory | None = None
    changed: Mapping[str, Tensor] = field(default_factory=dict)
    report: RestoreReport | None = None
    resumed: bool = False
    left: int = 0
    past: Past = Past()


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """The model that is restored into, and who trains it.

    Attributes:
        ranks: all of them.
        tables: what this rank holds.
        names: of all tables, over all ranks.
        state: everything else.
        staged: the highest generation that anything staged on their hosts is of; 0: there is none.
    """

    ranks: Ranks
    tables: Sequence[Table]
    names: Collection[str]
    state: TrainingState
    staged: int = 0

    def target(self, *, since_full: bool) -> ModelTarget:
        """What a checkpoint is restored into here."""
        return ModelTarget(
            self.tables,
            self.state,
            since_full=since_full,
            rank=self.ranks.rank,
            count=self.ranks.count,
            elsewhere=self.names,
        )


def store_of(url: str) -> Store:
    """The store of a run that a trainer starts on, or starts with parts of; nothing is read yet.

    Raises:
        SettingsError: see `open_store`.
    """
    return open_store(url, timeouts=_TIMEOUTS)


#: Of each rank: generation and step -> rank -> how many ranks take part (`StagingArea.parts_here`).
StagedParts = list[dict[tuple[int, int], dict[int, int]]]


def take_area(area: StagingArea, ranks: Ranks) -> StagedParts:
    """Take the staging area; on all ranks or on none.

    Args:
        area: this rank's.
        ranks: all of them.

    Returns:
        What earlier trainers have left there.

    Raises:
        StagingError: it cannot be used, or another process trains here.
        RankLost: another rank cannot.
    """
    failure: BaseException | None = None
    try:
        area.create()
        area.lock()
        area.withdraw_cancels()
        parts = area.parts_here()
    except BaseException as error:
        failure, parts = error, {}
    ranks.agree(failure, doing="taking the staging area")
    return ranks.gather(parts)


def open_run(
    store: Store, area: StagingArea, ranks: Ranks, staged_parts: StagedParts, drain_seconds: float
) -> Run:
    """The run, once an agent has finished what it can; on all ranks or on none.

    Args:
        store: where the run is, or is to be.
        area: this rank's.
        ranks: all of them.
        staged_parts: as `take_area` returned them.
        drain_seconds: how long an agent may take for what an earlier trainer has staged.

    Raises:
        StagingError, StoreError: area or store cannot be used.
        RankLost: another rank cannot.
    """
    run: Run | None = None
    failure: BaseException | None = None
    try:
        waiting = area.wait_until_drained(drain_seconds, incomplete_parts(staged_parts))
        if waiting:
            _log.warning(
                "%d staged checkpoint(s) of an earlier trainer are left behind: %s. Next: keep an "
                "agent running: %s",
                waiting,
                ", ".join(path.stem for path in area.jobs()),
                area.agent_command(),
            )
        if ranks.rank == 0:
            run = Run.create(store)
    except BaseException as error:
        failure = error
    ranks.agree(failure, doing="opening the run and its staging area")
    return Run.open(store) if run is None else run


def start(
    run: Run,
    job: Job,
    policy: Policy,
    wanted: Wanted,
) -> Start:
    """Restore what is wanted, and take the run over; on all ranks together.

    Raises:
        NothingToRestore: the step is not there, every checkpoint is damaged, or none counts.
        IncompatibleModel: it does not fit; the model is untouched.
        StoreError: a store cannot be read or written.
        SettingsError: several ranks are to start with parts of a checkpoint.
        RankLost: a rank did not answer, or failed.
    """
    tables, state, selection = job.tables, job.state, wanted.selection
    if job.ranks.several and (wanted.partial is not None or wanted.seed is not None):
        raise SettingsError(
            "restore(partial=...)" if wanted.partial is not None else "restore(seed=...)",
            found=f"{job.ranks.count} ranks",
            expected="one process",
            next_step="load the parts in one process, take a checkpoint there, and restore it here",
        )
    if wanted.fresh:
        # Also when the run has checkpoints: they are superseded.
        return begun(claim_together(job.ranks, lambda: run.claim(None, above=job.staged)))
    if wanted.partial is not None:
        if not selection.named:
            line_to_go_on(run, partial=True)
        target = PartialTarget(tables, state, parts_of(wanted.partial))
        with reading(run, purpose="restore") as lease:
            report = restore(run, target, selection, leased=lease is not None)
        tell_restored(run, report)
        return _begun_with(target, report, run.claim(None, above=job.staged).generation)
    started = _start_restored(run, job, policy, selection)
    if started.resumed or wanted.seed is None:
        return started
    return _start_seeded(tables, state, wanted.seed, started.generation)


def _start_restored(run: Run, job: Job, policy: Policy, selection: Selection) -> Start:
    """Restore the checkpoint that is selected, and go on from it.

    With nothing to restore, training starts from nothing. With checkpoints that are all damaged,
    all superseded, or none of them validated with `validated_only`, it does not: nobody should
    train for days before noticing.

    Raises:
        NothingToRestore: the step is not there, every checkpoint is damaged, or none counts.
        IncompatibleModel: it does not fit; the model is untouched.
        StoreError: the store cannot be read or written.
    """
    # At least until the claim: from then on what was restored is the newest of the live line, and
    # stays.
    with reading(run, purpose="restore") if job.ranks.rank == 0 else nullcontext() as lease:
        model = _ModelRestore(run, job, policy, selection, leased=lease is not None)
        if job.ranks.several:
            record = restore_together(job.ranks, run, model.restore, selection, above=job.staged)
        elif not selection.named:
            record = run.claim_from_newest(model.restore, above=job.staged)
        else:
            record = run.claim(model.restore(None), above=job.staged)
        if record.restored is None or model.holds is None:
            return begun(record)
        target, report, generators = model.holds
        assert target.manifest is not None  # restore has finished it
        tip: Tip | None = None
        base_history: BaseHistory | None = None
        if target.manifest.ranks == job.ranks.count:  # else no increment may stand on it
            tip, base_history = _chain_to_go_on(
                run, target.manifest, report, policy, record.generation
            )
    tell_restored(run, report)
    left = tell_left(run, record) if selection.named and job.ranks.rank == 0 else 0
    restarts = run.restarts(record.generation)
    # Ranks store one checkpoint in one width: what one of them can read of the store counts.
    decided = job.ranks.first(left_behind(run, record) if job.ranks.rank == 0 else None)
    past = past_of(target.manifest.history, report, restarts=restarts)
    # The client of an object store draws from python's generator; claiming, and removing the lease,
    # came after restoring.
    rng_state.restore(generators)
    return Start(
        generation=record.generation,
        token=record.token,
        batches_done=target.batches_done,
        tip=tip,
        base_history=base_history,
        changed=target.changed,
        report=report,
        resumed=True,
        left=left,
        past=with_left_behind(past, decided),
    )


class _ModelRestore:
    """Restores checkpoints into the model, as whoever claims the run asks for them.

    Attributes:
        holds: what the model was restored from last, with the generators as they were then; None:
            it is as it was.
    """

    def __init__(
        self, run: Run, job: Job, policy: Policy, selection: Selection, *, leased: bool
    ) -> None:
        self._run, self._job, self._policy, self._selection = run, job, policy, selection
        self._leased = leased
        self.holds: tuple[ModelTarget, RestoreReport, dict[str, Any]] | None = None

    def restore(self, before: int | None, name: ManifestName | None = None) -> CheckpointRef | None:
        """Restore one checkpoint; None: there is none to go on from.

        Args:
            before: leave out this generation and later ones; None: none.
            name: of the one to restore; None: the one that is selected.
        """
        run, selection = self._run, self._selection
        if name is None and not selection.named and not line_to_go_on(run, before=before):
            return None
        target = self._job.target(since_full=self._policy.cumulative)
        if name is None:
            report = restore(run, target, selection, before=before, leased=self._leased)
        else:
            report = restore(run, target, Selection.of(name), leased=self._leased)
        self.holds = target, report, rng_state.capture()
        return report.restored


def begun(record: GenerationRecord) -> Start:
    """Training starts from nothing."""
    return Start(generation=record.generation, token=record.token)


def _chain_to_go_on(
    run: Run, restored: Manifest, report: RestoreReport, policy: Policy, generation: int
) -> tuple[Tip | None, BaseHistory | None]:
    """What the first increment is taken after, and what stands on its base already.

    A cumulative increment is taken after the full, as if training had never been interrupted: that
    keeps restores at two manifests, and the policy's figures comparable. What increments of the
    chain held is dirty again for that.
    """
    if not policy.cumulative:
        tip = tip_of(restored)
        return tip, BaseHistory(tip.base, links_to_read=report.chain_length)
    full = restored
    if report.full != restored.ref:
        try:
            full = run.manifest(report.full.step, report.full.generation)
        except (FormatError, ObjectNotFound):
            return None, None  # read in another representation: the first checkpoint is a full
    tip = tip_of(full)
    history = BaseHistory(tip.base, stored_bytes=report.full_stored_bytes)
    # Oldest first, of the line that this start goes on with: it may have been superseded before.
    line = reversed(run.live_line(before=generation + 1))
    since = [name for name in line if tip.ref.step < name.step <= restored.step]

    def read(name: ManifestName) -> Manifest | None:
        try:
            return run.manifest(*name)
        except (FormatError, ObjectNotFound):
            return None  # it is missed in the figures, and nowhere else

    # Several at a time: with one_shot there may be thousands, and training waits.
    with ReadScheduler.of_records() as reads:
        for manifest in reads.results(since, read):
            if manifest is not None and manifest.links.base == tip.base:
                history.cut(manifest.ref)
                history.stored(manifest.ref, manifest.stored_bytes, links_to_read=2)
    return tip, history


def _start_seeded(
    tables: Sequence[Table], state: TrainingState, seed: Seed, generation: int
) -> Start:
    """Begin a run that has no checkpoint with parts of another's."""
    target = PartialTarget(tables, state, seed.parts)
    store = store_of(seed.url)
    with naming_errors(store.url):  # the source, not the run that begins
        source = Run.open(store)
    with reading(source, purpose="restore") as lease:
        report = restore(source, target, seed.selection, leased=lease is not None)
    tell_restored(source, report)
    return _begun_with(target, report, generation)


def _begun_with(target: PartialTarget, report: RestoreReport, generation: int) -> Start:
    """Another job begins here: what the rows have lost stays with them, and nothing else does."""
    assert target.manifest is not None  # restore has finished it
    lossy = past_of(target.manifest.history, report, restarts=0).lossy_restores
    return Start(generation=generation, report=report, past=Past(lossy_restores=lossy))
