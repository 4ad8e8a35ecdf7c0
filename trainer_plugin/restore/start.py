"""Starts a trainer on a run: validates the request, restores all ranks, takes the run over."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol

from torch import Tensor

from recpoint.catalog.restore.order import RestoreOrder, Selection, candidates
from recpoint.catalog.restore.restore import RestoreReport, restore
from recpoint.catalog.run.leases import reading
from recpoint.catalog.run.repair import left_by_going_back, line_to_go_on
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import Doubts
from recpoint.catalog.store.contract import Store
from recpoint.catalog.store.run_url import naming_errors
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.catalog.store.store import S3Timeouts, open_store
from recpoint.embeddings.tables import Table
from recpoint.errors import (
    ChainError,
    FormatError,
    ObjectNotFound,
    RankLost,
    RecpointError,
    RetentionRefused,
    SettingsError,
    UnsupportedVersion,
)
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from recpoint.format.records import CheckpointRef, GenerationRecord
from recpoint.trainer_plugin.policy import BaseHistory, Policy, Tip
from recpoint.trainer_plugin.ranks.agreement import incomplete_parts
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.restore.target import (
    ModelTarget,
    PartialTarget,
    Seed,
    parts_of,
    tip_of,
)
from recpoint.trainer_plugin.schedule.outlook import left_behind, past_of, with_left_behind
from recpoint.trainer_plugin.settings import Past
from recpoint.trainer_plugin.snapshot.staging import StagingArea
from recpoint.trainer_plugin.state import rng
from recpoint.trainer_plugin.state.training_state import TrainingState

__all__ = [
    "Job",
    "Start",
    "Wanted",
    "announce_start",
    "open_run",
    "restore_together",
    "start_training",
    "store_of",
    "take_area",
]


# Tells people of a start: what was restored, without what, and what is left behind.


_log = logging.getLogger("recpoint")


def tell_restored(run: Run, report: RestoreReport) -> None:
    """Log what was restored, and what without: newer checkpoints, damaged forms of this one."""
    known = report.validation
    state = known.in_words if known else "not validated"
    _log.info("%s is restored: %s", report.restored, state)
    for name, error in report.skipped:
        _log.warning("%s is not restored: %s", name, error)
    for key, error in report.passed_over:
        _log.warning("restored without %s: %s", key, error)


def announce_start(run_url: str, report: RestoreReport | None, *, resumed: bool, left: int) -> None:
    """Print one line to stderr, which people see without any logging set up.

    Args:
        run_url: of the run.
        report: of what was restored; None: nothing was.
        resumed: whether training goes on where that checkpoint was cut.
        left: how many checkpoints are left behind, where training goes back.
    """
    if report is None:
        line = f"{run_url} begins: nothing is restored"
    elif not resumed:
        line = f"{run_url} begins with parts of {report.restored}"
    elif left:
        line = f"{run_url} goes back to {report.restored}: {left} checkpoint(s) are left behind"
    else:
        line = f"{run_url} is restored: {report.restored}"
    if sys.stderr is None:
        return
    try:
        print(f"recpoint: {line}", file=sys.stderr, flush=True)
    except Exception as error:
        # It is closed, or nobody reads it, or it is the user's own: training can begin.
        _log.warning("a line could not be printed to stderr: %s", error)


def tell_left(run: Run, record: GenerationRecord) -> int:
    """Log what going back leaves behind: in a script that always does, each restart does it.

    Returns:
        How many checkpoints are left behind.
    """
    try:
        left = left_by_going_back(run, record)
    except RecpointError:  # from a line that is damaged, a person has named a way on
        return 0
    if left:
        _log.warning(
            "%d checkpoint(s) that counted, up to %s, are left behind for %s. Next: take the step "
            "out of restore() before the next start, which would go back there once more",
            len(left),
            left[0],
            record.restored,
        )
    return len(left)


# Validates what a trainer asks `Checkpointer.restore` for.


class Wanted(NamedTuple):
    """What a trainer asks for, see `Checkpointer.restore`."""

    selection: Selection
    fresh: bool
    partial: Mapping[str, Sequence[str]] | None
    seed: Seed | None

    def check(self) -> None:
        """Check that all of it can be had at once.

        Raises:
            SettingsError: options that exclude each other, or that cannot be meant.
        """
        given = {
            "step": self.selection.step,
            "generation": self.selection.generation,
            "partial": self.partial,
            "seed": self.seed,
        }
        for one, others in (
            ("fresh", ("step", "generation", "partial", "seed")),
            ("seed", ("step", "generation", "partial")),
        ):
            if not getattr(self, one):
                continue
            for other in others:
                if given[other] is not None:
                    raise SettingsError(
                        f"restore({one}=...)",
                        found=f"{other} with it",
                        expected=f"{one} without {' or '.join(others)}",
                        next_step="see the docstring of Checkpointer.restore",
                    )
        if self.partial is not None:
            parts_of(self.partial)
        if not isinstance(self.seed, Seed | None):
            raise SettingsError(
                "restore(seed=...)",
                found=f"a {type(self.seed).__name__}",
                expected="a recpoint.Seed",
                next_step="seed=recpoint.Seed(URL, tables=..., dense=...)",
            )


# Restoring one and the same checkpoint on all ranks: rank 0 chooses, and claims the run.
#
# Rank 0 tells the others what to do, one order after another; they do it and say how it went. Each
# candidate is named, so that none of them looks at the store by itself and finds a newer one.


_GOOD: Final = 0
_DAMAGED: Final = 1
_FAILED: Final = 2


class RestoreOne(Protocol):
    """Restores one checkpoint into this rank."""

    def __call__(self, before: int | None, name: ManifestName) -> CheckpointRef | None:
        """Raises what `catalog.restore.restore.restore` does of a checkpoint that is named."""


class _Order(NamedTuple):
    """What rank 0 wants done: a checkpoint restored, or nothing more."""

    kind: Literal["restore", "claimed", "failed"]
    name: ManifestName | None = None
    record: GenerationRecord | None = None
    error: str = ""


class _KnownToAll(Exception):
    """A failure of which the other ranks have been told: none of them waits for another order."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__(failure)
        self.failure = failure


def claim_together(ranks: Ranks, claim: Callable[[], GenerationRecord]) -> GenerationRecord:
    """The generation record that rank 0 creates, on all ranks.

    Raises:
        RankLost: it could not; on rank 0 what `claim` raised.
    """
    if not ranks.several:
        return claim()
    if ranks.rank == 0:
        return _leading(ranks, claim)
    return _follow(ranks, None)


def restore_together(
    ranks: Ranks,
    run: Run,
    restore_one: RestoreOne,
    selection: Selection,
    *,
    above: int = 0,
) -> GenerationRecord:
    """Restore on all ranks what rank 0 finds to be the newest that is good on all, and claim.

    Args:
        ranks: of the job, several.
        run: the run.
        restore_one: restores a checkpoint into this rank.
        selection: see `catalog.restore.restore.restore`.
        above: see `Run.claim`.

    Returns:
        The record of the new generation; with `restored` None nothing was restored.

    Raises:
        NothingToRestore, FormatError, ChainError: on rank 0, as
            `catalog.restore.restore.restore`.
        RankLost: on the others when another rank could not go on.
    """
    if ranks.rank != 0:
        return _follow(ranks, restore_one)

    def restore_newest(before: int | None) -> CheckpointRef | None:
        doubts: Doubts | None = None
        if selection.named:
            names = candidates(run, selection, before=before)
        else:
            names = line_to_go_on(run, before=before)
            if not names:
                return None
            doubts = Doubts(run, validated_only=selection.validated_only)
        order = RestoreOrder(names, doubts, selection)
        for name in order:
            ranks.first(_Order("restore", name=name))
            found = _restore(ranks, restore_one, name)
            if isinstance(found, CheckpointRef):
                for one, why in order.skipped:
                    _log.warning("not restored on any rank: %s: %s", one, why)
                return found
            order.damaged(name, found)
        raise order.nothing_good(run, good="good on all ranks")

    if selection.named:
        return _leading(ranks, lambda: run.claim(restore_newest(None), above=above))
    return _leading(ranks, lambda: run.claim_from_newest(restore_newest, above=above))


def _leading(ranks: Ranks, claim: Callable[[], GenerationRecord]) -> GenerationRecord:
    try:
        record = claim()
    except RankLost:
        raise  # nobody listens
    except _KnownToAll as known:
        raise known.failure from None
    except BaseException as error:
        ranks.first(_Order("failed", error=f"{type(error).__name__}: {error}"))
        raise
    ranks.first(_Order("claimed", record=record))
    return record


def _follow(ranks: Ranks, restore_one: RestoreOne | None) -> GenerationRecord:
    while True:
        order: _Order = ranks.first()
        if order.kind == "restore":
            assert restore_one is not None and order.name is not None
            try:
                _restore(ranks, restore_one, order.name)
            except _KnownToAll as known:
                raise known.failure from None
        elif order.kind == "claimed":
            assert order.record is not None
            return order.record
        else:
            raise RankLost(
                f"rank 0 of {ranks.count}",
                found=order.error,
                expected="a checkpoint to restore, and the run claimed",
                next_step="see its log",
            )


def _restore(ranks: Ranks, restore_one: RestoreOne, name: ManifestName) -> CheckpointRef | str:
    """Restore a checkpoint on all ranks: which it was, or why not everywhere.

    Raises:
        _KnownToAll: what has nothing to do with damage.
        RankLost: another rank had that.
    """
    restored: CheckpointRef | None = None
    damage = ""
    failure: BaseException | None = None
    try:
        restored = restore_one(None, name)
    except UnsupportedVersion as error:
        failure = error
    except (FormatError, ChainError, ObjectNotFound, RetentionRefused) as error:
        damage = f"{type(error).__name__}: {error}"
    except BaseException as error:
        failure = error
    mine = _FAILED if failure is not None else _GOOD if restored is not None else _DAMAGED
    said = [result for (result,) in ranks.exchange("a checkpoint to restore", [mine])]
    failed = [rank for rank, result in enumerate(said) if result == _FAILED]
    if failure is not None:
        raise _KnownToAll(failure)
    if failed:
        raise RankLost(
            f"rank {', '.join(map(str, failed))} of {ranks.count}",
            found=f"an error while restoring {name}",
            expected=f"{name} restored on all ranks",
            next_step="see the log of that rank",
        )
    damaged = [rank for rank, result in enumerate(said) if result == _DAMAGED]
    if damaged:
        return damage or f"damaged, as rank {', '.join(map(str, damaged))} found"
    assert restored is not None
    return restored


# A trainer's start on a run: what it restores, and taking the run over (format §6.1, write
# order, rule 1).


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


def start_training(
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
        self.holds = target, report, rng.capture()
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
