"""Passes on to a sink the rows of a version that changed most, and defers the others.

Each row that comes is compared with the one that readers see. Rows that are equal need not come.
The others come in the order of their changes until the budget is used up, and the rest is deferred:
its ids and the version that each row stands at are recorded with the new version (`backlog`). A
later version is made from the rows that changed since the oldest of these, so a deferred row comes
up again with all that has changed meanwhile, and nothing must be remembered outside the sink.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.serving.sinks.backlog import Backlog
from recpoint.serving.sinks.most_changed import ID_BYTES, MostChanged, change_of
from recpoint.serving.sinks.records import CommittedVersion, SinkVersion
from recpoint.serving.sinks.row_bytes import equal_rows
from recpoint.serving.sinks.row_stream import TakesRows

__all__ = ["BudgetedRows"]


class BudgetedRows:
    """Chooses among the rows that make the next version out of the one that is held.

    Args:
        taker: takes the rows that are chosen, and all deletions.
        version: the next version.
        held: what the sink holds.
        backlog: the rows that it holds of older versions.
        budget_bytes: of rows and their ids.
        most_versions: a row that would stand at an older version than so many before the next one
            goes whatever the budget.
    """

    def __init__(
        self,
        taker: TakesRows,
        version: SinkVersion,
        held: CommittedVersion,
        backlog: Backlog,
        *,
        budget_bytes: int,
        most_versions: int,
    ) -> None:
        self._taker, self._held, self._backlog = taker, held, backlog
        self._tables = {table.name: table for table in version.tables}
        self._oldest_number = held.number + 1 - most_versions
        self._deferred = Backlog()
        self._deferred.checkpoints |= backlog.checkpoints
        self._deferred.checkpoints[held.number] = held.version.checkpoint
        row_bytes = {table.name: table.row_bytes for table in version.tables}
        self._most_changed = MostChanged(budget_bytes, row_bytes, self._deferred.add)

    def put(self, table: str, ids: Tensor, rows: Tensor, importance: Tensor | None) -> None:
        """Take rows; see `TakesRows.put`."""
        if not len(ids):
            return
        held_rows, present = self.held_rows(table, ids)
        is_new = ~(present & equal_rows(held_rows, rows))
        ids, rows, held_rows = ids[is_new], rows[is_new], held_rows[is_new]
        if self._tables[table].ids == "slots":
            self._taker.put(table, ids, rows, None)  # publishers need all of them
            return
        changes = change_of(rows, held_rows, None if importance is None else importance[is_new])
        numbers = self._backlog.rows_of(table).numbers_of(ids)
        numbers = torch.where(numbers > 0, numbers, self._held.number)
        is_due = numbers < self._oldest_number
        if bool(is_due.any()):
            self._most_changed.reserve(
                int(is_due.sum()) * (self._tables[table].row_bytes + ID_BYTES)
            )
            self._taker.put(table, ids[is_due], rows[is_due], None)
        self._most_changed.add(
            table, ids[~is_due], rows[~is_due], changes[~is_due], numbers[~is_due]
        )

    def delete(self, table: str, ids: Tensor) -> None:
        """Have rows deleted: a row that is no more is never deferred."""
        self._taker.delete(table, ids)

    def held_rows(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that readers see; see `TakesRows.held_rows`."""
        return self._taker.held_rows(table, ids)

    def finish(self) -> Backlog:
        """Pass the chosen rows on, after the last row has come; return the deferred ones."""
        for table, ids, rows in self._most_changed.chosen():
            self._taker.put(table, ids, rows, None)
        return self._deferred
