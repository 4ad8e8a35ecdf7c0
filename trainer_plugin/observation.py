"""Describes a trainer's checkpoints at one moment, for threads that watch training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from recpoint.counting import HistogramReading
from recpoint.embeddings.cache.progress import CacheStats
from recpoint.embeddings.tables.keyed import KeyCounts
from recpoint.format.manifest import Kind
from recpoint.format.servers import AllServers
from recpoint.trainer_plugin.schedule.ledger import Statistics
from recpoint.trainer_plugin.snapshot.staging import StagingArea

__all__ = ["Observation"]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Describes the state of a trainer's checkpoints at one moment.

    `step()` learns the outcomes of checkpoints. While training pauses, for instance for an
    evaluation, `pending` and the counters therefore stand still, and the lag grows.

    Attributes:
        run: the run URL.
        running: True between `restore()` and `close()`.
        batches: number of batches that this process has trained.
        lag_batches, lag_seconds: as in `Stats`; None: not running.
        interval_seconds: length of the last interval between two due checkpoints, in seconds;
            None: unknown.
        committed, skipped, cancelled, failed: number of checkpoints with this outcome.
        unmarked_rows: as in `Stats`.
        pending: number of checkpoints that were cut and whose outcome is not known yet.
        failures: number of failed checkpoints by cause (`recpoint.counting`).
        stalls: how long training waited for each checkpoint, in seconds.
        copied_rows, copied_bytes: where rows can be copied before a checkpoint: rows that
            checkpoints copied, and their bytes with row states, by "before" (while training went
            on) and "in_stall".
        stored_bytes: bytes of chunks of the committed checkpoints, by kind.
        restores: number of checkpoints that this process restored and went on from.
        last_commit_ms: when the newest checkpoint was committed, in milliseconds since the epoch;
            None: no checkpoint was committed.
        agent_running: whether an agent serves the staging area.
        staging_free_bytes: bytes that snapshots may take in the staging area; None: unknown.
        staging_bound_bytes: the most bytes that snapshots take.
        cache, keyed: as in `Stats`.
        servers: how the embedding servers are; None: there are none.
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
    copied_rows: Mapping[str, int]
    copied_bytes: Mapping[str, int]
    stored_bytes: Mapping[Kind, int]
    restores: int
    last_commit_ms: int | None
    agent_running: bool
    staging_free_bytes: int | None
    staging_bound_bytes: int
    cache: CacheStats | None
    keyed: Mapping[str, KeyCounts]
    servers: AllServers | None

    @classmethod
    def of(
        cls,
        statistics: Statistics,
        area: StagingArea,
        *,
        safe_batches: int,
        batches_done: int,
        running: bool,
        pending: int,
        bound_bytes: int,
        cache: CacheStats | None,
        keyed: Mapping[str, KeyCounts],
        servers: AllServers | None,
    ) -> Self:
        """Read the numbers, while training changes them.

        Args:
            statistics: of the Checkpointer's checkpoints.
            area: the staging area.
            safe_batches: batches up to the newest checkpoint that a restart finds.
            batches_done: batches that the model was trained with.
            running, pending, cache, keyed, servers: as the attributes.
            bound_bytes: the most bytes that snapshots take in the staging area.
        """
        return cls(
            run=area.run_url,
            running=running,
            batches=max(0, batches_done - statistics.started_batches),
            lag_batches=max(0, batches_done - safe_batches) if running else None,
            lag_seconds=statistics.lag_seconds if running else None,
            interval_seconds=statistics.interval_seconds,
            committed=statistics.committed,
            skipped=statistics.skipped,
            cancelled=statistics.cancelled,
            failed=statistics.failed,
            unmarked_rows=statistics.unmarked_rows,
            pending=pending,
            failures=dict(statistics.failures),
            stalls=statistics.stalls.read(),
            copied_rows=dict(statistics.copied_rows),
            copied_bytes=dict(statistics.copied_bytes),
            stored_bytes=dict(statistics.stored_bytes),
            restores=statistics.restores,
            last_commit_ms=statistics.last_commit_ms,
            agent_running=area.agent_is_running(),
            staging_free_bytes=area.room.free_bytes(),
            staging_bound_bytes=bound_bytes,
            cache=cache,
            keyed=keyed,
            servers=servers,
        )
