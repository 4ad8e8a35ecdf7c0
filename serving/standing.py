"""How far behind a version is, known before requests are given it."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from recpoint.catalog.runs.lineage import Representation
from recpoint.catalog.runs.run import Run
from recpoint.format.naming import ManifestName
from recpoint.serving.updater import DAMAGE, Updater
from recpoint.serving.wanted import Wanted

__all__ = ["Standing", "Standings"]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a look has found, as it is from one version.

    Attributes:
        served: that version; None: nothing is served.
        wanted: what is better.
        waiting_since_ms: since when something better has been there; None: nothing is.
        doubt: what validations have against the version.
    """

    served: ManifestName | None
    wanted: Wanted
    waiting_since_ms: int | None
    doubt: str | None

    @property
    def lag_seconds(self) -> float:
        """See `Status.lag_seconds`."""
        since = self.waiting_since_ms
        return 0.0 if since is None else max(0.0, time.time() - since / 1000)


class Standings:
    """The last look from what is served, and during a move also from what will be.

    One thread looks and moves. Others ask at any time: both are there before requests are given the
    new version, until after that, so that each version is found with its own.
    """

    def __init__(self) -> None:
        self._known: tuple[Standing, ...] = ()  # replaced, never changed
        self._committed_ms: dict[ManifestName, int] = {}

    @property
    def last(self) -> Standing | None:
        """Of what is served; None: nobody has looked."""
        return self._known[0] if self._known else None

    def of(self, served: ManifestName | None) -> Standing | None:
        """Of this version, if that is what is served or moved to; else of what is served."""
        known = self._known
        return next((one for one in known if one.served == served), known[0] if known else None)

    def note(self, served: ManifestName | None, wanted: Wanted, run: Run, updater: Updater) -> None:
        """Take over what a look has found from what is served now."""
        self._known = (self._standing(served, wanted, run, updater),)

    def moving(self, to: ManifestName, wanted: Wanted, run: Run, updater: Updater) -> None:
        """From now on until `moved` either of two versions may be served."""
        self._known = (*self._known[:1], self._standing(to, wanted, run, updater))

    def moved(self, *, well: bool) -> None:
        """The move has ended; what is served is the version moved to, or still the one before."""
        self._known = self._known[-1:] if well else self._known[:1]

    def _standing(
        self, served: ManifestName | None, wanted: Wanted, run: Run, updater: Updater
    ) -> Standing:
        return Standing(
            served=served,
            wanted=wanted,
            waiting_since_ms=self._since(wanted, run, updater),
            doubt=None if served is None else wanted.doubts.against(served),
        )

    def _since(self, wanted: Wanted, run: Run, updater: Updater) -> int | None:
        if wanted.published_ms is not None:
            return wanted.published_ms
        names = wanted.names
        self._committed_ms = {one: at for one, at in self._committed_ms.items() if one in names}
        for name in reversed(names):
            if (since := self._committed(name, run, updater)) is not None:
                return since
        # Where none can be read, it is no less far behind than before.
        return None if not names or self.last is None else self.last.waiting_since_ms

    def _committed(self, name: ManifestName, run: Run, updater: Updater) -> int | None:
        """When a checkpoint was committed, at the latest; None: none of its manifests is good."""
        known = self._committed_ms.get(name)
        if known is None:
            with suppress(*DAMAGE):
                known = updater.read(Representation(name)).committed_ms
        if known is None:  # retention let go of its own: a merged one is of a later time
            with suppress(*DAMAGE):
                known = run.manifest(*name).committed_ms
        if known is not None:
            self._committed_ms[name] = known
        return known
