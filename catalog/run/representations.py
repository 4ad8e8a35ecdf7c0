"""Decides which manifest of a checkpoint a reader prefers, and what it needs (format §6.6)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from recpoint.format.naming import ManifestName

__all__ = ["Opinion", "Representations", "RunFacts", "StoredManifest"]


#: The verdict of validations on a checkpoint, as retention uses it.
Opinion = Literal["failed", "stateless", "sample", "full"]


class StoredManifest(NamedTuple):
    """What retention needs to know of one manifest.

    Attributes:
        key: its key.
        name: the checkpoint that it represents.
        attempt: the attempt of that checkpoint.
        parent: the checkpoint that must be read before it; None for a full.
        parent_attempt: the attempt of the parent; empty for a full.
        taken_ms: when the checkpoint was cut, by its trainer's clock.
        modified_ms: when this manifest was written, by the store's clock.
        stored_bytes: bytes of its chunks.
        whole: all its row chunks are stored with the right length, no validation found it damaged
            and did without it, and it contradicts no other manifest.
        base: the full with which its chain starts; None for a full.
        state_whole: all its state chunks are stored too. Only a restore of this checkpoint itself
            reads them.
        base_attempt: the attempt of `base`, if rows of it are needed for residuals (format §3.7),
            whichever way the chain goes; else empty.
    """

    key: str
    name: ManifestName
    attempt: str
    parent: ManifestName | None
    parent_attempt: str
    taken_ms: int
    modified_ms: int
    stored_bytes: int
    whole: bool
    base: ManifestName | None = None
    state_whole: bool = True
    base_attempt: str = ""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known of a run when retention makes a plan.

    Attributes:
        manifests: all manifests, in any order; a checkpoint may have several.
        live: the live line, newest first.
        now_ms: this host's time; only used to find times in the future.
        pins: names of the pins of each pinned checkpoint.
        leased: who reads which checkpoint, for leases that do not cover everything.
        metrics: finite values by metric and checkpoint.
        verdicts: the verdicts of validations (format §10): the checkpoint does not restore
            (`failed`, `stateless`), or it is validated up to a level (`sample`, `full`).
        unreadable: keys of manifests that cannot be read, so it is unknown what they need.
        lost: generations beside the live line that have no record.
        generations: generations that had a record when the live line was read.
    """

    manifests: Sequence[StoredManifest]
    live: Sequence[ManifestName]
    now_ms: int
    pins: Mapping[ManifestName, Sequence[str]] = field(default_factory=dict)
    leased: Mapping[ManifestName, str] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[ManifestName, float]] = field(default_factory=dict)
    verdicts: Mapping[ManifestName, Opinion] = field(default_factory=dict)
    unreadable: Sequence[str] = ()
    lost: Collection[int] = ()
    generations: Collection[int] = ()

    def times_ms(self) -> tuple[Mapping[ManifestName, int], Mapping[ManifestName, int]]:
        """Return when each checkpoint was made, by its trainer's clock and by the store's clock.

        The oldest of several manifests decides, because a consolidated manifest is written later.
        If only that one is left, the store's time is the time of the consolidation.
        """
        taken_ms: dict[ManifestName, int] = {}
        stored: dict[ManifestName, int] = {}
        for manifest in self.manifests:
            name = manifest.name
            taken_ms[name] = min(manifest.taken_ms, taken_ms.get(name, manifest.taken_ms))
            stored[name] = min(manifest.modified_ms, stored.get(name, manifest.modified_ms))
        return taken_ms, stored


class Representations:
    """Knows all manifests by checkpoint; resolves each checkpoint once, on construction.

    Args:
        manifests: all manifests of the run.
        verdicts: the verdicts of validations.
    """

    def __init__(
        self,
        manifests: Iterable[StoredManifest],
        verdicts: Mapping[ManifestName, Opinion] | None = None,
    ) -> None:
        self._verdicts = verdicts or {}
        self._of: dict[ManifestName, list[StoredManifest]] = {}
        for manifest in manifests:
            self._of.setdefault(manifest.name, []).append(manifest)
        self._best: dict[ManifestName, StoredManifest | None] = {}
        # (checkpoint, attempt) for which the rows of the whole chain are stored
        self._readable: set[tuple[ManifestName, str]] = set()
        self._failed_link: set[ManifestName] = set()  # checkpoints with a failed link in the chain
        # Parents have lower steps, so in this order each is known before its children.
        for name in sorted(self._of):
            self._readable |= {
                (name, manifest.attempt) for manifest in self._of[name] if self._leads(manifest)
            }
            usable = [manifest for manifest in self._of[name] if self._restores(manifest)]
            self._best[name] = min(usable, key=_cost, default=None)
            # Any of its manifests counts: a merged one holds the rows of the links it replaces.
            parent_failed = any(manifest.parent in self._failed_link for manifest in self._of[name])
            if parent_failed or self._verdicts.get(name) == "failed":
                self._failed_link.add(name)

    def of(self, name: ManifestName) -> Sequence[StoredManifest]:
        """Return all manifests of a checkpoint; empty if there are none."""
        return self._of.get(name, ())

    def best(self, name: ManifestName) -> StoredManifest | None:
        """Return the manifest that a reader prefers: a full, or the one with the oldest parent.

        None if none restores: chunks are missing, or the chain does not join up.
        """
        return self._best.get(name)

    def is_doubted(self, name: ManifestName) -> bool:
        """Say whether a validation of it, or of a link of its original chain, stands as failed."""
        return name in self._failed_link

    def needed_forms(self, name: ManifestName) -> Sequence[StoredManifest]:
        """Return the manifests to keep of a checkpoint that stays: only the best one if possible.

        All manifests of a checkpoint that does not restore are kept, because a person may repair
        it. All manifests of a doubted checkpoint are kept too, because only its own manifest shows
        which failed links its merged rows come from.
        """
        best = self.best(name)
        return self.of(name) if best is None or self.is_doubted(name) else (best,)

    def outlasting(self, name: ManifestName) -> StoredManifest | None:
        """Return the manifest of a checkpoint to delete last: the best of those that restore it.

        For a doubted checkpoint it is the manifest with the most links, because without it the
        others would count as good. None if none restores.
        """
        usable = (manifest for manifest in self.of(name) if self._restores(manifest))
        return (max if self.is_doubted(name) else min)(usable, key=_cost, default=None)

    def is_trusted(self, name: ManifestName) -> bool:
        """Say whether a reader takes it unasked: it restores, and no validation is against it."""
        verdict = self._verdicts.get(name)
        if self.best(name) is None or verdict in ("failed", "stateless"):
            return False
        return verdict == "full" or name not in self._failed_link

    def is_validated(self, name: ManifestName) -> bool:
        """Say whether it is trusted, and a validation that read its bytes has passed."""
        return self.is_trusted(name) and self._verdicts.get(name) in ("sample", "full")

    def mark_chain(self, name: ManifestName, reason: str, needed: dict[str, str]) -> None:
        """Add the manifests that restore `name` to `needed`, with `reason`, unless they are there.

        For each checkpoint of the chain these are the manifests of `needed_forms`.
        """
        pending = [name]
        while pending:
            checkpoint = pending.pop()
            for manifest in self.needed_forms(checkpoint):
                if manifest.key in needed:
                    continue  # its chain is in `needed` too, or the caller adds it
                needed[manifest.key] = reason
                pending.extend(self.before(manifest))

    def before(self, manifest: StoredManifest) -> Sequence[ManifestName]:
        """Return the checkpoints that a manifest needs: its parent, and the base of residuals.

        If the parent's manifests are lost, these are all checkpoints that may have been before the
        parent in the chain. Once the parent's manifest is put back, some are needed again, and only
        that manifest says which (format §6.5).
        """
        first, last = manifest.base, manifest.parent
        if last is None:
            return ()
        if first is None or last in self._of:
            return (last, first) if first and manifest.base_attempt else (last,)
        return tuple(
            name
            for name in self._of
            if first.step <= name.step < last.step
            and first.generation <= name.generation <= last.generation
        )

    def _restores(self, manifest: StoredManifest) -> bool:
        return manifest.state_whole and self._leads(manifest)

    def _leads(self, manifest: StoredManifest) -> bool:
        """Say whether all rows of its chain are stored; its children need nothing else of it."""
        if manifest.parent is None or not manifest.whole:
            return manifest.whole
        needed_keys = {(manifest.parent, manifest.parent_attempt)}
        if manifest.base is not None and manifest.base_attempt:
            needed_keys.add((manifest.base, manifest.base_attempt))
        return manifest.parent < manifest.name and needed_keys <= self._readable


def _cost(manifest: StoredManifest) -> tuple[int, str]:
    # The key only makes the order unique: two manifests of equal cost are equally good.
    return (-1 if manifest.parent is None else manifest.parent.step), manifest.key
