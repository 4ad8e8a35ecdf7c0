"""Restores a keyed table from another number of slots, or from a plain table, and back.

The rows of the checkpoint are read into tensors of their own, or wait at home, if the table is in a
cache. Then they go to the slots that they have here:

- A slot that the table has keeps its number. Keys of higher slots take the lowest free ones.
- If the table has fewer slots than keys, the rule of eviction decides which keys leave.
- A plain table's row i is that of key i. No key has been used yet, so the least keys leave first.
- Of a keyed table, a plain one takes the rows of keys that are its row numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recpoint.catalog.restore.keyed_rows import KEY, KEYED_STATES, LAST_USE, has_keys
from recpoint.catalog.restore.placement import TablePart
from recpoint.catalog.restore.rows import LogicalTable
from recpoint.embeddings.tables.tables import ModuleTable, Table
from recpoint.format.dtypes import torch_dtype
from recpoint.trainer_plugin import mismatches
from recpoint.trainer_plugin.integrations.keyed import KeyedSource, KeyedTable
from recpoint.trainer_plugin.mismatches import Mismatch
from recpoint.trainer_plugin.restore.growth import Growth
from recpoint.trainer_plugin.restore.kept_keys import begun_state, kept_slots
from recpoint.trainer_plugin.restore.shelved_rows import ShelvedRows
from recpoint.trainer_plugin.restore.unkeyed_rows import place_rows_of_keys

__all__ = ["MovedKeys"]


class MovedKeys:
    """The keyed tables of a model whose rows have other numbers in a checkpoint.

    Args:
        tables: tables of the model.
        stored_tables: tables of the checkpoint, by name.
        growth: has the rules for rows whose keys the checkpoint lacks.

    Attributes:
        names: name of each such table -> its rows in the checkpoint.
        unkeyed: plain tables here that are keyed in the checkpoint, by name.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        stored_tables: Mapping[str, LogicalTable],
        growth: Growth,
    ) -> None:
        self._growth = growth
        self._tables = {
            table.name: table
            for table in tables
            if isinstance(table, KeyedTable) and table.name in stored_tables
        }
        self._stored = stored_tables
        self._values: dict[str, Tensor] = {}
        self._states: dict[str, dict[str, Tensor]] = {}
        self._shelves: dict[str, ShelvedRows] = {}
        self.names = {
            name: stored_tables[name].rows
            for name, table in self._tables.items()
            if stored_tables[name].rows != table.table_rows or not self._has_keys(name)
        }
        self.unkeyed = {
            table.name: table
            for table in tables
            if table.name in stored_tables
            and table.name not in self._tables
            and self._has_keys(table.name)
        }
        self.names |= {name: stored_tables[name].rows for name in self.unkeyed}

    def _has_keys(self, name: str) -> bool:
        return has_keys([state.name for state in self._stored[name].row_states])

    def differences(self) -> list[Mismatch]:
        """Return the keyed tables whose row states of keys are others than in the checkpoint.

        Also tables that have keys there, and here are sharded, in a cache or of a library.
        """
        differences = [
            Mismatch(
                f"table {name!r} has keys in the checkpoint, and is no whole plain table here",
                mismatches.KEYED_SETTINGS,
            )
            for name, table in self.unkeyed.items()
            if type(table) is not ModuleTable
        ]
        for name, table in self._tables.items():
            stored_names = {
                state.name for state in self._stored[name].row_states if state.name in KEYED_STATES
            }
            if self._has_keys(name) and stored_names != table.own_states.keys():
                text = (
                    f"keyed table {name!r} has the row states {sorted(table.own_states)} here and "
                    f"{sorted(stored_names)} in the checkpoint"
                )
                differences.append(Mismatch(text, mismatches.KEYED_SETTINGS))
        return differences

    def part(self, table: Table) -> TablePart:
        """Return where all rows of a table of the checkpoint go until `place` moves them."""
        stored = self._stored[table.name]
        self._values[table.name] = torch.empty(
            (stored.rows, stored.dim), dtype=table.weight.dtype, device="cpu"
        )
        self._states[table.name] = {
            state.name: torch.empty(
                (stored.rows, *state.shape), dtype=torch_dtype(state.dtype), device="cpu"
            )
            for state in stored.row_states
        }
        return TablePart(
            table=table.name,
            values=self._values[table.name],
            row_states=self._states[table.name],
            first_row=0,
            first_column=0,
        )

    def shelf(self, table: Table) -> ShelvedRows:
        """Return where all rows of a table in a cache go until `place` moves them."""
        stored, keys = self._stored[table.name], self._tables[table.name].in_cache
        assert keys is not None
        states = {
            state.name: torch.empty(stored.rows, dtype=torch.int64, device="cpu")
            for state in stored.row_states
            if state.name in KEYED_STATES
        }
        self._shelves[table.name] = ShelvedRows(keys, stored.rows, states)
        return self._shelves[table.name]

    def give_up(self) -> None:
        """Have homes forget rows that were not placed."""
        while self._shelves:
            self._shelves.popitem()[1].give_up()

    def adopt(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a state tree in which plain tables of the checkpoint are keyed ones, never used.

        Args:
            saved: the tree for this rank, as `model.tree_for` returned it.
        """
        begun = {
            name: begun_state(self._tables[name].slots, steps=0)
            for name in self.names
            if not self._has_keys(name)
        }
        sources = dict(saved["sources"])
        states = {**sources.pop(KeyedSource.name, [{}])[0], **begun}
        for name in self.unkeyed:
            states.pop(name, None)
        if states:
            sources[KeyedSource.name] = [states]
        return {**saved, "sources": sources}

    def place(
        self,
        row_states: Mapping[str, Mapping[str, Tensor]],
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Give each table its rows, row states and keys, after all rows were read.

        Args:
            row_states: parameter name -> name -> row state that the optimizer gets, [rows, ...].
            optimizers: the optimizers.

        Raises:
            IncompatibleModel: a plain table here has not the rows of the keys there.
        """
        for name in self.names.keys() & self._tables.keys():
            self._place(self._tables[name], row_states[self._tables[name].parameter_name])
        for name, table in self.unkeyed.items():
            place_rows_of_keys(
                table,
                self._values.pop(name),
                self._states.pop(name),
                row_states[table.parameter_name],
                rule=self._growth.rule(name),
                optimizers=optimizers,
            )

    @torch.no_grad()
    def _place(self, table: KeyedTable, row_states: Mapping[str, Tensor]) -> None:
        shelf = self._shelves.pop(table.name, None)
        states = self._states.pop(table.name) if shelf is None else shelf.states
        own_states = {key: states[key] for key in table.own_states.keys() & states.keys()}
        # Row 0 of a keyed table has no key. A plain table has no such row.
        first_slot = 0 if own_states else 1
        if not own_states:
            own_states = _unused(self._stored[table.name].rows, table.own_states)
        slots = kept_slots(table, own_states)
        places = _places(slots, capacity_rows=table.table_rows - 1)
        stored_rows = slots - first_slot
        if shelf is not None:
            # Several trainers have the rows of one home; each places those of its part.
            is_here = (places >= table.first_row) & (places < table.first_row + table.rows)
            shelf.place(places[is_here], stored_rows[is_here])
        else:
            table.weight.detach().zero_()[places] = self._values.pop(table.name)[stored_rows]
            for state_name, tensor in row_states.items():
                if state_name not in own_states:
                    # A slot without key gets its entries when a key gets it.
                    tensor.zero_()[places] = states[state_name][stored_rows].view_as(tensor[places])
        for state_name, tensor in table.slots.row_states.items():
            tensor.fill_(-1 if state_name == LAST_USE else 0)
            tensor[places] = own_states[state_name][slots]


def _unused(keys: int, own_states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return row states of slots 1 … `keys` of the keys from 0 on, which were never used."""
    states = {name: torch.zeros(keys + 1, dtype=torch.int64, device="cpu") for name in own_states}
    states[KEY][1:] = torch.arange(keys, device="cpu")
    states[LAST_USE][0] = -1
    return states


def _places(slots: Tensor, *, capacity_rows: int) -> Tensor:
    """Return the slots here of keys that have these slots in a checkpoint, each int64 [n]."""
    is_taken = torch.zeros(capacity_rows + 1, dtype=torch.bool, device="cpu")
    is_taken[0] = True
    fits = slots <= capacity_rows
    is_taken[slots[fits]] = True
    places = slots.clone()
    free_slots = (~is_taken).nonzero().flatten()
    places[~fits] = free_slots[: int((~fits).sum())]
    return places
