"""Reads several manifests of a chain at a time, although each names only the next one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack

from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.closing import Closing
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName

__all__ = [
    "ManifestsAhead",
]


#: Shorter chains are read as fast without reading ahead.
_WORTH_IT = 4


class ManifestsAhead(Closing):
    """Reads manifests ahead for a walk from a checkpoint to its full.

    The first manifest of a chain says how long the chain is and where it starts. From this the
    next manifests of the walk are guessed, because a chain mostly follows the live line, and read
    ahead. A wrong guess is dropped, and a manifest that was not guessed is read when the walk asks
    for it. So a wrong guess costs only time.

    Args:
        run: the run of the manifests.
        line: checkpoints, newest first, among which parents are guessed; may be empty.
        there: consolidated manifests of each checkpoint, cheapest to restore first.
        avoid: keys that the walk will not ask for.
    """

    def __init__(
        self,
        run: Run,
        line: Sequence[ManifestName],
        there: Mapping[ManifestName, Sequence[Representation]],
        avoid: Collection[str] = (),
    ) -> None:
        self._run = run
        self._line = line
        self._there = there
        self._avoid = avoid
        self._left: set[Representation] | None = None
        self._coming: Iterator[tuple[Representation, Future[Manifest]]] = iter(())
        self._closing = ExitStack()

    def close(self) -> None:
        """Give up the reads that nobody has asked for."""
        self._closing.close()

    def read(self, representation: Representation) -> Manifest:
        """Return one manifest; raise as `Run.read_manifest`, and only for this manifest."""
        if self._left and representation in self._left:
            for guess, coming in self._coming:
                self._left.remove(guess)
                if guess == representation:
                    return coming.result()
        found = self._run.read_manifest(representation)
        if self._left is None and self._line and found.chain_length >= _WORTH_IT:
            guesses = list(self._guesses(found))
            self._left = set(guesses)
            reads = self._closing.enter_context(ReadScheduler.of_records())
            self._coming = reads.in_order(guesses, self._run.read_manifest)
        return found

    def _guesses(self, found: Manifest) -> Iterator[Representation]:
        """Yield the walk after `found` if each checkpoint's parent is the one before it."""
        if found.parent is None or found.base is None:
            return
        newest, left = found.parent.step, found.chain_length - 1
        for name in self._line:
            if name.step > newest:
                continue
            if left == 0 or name.step < found.base.step:
                return
            left -= 1
            choices = [*self._there.get(name, ()), Representation(name)]
            choice = next((one for one in choices if one.key not in self._avoid), None)
            if choice is None:
                return
            yield choice
            if choice.form == "full":
                return
            if choice.after is not None:
                newest = choice.after
