"""Makes up facts of runs for tests of retention, without a store or a clock."""

from __future__ import annotations

from collections.abc import Iterable

from recpoint.catalog.run.representations import RunFacts, StoredManifest
from recpoint.format.naming import MANIFEST_KEY, ManifestName

__all__ = ["HOUR_MS", "NOW_MS", "facts", "full", "increment", "merged"]

HOUR_MS = 3_600_000
#: Thursday, 12 June 2025, 12:00 UTC.
NOW_MS = 1_749_729_600_000


def name(step: int, generation: int = 1) -> ManifestName:
    return ManifestName(step, generation)


def _attempt(checkpoint: ManifestName) -> str:
    return f"{checkpoint.step:016x}{checkpoint.generation:016x}"


def full(
    step: int, *, generation: int = 1, hours_ago: float = 0.0, whole: bool = True
) -> StoredManifest:
    """Return the own manifest of a checkpoint that is a full."""
    name = ManifestName(step, generation)
    return StoredManifest(
        key=MANIFEST_KEY.of(step, generation),
        name=name,
        attempt=_attempt(name),
        parent=None,
        parent_attempt="",
        taken_ms=NOW_MS - int(hours_ago * HOUR_MS),
        modified_ms=NOW_MS - int(hours_ago * HOUR_MS),
        stored_bytes=100,
        whole=whole,
    )


def increment(
    step: int,
    parent: StoredManifest,
    *,
    generation: int = 1,
    hours_ago: float = 0.0,
    whole: bool = True,
) -> StoredManifest:
    """Return the own manifest of a checkpoint that is an increment on `parent`."""
    return full(step, generation=generation, hours_ago=hours_ago, whole=whole)._replace(
        parent=parent.name, parent_attempt=parent.attempt, stored_bytes=10
    )


def merged(of: StoredManifest, after: StoredManifest | None = None) -> StoredManifest:
    """Return a consolidated manifest of a checkpoint: a full, or an increment on `after`."""
    stem = of.key.removeprefix("manifests/").removesuffix(".json")
    tail = "full" if after is None else f"after-{after.name.step:012d}"
    return of._replace(
        key=f"consolidated/{stem}-{tail}.json",
        parent=None if after is None else after.name,
        parent_attempt="" if after is None else after.attempt,
    )


def facts(
    manifests: Iterable[StoredManifest],
    *,
    live: Iterable[ManifestName] | None = None,
    now_ms: int = NOW_MS,
) -> RunFacts:
    """Return facts of a run; all checkpoints are live unless `live` names the live ones."""
    facts_given = tuple(manifests)
    names = {manifest.name for manifest in facts_given} if live is None else set(live)
    return RunFacts(manifests=facts_given, live=tuple(sorted(names, reverse=True)), now_ms=now_ms)
