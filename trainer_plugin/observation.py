"""What a monitoring thread may see of a Checkpointer, without training noticing that it looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recpoint.catalog.overview.histogram import HistogramReading
from recpoint.format.manifest import Kind
from recpoint.trainer_plugin.checkpointer import Checkpointer
from recpoint.trainer_plugin.statistics import Statistics

__all__ = ["Observation", "observe"]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A trainer's checkpoints at one moment.

    What became of a checkpoint is learned in `step()`: while training pauses, for an evaluation
    for instance, `pending` and the counters stand still, and the lag grows.

    Attributes:
        run: the run URL.
        running: between `restore()` and `close()`.
        batches: trained by this process.
        lag_batches, lag_seconds: as in `Stats`; None: not running.
        interval_seconds: how long the last interval between due checkpoints took; None: not known.
        committed, skipped, cancelled, failed: checkpoints, by what became of them.
        unmarked_rows: as in `Stats`.
        pending: cut, and no outcome known yet.
        failures: of the failed, how many by cause (`recpoint.catalog.overview.failure_causes`).
        stalls: how long training waited for each, in seconds.
        stored_bytes: bytes of chunks of the committed, by kind.
        restores: checkpoints that this process has restored and gone on from.
        last_commit_ms: when the newest was committed, in milliseconds since the epoch; None: none.
        agent_running: whether an agent serves the staging area.
        staging_free_bytes: space that snapshots may take; None: unknown.
        staging_bound_bytes: the most that they take.
    """

    run: str
    running: bool
    batches: int
    lag_batches: int | None
    lag_seconds: float | None
    interval_seconds: float | None
    committed: int
    skipped: int
    cancelled: int
    failed: int
    unmarked_rows: int
    pending: int
    failures: Mapping[str, int]
    stalls: HistogramReading
    stored_bytes: Mapping[Kind, int]
    restores: int
    last_commit_ms: int | None
    agent_running: bool
    staging_free_bytes: int | None
    staging_bound_bytes: int


def observe(checkpointer: Checkpointer) -> Observation:
    """Look at a Checkpointer from any thread, at any time; changes nothing and takes no lock.

    Single numbers are read one after another while training goes on: they may be of moments that
    are microseconds apart. Asks the file system three things, and neither the store nor the device.
    """
    # Private to this package, and read only: a property of the public class would be an invitation
    # to call from other threads what may be called from the training thread alone.
    pipeline, area = checkpointer._pipeline, checkpointer._area
    running = pipeline is not None and not checkpointer._closed
    statistics = Statistics() if pipeline is None else pipeline.statistics
    safe = statistics.safe_batches  # first: batches_done only grows, so that no lag is negative
    done = checkpointer.batches_done
    return Observation(
        run=area.run_url,
        running=running,
        batches=max(0, done - statistics.started_batches),
        lag_batches=max(0, done - safe) if running else None,
        lag_seconds=statistics.lag_seconds if running else None,
        interval_seconds=statistics.interval_seconds,
        committed=statistics.committed,
        skipped=statistics.skipped,
        cancelled=statistics.cancelled,
        failed=statistics.failed,
        unmarked_rows=statistics.unmarked_rows,
        pending=0 if pipeline is None else pipeline.pending,
        failures=dict(statistics.failures),
        stalls=statistics.stalls.read(),
        stored_bytes=dict(statistics.stored_bytes),
        restores=statistics.restores,
        last_commit_ms=statistics.last_commit_ms,
        agent_running=area.agent_is_running(),
        staging_free_bytes=area.free_bytes(),
        staging_bound_bytes=checkpointer.memory_bound_bytes,
    )
