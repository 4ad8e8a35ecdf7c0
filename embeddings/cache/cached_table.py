"""Describes a cached table to the rest of recpoint, and tracks which of its rows have changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.residents import CachedRows
from recpoint.embeddings.tables.marks import Tracker
from recpoint.embeddings.tables.tables import (
    ModuleTable,
    Table,
)
from recpoint.interrupts import held
from recpoint.kernels import dirty_bitmap

__all__ = ["CachedTable", "CachedTracker"]


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedTable(ModuleTable):
    """A table whose rows are in slots or at home.

    `weight` has the slots, and `rows` is the number of rows of this trainer's part of the table.
    """

    cache: Cache
    key_in_cache: str = field(repr=False)

    @property
    def cached_rows(self) -> CachedRows:
        """The slots of the table, and what assigns them."""
        return self.cache.tables[self.key_in_cache]

    @property
    def rows(self) -> int:
        """Rows of this trainer's part of the table."""
        return len(self.cached_rows.part)

    @property
    def first_row(self) -> int:
        """First row of the part."""
        return self.cached_rows.part.start

    @property
    def table_rows(self) -> int:
        """Rows of the whole table."""
        return self.cached_rows.slots.rows

    @property
    def name_in_cache(self) -> str:
        """Name of the table in the cache."""
        return self.key_in_cache

    @property
    def filled_slots(self) -> Tensor:
        """Slots that have a row now. The home thread may be about to give one to another row."""
        slots = self.cached_rows.slots
        return torch.nonzero(slots.ready & (slots.ids >= 0)).flatten()

    @property
    def counts_changes(self) -> bool:
        """False: rows that come and go change the weight, too. The cache reports changed rows."""
        return False

    def refuse_optimizer(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Refuse an optimizer that changes rows that were not looked up; follow its row states.

        Raises:
            SettingsError: it does.
        """
        self.cache.refuse_optimizer(self.key_in_cache, optimizer, group)

    def zero_rows(self, ids: Tensor, row_states: Iterable[Tensor]) -> None:
        """Set rows to zero wherever they are, and all their row states.

        Raises:
            SettingsError: rows are in the caches of several trainers.
        """
        with held():
            self.cache.zero_rows(self.key_in_cache, ids.cpu())


class CachedTracker(Tracker):
    """Tracks the dirty rows of a cached table: the cache marks the rows of each step.

    Args:
        table: the table.
        cached_rows: its rows in the cache.
    """

    __slots__ = ("_cached_rows",)

    def __init__(self, table: Table, cached_rows: CachedRows) -> None:
        super().__init__(table)
        self._cached_rows = cached_rows
        if self.bitmap.device.type != "cpu":  # ids and the cache's lists are on the CPU
            self._spare = [dirty_bitmap.new(self.rows, device="cpu")]
            self._use(dirty_bitmap.new(self.rows, device="cpu"))

    def install(self) -> None:
        """Have the cache mark rows here; `remove` undoes it."""
        self._installed = True
        rows = self._cached_rows
        rows.marker = self
        if rows.is_unmarked:
            self.all_rows, rows.is_unmarked = True, False

    def remove(self) -> None:
        """Have the cache mark no rows here."""
        self._installed = False
        self._cached_rows.marker = None

    def choose(self, *, by_gradient: bool, whole: bool = False) -> None:
        """Do nothing: the cache knows which rows a step changes, and refuses other optimizers."""

    def after_step(self) -> Tensor | None:
        """Note that rows that a keyed table has looked up are trained; the cache has marked all."""
        self.unapplied = False
        return None

    def step_failed(self, *, whole: bool) -> None:
        """Do nothing: rows are marked before a step."""

    def follow_weight(self) -> None:
        """Do nothing: the weight has slots."""

    def notice_changes(self, row_states: object = ()) -> None:
        """Do nothing: the cache reports each change."""

    def follow_row_states(self, tensors: object) -> None:
        """Do nothing: the cache follows them."""
