"""Figures of a run's overview, from what is kept of its manifests and generation records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from recpoint.catalog.overview.overview import (
    CheckpointFacts,
    Ended,
    Lag,
    RestoreEstimate,
    State,
    Totals,
    measured_interval_seconds,
)
from recpoint.catalog.records.validations import Verdict
from recpoint.catalog.runs.chain import Chain
from recpoint.catalog.runs.run import Run
from recpoint.errors import RecpointError
from recpoint.format.manifest import Manifest

__all__ = [
    "ManifestFigures",
    "ended_lag",
    "expected_interval_seconds",
    "kept",
    "lag_of",
    "pace",
    "restore_estimate",
    "state_of",
    "totals",
    "unreadable",
    "with_risk",
]

#: So many of the newest gaps tell how fast training is.
_GAPS = 16


class ManifestFigures(NamedTuple):
    """What is kept of a manifest once it has been read, as taken; `error`: it could not be."""

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
    error: str | None


def kept(manifest: Manifest) -> ManifestFigures:
    """What is kept of a manifest."""
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
        error=None,
    )


def unreadable(error: RecpointError) -> ManifestFigures:
    """What is kept of one that cannot be read."""
    return ManifestFigures("full", 0, 0, 0, 0, 0, 0, 0, None, None, str(error))


def state_of(read: ManifestFigures, verdict: Verdict | None) -> State:
    """The state of a checkpoint, from its manifest and what validations say."""
    if read.error is not None:
        return "damaged"
    if verdict is None:
        return "committed"
    if verdict.result != "passed":
        return verdict.result
    return "validated" if verdict.passed("sample") else "committed"


def with_risk(facts: Sequence[CheckpointFacts], run: Run) -> tuple[CheckpointFacts, ...]:
    """With what was at risk right before each commit; `facts` newest first."""
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
        # One host's clock; it may have been set meanwhile.
        gap_seconds = max(0, one.snapshot_ms - since_ms) / 1000
        meanwhile = one.lag_seconds * batches / gap_seconds if gap_seconds > 0 else 0.0
        found.append(
            replace(
                one,
                at_risk_seconds=gap_seconds + one.lag_seconds,
                interval_batches=batches,
                at_risk_batches=batches + round(meanwhile),
            )
        )
    return tuple(found)


def _before(
    one: CheckpointFacts, before: CheckpointFacts | None, run: Run, *, alone: bool
) -> tuple[int, int] | None:
    """(time, step) from which on training was in no checkpoint; by its trainer's host's clock."""
    if before is not None and before.generation == one.generation:
        return None if before.error is not None else (before.snapshot_ms, before.step)
    if before is None and not alone:
        return None  # retention may have let go of the one before it, or it was not read
    record = run.generation(one.generation)
    return record.created_ms, 0 if record.restored is None else record.restored.step


def pace(facts: Sequence[CheckpointFacts]) -> float | None:
    """Batches a second between the newest cuts; None: not known."""
    known = [
        (one.interval_batches, one.at_risk_seconds - one.lag_seconds)
        for one in facts
        if one.interval_batches is not None and one.at_risk_seconds is not None
    ][:_GAPS]
    seconds = sum(gap for _, gap in known)
    return sum(batches for batches, _ in known) / seconds if seconds > 0 else None


def expected_interval_seconds(
    newest: ManifestFigures | None, facts: Sequence[CheckpointFacts]
) -> float | None:
    """From one checkpoint to the next: as its trainer meant it, or as measured if that is longer.

    Longer where checkpoints are skipped, since the store is slower than the interval. None: the
    trainer did not know, or how long a batch takes is not known.

    Args:
        newest: the newest manifest that can be read.
        facts: of the live line, newest first.
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


def lag_of(
    seconds: float | None,
    at_risk_seconds: float,
    pace: float | None,
    clock: Literal["store", "watched"],
    interval_seconds: float | None,
    note: str = "",
) -> Lag:
    """The lag; `pace` in batches a second turns it into batches."""
    return Lag(
        seconds=seconds,
        at_risk_seconds=at_risk_seconds,
        at_risk_batches=None if pace is None else round(pace * at_risk_seconds),
        clock=clock,
        interval_seconds=interval_seconds,
        intervals=at_risk_seconds / interval_seconds if interval_seconds else None,
        clock_note=note,
    )


def ended_lag(lag: Lag, ended: Ended, safe_step: int | None) -> Lag:
    """The lag of a run whose trainer has ended: what is at risk is what it could not store.

    Args:
        lag: as if it still trained.
        ended: its word.
        safe_step: of the newest checkpoint that restores; None: there is none.
    """
    missing = ended.step - (safe_step or 0)
    if missing <= 0:
        return replace(lag, at_risk_seconds=0.0, at_risk_batches=0, intervals=None)
    return replace(lag, at_risk_batches=missing)


def restore_estimate(chain: Chain, bytes_per_second: float | None) -> RestoreEstimate:
    """What a restore by `chain` reads: the rows of all links, the state of the newest (§6.3)."""
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
    """Sums over all that could be read."""
    readable = [one for one in facts if one.error is None]
    gaps = [
        one.at_risk_seconds - one.lag_seconds for one in readable if one.at_risk_seconds is not None
    ]
    return Totals(
        checkpoints=len(readable),
        stored_bytes=sum(one.stored_bytes for one in readable),
        full_bytes=sum(one.full_bytes for one in readable),
        stall_seconds=sum(one.stall_seconds for one in readable),
        trained_seconds=sum(gaps) if gaps else None,
    )
