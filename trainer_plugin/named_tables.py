"""Finds the tables of a model by name, and marks rows that change otherwise than by training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from recpoint.embeddings.tables.marks import Tracker
from recpoint.embeddings.tables.tables import Table
from recpoint.errors import SettingsError
from recpoint.interrupts import held
from recpoint.trainer_plugin.ranks.sharding import StoredShard
from recpoint.trainer_plugin.state.optimizers import OptimizerState

__all__ = ["NamedTables"]


class NamedTables:
    """The tables of a job, for calls of a script that names them.

    `Checkpointer` documents its methods of the same names, and what they raise.

    Args:
        shards: all tables of the job.
        trackers: `Table.key` -> tracker of the table's dirty rows.
        optimizers: have the row states of the tables.
    """

    def __init__(
        self,
        shards: Sequence[StoredShard],
        trackers: Mapping[str, Tracker],
        optimizers: OptimizerState,
    ) -> None:
        self._shards = tuple(shards)
        self._trackers = trackers
        self._optimizers = optimizers

    def mark(self, name: str, ids: Tensor) -> None:
        """Mark rows of a table."""
        self._optimizers.begin_entries()
        for piece, tracker in self._pieces(name):
            tracker.mark(
                ids
                if piece.rows == piece.table_rows and not piece.own_states
                else piece.rows_of(ids)
            )

    def mark_all(self, name: str) -> None:
        """Mark all rows of a table."""
        for _, tracker in self._pieces(name):
            tracker.mark_all()

    def delete_rows(self, name: str, ids: Tensor) -> None:
        """Set rows of a table, and their row states, to zero.

        A rank that has a copy of a table that another rank stores sets them to zero in its copy,
        too: checkpoints compare copies.
        """
        for shard in self._shards_of(name):
            table = shard.copy if shard.table is None else shard.table
            if table is None:
                continue
            _refuse_mapped(table)
            self._optimizers.begin_entries()
            deleted_ids = table.rows_of(ids)
            row_states = list(self._optimizers.row_states(table).tensors.values())
            tracker = self._trackers.get(shard.key)  # of tables that this rank stores
            with held():
                if tracker is not None:
                    # First, because the mark below counts all earlier in-place changes as reported.
                    tracker.notice_changes(row_states)
                table.zero_rows(deleted_ids, row_states)
                self._optimizers.begin_entries()
                if tracker is not None:
                    tracker.mark(deleted_ids)

    def _pieces(self, name: str) -> list[tuple[Table, Tracker]]:
        """Return the pieces of a table that this process stores, each with its tracker."""
        return [
            (shard.table, self._trackers[shard.key])
            for shard in self._shards_of(name)
            if shard.table is not None
        ]

    def _shards_of(self, name: str) -> list[StoredShard]:
        """Return the shards of a table, of this rank and of others."""
        shards = [shard for shard in self._shards if shard.name == name]
        if not shards:
            raise SettingsError(
                f"table {name!r}",
                found="no such table in the model",
                expected=f"one of {sorted({shard.name for shard in self._shards})!r:.400}",
                next_step="use the name of the embedding module, as in model.named_modules()",
            )
        return shards


def _refuse_mapped(table: Table) -> None:
    """Refuse a table whose rows TorchRec gives to other ids over time.

    Raises:
        SettingsError: row states say which id each row belongs to, and they are a library's.
    """
    if table.maps_ids and table.fused:
        raise SettingsError(
            f"table {table.name!r}",
            found="managed collisions, which map ids to its rows",
            expected="a table whose ids are its rows",
            next_step="delete nothing: TorchRec's eviction gives rows of old ids to new ones",
        )
