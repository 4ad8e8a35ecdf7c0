"""Finds how the manifests of a run depend on each other (format §4, invariant 4)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from recpoint.catalog.run.chain import DAMAGE, check_link, check_with_own, needed_beside
from recpoint.catalog.run.facts import OnStep, unwatched
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.errors import ChainError, FormatError, MissingLink, ObjectNotFound
from recpoint.format.manifest import Manifest
from recpoint.format.naming import MANIFEST_KEY, ManifestName

__all__ = [
    "Damage",
    "RepresentationGraph",
]


Damage: TypeAlias = FormatError | ChainError | ObjectNotFound


class RepresentationGraph:
    """The representations of all checkpoints, and which of its parent's each of them can follow.

    Args:
        run: the run.
        representations: every representation of every checkpoint.

    Attributes:
        broken: the representations that do not lead to a full, and why.
    """

    def __init__(
        self, run: Run, representations: Mapping[ManifestName, Sequence[Representation]]
    ) -> None:
        self._run = run
        self._representations = representations
        self._manifests: dict[Representation, Manifest | Damage] = {}
        self._follows: dict[Representation, list[Representation]] = {}
        self.broken: dict[Representation, Damage] = {}

    def read(self, representation: Representation) -> Manifest | Damage:
        """Return one manifest, or what is wrong with it; reads each once."""
        if representation not in self._manifests:
            try:
                self._manifests[representation] = self._run.read_manifest(representation)
            except (FormatError, ObjectNotFound) as error:
                self._manifests[representation] = error
        return self._manifests[representation]

    def load(self, names: Iterable[ManifestName], on_step: OnStep = unwatched) -> None:
        """Read these checkpoints and all that they depend on, and link each to its parent.

        `on_step` is called after each manifest, with the number read and the total in the run.
        """
        total = sum(map(len, self._representations.values()))
        waiting = [link for name in names for link in self.of(name)]
        loaded: set[Representation] = set()
        while waiting:
            link = waiting.pop()
            if link in loaded:
                continue
            loaded.add(link)
            waiting.extend(self._before(self.read(link)))
            on_step("reading manifests", len(loaded), total)
        for link in sorted(
            loaded, key=lambda link: link.name
        ):  # parents first: their step is lower
            error = self._join(link)
            if error is not None:
                self.broken[link] = error

    def of(self, name: ManifestName) -> Sequence[Representation]:
        """Return the representations of a checkpoint, the cheapest to read first."""
        return self._representations.get(name, ())

    def sound(self) -> Iterator[tuple[Representation, Manifest]]:
        """Yield every loaded representation that leads to a full, ascending."""
        for link in sorted(self._follows, key=lambda link: (link.name, link.cost)):
            manifest = self._manifests[link]
            if link not in self.broken and isinstance(manifest, Manifest):
                yield link, manifest

    def needs(self, name: ManifestName) -> set[Representation]:
        """Return every representation that a chain of this checkpoint may go through."""
        waiting, needed = list(self.of(name)), set[Representation]()
        while waiting:
            link = waiting.pop()
            if link not in needed:
                needed.add(link)
                waiting.extend(self._before(self.read(link)))
        return needed

    def leading(self, damaged: Collection[Representation]) -> set[Representation]:
        """Return the representations that lead to a full without using one in `damaged`."""
        good: set[Representation] = set()
        for link, manifest in self.sound():
            reached = manifest.parent is None or any(o in good for o in self._follows[link])
            base = manifest.needed_base
            if base is not None:
                own = Representation(ManifestName(base.step, base.generation))
                reached = reached and own in good
            if link not in damaged and reached:
                good.add(link)
        return good

    def _before(self, manifest: Manifest | Damage) -> Sequence[Representation]:
        """Return every representation of the parent, and of the base of residuals."""
        if not isinstance(manifest, Manifest) or manifest.parent is None:
            return ()
        parents = self.of(ManifestName(manifest.parent.step, manifest.parent.generation))
        base = manifest.needed_base
        if base is None or base == manifest.parent:
            return parents
        return (*parents, *self.of(ManifestName(base.step, base.generation)))

    def _join(self, link: Representation) -> Damage | None:
        """Note which representations `link` follows; return why, if it leads to no full."""
        manifest = self.read(link)
        follows = self._follows[link] = []
        if not isinstance(manifest, Manifest):
            return manifest
        contradiction = self._contradiction(manifest) or self._lacks_base(manifest)
        if contradiction is not None or manifest.parent is None:
            return contradiction
        first: Damage | None = None
        for parent_name in self.of(ManifestName(manifest.parent.step, manifest.parent.generation)):
            parent = self.read(parent_name)
            try:
                if not isinstance(parent, Manifest):
                    raise parent
                check_link(manifest, parent)
                if parent_name in self.broken:
                    raise self.broken[parent_name]
            except DAMAGE as error:
                first = first or error
            else:
                follows.append(parent_name)
        if follows:
            return None
        return first or MissingLink(
            MANIFEST_KEY.of(manifest.parent.step, manifest.parent.generation),
            found="no manifest",
            expected=f"{manifest.parent}, on which {manifest.ref} depends",
            next_step="restore another checkpoint: recpoint list URL",
        )

    def _contradiction(self, manifest: Manifest) -> ChainError | None:
        """Return how a consolidated manifest contradicts the own one (format §4, invariant 6)."""
        try:
            check_with_own(manifest, self._read_good)
        except ChainError as error:
            return error
        return None

    def _lacks_base(self, manifest: Manifest) -> Damage | None:
        """Return why the rows are not there that residuals are added to (format §3.7)."""
        try:
            needed_beside([manifest], self._read_good)
        except DAMAGE as error:
            return error
        return None

    def _read_good(self, representation: Representation) -> Manifest:
        manifest = self.read(representation)
        if not isinstance(manifest, Manifest):
            raise manifest
        return manifest
