"""Removing what no checkpoint will ever need: plan, then execute (format §6.4, §6.5)."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from recpoint.catalog.lineage import ManifestName
from recpoint.catalog.run import Run
from recpoint.catalog.store_contract import ObjectInfo
from recpoint.errors import FormatError, ObjectNotFound, SettingsError
from recpoint.format.naming import (
    RUN_KEY,
    AttemptName,
    attempt_prefix,
    is_probe_key,
    manifest_key,
    parse_chunk_key,
    parse_generation_key,
    parse_manifest_key,
)

__all__ = ["KeptPrefix", "SweepPlan", "SweepResult", "SweptObject", "execute", "plan_sweep"]


class SweptObject(NamedTuple):
    """One object to remove, and why nobody will miss it."""

    key: str
    size_bytes: int
    reason: str


class KeptPrefix(NamedTuple):
    """Chunks without a manifest that stay for now, and why."""

    prefix: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What a sweep would do. Made by reading alone.

    Attributes:
        prefixes: attempts to remove.
        objects: their chunks, and what killed probes left behind.
        unfinished: temporary files and multipart uploads to remove.
        kept: attempts without a manifest that stay.
        unrecognised: keys that are not ours; never removed.
        blocked: manifests that cannot be read. What they name is unknown, so that no chunk is
            removed while there are any.
        grace_seconds: younger objects stay.
        keep: attempts that staged jobs name.
    """

    prefixes: tuple[AttemptName, ...]
    objects: tuple[SweptObject, ...]
    unfinished: tuple[SweptObject, ...]
    kept: tuple[KeptPrefix, ...]
    unrecognised: tuple[str, ...]
    blocked: tuple[str, ...]
    grace_seconds: float
    keep: frozenset[str]

    @property
    def size_bytes(self) -> int:
        """Bytes that `execute` would free."""
        return sum(swept.size_bytes for swept in self.objects + self.unfinished)


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """What a sweep did; `spared` is what turned out to be needed between plan and deed."""

    removed: tuple[SweptObject, ...]
    spared: tuple[KeptPrefix, ...]

    @property
    def removed_bytes(self) -> int:
        """Bytes freed."""
        return sum(swept.size_bytes for swept in self.removed)


def plan_sweep(run: Run, *, grace_seconds: float, keep: Collection[str] = ()) -> SweepPlan:
    """Find what can go; nothing is changed.

    Args:
        run: the run.
        grace_seconds: what the store says was modified less long ago stays: it may belong to a
            checkpoint that is being written. Must exceed the longest time a persist takes.
        keep: attempts that jobs in a staging area name: an agent will finish them.

    Raises:
        SettingsError: a negative grace.
        StoreError: the store cannot be read.
    """
    if grace_seconds < 0:
        raise SettingsError(
            "grace_seconds",
            found=str(grace_seconds),
            expected="0 or more",
            next_step="give the longest time that writing a checkpoint may take",
        )
    # Chunks before manifests: a chunk that is seen here, and named by the time of the second
    # listing, is seen to be named. The other order would take a fresh commit for an orphan.
    chunks: dict[AttemptName, list[ObjectInfo]] = {}
    objects: list[SweptObject] = []
    unrecognised: list[str] = []
    now_ms = _now_ms()
    for info in run.store.list():
        attempt = parse_chunk_key(info.key)
        if attempt is not None:
            chunks.setdefault(attempt, []).append(info)
        elif is_probe_key(info.key):
            if _is_old((info,), now_ms, grace_seconds):
                objects.append(SweptObject(info.key, info.size_bytes, "left by a killed probe"))
        elif not _is_record(info.key):
            unrecognised.append(info.key)
    named = _Named(run)
    named.look()
    doomed: list[AttemptName] = []
    kept: list[KeptPrefix] = []
    for attempt, infos in chunks.items():
        if attempt in named.attempts:
            continue
        reason = _reason_to_keep(attempt, infos, named, keep, now_ms, grace_seconds)
        if reason:
            kept.append(KeptPrefix(attempt_prefix(*attempt), reason))
            continue
        doomed.append(attempt)
        why = f"no manifest names attempt {attempt.attempt} of step {attempt.step}"
        objects.extend(SweptObject(info.key, info.size_bytes, why) for info in infos)
    return SweepPlan(
        prefixes=tuple(doomed),
        objects=tuple(objects),
        unfinished=tuple(
            SweptObject(info.key, info.size_bytes, "left unfinished by a killed writer")
            for info in run.store.list_unfinished()
            if _is_old((info,), now_ms, grace_seconds)
        ),
        kept=tuple(kept),
        unrecognised=tuple(unrecognised),
        blocked=tuple(named.unreadable),
        grace_seconds=grace_seconds,
        keep=frozenset(keep),
    )


def execute(run: Run, plan: SweepPlan) -> SweepResult:
    """Do what a plan says. Killed anywhere, the next sweep finds and finishes the rest.

    Every attempt is looked at again right before it is removed: what has been committed, or
    written to, since the plan was made stays.

    Raises:
        StoreError: the store refuses or cannot be reached; what was not yet removed stays.
    """
    removed: list[SweptObject] = []
    spared: list[KeptPrefix] = []
    reasons = {swept.key: swept for swept in plan.objects}
    named = _Named(run)
    for attempt in plan.prefixes:
        prefix = attempt_prefix(*attempt)
        infos = [info for info in run.store.list(prefix) if parse_chunk_key(info.key) == attempt]
        named.look()
        reason = (
            "a manifest names it now"
            if attempt in named.attempts
            else _reason_to_keep(attempt, infos, named, plan.keep, _now_ms(), plan.grace_seconds)
        )
        if not reason and any(info.key not in reasons for info in infos):
            reason = "chunks were added to it"
        if reason:
            spared.append(KeptPrefix(prefix, reason))
            continue
        for info in infos:
            run.store.delete(info.key)
            removed.append(reasons[info.key])
    for swept in plan.objects:
        if is_probe_key(swept.key):
            run.store.delete(swept.key)
            removed.append(swept)
    for swept in plan.unfinished:
        run.store.delete_unfinished(swept.key)
        removed.append(swept)
    return SweepResult(removed=tuple(removed), spared=tuple(spared))


class _Named:
    """The attempts that manifests name chunks of; each manifest is read once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: set[ManifestName] = set()
        self.attempts: set[AttemptName] = set()
        self.unreadable: list[str] = []

    def look(self) -> None:
        """Read the manifests that have appeared since the last look."""
        self.unreadable.clear()
        for name in self._run.manifest_names():
            if name in self._known:
                continue
            try:
                manifest = self._run.manifest(*name)
            except ObjectNotFound:
                continue  # removed between listing and reading
            except FormatError:
                self.unreadable.append(manifest_key(*name))
                continue
            self._known.add(name)
            found = (parse_chunk_key(entry.key) for entry in manifest.chunks)
            self.attempts.update(attempt for attempt in found if attempt is not None)


def _reason_to_keep(
    attempt: AttemptName,
    infos: Iterable[ObjectInfo],
    named: _Named,
    keep: Collection[str],
    now_ms: int,
    grace_seconds: float,
) -> str:
    if named.unreadable:
        return f"{named.unreadable[0]} cannot be read and may name it"
    if attempt.attempt in keep:
        return "a staged job names it"
    if not _is_old(infos, now_ms, grace_seconds):
        return f"younger than {grace_seconds:g} s"
    return ""


def _is_old(infos: Iterable[ObjectInfo], now_ms: int, grace_seconds: float) -> bool:
    """Whether all were last modified before the grace period; a time in the future is young."""
    return all(now_ms - info.modified_ms >= grace_seconds * 1000 for info in infos)


def _is_record(key: str) -> bool:
    return (
        key == RUN_KEY
        or parse_generation_key(key) is not None
        or parse_manifest_key(key) is not None
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
