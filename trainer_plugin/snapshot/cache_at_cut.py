"""Prepares a cache for a cut, and says what embedding servers stage of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.progress import CacheStats
from recpoint.embeddings.cache.view import CacheView
from recpoint.embeddings.server.served_part import part_of
from recpoint.format.first_values import FirstValueRule
from recpoint.format.manifest import CacheUse
from recpoint.trainer_plugin.snapshot.plan import CutTable
from recpoint.trainer_plugin.snapshot.seal import ServedTables

__all__ = ["CacheAtCut"]


class CacheAtCut:
    """The cache of a model as a cut needs it; without a cache, its methods do nothing.

    Args:
        cache: has the rows of cached tables; None: no table is cached.
        at_servers: whether embedding servers stage their own rows.

    Attributes:
        staged_at_home: names in the cache of the tables that servers stage at this cut.
    """

    def __init__(self, cache: Cache | None, *, at_servers: bool) -> None:
        self._cache = cache
        self._at_servers = at_servers
        self._used = CacheStats() if cache is None else cache.stats  # at the cut before
        self.staged_at_home: frozenset[str] = frozenset()

    @property
    def staging_servers(self) -> int:
        """How many embedding servers stage their own rows; 0: none do."""
        if self._cache is None or not self._at_servers:
            return 0
        return self._cache.home.staging_servers

    def announce(self) -> None:
        """Say that this rank takes a checkpoint next, or ends training; see `Cache.announce_cut`.

        Raises:
            RanksDiffer: ranks that share rows do different things.
        """
        if self._cache is not None:
            self._cache.announce_cut()

    def prepare(self) -> Callable[[], None]:
        """Prepare for a cut, which must follow before training goes on.

        With several ranks, each must call it, also if its own cut then fails.

        Returns:
            What to call at the end of the stall, also after an error; see `Cache.prepare_view`.

        Raises:
            HomeError: rows of a cached table cannot be written to their home.
            RankLost: a rank does not answer.
        """
        if self._cache is None:
            return lambda: None
        cache = self._cache
        self.staged_at_home = frozenset(
            name for name in cache.tables if self._at_servers and cache.stages_at_home(name)
        )
        return cache.prepare_view(writes_back=self._at_servers)

    def rule_of(self, name: str | None) -> FirstValueRule | None:
        """Return the rule of a table's first values; None: checkpoints cannot name one.

        Args:
            name: name of the table in its cache; None: it is in none.
        """
        if self._cache is None or name is None:
            return None
        return self._cache.tables[name].rule

    def view(self) -> CacheView | None:
        """Return what reads the rows of cached tables after the cut; None: no table is cached."""
        return None if self._cache is None else self._cache.view()

    def served(self, parts: Sequence[CutTable], attempt: str) -> ServedTables | None:
        """Return what embedding servers stage of the checkpoint; None: nothing, on all ranks."""
        if self._cache is None or not self.staged_at_home:
            return None
        indexes = {
            part.in_cache: position
            for position, part in enumerate(parts)
            if part.in_cache is not None
        }
        part = part_of(self._cache.home, indexes, attempt)
        return ServedTables(part=part, tables=tuple(part.staged_at_servers for part in parts))

    def take_use(self) -> CacheUse | None:
        """Return what the cache did since the cut before; None: no table is cached."""
        if self._cache is None:
            return None
        previous, now = self._used, self._cache.stats
        self._used = now
        return CacheUse(
            hits=now.hits - previous.hits,
            misses=now.misses - previous.misses,
            fetched_rows=now.fetched_rows - previous.fetched_rows,
            fetched_bytes=now.fetched_bytes - previous.fetched_bytes,
            written_rows=now.written_rows - previous.written_rows,
            written_bytes=now.written_bytes - previous.written_bytes,
            wait_us=round(1e6 * (now.wait_seconds - previous.wait_seconds)),
            window=now.window,
        )
