"""Whether somebody has come to a run since retention has looked who is there (format §6.6 T5)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

from recpoint.catalog.records.leases import Held
from recpoint.catalog.runs.run import Run
from recpoint.format.record_kinds import LEASE

__all__ = ["Present"]


class Present(NamedTuple):
    """Who was there: leases, as they were last written, and generations."""

    leases: frozenset[tuple[str, int]]
    generations: frozenset[int]

    @classmethod
    def of(cls, leases: Iterable[Held], generations: Iterable[int]) -> Self:
        """What was found by reading all leases, and by listing the generations before that."""
        written = frozenset((lease.key, lease.modified_ms) for lease in leases)
        return cls(written, frozenset(generations))

    def anybody_new(self, run: Run) -> bool:
        """Whether there is a lease or a generation that was not; two listings.

        Raises:
            StoreError: the store cannot be listed.
        """
        # Leases first: a trainer gives up its own when its generation is there.
        for _, info in run.records(LEASE).listed():
            if (info.key, info.modified_ms) not in self.leases:
                return True
        return not self.generations.issuperset(run.generation_numbers())
