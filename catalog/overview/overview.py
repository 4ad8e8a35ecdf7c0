"""Describes a run from its catalog: lag, stalls, bytes, chain, states, failures."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from recpoint import errors
from recpoint.catalog.run.chain import Chain
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import Verdict
from recpoint.catalog.staging.agent import AgentTrouble
from recpoint.errors import RecpointError
from recpoint.format.manifest import CacheUse, CopiedAhead, Manifest
from recpoint.format.records import EndRecord
from recpoint.format.retention_records import Plan
from recpoint.format.servers import AllServers
from recpoint.units import duration_text, time_text

__all__ = [
    "Age",
    "Alarm",
    "CAUSES",
    "CheckpointFacts",
    "Ended",
    "ExpiringManifest",
    "Failure",
    "Generation",
    "Histogram",
    "HistogramReading",
    "INTERVALS_OF_SILENCE",
    "Lag",
    "ManifestFigures",
    "RunOverview",
    "SECONDS",
    "ServersSeen",
    "StagedRisk",
    "Totals",
    "Validated",
    "alarms",
    "cause_of",
    "cause_of_name",
    "clock_note",
    "ended_lag",
    "expected_interval_seconds",
    "gone_lag",
    "kept",
    "lag_of",
    "longest_wait_seconds",
    "measured_interval_seconds",
    "pace",
    "restore_estimate",
    "state_of",
    "totals",
    "unreadable",
    "with_risk",
]


# Classifies failures of checkpoints, so that they can be counted and alerted on.
#
# The classes are few and fixed, so that they can be the values of a metric's label; the message
# has the details.


#: Most specific class first.
_BY_CLASS: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (errors.StoreUnavailable, "store_unavailable"),
    (errors.StoreThrottled, "store_throttled"),
    (errors.StoreAccessDenied, "store_denied"),
    (errors.StoreFull, "store_full"),
    (errors.StoreError, "store"),
    (errors.NothingToRestore, "run_missing"),
    (errors.StagingFull, "staging_full"),
    (errors.StagingError, "staging"),
    (errors.RecordTooLarge, "too_large"),
    (errors.FormatError, "damaged"),
    (errors.ChainError, "chain_broken"),
    (errors.CommitError, "superseded"),
    (errors.CheckpointCancelled, "cancelled"),
    (MemoryError, "memory"),
    (OSError, "host"),
)
_OTHER: Final = "other"

#: All classes.
CAUSES: Final = (*(cause for _, cause in _BY_CLASS), _OTHER)


def cause_of(error: BaseException) -> str:
    """Return the class of an error."""
    return _cause(type(error))


def cause_of_name(error_type: str) -> str:
    """Return the class of an error from its recpoint exception class's name, as in outcomes."""
    found = getattr(errors, error_type, None) if error_type in errors.__all__ else None
    return _cause(found) if isinstance(found, type) else _OTHER


def _cause(kind: type[BaseException]) -> str:
    return next((cause for base, cause in _BY_CLASS if issubclass(kind, base)), _OTHER)


# Counts durations in buckets, which a monitoring system can add up over hosts.


#: Bucket bounds in seconds, from a copy of a few rows to an object store on a bad day. Three for
#: each factor of ten tell 0.2 s from 0.5 s; nobody needs finer ones.
SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class HistogramReading(NamedTuple):
    """A histogram at one moment.

    Attributes:
        bounds: upper bounds of the buckets, inclusive, ascending, without infinity.
        counts: number of values in each bucket alone; the last is the number above all bounds.
        total: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Counts values; one thread at a time adds, any thread reads, and neither waits.

    A reading during an `add` may miss the value in the sum. That is harmless, because a monitoring
    system reads again.
    """

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count `value`."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> HistogramReading:
        """Return the counts so far."""
        return HistogramReading(self._bounds, tuple(self._counts), self._total)


# Describes a run from its catalog: lag, stalls, bytes, chain, states, failures.
#
# The functions here only compute; `watch.RunWatch` reads. So a page, a command and a metric agree.
# Nothing here asks Prefect, a trainer or an agent.
#
# Clocks: `snapshot_ms`, `staged_ms` and `committed_ms` of a checkpoint, `created_ms` of its
# generation and `ended_ms` of a trainer are by one clock, that of the trainer's host, where the
# agent runs too. Their differences (`stall`, `lag_seconds`, `at_risk_seconds` of a checkpoint) do
# not depend on whether that clock is right. How long ago something happened is an `Age`: this
# host's time less the store's time of the object, limited to the bounds that this process has
# observed with its monotonic clock.


#: A run is lagging when this many of its intervals have passed without a commit.
INTERVALS_OF_SILENCE = 3.0

#: Number of the newest gaps between checkpoints that figures are computed from.
_GAPS = 16

#: A difference of clocks above this is reported.
_CLOCK_SECONDS = 60.0

#: committed: stored, and nothing more is known. validated: its bytes have been compared (§10,
#: sample or full). failed, stateless: the result of its validation. damaged: its manifest is
#: unreadable. The catalog does not have staged checkpoints, and only records of rejected ones.
State = Literal["committed", "validated", "failed", "stateless", "damaged"]


class Age(NamedTuple):
    """How long ago something was written.

    Attributes:
        seconds: this host's time less the store's time of the object, limited to the bounds that
            this process has observed with its monotonic clock.
        clock: `store`, or `watched` if a bound was applied.
    """

    seconds: float
    clock: Literal["store", "watched"]

    @classmethod
    def of(cls, *, store_seconds: float, least: float, most: float | None) -> Age:
        """Make an age from the store's value and the bounds that this process has observed."""
        held = max(store_seconds, least) if most is None else min(max(store_seconds, least), most)
        return cls(held, "store" if held == store_seconds else "watched")


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """One checkpoint of the live line.

    Attributes:
        step, generation: its name.
        kind: `full` or `increment`, as it was taken.
        chain_length: number of manifests in its chain as it was taken, its own included.
        state: see `State`.
        validation: result of its validations; None: never validated.
        pins: names of its pins.
        expires: whether retention has marked all its manifests.
        merged: whether it has a consolidated manifest.
        snapshot_ms, staged_ms, committed_ms: when it was cut, durable in staging, committed; in
            milliseconds since the epoch.
        stall_seconds: how long training waited for it.
        lag_seconds: time from cut to commit.
        interval_seconds: time from the cut of the checkpoint before it, or from the start of its
            trainer if that is later, to its cut. None: the time before is not known.
        interval_batches: batches trained in that interval; exact.
        at_risk_seconds: training that a crash right before its commit would have lost: the
            interval, and the training until the commit, none of it after the trainer's end.
        at_risk_batches: the same in batches, at the pace of the interval; at most the batches that
            the trainer is known to have trained.
        stored_bytes: bytes of its chunks.
        full_bytes: bytes of a full, exact (fp32) checkpoint of the same state.
        copied_ahead: rows and bytes copied before its stall and in it; None: none was before.
        cache: what the cache of the trainer's tables did before it; None: no table was in a cache.
        error: what is wrong with its manifest; the other figures are then 0 or None.
    """

    step: int
    generation: int
    kind: Literal["full", "increment"]
    chain_length: int
    state: State
    validation: Verdict | None
    pins: tuple[str, ...]
    expires: bool
    merged: bool
    snapshot_ms: int
    staged_ms: int
    committed_ms: int
    stall_seconds: float
    lag_seconds: float
    interval_seconds: float | None
    interval_batches: int | None
    at_risk_seconds: float | None
    at_risk_batches: int | None
    stored_bytes: int
    full_bytes: int
    copied_ahead: CopiedAhead | None = None
    cache: CacheUse | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A start of the trainer: its number, its process, and the step it restored (None: nothing)."""

    number: int
    host: str
    pid: int
    created_ms: int
    age: Age
    restored_step: int | None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of the newest trainer, if it has ended by itself.

    Nothing is lost if there is a checkpoint of `step`. If `step` is 0 and there is no checkpoint,
    the trainer has counted no batch: what it trained is not known, and none of it is stored.

    Attributes:
        step: number of batches trained.
        reason: `finished`, `terminated` or `failed`.
        error: the exception that ended it; empty: none did.
        ended_ms: time in milliseconds since the epoch, by the clock of the trainer's host.
    """

    step: int
    reason: str
    ended_ms: int
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Lag:
    """What a crash at this moment would cost.

    Attributes:
        seconds: age of the state that a restore would bring back; None: there is none.
        silent_seconds: time since the last checkpoint that restores: as `seconds`, but at most the
            time that the newest trainer has been running. It grows after the end of training too.
        at_risk_seconds: training that would be lost with the trainer's host: the silence, and
            training of earlier trainers that does not restore any more. After the run has ended it
            is constant, and 0 if everything is stored. If the trainer is known to be gone, it is
            constant too: the training until the trainer's last sign of life.
        at_risk_batches: the same in batches, at the pace of the newest checkpoints; exact after the
            run has ended. None: not known, for instance if `overdue`, or if a run has ended and
            counted no batch. `at_risk_seconds` is then the largest possible loss.
        overdue: the run has not ended, and has been silent for longer than a checkpoint takes. The
            catalog cannot tell a dead trainer from one whose agent is dead. `at_risk_seconds` is
            then the loss if the trainer still trains, which is the largest possible.
        clock: the clock of the age, see `Age`.
        interval_seconds: time from one checkpoint to the next, as the trainer intends or as
            measured, whichever is longer; None: not known yet.
        intervals: `at_risk_seconds` in these intervals; None: not known.
        clock_note: a note if clocks disagree; empty if not.
    """

    seconds: float | None
    silent_seconds: float
    at_risk_seconds: float
    at_risk_batches: int | None
    overdue: bool
    clock: Literal["store", "watched"]
    interval_seconds: float | None
    intervals: float | None
    clock_note: str = ""


@dataclass(frozen=True, kw_only=True)
class StagedRisk:
    """The newest checkpoint that is staged on this host and not stored, and what comes after it.

    It survives the trainer, but not the host: an agent on this host stores it, if it does so before
    the next trainer starts.

    Attributes:
        step: number of batches trained.
        at_risk_seconds: training after its cut, which is lost if only the trainer dies, or which
            was lost with the trainer.
        at_risk_batches: the same in batches, at the pace of the newest checkpoints; exact after the
            run has ended. None: not known.
        trouble: why this host's agent cannot store what is staged; None: it does not say.
    """

    step: int
    at_risk_seconds: float
    at_risk_batches: int | None
    trouble: AgentTrouble | None = None


@dataclass(frozen=True, kw_only=True)
class RestoreEstimate:
    """The cost of a restore of the newest checkpoint that restores.

    Attributes:
        step, generation: that checkpoint.
        chain_length: number of links of its chain as it was taken.
        manifests_to_read: number of manifests in the cheapest chain, consolidated ones included.
        bytes_to_read: bytes of chunks, without samples.
        seconds: time at `bytes_per_second`; None: that is not known.
        bytes_per_second: speed at which the newest validation read, decoded and compared bytes;
            None: there was none.
    """

    step: int
    generation: int
    chain_length: int
    manifests_to_read: int
    bytes_to_read: int
    seconds: float | None
    bytes_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class ExpiringManifest:
    """A manifest that retention has marked: why (`""` if unreadable), and how long ago."""

    key: str
    reason: str
    age: Age


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Something that went wrong, as recorded in the catalog.

    Attributes:
        kind: `validation` (failed), `manifest` (unreadable), `chain` (broken), `restart` (a trainer
            was killed and its successor continued), `deletion` (announced and not finished),
            `record` (damaged or lost, but no checkpoint depends on it), `ranks` (a checkpoint waits
            for parts of some ranks), `rejected` (an agent found that a checkpoint can never be
            stored).
        subject: the object.
        cause: what is wrong with it.
        when_ms: time in milliseconds since the epoch, by the clock of the process that recorded it;
            None: not recorded.
        next_step: what to run or read next.
    """

    kind: Literal[
        "validation",
        "manifest",
        "chain",
        "restart",
        "superseded",
        "deletion",
        "record",
        "ranks",
        "rejected",
    ]
    subject: str
    cause: str
    when_ms: int | None
    next_step: str


@dataclass(frozen=True, kw_only=True)
class ServersSeen:
    """What the newest trainer has said last of its embedding servers.

    Attributes:
        servers: what it said; None: that cannot be read.
        age_seconds: how long ago, by this host's clock.
        trainer_lives: whether the trainer may say more. If not, its servers may be gone, too.
        error: why it cannot be read; empty: it was read.
    """

    servers: AllServers | None
    age_seconds: float
    trainer_lives: bool
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over `RunOverview.checkpoints`, without unreadable ones."""

    checkpoints: int
    stored_bytes: int
    full_bytes: int
    stall_seconds: float
    trained_seconds: float | None

    @property
    def share_of_full(self) -> float | None:
        """Stored bytes as a share of full fp32 checkpoints of the same states; None: none known."""
        return self.stored_bytes / self.full_bytes if self.full_bytes else None

    @property
    def stall_share(self) -> float | None:
        """Share of the time from first to last cut that training waited; None: too few cuts."""
        return self.stall_seconds / self.trained_seconds if self.trained_seconds else None


class Validated(NamedTuple):
    """A checkpoint that was validated, and the combined result of its validations."""

    step: int
    generation: int
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class RunOverview:
    """One run at one moment.

    Attributes:
        url, run: the run URL and the run's id.
        refreshed_ms: this host's time of the refresh, in milliseconds since the epoch.
        checkpoints: the newest of the live line, newest first.
        live_checkpoints, superseded_checkpoints: number of all such checkpoints.
        last_validated: the newest checkpoint of the whole live line that was validated; None: none
            was.
        generation: the newest trainer; None: none has started.
        restarts: number of starts of trainers on this line after the first.
        ended: the end of the newest trainer; None: it has not ended, or has not said so.
        gone_ms: the last sign of life of the newest trainer, if it is known to be gone without
            having said that it ended; in milliseconds since the epoch. Only the trainer's host
            knows that. None: it is not known to be gone.
        staged: see `StagedRisk`; None: nothing newer than `restore` is known to be staged. Only the
            trainer's host knows that.
        servers: see `ServersSeen`; None: it has none, or has said nothing of them yet. Only the
            host of rank 0 knows that.
        lag, totals: see their classes.
        restore: see `RestoreEstimate`; None: no checkpoint restores.
        plan: the plan of the newest retention; None: none has stored a plan.
        expiring: the manifests that are marked now.
        failures: newest first; those of unknown time last.
    """

    url: str
    run: str
    refreshed_ms: int
    checkpoints: tuple[CheckpointFacts, ...]
    live_checkpoints: int
    superseded_checkpoints: int
    last_validated: Validated | None
    generation: Generation | None
    restarts: int
    ended: Ended | None
    gone_ms: int | None
    staged: StagedRisk | None
    servers: ServersSeen | None
    lag: Lag
    restore: RestoreEstimate | None
    totals: Totals
    plan: Plan | None
    expiring: tuple[ExpiringManifest, ...]
    failures: tuple[Failure, ...]

    @property
    def newest(self) -> CheckpointFacts | None:
        """The newest checkpoint of the live line, whether it restores or not."""
        return self.checkpoints[0] if self.checkpoints else None

    @property
    def trainer_gone(self) -> bool:
        """Whether the newest trainer is known to be gone without having said that it ended."""
        return self.gone_ms is not None

    @property
    def counted_nothing(self) -> bool:
        """Whether the newest trainer has ended, and no trainer of this line counted a batch."""
        return self.ended is not None and self.ended.step == 0 and not self.checkpoints


#: Kinds of alarms.
Trouble = Literal[
    "no_commit",
    "failed",
    "superseded",
    "validation_failed",
    "chain_broken",
    "manifest_damaged",
]


class Alarm(NamedTuple):
    """Something that needs attention now, in one sentence, and what to do."""

    trouble: Trouble
    text: str
    next_step: str


def measured_interval_seconds(checkpoints: Sequence[CheckpointFacts]) -> float | None:
    """Return the time between cuts: the median of the newest gaps; None: there is none yet.

    Args:
        checkpoints: checkpoints of the live line, newest first.
    """
    gaps = [one.interval_seconds for one in checkpoints if one.interval_seconds is not None]
    gaps = [gap for gap in gaps[:_GAPS] if gap > 0]
    return statistics.median(gaps) if gaps else None


def alarms(
    overview: RunOverview,
    *,
    intervals: float = INTERVALS_OF_SILENCE,
    unknown_interval_seconds: float = 1800.0,
) -> tuple[Alarm, ...]:
    """Return what is wrong now, worst first; empty if nothing is.

    Args:
        overview: the run.
        intervals: number of the run's intervals without a commit that is too long.
        unknown_interval_seconds: time without a commit that is too long if the run's interval is
            not known.
    """
    found: list[Alarm] = []
    silence = (
        _failed(overview)
        or _uncounted(overview)
        or _gone(overview)
        or _silence(overview, intervals, unknown_interval_seconds)
    )
    if silence is not None:
        found.append(silence)
    troubles: dict[str, Trouble] = {
        "superseded": "superseded",
        "chain": "chain_broken",
        "manifest": "manifest_damaged",
        "validation": "validation_failed",
    }
    for failure in overview.failures:
        trouble = troubles.get(failure.kind)
        if trouble is not None:
            found.append(Alarm(trouble, f"{failure.subject}: {failure.cause}", failure.next_step))
    return tuple(found)


def _failed(overview: RunOverview) -> Alarm | None:
    generation, ended, restore = overview.generation, overview.ended, overview.restore
    if generation is None or ended is None or not ended.error:
        return None
    stored = "no checkpoint is stored" if restore is None else f"step {restore.step} is stored"
    return Alarm(
        "failed",
        f"the trainer (process {generation.pid} of {generation.host}) ended after step "
        f"{ended.step} with an exception, {ended.error} ({time_text(ended.ended_ms)} UTC); "
        f"{stored}",
        f"on {generation.host}: read the trainer's log, and start the training again",
    )


def _uncounted(overview: RunOverview) -> Alarm | None:
    if overview.ended is None or not overview.counted_nothing:
        return None
    ended = _ENDED[overview.ended.reason]
    return Alarm(
        "no_commit",
        f"training has {ended}, and its Checkpointer counted no batch: nothing is stored",
        "in the training script: call step() after each batch, or loop over batches(), which "
        "calls it; then train again",
    )


def _gone(overview: RunOverview) -> Alarm | None:
    generation, restore = overview.generation, overview.restore
    if generation is None or overview.gone_ms is None:
        return None
    stored = "no checkpoint is stored" if restore is None else f"step {restore.step} is stored"
    next_step = "start the training again"
    if overview.staged is not None:
        stored += f", and step {overview.staged.step} is staged"
        next_step = f"run recpoint agent, which stores what is staged, then {next_step}"
    return Alarm(
        "no_commit",
        f"the trainer (process {generation.pid} of {generation.host}) is gone and did not say that "
        f"it ended (last sign of life {time_text(overview.gone_ms)} UTC); {stored}",
        f"on {generation.host}: {next_step}",
    )


def _silence(
    overview: RunOverview, intervals: float, unknown_interval_seconds: float
) -> Alarm | None:
    lag, generation, ended = overview.lag, overview.generation, overview.ended
    if generation is None or (ended is not None and lag.at_risk_batches == 0):
        return None
    known = lag.interval_seconds
    silence = lag.silent_seconds
    if silence <= (unknown_interval_seconds if known is None else intervals * known):
        return None
    host = generation.host
    if ended is not None:
        return Alarm(
            "no_commit",
            f"training has {_ENDED[ended.reason]} after step {ended.step}, and its last "
            f"{lag.at_risk_batches} batches are not stored",
            f"on {host}: if a checkpoint is staged there, run recpoint agent, which stores it; a "
            "new start trains the other batches again",
        )
    what = f"no new checkpoint at all for {duration_text(silence)}"
    if overview.checkpoints:
        what = f"no new checkpoint that restores for {duration_text(silence)}"
    if lag.seconds is not None and lag.seconds > silence:
        # A trainer that has just started is silent for less time than the checkpoint is old.
        what += (
            f", since the newest trainer started; the newest is {duration_text(lag.seconds)} old"
        )
    if known is not None:
        what += f"; one is expected every {duration_text(known)}"
    next_step = "is the trainer alive, and recpoint agent running?"
    staged = overview.staged
    if staged is not None and staged.trouble is not None:
        error, next_step, tries = staged.trouble
        counted_tries = f"{tries} {'try' if tries == 1 else 'tries'}"
        what += f"; recpoint agent cannot store step {staged.step} ({counted_tries}): {error}"
        next_step = next_step or "read the log of recpoint agent"
    return Alarm("no_commit", what, f"on {host}: {next_step}")


#: Completes "training has …" by the reason of its end.
_ENDED: Final[dict[str, str]] = {
    "finished": "finished",
    "terminated": "been terminated",
    "failed": "failed",
}


def clock_note(*, store_less_trainer_seconds: float, ahead_seconds: float) -> str:
    """Return a note about clocks that differ by more than a minute; empty if they do not.

    Args:
        store_less_trainer_seconds: the store's time of the newest manifest less the commit time in
            the manifest.
        ahead_seconds: by how much the store's time of that object is after this host's time.
    """
    if ahead_seconds > _CLOCK_SECONDS:
        return f"the store's clock is {ahead_seconds:.0f} s ahead of this host's"
    apart = store_less_trainer_seconds
    if abs(apart) <= _CLOCK_SECONDS:
        return ""
    order = "after" if apart > 0 else "before"
    return (
        f"the store dates the newest manifest {abs(apart):.0f} s {order} its trainer did: their "
        "clocks differ, or the run was copied; ages are by the store's clock"
    )


# Computes the figures of an overview from the kept figures of manifests and generation records.


class ManifestFigures(NamedTuple):
    """The figures kept of a manifest, as the checkpoint was taken; `error` if it is unreadable."""

    kind: Literal["full", "increment"]
    chain_length: int
    snapshot_ms: int
    staged_ms: int
    committed_ms: int
    stall_us: int
    stored_bytes: int
    full_bytes: int
    due_ms: int | None
    due_batches: int | None
    copied_ahead: CopiedAhead | None
    cache: CacheUse | None
    error: str | None


def kept(manifest: Manifest) -> ManifestFigures:
    """Return the figures to keep of a manifest."""
    links = manifest.links
    return ManifestFigures(
        kind=links.kind,
        chain_length=links.chain_length,
        snapshot_ms=manifest.snapshot_ms,
        staged_ms=manifest.staged_ms,
        committed_ms=manifest.committed_ms,
        stall_us=manifest.stall_us,
        stored_bytes=manifest.stored_bytes,
        full_bytes=manifest.full_bytes,
        due_ms=manifest.history.due_ms,
        due_batches=manifest.history.due_batches,
        copied_ahead=manifest.copied_ahead,
        cache=manifest.cache,
        error=None,
    )


def unreadable(error: RecpointError) -> ManifestFigures:
    """Return the figures to keep of an unreadable manifest."""
    return ManifestFigures("full", 0, 0, 0, 0, 0, 0, 0, None, None, None, None, str(error))


def state_of(read: ManifestFigures, verdict: Verdict | None) -> State:
    """Return the state of a checkpoint, from its manifest and the result of its validations."""
    if read.error is not None:
        return "damaged"
    if verdict is None:
        return "committed"
    if verdict.result != "passed":
        return verdict.result
    return "validated" if verdict.passed("sample") else "committed"


def with_risk(
    facts: Sequence[CheckpointFacts], run: Run, ends: Mapping[int, EndRecord]
) -> tuple[CheckpointFacts, ...]:
    """Return the checkpoints with their intervals and what was at risk right before each commit.

    Args:
        facts: checkpoints of the live line, newest first.
        run: the run.
        ends: the end records by generation, for trainers that have said that they have ended.
    """
    newest_steps = {one.generation: one.step for one in reversed(facts)}
    # An end record does not count if its trainer has continued after it (format §5).
    last_steps = {
        generation: end.step
        for generation, end in ends.items()
        if end.step >= newest_steps.get(generation, 0)
    }
    found = []
    for position, one in enumerate(facts):
        before = facts[position + 1] if position + 1 < len(facts) else None
        alone = len(facts) == 1
        start = None if one.error is not None else _before(one, before, run, alone=alone)
        if start is None:
            found.append(one)
            continue
        since_ms, since_step = start
        batches = one.step - since_step
        # Both times are by one host's clock, which may have been set back meanwhile.
        gap_seconds = max(0, one.snapshot_ms - since_ms) / 1000
        meanwhile = one.lag_seconds * batches / gap_seconds if gap_seconds > 0 else 0.0
        last_step = last_steps.get(one.generation)
        trained = min(meanwhile, _most_meanwhile(one, facts[:position], last_step))
        share = trained / meanwhile if meanwhile else 1.0
        found.append(
            replace(
                one,
                interval_seconds=gap_seconds,
                interval_batches=batches,
                at_risk_seconds=gap_seconds + one.lag_seconds * share,
                at_risk_batches=batches + round(trained),
            )
        )
    return tuple(found)


def _most_meanwhile(
    one: CheckpointFacts, newer: Sequence[CheckpointFacts], last_step: int | None
) -> float:
    """Return the most batches that its trainer can have trained from `one`'s cut to its commit.

    Args:
        one: a checkpoint.
        newer: the checkpoints after it, newest first.
        last_step: the step at which its trainer ended; None: not known.
    """
    for other in reversed(newer):
        if other.generation != one.generation:
            break
        if other.error is None and other.snapshot_ms >= one.committed_ms:
            return other.step - one.step
    return math.inf if last_step is None else last_step - one.step


def _before(
    one: CheckpointFacts, before: CheckpointFacts | None, run: Run, *, alone: bool
) -> tuple[int, int] | None:
    """Return from when and from which step on training was in no checkpoint before `one`.

    The time is in ms by the clock of the trainer's host. None: they are not known.
    """
    if before is not None and before.generation == one.generation:
        return None if before.error is not None else (before.snapshot_ms, before.step)
    if before is None and not alone:
        return None  # the checkpoint before it was not read, or retention has deleted it
    record = run.generation(one.generation)
    return record.created_ms, 0 if record.restored is None else record.restored.step


def pace(facts: Sequence[CheckpointFacts]) -> float | None:
    """Return the batches per second between the newest cuts; None: not known."""
    known = [
        (one.interval_batches, one.interval_seconds)
        for one in facts
        if one.interval_batches is not None and one.interval_seconds is not None
    ][:_GAPS]
    seconds = sum(gap for _, gap in known)
    return sum(batches for batches, _ in known) / seconds if seconds > 0 else None


def expected_interval_seconds(
    newest: ManifestFigures | None, facts: Sequence[CheckpointFacts]
) -> float | None:
    """Return the time between checkpoints that the trainer intends, or the measured one if longer.

    It is longer if checkpoints are skipped because the store is slower than the interval. None: the
    trainer did not state it, or the time of a batch is not known.

    Args:
        newest: the newest manifest that can be read.
        facts: checkpoints of the live line, newest first.
    """
    if newest is None:
        return None
    meant: float | None = None
    rate = pace(facts)
    if newest.due_ms is not None:
        meant = newest.due_ms / 1000
    elif newest.due_batches is not None and rate:
        meant = newest.due_batches / rate
    if meant is None:
        return None
    return max(meant, measured_interval_seconds(facts) or 0.0)


def longest_wait_seconds(
    interval_seconds: float | None, facts: Sequence[CheckpointFacts]
) -> float | None:
    """Return the longest time from a cut to the next checkpoint's commit; None: not known.

    It is the maximum over the newest checkpoints and the expected one.

    Args:
        interval_seconds: see `expected_interval_seconds`.
        facts: checkpoints of the live line, newest first.
    """
    known = [one for one in facts if one.interval_seconds][:_GAPS]
    waits = [one.lag_seconds + (one.interval_seconds or 0.0) for one in known]
    if interval_seconds is not None:
        waits.append(interval_seconds + max((one.lag_seconds for one in known), default=0.0))
    return max(waits, default=None)


def lag_of(
    seconds: float | None,
    silent_seconds: float,
    clock: Literal["store", "watched"],
    *,
    facts: Sequence[CheckpointFacts] = (),
    interval_seconds: float | None = None,
    earlier_batches: int = 0,
    note: str = "",
) -> Lag:
    """Return the lag of a run whose trainer has not said that it has ended.

    Args:
        seconds, silent_seconds, clock, interval_seconds: see `Lag`.
        facts: checkpoints of the live line, newest first.
        earlier_batches: batches of earlier trainers that do not restore any more.
        note: `Lag.clock_note`.
    """
    rate = pace(facts)
    at_risk = silent_seconds + (earlier_batches / rate if rate else 0.0)
    if seconds is not None:
        at_risk = min(at_risk, seconds)
    longest = longest_wait_seconds(interval_seconds, facts)
    overdue = longest is not None and silent_seconds > longest
    batches = None if rate is None or overdue else round(rate * silent_seconds) + earlier_batches
    return Lag(
        seconds=seconds,
        silent_seconds=silent_seconds,
        at_risk_seconds=at_risk,
        at_risk_batches=batches,
        overdue=overdue,
        clock=clock,
        interval_seconds=interval_seconds,
        intervals=at_risk / interval_seconds if interval_seconds else None,
        clock_note=note,
    )


def ended_lag(
    lag: Lag, ended: Ended, safe_step: int | None, *, most_seconds: float, pace: float | None
) -> Lag:
    """Return the lag of a run whose trainer has ended: the training that is not stored is at risk.

    Only `seconds` and `silent_seconds` grow with time.

    Args:
        lag: the lag as if it still trained.
        ended: its end.
        safe_step: step of the newest checkpoint that restores; None: there is none.
        most_seconds: the most time that training the missing batches can have taken.
        pace: batches per second; None: not known.
    """
    missing = ended.step - (safe_step or 0)
    if ended.step == 0 and safe_step is None:  # no batch was counted: it may have trained all along
        return replace(
            lag,
            at_risk_seconds=min(lag.at_risk_seconds, most_seconds),
            at_risk_batches=None,
            overdue=False,
            intervals=None,
        )
    if missing <= 0:
        return replace(lag, at_risk_seconds=0.0, at_risk_batches=0, overdue=False, intervals=None)
    # A trainer waits for its agent before it writes its end record, and trains nothing meanwhile.
    at_pace = missing / pace if pace else math.inf
    trained = min(lag.at_risk_seconds, most_seconds, at_pace)
    interval = lag.interval_seconds
    return replace(
        lag,
        at_risk_seconds=trained,
        at_risk_batches=missing,
        overdue=False,
        intervals=trained / interval if interval else None,
    )


def gone_lag(lag: Lag, *, most_seconds: float, earlier_batches: int, pace: float | None) -> Lag:
    """Return the lag of a run whose trainer is known to be gone: it has trained nothing since.

    Only `seconds` and `silent_seconds` grow with time.

    Args:
        lag: the lag as if it still trained.
        most_seconds: the training that does not restore, until the trainer's last sign of life.
        earlier_batches: see `lag_of`; the other batches are computed from `pace`.
        pace: batches per second; None: not known.
    """
    trained = min(lag.at_risk_seconds, most_seconds)
    earlier_seconds = earlier_batches / pace if pace else 0.0
    own_seconds = max(0.0, trained - earlier_seconds)
    interval = lag.interval_seconds
    return replace(
        lag,
        at_risk_seconds=trained,
        at_risk_batches=round(pace * own_seconds) + earlier_batches if pace else None,
        overdue=False,
        intervals=trained / interval if interval else None,
    )


def restore_estimate(chain: Chain, bytes_per_second: float | None) -> RestoreEstimate:
    """Return the cost of a restore by `chain`: all links' rows, the newest's state (§6.3)."""
    newest = chain.newest
    total = sum(
        chunk.bytes
        for link in chain.manifests
        for chunk in link.chunks
        if chunk.content == "rows" or (chunk.content == "state" and link is newest)
    )
    return RestoreEstimate(
        step=newest.step,
        generation=newest.generation,
        chain_length=newest.links.chain_length,
        manifests_to_read=len(chain.manifests),
        bytes_to_read=total,
        seconds=None if bytes_per_second is None else total / bytes_per_second,
        bytes_per_second=bytes_per_second,
    )


def totals(facts: Sequence[CheckpointFacts]) -> Totals:
    """Return sums over the checkpoints that could be read."""
    readable = [one for one in facts if one.error is None]
    gaps = [one.interval_seconds for one in readable if one.interval_seconds is not None]
    return Totals(
        checkpoints=len(readable),
        stored_bytes=sum(one.stored_bytes for one in readable),
        full_bytes=sum(one.full_bytes for one in readable),
        stall_seconds=sum(one.stall_seconds for one in readable),
        trained_seconds=sum(gaps) if gaps else None,
    )
