"""Describes a run from its catalog: lag, stalls, bytes, chain, states, failures.

The functions that make it only compute; `watch.RunWatch` reads. So a page, a command and a metric
agree. Nothing here asks Prefect, a trainer or an agent.

Clocks: `snapshot_ms`, `staged_ms` and `committed_ms` of a checkpoint, `created_ms` of its
generation and `ended_ms` of a trainer are by one clock, that of the trainer's host, where the
agent runs too. Their differences (`stall`, `lag_seconds`, `at_risk_seconds` of a checkpoint) do
not depend on whether that clock is right. How long ago something happened is an `Age`: this
host's time less the store's time of the object, limited to the bounds that this process has
observed with its monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from recpoint.catalog.overview.keys_of_tables import KeysOfTables
from recpoint.catalog.overview.width_mix import WidthMix
from recpoint.catalog.run.validations import Verdict
from recpoint.catalog.staging.agent_trouble import AgentTrouble
from recpoint.format.manifest import CacheUse, CopiedAhead, MeasuredLoss
from recpoint.format.retention_records import Plan
from recpoint.format.servers import AllServers

__all__ = [
    "Age",
    "CheckpointFacts",
    "Ended",
    "ExpiringManifest",
    "Failure",
    "Generation",
    "Lag",
    "RestoreEstimate",
    "RunOverview",
    "ServersSeen",
    "StagedRisk",
    "State",
    "Totals",
    "Validated",
]


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
        widths: widths of the rows that it stores; None: it stores none.
        keyed: what the keys of its keyed tables did; None: no table is keyed.
        loss: what rounding costs in loss, as its trainer had measured; None: it measured none.
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
    widths: WidthMix | None = None
    keyed: KeysOfTables | None = None
    loss: MeasuredLoss | None = None
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
