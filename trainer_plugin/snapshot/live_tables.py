"""Reads the tables of a job once in each stall, with their live values and row states.

Each access to a module or an optimizer costs time, and models have hundreds of tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from recpoint.embeddings.tables.tables import TABLE_DTYPES, Table
from recpoint.format.dtypes import dtype_name
from recpoint.format.manifest import RowStateSpec, TableSpec
from recpoint.trainer_plugin.policy import Tip
from recpoint.trainer_plugin.ranks.sharding import StoredShard
from recpoint.trainer_plugin.state.optimizers import OptimizerState

__all__ = ["LiveTable", "LiveTables"]


class LiveTable(NamedTuple):
    """One table of the job as it is in a stall.

    Attributes:
        key: `StoredShard.key`.
        table: the table with the rows that this rank stores; None: it stores no row.
        spec: the table as it is stored.
        held: the rows of the table that this rank stores.
        weight: the live values, [len(held), dim]; of a cached table, its slots.
        row_states: the live row states, in the order of `spec.row_states`.
    """

    key: str
    table: Table | None
    spec: TableSpec
    held: range
    weight: Tensor
    row_states: tuple[Tensor, ...]


class LiveTables:
    """Reads the tables of a job.

    Args:
        shards: all tables of the job, in the order in which they are stored.
        optimizers: the state of the optimizers, which hold the row states.
    """

    def __init__(self, shards: Sequence[StoredShard], optimizers: OptimizerState) -> None:
        self._shards = tuple(shards)
        self._optimizers = optimizers
        self._specs: dict[str, tuple[object, TableSpec]] = {}

    def tables(self, tip: Tip | None) -> tuple[LiveTable, ...]:
        """Return all tables as they are now.

        Args:
            tip: tip of the chain. For a table without rows here, the spec in the tip is kept.
        """
        return tuple(
            self._elsewhere(shard, tip) if shard.table is None else self._here(shard, shard.table)
            for shard in self._shards
        )

    def _here(self, shard: StoredShard, table: Table) -> LiveTable:
        weight, first_row = table.weight, table.first_row
        row_state = self._optimizers.row_states(table)
        form = [(name, t.dtype, tuple(t.shape[1:])) for name, t in row_state.tensors.items()]
        dim, dtype = weight.shape[1], TABLE_DTYPES[weight.dtype]
        key = (table.table_rows, dim, dtype, row_state.optimizer, form)
        last_spec = self._specs.get(shard.key)
        if last_spec is None or last_spec[0] != key:
            # Built anew only if something differs, because building a checked model takes long.
            states = tuple(
                RowStateSpec(
                    name=name,
                    dtype=dtype_name(dtype),
                    shape=shape,
                    optimizer=row_state.optimizer or 0,
                )
                for name, dtype, shape in form
            )
            last_spec = self._specs[shard.key] = (key, _spec_of(shard, states))
        return LiveTable(
            key=shard.key,
            table=table,
            spec=last_spec[1],
            held=range(first_row, first_row + table.rows),
            weight=weight,
            row_states=tuple(row_state.tensors.values()),
        )

    def _elsewhere(self, shard: StoredShard, tip: Tip | None) -> LiveTable:
        """Describe a table of which this rank holds no row, and so does not know the row states.

        The row states in the tip are assumed unchanged; if they changed, a rank that holds rows
        says so.
        """
        last_spec = self._specs.get(shard.key)
        spec = _spec_of(shard, ()) if last_spec is None else last_spec[1]
        self._specs[shard.key] = (None, spec)
        for stored_spec in () if tip is None else tip.tables:
            if stored_spec.model_copy(update={"row_states": ()}) == spec:
                spec = stored_spec
                break
        return LiveTable(shard.key, None, spec, shard.held, shard.weight, ())


def _spec_of(shard: StoredShard, row_states: tuple[RowStateSpec, ...]) -> TableSpec:
    return TableSpec(
        name=shard.name,
        rows=shard.rows,
        dim=shard.dim,
        dtype=shard.dtype,
        row_states=row_states,
        columns=shard.columns,
    )
