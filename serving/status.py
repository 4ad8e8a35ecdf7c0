"""What a follower says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from recpoint.catalog.restoring.restore_order import Skipped
from recpoint.catalog.runs.chain import PassedOver
from recpoint.format.records import CheckpointRef

__all__ = ["Status"]


@dataclass(frozen=True, kw_only=True)
class Status:
    """A follower at one moment.

    Attributes:
        serving: the checkpoint that requests see; None: nothing yet.
        committed_ms, served_ms: when it was committed and first served, Unix milliseconds by the
            agent's and this host's clock; 0 while nothing is served.
        newest: step of the newest checkpoint of the live line at the last look.
        lag_seconds: how long something better than what is served has been there, by the clocks of
            agent and this host; 0.0: there was nothing better at the last look. None: never looked.
        lag_checkpoints: how many better ones there are.
        lag_batches: batches between what is served and the newest; None while nothing is served.
        pinned: step that it is pinned to.
        versions_applied: since the start.
        increments_applied, fulls_applied: manifests read for that.
        bytes_read: of chunks.
        skipped: what is passed over ahead of what is served, and why; at the last look.
        passed_over: damaged manifests that the way to the version in service went around.
        doubt: what validations have against what is served, at the last look. It is served all the
            same since it was published or pinned, or since there is no other.
        error: what went wrong at the last look; None: nothing did.
        looked_seconds_ago: since the last look that reached the store; None: there was none.
        memory_bytes: of tables, both copies.
    """

    serving: CheckpointRef | None
    committed_ms: int
    served_ms: int
    newest: int | None
    lag_seconds: float | None
    lag_checkpoints: int
    lag_batches: int | None
    pinned: int | None
    versions_applied: int
    increments_applied: int
    fulls_applied: int
    bytes_read: int
    skipped: tuple[Skipped, ...]
    passed_over: tuple[PassedOver, ...]
    doubt: str | None
    error: str | None
    looked_seconds_ago: float | None
    memory_bytes: int
