"""The tables of a job as they are in one stall: looked at once, since each look at a module or an
optimizer costs, and models have hundreds of tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from recpoint.embeddings.tables import TABLE_DTYPES, Table
from recpoint.format.dtypes import dtype_name
from recpoint.format.manifest import RowStateSpec, TableSpec
from recpoint.trainer_plugin.policy import Tip
from recpoint.trainer_plugin.ranks.sharding import Shard
from recpoint.trainer_plugin.state.optimizers import OptimizerState

__all__ = ["LiveTable", "LiveTables"]


class LiveTable(NamedTuple):
    """One table of the job.

    Attributes:
        key: `Shard.key`.
        table: has the rows that this rank stores; None: it stores none.
        spec: as it is stored.
        held: which rows of the table this rank stores.
        weight: [len(held), dim], the live values.
        row_states: live, in the order of `spec.row_states`.
    """

    key: str
    table: Table | None
    spec: TableSpec
    held: range
    weight: Tensor
    row_states: tuple[Tensor, ...]


class LiveTables:
    """Looks at them.

    Args:
        shards: all tables of the job, in the order in which they are stored.
        optimizers: have their row states.
    """

    def __init__(self, shards: Sequence[Shard], optimizers: OptimizerState) -> None:
        self._shards = tuple(shards)
        self._optimizers = optimizers
        self._specs: dict[str, tuple[object, TableSpec]] = {}

    def tables(self, tip: Tip | None) -> tuple[LiveTable, ...]:
        """All of them, as they are now.

        Args:
            tip: of the chain. What it says of tables of which no row is here stays as it is.
        """
        return tuple(
            self._elsewhere(shard, tip) if shard.table is None else self._here(shard, shard.table)
            for shard in self._shards
        )

    def _here(self, shard: Shard, table: Table) -> LiveTable:
        weight, first_row = table.weight, table.first_row
        found = self._optimizers.row_states(table)
        form = [(name, t.dtype, tuple(t.shape[1:])) for name, t in found.tensors.items()]
        dim, dtype = weight.shape[1], TABLE_DTYPES[weight.dtype]
        key = (table.table_rows, dim, dtype, found.optimizer, form)
        known = self._specs.get(shard.key)
        if known is None or known[0] != key:
            # Built anew only when something differs: checked models take long in a stall.
            states = tuple(
                RowStateSpec(
                    name=name, dtype=dtype_name(dtype), shape=shape, optimizer=found.optimizer or 0
                )
                for name, dtype, shape in form
            )
            known = self._specs[shard.key] = (key, _spec_of(shard, states))
        return LiveTable(
            key=shard.key,
            table=table,
            spec=known[1],
            held=range(first_row, first_row + weight.shape[0]),
            weight=weight,
            row_states=tuple(found.tensors.values()),
        )

    def _elsewhere(self, shard: Shard, tip: Tip | None) -> LiveTable:
        """Which row states it has, others know.

        Those of the tip count as unchanged here; a rank that holds rows says when they are not.
        """
        known = self._specs.get(shard.key)
        spec = _spec_of(shard, ()) if known is None else known[1]
        self._specs[shard.key] = (None, spec)
        for there in () if tip is None else tip.tables:
            if there.model_copy(update={"row_states": ()}) == spec:
                spec = there
                break
        return LiveTable(shard.key, None, spec, shard.held, shard.weight, ())


def _spec_of(shard: Shard, row_states: tuple[RowStateSpec, ...]) -> TableSpec:
    return TableSpec(
        name=shard.name,
        rows=shard.rows,
        dim=shard.dim,
        dtype=shard.dtype,
        row_states=row_states,
        columns=shard.columns,
    )
