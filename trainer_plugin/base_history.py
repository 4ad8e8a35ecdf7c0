"""The checkpoints on one base, and their sizes as stored: what a policy decides by. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

from recpoint.format.records import CheckpointRef

__all__ = ["BaseHistory", "Sizes"]


class Sizes(NamedTuple):
    """Bytes as stored of the increments on a base whose outcome is known."""

    number: int = 0
    total_bytes: int = 0
    newest_bytes: int = 0  # of the one that was cut last

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Self:
        """Of increments in the order of their cuts."""
        found = cls()
        for size in sizes:
            found = found.then(size)
        return found

    def then(self, size_bytes: int) -> Self:
        """With one more, cut later than these."""
        return type(self)(self.number + 1, self.total_bytes + size_bytes, size_bytes)


class BaseHistory:
    """A base and the increments cut on it, in that order.

    Outcomes arrive later than cuts, and in any order. What came to nothing leaves no trace. Memory
    follows the increments that wait for an outcome, not those on the base: with `one_shot` there is
    no end of these.

    Args:
        base: what the increments stand on.
        stored_bytes: bytes of its chunks, or of the full that stands for it; None: not known yet.
        links_to_read: manifests that a restore of the base reads.
    """

    def __init__(
        self, base: CheckpointRef, *, stored_bytes: int | None = None, links_to_read: int = 1
    ) -> None:
        self.base = base
        self.base_bytes = stored_bytes
        # Of all that were cut before the first that waits; their outcomes do not change any more.
        self._settled = Sizes()
        self._settled_links = links_to_read
        # In the order of the cuts; size and links once they are known.
        self._others: dict[CheckpointRef, tuple[int, int] | None] = {}

    def __len__(self) -> int:
        """Checkpoints on this base, itself counted, but for those that came to nothing."""
        return 1 + self._settled.number + len(self._others)

    @property
    def waiting(self) -> int:
        """Increments that are remembered one by one."""
        return len(self._others)

    def cut(self, ref: CheckpointRef) -> None:
        """An increment was cut; its size is not known yet."""
        self._others[ref] = None

    def stored(self, ref: CheckpointRef, stored_bytes: int, *, links_to_read: int) -> None:
        """The base, or an increment that was cut, is committed.

        Args:
            ref: one of this history that waits for its outcome; others change nothing.
            stored_bytes: bytes of its chunks.
            links_to_read: manifests that a restore of it read when it was committed.
        """
        if ref == self.base:
            self.base_bytes = stored_bytes
            if not self._settled.number:
                self._settled_links = links_to_read
        elif ref in self._others:
            self._others[ref] = (stored_bytes, links_to_read)
            self._fold_outcomes()

    def lost(self, ref: CheckpointRef) -> None:
        """An increment that waited for its outcome came to nothing."""
        self._others.pop(ref, None)
        self._fold_outcomes()

    @property
    def known(self) -> Sizes:
        """Of the increments whose outcome is known."""
        found = self._settled
        for outcome in self._others.values():
            if outcome is not None:
                found = found.then(outcome[0])
        return found

    @property
    def links_to_read(self) -> int:
        """Manifests that a restore of the newest increment of a chain reads, as far as is known.

        Those that its newest committed one needs, and one for each that was cut after it.
        """
        after = 0
        for outcome in reversed(self._others.values()):
            if outcome is not None:
                return outcome[1] + after
            after += 1
        return self._settled_links + after

    def _fold_outcomes(self) -> None:
        for ref, outcome in list(self._others.items()):
            if outcome is None:
                return
            del self._others[ref]
            self._settled = self._settled.then(outcome[0])
            self._settled_links = outcome[1]
