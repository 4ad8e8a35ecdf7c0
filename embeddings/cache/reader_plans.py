"""Plans the batches of a reader, under the names that the reader has for tables."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from recpoint.catalog.restore.state import canonical_name
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.lookup_hooks import cached_modules

__all__ = ["PlannedCache", "planned_cache"]

_log = logging.getLogger("recpoint")


class PlannedCache:
    """Tells a cache of the batches that are read, under the names that a reader has for tables.

    Each reader has its own. The cache plans the batches of the reader that was asked last: an
    evaluation in mid-epoch has the plans of the training forgotten, and made again afterwards.

    Args:
        cache: the cache.
        names: name of a table for the reader -> its name in the cache.
    """

    def __init__(self, cache: Cache, names: Mapping[str, str]) -> None:
        self.cache = cache
        self._names = dict(names)
        self._has_told = False

    @property
    def ahead(self) -> int:
        """Number of batches that are planned and were not handed out."""
        return self.cache.planned - self.cache.batch

    def plan(self, batches: Sequence[Mapping[str, Tensor]], *, fetched: int, window: int) -> None:
        """Plan batches, as far as there is room.

        Args:
            batches: all that were read and not handed out, in order: table name -> ids.
            fetched: rows of so many of them are fetched now. Rows of the others stay if they are in
                slots. A row that came early would take a slot in which another row could stay.
            window: number of batches that the reader is to hold; the same on all ranks.

        Raises:
            SettingsError: the next batch alone needs more slots than a table has.
            HomeError: the home has failed.
        """
        self.cache.turn_to(self)
        last_known = self.cache.tell(
            len(batches), lambda position: self._own(batches[position]), window=window
        )
        for ids in batches[self.cache.expected - self.cache.batch : last_known]:
            self.cache.expect(self._own(ids))
        for ids in batches[self.ahead : min(fetched, last_known)]:
            if not self.cache.plan(self._own(ids), is_next=self.ahead == 0):
                if not self._has_told:
                    self._tell(fetched)
                return

    def _own(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {own_name: ids[name] for name, own_name in self._names.items() if name in ids}

    def _tell(self, fetched: int) -> None:
        """Say once that the window has shrunk."""
        self._has_told = True
        _log.warning(
            "cached(capacity_rows=...): the slots have room for the rows of %d batches, and rows "
            "are to be fetched %d batches ahead. Results do not change, and training may wait for "
            "rows. Next: give the tables more slots, or make the Lookahead's window smaller",
            self.ahead,
            fetched,
        )

    def end_batch(self) -> None:
        """See `Cache.end_batch`."""
        self.cache.end_batch()

    def begin_batch(self) -> None:
        """See `Cache.begin_batch`."""
        self.cache.begin_batch()

    def forget(self) -> None:
        """Forget the plans of batches that were not handed out, if they are this reader's."""
        self.cache.turn_from(self)


def planned_cache(model: nn.Module) -> PlannedCache | None:
    """Return what plans batches for the cached tables of a model; None: it has none."""
    cached_tables = dict(cached_modules(model))
    names = {
        canonical_name(model, name) or "weight": lookups.name
        for name, lookups in cached_tables.items()
    }
    if not names:
        return None
    return PlannedCache(next(iter(cached_tables.values())).cache, names)
