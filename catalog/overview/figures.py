"""Computes the figures of an overview from the kept figures of manifests and generation records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from recpoint.catalog.overview.keys_of_tables import KeysOfTables, keys_of_tables
from recpoint.catalog.overview.overview import (
    CheckpointFacts,
    Ended,
    Lag,
    RestoreEstimate,
    State,
    Totals,
)
from recpoint.catalog.overview.width_mix import WidthMix, width_mix
from recpoint.catalog.run.chain import Chain
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import Verdict
from recpoint.errors import RecpointError
from recpoint.format.manifest import CacheUse, CopiedAhead, Manifest, MeasuredLoss
from recpoint.format.records import EndRecord

__all__ = [
    "ManifestFigures",
    "ended_lag",
    "expected_interval_seconds",
    "gone_lag",
    "kept",
    "lag_of",
    "measured_interval_seconds",
    "longest_wait_seconds",
    "pace",
    "restore_estimate",
    "state_of",
    "totals",
    "unreadable",
    "with_risk",
]


#: Number of the newest gaps between checkpoints that figures are computed from.
_GAPS = 16


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
    widths: WidthMix | None
    keyed: KeysOfTables | None
    loss: MeasuredLoss | None
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
        widths=width_mix(manifest.chunks, manifest.tables),
        keyed=keys_of_tables(manifest),
        loss=manifest.loss,
        error=None,
    )


def unreadable(error: RecpointError) -> ManifestFigures:
    """Return the figures to keep of an unreadable manifest."""
    nothing = (None, None, None, None, None, None, None)
    return ManifestFigures("full", 0, 0, 0, 0, 0, 0, 0, *nothing, str(error))


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
    newest_steps = {checkpoint.generation: checkpoint.step for checkpoint in reversed(facts)}
    # An end record does not count if its trainer has continued after it (format §5).
    last_steps = {
        generation: end.step
        for generation, end in ends.items()
        if end.step >= newest_steps.get(generation, 0)
    }
    facts_with_risk = []
    for position, checkpoint in enumerate(facts):
        earlier = facts[position + 1] if position + 1 < len(facts) else None
        alone = len(facts) == 1
        start = (
            None if checkpoint.error is not None else _before(checkpoint, earlier, run, alone=alone)
        )
        if start is None:
            facts_with_risk.append(checkpoint)
            continue
        since_ms, since_step = start
        batches = checkpoint.step - since_step
        # Both times are by one host's clock, which may have been set back meanwhile.
        gap_seconds = max(0, checkpoint.snapshot_ms - since_ms) / 1000
        meanwhile = checkpoint.lag_seconds * batches / gap_seconds if gap_seconds > 0 else 0.0
        last_step = last_steps.get(checkpoint.generation)
        trained = min(meanwhile, _most_meanwhile(checkpoint, facts[:position], last_step))
        share = trained / meanwhile if meanwhile else 1.0
        facts_with_risk.append(
            replace(
                checkpoint,
                interval_seconds=gap_seconds,
                interval_batches=batches,
                at_risk_seconds=gap_seconds + checkpoint.lag_seconds * share,
                at_risk_batches=batches + round(trained),
            )
        )
    return tuple(facts_with_risk)


def _most_meanwhile(
    one: CheckpointFacts, newer: Sequence[CheckpointFacts], last_step: int | None
) -> float:
    """Return the most batches that its trainer can have trained from `one`'s cut to its commit.

    Args:
        one: a checkpoint.
        newer: the checkpoints after it, newest first.
        last_step: the step at which its trainer ended; None: not known.
    """
    for newer_facts in reversed(newer):
        if newer_facts.generation != one.generation:
            break
        if newer_facts.error is None and newer_facts.snapshot_ms >= one.committed_ms:
            return newer_facts.step - one.step
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
    intervals = [
        (checkpoint.interval_batches, checkpoint.interval_seconds)
        for checkpoint in facts
        if checkpoint.interval_batches is not None and checkpoint.interval_seconds is not None
    ][:_GAPS]
    seconds = sum(gap for _, gap in intervals)
    return sum(batches for batches, _ in intervals) / seconds if seconds > 0 else None


def measured_interval_seconds(checkpoints: Sequence[CheckpointFacts]) -> float | None:
    """Return the time between cuts: the median of the newest gaps; None: there is none yet.

    Args:
        checkpoints: checkpoints of the live line, newest first.
    """
    gaps = [
        checkpoint.interval_seconds
        for checkpoint in checkpoints
        if checkpoint.interval_seconds is not None
    ]
    gaps = [gap for gap in gaps[:_GAPS] if gap > 0]
    return statistics.median(gaps) if gaps else None


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
    intended_seconds: float | None = None
    rate = pace(facts)
    if newest.due_ms is not None:
        intended_seconds = newest.due_ms / 1000
    elif newest.due_batches is not None and rate:
        intended_seconds = newest.due_batches / rate
    if intended_seconds is None:
        return None
    return max(intended_seconds, measured_interval_seconds(facts) or 0.0)


def longest_wait_seconds(
    interval_seconds: float | None, facts: Sequence[CheckpointFacts]
) -> float | None:
    """Return the longest time from a cut to the next checkpoint's commit; None: not known.

    It is the maximum over the newest checkpoints and the expected one.

    Args:
        interval_seconds: see `expected_interval_seconds`.
        facts: checkpoints of the live line, newest first.
    """
    measured = [checkpoint for checkpoint in facts if checkpoint.interval_seconds][:_GAPS]
    waits = [
        checkpoint.lag_seconds + (checkpoint.interval_seconds or 0.0) for checkpoint in measured
    ]
    if interval_seconds is not None:
        waits.append(
            interval_seconds + max((checkpoint.lag_seconds for checkpoint in measured), default=0.0)
        )
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
        for link in chain.all_manifests
        for chunk in link.chunks
        if chunk.content == "rows" or (chunk.content == "state" and link is newest)
    )
    return RestoreEstimate(
        step=newest.step,
        generation=newest.generation,
        chain_length=newest.links.chain_length,
        manifests_to_read=len(chain.all_manifests),
        bytes_to_read=total,
        seconds=None if bytes_per_second is None else total / bytes_per_second,
        bytes_per_second=bytes_per_second,
    )


def totals(facts: Sequence[CheckpointFacts]) -> Totals:
    """Return sums over the checkpoints that could be read."""
    readable = [checkpoint for checkpoint in facts if checkpoint.error is None]
    gaps = [
        checkpoint.interval_seconds
        for checkpoint in readable
        if checkpoint.interval_seconds is not None
    ]
    return Totals(
        checkpoints=len(readable),
        stored_bytes=sum(checkpoint.stored_bytes for checkpoint in readable),
        full_bytes=sum(checkpoint.full_bytes for checkpoint in readable),
        stall_seconds=sum(checkpoint.stall_seconds for checkpoint in readable),
        trained_seconds=sum(gaps) if gaps else None,
    )
