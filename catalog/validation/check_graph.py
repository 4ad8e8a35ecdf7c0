"""How all manifests of a run depend on each other: what a check has to know (format §4, I4)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from recpoint.catalog.records.run_facts import OnStep, unwatched
from recpoint.catalog.runs.chain import DAMAGE, check_link, check_with_own
from recpoint.catalog.runs.lineage import Representation
from recpoint.catalog.runs.run import Run
from recpoint.errors import ChainError, FormatError, MissingLink, ObjectNotFound
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY, ManifestName

__all__ = ["Damage", "RepresentationGraph"]

Damage: TypeAlias = FormatError | ChainError | ObjectNotFound


class RepresentationGraph:
    """Checkpoints, their representations, and which of the parent's each of them can follow.

    Args:
        run: the run.
        there: every representation of every checkpoint.
    """

    def __init__(self, run: Run, there: Mapping[ManifestName, Sequence[Representation]]) -> None:
        self._run = run
        self._there = there
        self._manifests: dict[Representation, Manifest | Damage] = {}
        self._follows: dict[Representation, list[Representation]] = {}
        #: What keeps a representation from leading to a full.
        self.broken: dict[Representation, Damage] = {}

    def read(self, one: Representation) -> Manifest | Damage:
        """One manifest, or what is wrong with it; each is read once."""
        if one not in self._manifests:
            try:
                self._manifests[one] = self._run.read_manifest(one)
            except (FormatError, ObjectNotFound) as error:
                self._manifests[one] = error
        return self._manifests[one]

    def load(self, names: Iterable[ManifestName], on_step: OnStep = unwatched) -> None:
        """Read what these checkpoints depend on, and see what joins up.

        `on_step` is called after each manifest, with how many there are in the whole run.
        """
        total = sum(map(len, self._there.values()))
        waiting = [one for name in names for one in self.of(name)]
        loaded: set[Representation] = set()
        while waiting:
            one = waiting.pop()
            if one in loaded:
                continue
            loaded.add(one)
            waiting.extend(self._before(self.read(one)))
            on_step("reading manifests", len(loaded), total)
        for one in sorted(loaded, key=lambda one: one.name):  # a parent's step is lower
            error = self._join(one)
            if error is not None:
                self.broken[one] = error

    def of(self, name: ManifestName) -> Sequence[Representation]:
        """The representations of a checkpoint, those that read least first."""
        return self._there.get(name, ())

    def sound(self) -> Iterator[tuple[Representation, Manifest]]:
        """Every representation loaded that leads to a full, ascending."""
        for one in sorted(self._follows, key=lambda one: (one.name, one.cost)):
            manifest = self._manifests[one]
            if one not in self.broken and isinstance(manifest, Manifest):
                yield one, manifest

    def needs(self, name: ManifestName) -> set[Representation]:
        """Every representation that a chain of this checkpoint may go through."""
        waiting, found = list(self.of(name)), set[Representation]()
        while waiting:
            one = waiting.pop()
            if one not in found:
                found.add(one)
                waiting.extend(self._before(self.read(one)))
        return found

    def leading(self, damaged: Collection[Representation]) -> set[Representation]:
        """Representations that lead to a full past none that is damaged."""
        good: set[Representation] = set()
        for one, manifest in self.sound():
            reached = manifest.parent is None or any(o in good for o in self._follows[one])
            if one not in damaged and reached:
                good.add(one)
        return good

    def _before(self, manifest: Manifest | Damage) -> Sequence[Representation]:
        if not isinstance(manifest, Manifest) or manifest.parent is None:
            return ()
        return self.of(ManifestName(manifest.parent.step, manifest.parent.generation))

    def _join(self, one: Representation) -> Damage | None:
        """Note what `one` follows; what is wrong when that is nothing and it is no full."""
        manifest = self.read(one)
        follows = self._follows[one] = []
        if not isinstance(manifest, Manifest):
            return manifest
        contradiction = self._contradiction(manifest)
        if contradiction is not None or manifest.parent is None:
            return contradiction
        first: Damage | None = None
        for before in self._before(manifest):
            parent = self.read(before)
            try:
                if not isinstance(parent, Manifest):
                    raise parent
                check_link(manifest, parent)
                if before in self.broken:
                    raise self.broken[before]
            except DAMAGE as error:
                first = first or error
            else:
                follows.append(before)
        if follows:
            return None
        return first or MissingLink(
            MANIFEST_KEY.of(manifest.parent.step, manifest.parent.generation),
            found="no manifest",
            expected=f"{manifest.parent}, on which {manifest.ref} depends",
            next_step="restore another checkpoint: recpoint list URL",
        )

    def _contradiction(self, manifest: Manifest) -> ChainError | None:
        """Where a consolidated manifest says other things of its checkpoint than its own (I6)."""

        def read(own: Representation) -> Manifest:
            found = self.read(own)
            if not isinstance(found, Manifest):
                raise found
            return found

        try:
            check_with_own(manifest, read)
        except ChainError as error:
            return error
        return None
