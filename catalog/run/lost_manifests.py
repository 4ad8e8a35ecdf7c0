"""Finds checkpoints whose manifests are lost although a restore needs them (format §6.5).

A lost manifest differs from a manifest that retention deleted. Retention deletes a manifest only
after every manifest that needs it is gone or has a chain without it (format §6.4, delete order,
rule 1). So if a checkpoint has manifests, none of them leads to a full, and the parent of one has
no manifest, then the parent's manifest was lost. Once it is put back, the parent is whole again,
unless its chunks were removed meanwhile.
If all manifests are gone, no manifest says what another needs, so everything stays
(`manifests_gone`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from recpoint.catalog.run.pins import pinned_text
from recpoint.format.manifest import Manifest
from recpoint.format.naming import AttemptName, ManifestName
from recpoint.format.records import CheckpointRef

__all__ = [
    "Link",
    "LostManifests",
]


class Link(NamedTuple):
    """The place of one manifest in a chain.

    Attributes:
        checkpoint: the checkpoint that the manifest represents.
        parent: the checkpoint that must be read before it; None for a full.
        base: the full with which its chain starts; None for a full.
        taken_after: the parent of the checkpoint when it was taken, which a consolidation keeps;
            in other manifests the same as `parent`.
    """

    checkpoint: AttemptName
    parent: AttemptName | None
    base: AttemptName | None
    taken_after: AttemptName | None

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Return the link of a manifest."""
        return cls(
            _attempt(manifest.ref),
            None if manifest.parent is None else _attempt(manifest.parent),
            None if manifest.base is None else _attempt(manifest.base),
            None if manifest.links.parent is None else _attempt(manifest.links.parent),
        )


class _Gap(NamedTuple):
    """The part of a chain, from its base to its last link, in which manifests are missing."""

    first: AttemptName
    last: AttemptName

    def has(self, name: ManifestName) -> bool:
        # Steps ascend along a chain, and no parent has a later generation (format §4,
        # invariant 4).
        return (
            self.first.step <= name.step <= self.last.step
            and self.first.generation <= name.generation <= self.last.generation
        )


class LostManifests:
    """Knows the checkpoints that are needed although their manifests are lost.

    Args:
        links: the links of all manifests of the run, in any order.
        pins: names of the pins of each pinned checkpoint, existing or not; retention deletes no
            pinned checkpoint, so a missing one was lost.
        gone: the reason from `why_gone` if all manifests are gone; otherwise empty.
    """

    def __init__(
        self,
        links: Iterable[Link] = (),
        pins: Mapping[ManifestName, Sequence[str]] | None = None,
        *,
        gone: str = "",
    ) -> None:
        self._gone = gone
        by_name: dict[ManifestName, list[Link]] = {}
        for link in links:
            by_name.setdefault(_name(link.checkpoint), []).append(link)
        self._there = by_name.keys()
        self._pins = pins or {}
        #: Lost checkpoints, each with the newest checkpoint that does not restore without it.
        self._missing: dict[AttemptName, ManifestName] = {}
        self._gaps: dict[_Gap, ManifestName] = {}
        attempts = {link.checkpoint for same in by_name.values() for link in same}
        whole: set[AttemptName] = set()
        for name in sorted(by_name):  # a parent's step is lower
            good = [link for link in by_name[name] if link.parent is None or link.parent in whole]
            whole.update(link.checkpoint for link in good)
            if not good:
                for link in by_name[name]:
                    self._note(name, link, attempts)
        self._missing_names = {_name(lost): by for lost, by in self._missing.items()}

    def _note(self, name: ManifestName, link: Link, attempts: set[AttemptName]) -> None:
        if link.parent is None or link.parent in attempts:
            return  # the parent has a manifest; its own chain shows what is missing
        self._missing[link.parent] = name
        # Only the lost manifest said what the parent needs, so anything before it may be needed.
        if link.base is not None:
            self._gaps[_Gap(link.base, max(link.parent, link.taken_after or link.parent))] = name

    def why_needed(self, name: ManifestName, attempt: str | None = None) -> str:
        """Return why the remains of a checkpoint must stay; empty: nothing in the run needs them.

        Args:
            name: the checkpoint.
            attempt: the attempt that the remains belong to, as for chunks; None: any attempt.
        """
        if self._gone:
            return self._gone
        exact = None if attempt is None else self._missing.get(AttemptName(*name, attempt))
        if exact is None and name in self._there:
            return ""  # the checkpoint has manifests, so nothing of other attempts is needed
        by = exact or self._missing_names.get(name)
        if by is not None:
            return f"{name} is needed by {by}, and its manifest is gone"
        if name in self._pins:
            return f"{name} is {pinned_text(self._pins[name])}, and its manifest is gone"
        for gap, needs in self._gaps.items():
            if gap.has(name):
                return f"{name} may be of the chain of {needs}, of which manifests are gone"
        return ""


def _attempt(ref: CheckpointRef) -> AttemptName:
    return AttemptName(ref.step, ref.generation, ref.attempt)


def _name(attempt: AttemptName) -> ManifestName:
    return ManifestName(attempt.step, attempt.generation)
