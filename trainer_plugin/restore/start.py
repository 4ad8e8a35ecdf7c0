"""Starts a trainer on a run: validates the request, restores all ranks, takes over the run.

The order is that of format §6.1, write order, rule 1.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.foreign.contents import ForeignCheckpoint
from recpoint.catalog.foreign.recognize import is_absent, is_foreign, open_foreign
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import RestoreReport, restore
from recpoint.catalog.run.leases import reading
from recpoint.catalog.run.line_to_go_on import line_to_go_on
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import Store
from recpoint.catalog.store.run_url import naming_errors
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.catalog.store.store import S3Timeouts, open_store
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.tables.tables import Table
from recpoint.errors import (
    FormatError,
    NothingToRestore,
    ObjectNotFound,
    SettingsError,
)
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from recpoint.format.records import CheckpointRef, GenerationRecord
from recpoint.interrupts import Hold
from recpoint.trainer_plugin.policy import BaseHistory, Policy, Tip
from recpoint.trainer_plugin.ranks.agreement import incomplete_parts
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.restore.growth import Growth
from recpoint.trainer_plugin.restore.partial_target import PartialTarget
from recpoint.trainer_plugin.restore.parts import Seed, parts_of
from recpoint.trainer_plugin.restore.start_log import (
    tell_grown,
    tell_imported,
    tell_left,
    tell_restored,
)
from recpoint.trainer_plugin.restore.target import ModelTarget, tip_of
from recpoint.trainer_plugin.restore.together import claim_together, restore_together
from recpoint.trainer_plugin.restore.warm_start import WarmStart
from recpoint.trainer_plugin.schedule.outlook import left_behind, past_of, with_left_behind
from recpoint.trainer_plugin.settings import Past
from recpoint.trainer_plugin.snapshot.staging import StagingArea
from recpoint.trainer_plugin.state import rng
from recpoint.trainer_plugin.state.training_state import TrainingState

__all__ = ["Start", "StartRequest", "TrainerStarts", "TrainingJob", "store_of"]


_log = logging.getLogger("recpoint")


class StartRequest(NamedTuple):
    """The arguments of `Checkpointer.restore`.

    Attributes:
        selection: which checkpoint to restore.
        fresh: start a new line from nothing.
        partial: the parts to load; None: everything.
        seed: the parts of another run, or of another tool's checkpoint, to start from, if the run
            has no checkpoint.
    """

    selection: Selection
    fresh: bool
    partial: Mapping[str, Sequence[str] | Mapping[str, str]] | None
    seed: Seed | None

    def check(self) -> None:
        """Validate the arguments.

        Raises:
            SettingsError: two arguments exclude each other, or one is malformed.
        """
        arguments = {
            "step": self.selection.step,
            "generation": self.selection.generation,
            "partial": self.partial,
            "seed": self.seed,
        }
        for name, rivals in (
            ("fresh", ("step", "generation", "partial", "seed")),
            ("seed", ("step", "generation", "partial")),
        ):
            if not getattr(self, name):
                continue
            for rival in rivals:
                if arguments[rival] is not None:
                    raise SettingsError(
                        f"restore({name}=...)",
                        found=f"{rival} in the same call",
                        expected=f"{name} without {' or '.join(rivals)}",
                        next_step="see the docstring of Checkpointer.restore",
                    )
        if self.partial is not None:
            parts_of(self.partial)
        if not isinstance(self.seed, Seed | None):
            raise SettingsError(
                "restore(seed=...)",
                found=f"a {type(self.seed).__name__}",
                expected="a recpoint.Seed",
                next_step="pass seed=recpoint.Seed(URL, tables=..., dense=...)",
            )


#: Calls are repeated for this long if the store refuses them, also later calls through this store.
_TIMEOUTS: Final = S3Timeouts(refused_seconds=30.0)


@dataclass(frozen=True, kw_only=True)
class Start:
    """The state in which training starts.

    Attributes:
        generation: generation of this trainer; every earlier one is fenced off.
        token: token in the generation's record.
        batches_done: batches whose updates the model holds.
        tip: tip of the chain that checkpoints may extend; None: the first checkpoint is a full.
        base_history: the checkpoints on the tip's base.
        changed: `Table.key` -> dirty bitmap of the rows that differ from the tip; a table that is
            missing has none.
        report: report of the restore, if there was one.
        seeded_from: path of another tool's checkpoint whose parts were loaded; None: of none.
        resumed: whether training goes on exactly where it was, including random generators.
        left: number of checkpoints that are left behind because training goes back; only rank 0
            knows it.
        past: what happened on this line before the start.
    """

    generation: int
    token: str = ""
    batches_done: int = 0
    tip: Tip | None = None
    base_history: BaseHistory | None = None
    changed: Mapping[str, Tensor] = field(default_factory=dict)
    report: RestoreReport | None = None
    seeded_from: str | None = None
    resumed: bool = False
    left: int = 0
    past: Past = Past()


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingJob:
    """The model that is restored, and the ranks that train it.

    Attributes:
        ranks: the ranks of the job.
        tables: the tables that this rank holds.
        names: names of all tables, over all ranks.
        state: the training state outside tables.
        growth: knows which tables may have more rows than a checkpoint.
        cache: has the rows of cached tables; None: no table is cached.
    """

    ranks: Ranks
    tables: Sequence[Table]
    names: Collection[str]
    state: TrainingState
    growth: Growth
    cache: Cache | None = None

    def target(self, *, since_full: bool) -> ModelTarget:
        """Return the target into which this rank restores a checkpoint.

        Args:
            since_full: whether to find the rows that differ from the full of the chain.
        """
        return ModelTarget(
            self.tables,
            self.state,
            cache=self.cache,
            since_full=since_full,
            rank=self.ranks.rank,
            count=self.ranks.count,
            elsewhere=self.names,
            growth=self.growth,
        )


def store_of(url: str) -> Store:
    """Return the store of a run on which, or with parts of which, a trainer starts; reads nothing.

    Raises:
        SettingsError: see `open_store`.
    """
    return open_store(url, timeouts=_TIMEOUTS)


#: For each rank: (generation, step) -> rank -> number of ranks (`StagingArea.parts_here`).
StagedParts = list[dict[tuple[int, int], dict[int, int]]]


class TrainerStarts:
    """Starts this process as a trainer of a run: at first, and again at each rewind.

    Args:
        store: store of the run, which may not exist yet.
        area: staging area of this rank.
        job: the model and its ranks.
        policy: policy of the checkpoints to come.
        drain_seconds: how long to wait for the agent to store what an earlier trainer staged.
    """

    def __init__(
        self,
        store: Store,
        area: StagingArea,
        job: TrainingJob,
        policy: Policy,
        *,
        drain_seconds: float,
    ) -> None:
        self._store = store
        self._area = area
        self._job = job
        self._policy = policy
        self._drain_seconds = drain_seconds

    def start(self, request: StartRequest, hold: Hold) -> tuple[Run, Start]:
        """Take the staging area, restore what is wanted, and take over the run. Collective.

        After an error, the area is free again.

        Args:
            request: arguments of `Checkpointer.restore`.
            hold: lets a signal's handler interrupt the restore.

        Raises:
            RecpointError, BaseException: as `Checkpointer.restore`.
        """
        generators, gradients = rng.capture(), torch.is_grad_enabled()
        try:
            staged_parts = _take_area(self._area, self._job.ranks)
            # This may take long, so a signal may interrupt it: training has not begun, and a
            # repeated call overwrites what this one wrote.
            run, start = hold.let_through(lambda: self._taken_over(request, staged_parts))
            if not start.resumed:
                rng.restore(generators)  # as in rng.untouched
            self._area.take_over(start.generation)
        except BaseException:
            torch.set_grad_enabled(gradients)  # an interrupted `no_grad` may not have ended
            self._area.close()
            raise
        return run, start

    def _taken_over(self, request: StartRequest, staged_parts: StagedParts) -> tuple[Run, Start]:
        ranks = self._job.ranks
        run = _open_run(self._store, self._area, ranks, staged_parts, self._drain_seconds)
        generations = (generation for parts in staged_parts for generation, _ in parts)
        staged = max(generations, default=0)
        return run, _start_training(run, self._job, self._policy, request, staged=staged)


def _take_area(area: StagingArea, ranks: Ranks) -> StagedParts:
    """Take the staging area, on all ranks or on none. Collective.

    Args:
        area: staging area of this rank.
        ranks: the ranks of the job.

    Returns:
        The parts of checkpoints that earlier trainers have left there.

    Raises:
        StagingError: the area cannot be used, or another process trains here.
        RankLost: another rank cannot take its area.
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


def _open_run(
    store: Store, area: StagingArea, ranks: Ranks, staged_parts: StagedParts, drain_seconds: float
) -> Run:
    """Open or create the run, after the agent has finished what it can. Collective.

    Args:
        store: store of the run, which may not exist yet.
        area: staging area of this rank.
        ranks: the ranks of the job.
        staged_parts: as `_take_area` returned them.
        drain_seconds: how long to wait for the agent to store what an earlier trainer staged.

    Raises:
        StagingError, StoreError: area or store cannot be used.
        RankLost: another rank cannot use its area or the store.
    """
    run: Run | None = None
    failure: BaseException | None = None
    try:
        waiting = area.wait_until_drained(drain_seconds, incomplete_parts(staged_parts))
        if waiting:
            _log.warning(
                "%d staged checkpoint(s) of an earlier trainer are left behind, because they were "
                "not stored in time: %s. Next: keep an agent running: %s",
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


def _start_training(
    run: Run, job: TrainingJob, policy: Policy, request: StartRequest, *, staged: int
) -> Start:
    """Restore what is wanted, and take over the run. Collective.

    Args:
        run: the run.
        job: the model and its ranks.
        policy: policy of the checkpoints to come.
        request: arguments of `Checkpointer.restore`.
        staged: the highest generation of a checkpoint staged on the ranks' hosts; 0: none is.

    Raises:
        NothingToRestore: the run has no checkpoint of the step, every checkpoint is damaged, or
            none counts.
        IncompatibleModel: the checkpoint does not fit; the model is unchanged.
        StoreError: a store cannot be read or written.
        SettingsError: parts of a checkpoint were asked for with several ranks.
        RankLost: a rank did not answer, or failed.
    """
    tables, state, selection = job.tables, job.state, request.selection
    # Rank 0 decides for all: a path may be missing on another rank's host.
    foreign_seed = request.seed is not None and job.ranks.first(is_foreign(request.seed.url))
    if job.ranks.several and (
        request.partial is not None or (request.seed is not None and not foreign_seed)
    ):
        raise SettingsError(
            "restore(partial=...)" if request.partial is not None else "restore(seed=...)",
            found=f"{job.ranks.count} ranks",
            expected="one process",
            next_step="load the parts in one process, take a checkpoint there, and restore it here",
        )
    if request.fresh:
        # If the run has checkpoints, they are superseded.
        return _begun(claim_together(job.ranks, lambda: run.claim(None, above=staged)))
    if request.partial is not None:
        if not selection.named:
            line_to_go_on(run, partial=True)
        target = PartialTarget(tables, state, parts_of(request.partial))
        with reading(run, purpose="restore") as lease:
            report = restore(run, target, selection, leased=lease is not None)
        tell_restored(run, report)
        return _begun_with(target, report, run.claim(None, above=staged).generation)
    started = _start_restored(run, job, policy, selection, staged)
    if started.report is not None or request.seed is None:
        return started
    if foreign_seed:
        return _start_warm(job, request.seed, started.generation)
    return _start_seeded(tables, state, request.seed, started.generation)


def _start_restored(
    run: Run, job: TrainingJob, policy: Policy, selection: Selection, staged: int
) -> Start:
    """Restore the selected checkpoint, and go on from it.

    If the run has no checkpoint, training starts from nothing. If all checkpoints are damaged or
    superseded, or with `validated_only` none is validated, this raises an error: otherwise somebody
    might train for days before noticing.

    Raises:
        NothingToRestore: the run has no checkpoint of the step, every checkpoint is damaged, or
            none counts.
        IncompatibleModel: the checkpoint does not fit; the model is unchanged.
        StoreError: the store cannot be read or written.
    """
    # The lease protects the checkpoint from deletion until the claim. After the claim, it is the
    # newest checkpoint of the live line, which is kept.
    with reading(run, purpose="restore") if job.ranks.rank == 0 else nullcontext() as lease:
        model = _ModelRestore(run, job, policy, selection, leased=lease is not None)
        if job.ranks.several:
            record = restore_together(job.ranks, run, model.restore, selection, above=staged)
        elif not selection.named:
            record = run.claim_from_newest(model.restore, above=staged)
        else:
            record = run.claim(model.restore(None), above=staged)
        if record.restored is None or model.holds is None:
            return _begun(record)
        target, report, generators = model.holds
        assert target.manifest is not None  # restore has finished it
        if target.imported is not None:
            tell_imported(run, report, target.imported)
            return Start(
                generation=record.generation,
                token=record.token,
                report=report,
                past=Past(lossy_restores=_lossy_restores(target.manifest, report)),
            )
        tip: Tip | None = None
        base_history: BaseHistory | None = None
        # Otherwise no increment may be based on it: a whole chain has the same ranks and tables.
        if target.manifest.ranks == job.ranks.count and target.keeps_rows:
            tip, base_history = _chain_to_go_on(
                run, target.manifest, report, policy, record.generation
            )
    tell_restored(run, report)
    tell_grown(report, target.grown)
    left_count = tell_left(run, record) if selection.named and job.ranks.rank == 0 else 0
    restarts = run.restarts(record.generation)
    # All ranks must store a checkpoint in the same width, so what rank 0 reads counts for all.
    decided = job.ranks.first(left_behind(run, record) if job.ranks.rank == 0 else None)
    past = past_of(target.manifest.history, report, restarts=restarts)
    # The client of an object store draws from Python's generator, and after the restore it was used
    # to claim the run and to remove the lease.
    rng.restore(generators)
    return Start(
        generation=record.generation,
        token=record.token,
        batches_done=target.batches_done,
        tip=tip,
        base_history=base_history,
        changed=target.changed,
        report=report,
        resumed=True,
        left=left_count,
        past=with_left_behind(past, decided),
    )


class _ModelRestore:
    """Restores checkpoints into the model while the run is claimed.

    Attributes:
        holds: target and report of the last restore, and the random generators after it; None: the
            model is unchanged.
    """

    def __init__(
        self, run: Run, job: TrainingJob, policy: Policy, selection: Selection, *, leased: bool
    ) -> None:
        self._run, self._job, self._policy, self._selection = run, job, policy, selection
        self._leased = leased
        self.holds: tuple[ModelTarget, RestoreReport, dict[str, Any]] | None = None

    def restore(self, before: int | None, name: ManifestName | None = None) -> CheckpointRef | None:
        """Restore one checkpoint, and return which it was; None: there is none to go on from.

        Args:
            before: leave out this generation and later ones; None: leave out none.
            name: the checkpoint to restore; None: the selected checkpoint.
        """
        run, selection = self._run, self._selection
        if name is None and not selection.named and not line_to_go_on(run, before=before):
            return None
        target = self._job.target(since_full=self._policy.cumulative)
        if name is None:
            report = restore(run, target, selection, before=before, leased=self._leased)
        else:
            report = restore(run, target, Selection.of(name), leased=self._leased)
        self.holds = target, report, rng.capture()
        return report.restored


def _begun(record: GenerationRecord) -> Start:
    """Return the start of a training from nothing."""
    return Start(generation=record.generation, token=record.token)


def _chain_to_go_on(
    run: Run, restored: Manifest, report: RestoreReport, policy: Policy, generation: int
) -> tuple[Tip | None, BaseHistory | None]:
    """Return the checkpoint after which the first increment is taken, and the history of its base.

    A cumulative increment is taken after the full, as if training had never been interrupted. A
    restore then still reads two manifests, and the policy's numbers stay comparable. For this, the
    rows that increments of the chain held become dirty again.
    """
    if not policy.cumulative:
        tip = tip_of(restored)
        return tip, BaseHistory(tip.base, links_to_read=report.chain_length)
    full = restored
    if report.full != restored.ref:
        try:
            full = run.manifest(report.full.step, report.full.generation)
        except (FormatError, ObjectNotFound):
            # The restore read another representation of the full: begin with a new full.
            return None, None
    tip = tip_of(full)
    history = BaseHistory(tip.base, stored_bytes=report.full_stored_bytes)
    # Oldest first, on the line of this start, which may have been superseded before.
    line = reversed(run.live_line(before=generation + 1))
    later_names = [name for name in line if tip.ref.step < name.step <= restored.step]

    def read(name: ManifestName) -> Manifest | None:
        try:
            return run.manifest(*name)
        except (FormatError, ObjectNotFound):
            return None  # only the policy's numbers lack it

    # In parallel: with one_shot there may be thousands, and training waits.
    with ReadScheduler.of_records() as reads:
        for manifest in reads.results(later_names, read):
            if manifest is not None and manifest.links.base == tip.base:
                history.cut(manifest.ref)
                history.stored(manifest.ref, manifest.stored_bytes, links_to_read=2)
    return tip, history


def _start_seeded(
    tables: Sequence[Table], state: TrainingState, seed: Seed, generation: int
) -> Start:
    """Begin a run that has no checkpoint with parts of another run's checkpoint."""
    if seed.names:
        raise SettingsError(
            "Seed(names=...)",
            found=f"no checkpoint of another tool in {seed.url}",
            expected="names= only for such a checkpoint, in a local path",
            next_step="check the path; of a run, rename with Seed(tables={NEW: NAME})",
        )
    if is_absent(seed.url):
        raise NothingToRestore(
            seed.url,
            found="no file or directory at that path, and no run",
            expected="the URL of a run, or the path of another tool's checkpoint",
            next_step="check the path",
        )
    target = PartialTarget(tables, state, seed.parts)
    store = store_of(seed.url)
    with naming_errors(store.url):  # errors name the source, not the run that begins
        source = Run.open(store)
    with reading(source, purpose="restore") as lease:
        report = restore(source, target, seed.selection, leased=lease is not None)
    tell_restored(source, report)
    return _begun_with(target, report, generation)


def _start_warm(job: TrainingJob, seed: Seed, generation: int) -> Start:
    """Begin a run that has no checkpoint with parts of another tool's checkpoint. Collective."""
    ranks = job.ranks
    with ExitStack() as opened:
        # Before the first row is written, and before trainers that share rows wait for each other.
        with ranks.together(f"looking at {seed.url}"):
            checkpoint = opened.enter_context(_opened(seed))
            warm_start = WarmStart(
                checkpoint, seed, job.tables, job.state, cache=job.cache, elsewhere=job.names
            )
            warm_start.plan()
        with ranks.together(f"loading parts of {seed.url}"):
            warm_start.load()
    for line in (f"{checkpoint.form}, {seed.url}", *warm_start.lines()):
        _log.info("begins with: %s", line)
    return Start(generation=generation, seeded_from=seed.url)


def _opened(seed: Seed) -> ForeignCheckpoint:
    """Open another tool's checkpoint.

    Raises:
        SettingsError: the seed chooses among checkpoints.
        RecpointError: the checkpoint cannot be used.
    """
    if seed.selection != Selection():
        raise SettingsError(
            "Seed(step=..., validated_only=..., ...)",
            found=f"a choice among checkpoints with {seed.url}",
            expected="the path of one checkpoint of another tool, and no choice",
            next_step="leave the choice out",
        )
    return open_foreign(seed.url)


def _begun_with(target: PartialTarget, report: RestoreReport, generation: int) -> Start:
    """Return the start of another job, whose past is only the accuracy that its rows have lost."""
    assert target.manifest is not None  # restore has finished it
    past = Past(lossy_restores=_lossy_restores(target.manifest, report))
    return Start(generation=generation, report=report, past=past)


def _lossy_restores(manifest: Manifest, report: RestoreReport) -> int:
    """Return how often the restored rows have been rounded."""
    return past_of(manifest.history, report, restarts=0).lossy_restores
