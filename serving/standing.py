"""Says how far behind a version is; known before requests are given the version."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from recpoint.catalog.run.chain import DAMAGE
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.format.naming import ManifestName
from recpoint.serving.goal import FollowerGoal
from recpoint.serving.update import Updater

__all__ = [
    "FollowerStanding",
    "Standings",
]


@dataclass(frozen=True, kw_only=True)
class FollowerStanding:
    """What a look has found, seen from one version.

    Attributes:
        served: that version; None: nothing is served.
        wanted: the better checkpoints.
        waiting_since_ms: since when a better checkpoint has existed; None: there is none.
        doubt: what validations have against the version.
    """

    served: ManifestName | None
    wanted: FollowerGoal
    waiting_since_ms: int | None
    doubt: str | None

    @property
    def lag_seconds(self) -> float:
        """See `Status.lag_seconds`."""
        since_ms = self.waiting_since_ms
        return 0.0 if since_ms is None else max(0.0, time.time() - since_ms / 1000)


class Standings:
    """The last look, seen from the served version, and during a move also from the next version.

    One thread looks and moves. Other threads ask at any time. Both standings exist from before
    requests are given the new version until after, so each version is found with its own standing.
    """

    def __init__(self) -> None:
        self._standings: tuple[FollowerStanding, ...] = ()  # replaced, never changed
        self._committed_ms: dict[ManifestName, int] = {}

    @property
    def last(self) -> FollowerStanding | None:
        """The standing of the served version; None: nobody has looked."""
        return self._standings[0] if self._standings else None

    def of(self, served: ManifestName | None) -> FollowerStanding | None:
        """Return the standing of this version; if it is unknown, of the served version."""
        standings = self._standings
        return next(
            (standing for standing in standings if standing.served == served),
            standings[0] if standings else None,
        )

    def note(
        self, served: ManifestName | None, goal: FollowerGoal, run: Run, updater: Updater
    ) -> None:
        """Take over what a look has found, seen from the version that is served now."""
        self._standings = (self._standing(served, goal, run, updater),)

    def moving(self, to: ManifestName, goal: FollowerGoal, run: Run, updater: Updater) -> None:
        """Note that from now until `moved` either of two versions may be served."""
        self._standings = (*self._standings[:1], self._standing(to, goal, run, updater))

    def moved(self, *, well: bool) -> None:
        """The move has ended. If `well`, the new version is served; else still the one before."""
        self._standings = self._standings[-1:] if well else self._standings[:1]

    def _standing(
        self, served: ManifestName | None, goal: FollowerGoal, run: Run, updater: Updater
    ) -> FollowerStanding:
        return FollowerStanding(
            served=served,
            wanted=goal,
            waiting_since_ms=self._since(goal, run, updater),
            doubt=None if served is None else goal.doubts.against(served),
        )

    def _since(self, goal: FollowerGoal, run: Run, updater: Updater) -> int | None:
        if goal.published_ms is not None:
            return goal.published_ms
        names = goal.names
        self._committed_ms = {
            name: time_ms for name, time_ms in self._committed_ms.items() if name in names
        }
        for name in reversed(names):
            if (since_ms := self._committed(name, run, updater)) is not None:
                return since_ms
        # If no manifest can be read, the follower is at least as far behind as before.
        return None if not names or self.last is None else self.last.waiting_since_ms

    def _committed(self, name: ManifestName, run: Run, updater: Updater) -> int | None:
        """Return when it was committed at the latest; None: none of its manifests is good."""
        committed_ms = self._committed_ms.get(name)
        if committed_ms is None:
            with suppress(*DAMAGE):
                committed_ms = updater.read(Representation(name)).committed_ms
        if committed_ms is None:  # retention deleted its own; a merged one has a later time
            with suppress(*DAMAGE):
                committed_ms = run.manifest(*name).committed_ms
        if committed_ms is not None:
            self._committed_ms[name] = committed_ms
        return committed_ms
