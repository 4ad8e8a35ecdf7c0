"""The manifests of each checkpoint: which a reader prefers, and what it needs (format §6.6)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from recpoint.format.naming import ManifestName

__all__ = ["Opinion", "Representations", "RunFacts", "StoredManifest"]


#: What a validation says of a checkpoint, as far as retention goes by it.
Opinion = Literal["failed", "stateless", "sample", "full"]


class StoredManifest(NamedTuple):
    """One manifest, as far as retention needs it.

    Attributes:
        key: where it lies.
        name: the checkpoint it represents.
        attempt: that checkpoint's.
        parent: what must be read before it; None for a full.
        parent_attempt: that checkpoint's; empty for a full.
        taken_ms: when the checkpoint was cut, by its trainer's clock.
        modified_ms: when this manifest was written, by the store's clock.
        stored_bytes: bytes of its chunks.
        whole: its chunks of rows are all there in their lengths, no validation has found it damaged
            and done without it, and it contradicts no other manifest.
        base: the full that its chain starts from; None for a full.
        state_whole: so are its chunks of the state, which no restore of another checkpoint reads.
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


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known of a run when a plan is made.

    Attributes:
        manifests: all there are, in any order; a checkpoint may have several.
        live: the live line, newest first.
        now_ms: this host's time; only tells which times are in the future.
        pins: names of the pins of each pinned checkpoint.
        leased: who reads which checkpoint, for leases that do not cover everything.
        metrics: values by metric and checkpoint; finite.
        verdicts: what validations say of a checkpoint (format §10): that it does not restore
            (`failed`, `stateless`), or up to which level it is validated (`sample`, `full`).
        unreadable: keys of manifests that cannot be read; what they need is unknown.
        lost: generations beside the live line that have no record.
        generations: those that had one when the live line was read.
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
        """When each checkpoint was made: as its trainer stamped it, and as the store tells.

        Of several manifests the oldest tells: a consolidated one is written later. Where only that
        is left, the store tells when it was consolidated.
        """
        taken: dict[ManifestName, int] = {}
        stored: dict[ManifestName, int] = {}
        for manifest in self.manifests:
            name = manifest.name
            taken[name] = min(manifest.taken_ms, taken.get(name, manifest.taken_ms))
            stored[name] = min(manifest.modified_ms, stored.get(name, manifest.modified_ms))
        return taken, stored


class Representations:
    """Manifests by checkpoint; each checkpoint is resolved once, whatever asks for it.

    Args:
        manifests: all there are.
        verdicts: what validations say.
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
        self._readable: set[tuple[ManifestName, str]] = set()  # by attempt: rows of all the chain
        self._failed_link: set[ManifestName] = set()  # checkpoints whose chain has one
        # Parents are of lower steps, so that in this order each is known before its children.
        for name in sorted(self._of):
            self._readable |= {(name, one.attempt) for one in self._of[name] if self._leads(one)}
            usable = [manifest for manifest in self._of[name] if self._restores(manifest)]
            self._best[name] = min(usable, key=_cost, default=None)
            # Through any of its manifests: a merged one holds the rows of the links it stands for.
            before = any(manifest.parent in self._failed_link for manifest in self._of[name])
            if before or self._verdicts.get(name) == "failed":
                self._failed_link.add(name)

    def of(self, name: ManifestName) -> Sequence[StoredManifest]:
        """All manifests of a checkpoint; empty if there is none."""
        return self._of.get(name, ())

    def best(self, name: ManifestName) -> StoredManifest | None:
        """The manifest that a reader prefers: a full, else the one whose parent is furthest back.

        None if none restores: chunks are missing, or the chain does not join up.
        """
        return self._best.get(name)

    def is_doubted(self, name: ManifestName) -> bool:
        """Whether it, or a link of its chain as it was taken, stands as failed."""
        return name in self._failed_link

    def needed_forms(self, name: ManifestName) -> Sequence[StoredManifest]:
        """Manifests of a checkpoint that is to stay: the best one alone, where that is enough.

        All of one that does not restore: somebody may repair it. All of one that is doubted: with
        its own manifest would go what tells that its merged rows are doubtful.
        """
        best = self.best(name)
        return self.of(name) if best is None or self.is_doubted(name) else (best,)

    def outlasting(self, name: ManifestName) -> StoredManifest | None:
        """Of the manifests that restore a checkpoint, the one that may go last: the best.

        Of a doubted one that with the most links: without it the others would count as good.
        None if none restores.
        """
        usable = (manifest for manifest in self.of(name) if self._restores(manifest))
        return (max if self.is_doubted(name) else min)(usable, key=_cost, default=None)

    def is_trusted(self, name: ManifestName) -> bool:
        """Whether a reader takes it unasked: it restores, and no validation says otherwise."""
        verdict = self._verdicts.get(name)
        if self.best(name) is None or verdict in ("failed", "stateless"):
            return False
        return verdict == "full" or name not in self._failed_link

    def is_validated(self, name: ManifestName) -> bool:
        """Whether it is trusted since a validation of its bytes has passed."""
        return self.is_trusted(name) and self._verdicts.get(name) in ("sample", "full")

    def mark_chain(self, name: ManifestName, reason: str, needed: dict[str, str]) -> None:
        """Enter the manifests that restore `name` into `needed`, unless they are there.

        Of each checkpoint those of `needed_forms`.
        """
        left = [name]
        while left:
            at = left.pop()
            for manifest in self.needed_forms(at):
                if manifest.key in needed:
                    continue  # and with it its chain, now or by the caller
                needed[manifest.key] = reason
                left.extend(self.before(manifest))

    def before(self, manifest: StoredManifest) -> Sequence[ManifestName]:
        """The checkpoints that are needed for what a manifest stands on: its parent.

        Where that one has no manifest any more, which was lost, all that may have been before it in
        the chain: once it is put back, they are needed again, and it alone says which (format
        §6.5).
        """
        first, last = manifest.base, manifest.parent
        if last is None:
            return ()
        if first is None or last in self._of:
            return (last,)
        return tuple(
            name
            for name in self._of
            if first.step <= name.step < last.step
            and first.generation <= name.generation <= last.generation
        )

    def _restores(self, manifest: StoredManifest) -> bool:
        return manifest.state_whole and self._leads(manifest)

    def _leads(self, manifest: StoredManifest) -> bool:
        """Whether the rows of its chain are there: all that what stands on it needs."""
        if manifest.parent is None or not manifest.whole:
            return manifest.whole
        before = (manifest.parent, manifest.parent_attempt)
        return manifest.parent < manifest.name and before in self._readable


def _cost(manifest: StoredManifest) -> tuple[int, str]:
    # "manifests/" after "consolidated/": of two that cost the same, any may be taken.
    return (-1 if manifest.parent is None else manifest.parent.step), manifest.key
