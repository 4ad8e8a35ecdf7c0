"""Checkpoints whose manifests are gone though a restore needs them: lost, not let go (format §6.5).

How the two are told apart. Retention deletes a manifest only when what stands on it has gone before
it, or has a chain without it (format §6.4, D1). So where a checkpoint is there, none of its
manifests leads to a full, and the parent of one has no manifest, that one was lost. Its checkpoint
is whole again once it is put back, unless somebody has removed the chunks until then. Where all are
gone, no manifest tells what another needs: everything stays (`manifests_gone`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from recpoint.format.manifest import Manifest
from recpoint.format.naming import AttemptName, ManifestName
from recpoint.format.records import CheckpointRef

__all__ = ["Link", "LostManifests"]


class Link(NamedTuple):
    """What one manifest says of its place in a chain.

    Attributes:
        checkpoint: that it represents.
        parent: what must be read before it; None for a full.
        base: the full its chain starts from; None for a full.
        taken_after: the parent of the checkpoint as it was taken, where this is a consolidation;
            else `parent`.
    """

    checkpoint: AttemptName
    parent: AttemptName | None
    base: AttemptName | None
    taken_after: AttemptName | None

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """The link that a manifest is."""
        return cls(
            _attempt(manifest.ref),
            None if manifest.parent is None else _attempt(manifest.parent),
            None if manifest.base is None else _attempt(manifest.base),
            None if manifest.links.parent is None else _attempt(manifest.links.parent),
        )


class _Gap(NamedTuple):
    """A part of a chain in which manifests are missing, from the base to the last link."""

    first: AttemptName
    last: AttemptName

    def has(self, name: ManifestName) -> bool:
        # Steps ascend along a chain, and no parent is of a later generation (format §4, I4).
        return (
            self.first.step <= name.step <= self.last.step
            and self.first.generation <= name.generation <= self.last.generation
        )


class LostManifests:
    """What no manifest names any more and is needed all the same.

    Args:
        links: of all manifests that there are, in any order.
        pins: names of the pins of each pinned checkpoint, whether it is there or not: retention
            deletes none that is pinned.
        gone: what says that all manifests are gone (`manifests_gone.why_gone`); else empty.
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
        #: Each with the newest checkpoint that does not restore without it.
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
            return  # it is there; what is missing, its own chain tells
        self._missing[link.parent] = name
        # What the parent stood on, its manifest alone has told.
        if link.base is not None:
            self._gaps[_Gap(link.base, max(link.parent, link.taken_after or link.parent))] = name

    def why_needed(self, name: ManifestName, attempt: str | None = None) -> str:
        """Why what is left of a checkpoint has to stay; empty: nothing of the run needs it.

        Args:
            name: the checkpoint.
            attempt: of it, as chunks are of one; None: what is asked for is of any.
        """
        if self._gone:
            return self._gone
        exact = None if attempt is None else self._missing.get(AttemptName(*name, attempt))
        if exact is None and name in self._there:
            return ""  # beside the manifests of a checkpoint nothing else of it is needed
        by = exact or self._missing_names.get(name)
        if by is not None:
            return f"{name} is needed by {by}, and its manifest is gone"
        if name in self._pins:
            return f"{name} is pinned ({', '.join(self._pins[name])}), and its manifest is gone"
        for gap, needs in self._gaps.items():
            if gap.has(name):
                return f"{name} may be of the chain of {needs}, of which manifests are gone"
        return ""


def _attempt(ref: CheckpointRef) -> AttemptName:
    return AttemptName(ref.step, ref.generation, ref.attempt)


def _name(attempt: AttemptName) -> ManifestName:
    return ManifestName(attempt.step, attempt.generation)
