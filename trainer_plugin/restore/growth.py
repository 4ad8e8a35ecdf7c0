"""Gives values and row states to rows that a table has and the restored checkpoint lacks.

Old rows come from the checkpoint, bit for bit. New rows get first values from a rule that depends
on table, row and column alone, so they are the same on any number of ranks and at each start. Their
row states begin as the optimizer begins them:

- A state that exists before the first restore (Adagrad's sum, those of fused optimizers) has the
  same entry for each row then. That entry is copied, because rewinds come after training.
- Other states are made in the first step. torch's optimizers begin these with zeros, with two
  exceptions (Rprop's step sizes, and ASGD's averages once it averages). These and the states of
  other optimizers are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from recpoint.catalog.restore.rows import LogicalState, LogicalTable
from recpoint.embeddings.cache.residents import CachedRows
from recpoint.embeddings.home.initial import Initial, fill_rows, first_values
from recpoint.embeddings.tables.new_rows import begins_with_zeros
from recpoint.embeddings.tables.tables import Table
from recpoint.errors import SettingsError
from recpoint.format.dtypes import torch_dtype
from recpoint.trainer_plugin import mismatches
from recpoint.trainer_plugin.mismatches import Mismatch
from recpoint.trainer_plugin.state.optimizers import OptimizerState
from recpoint.trainer_plugin.tables import are_pieces, form_of

__all__ = ["Growth", "stored_rows_here"]

_ROWS_AT_A_TIME: Final = 65_536


class Growth:
    """Knows which tables may have more rows than a checkpoint, and how the new rows begin.

    One object serves all restores of a process.

    Args:
        initial: name of a table -> computes the first values of its new rows.
        table_rows: name -> rows of each table of the job, over all ranks.

    Raises:
        SettingsError: a name is no table of the job.
    """

    def __init__(self, initial: Mapping[str, Initial], table_rows: Mapping[str, int]) -> None:
        for name in initial:
            if name not in table_rows:
                raise SettingsError(
                    f"Options(grow=...): {name!r:.200}",
                    found="no such table",
                    expected=f"one of {sorted(table_rows)!r:.400}",
                    next_step="use the name of the embedding module, as in model.named_modules()",
                )
        self._initial = dict(initial)
        self._table_rows = dict(table_rows)
        #: `Table.key` -> row state -> the entry of a new row; None: the entries differ by row.
        self._first_entries: dict[str, dict[str, Tensor | None]] = {}
        self._has_looked = False

    def rule(self, name: str) -> Initial | None:
        """Return the rule for first values of new rows of a table; None: there is none."""
        return self._initial.get(name)

    def learn(self, table: Table, initial: Initial, first_entries: Mapping[str, Tensor]) -> None:
        """Take note that a table has grown after it was built, so that a rewind grows it, too.

        Args:
            table: the table, with all its rows.
            initial: computes the first values of the new rows.
            first_entries: name of a row state -> its entry of a new row.
        """
        if table.id_map:
            return  # a restore moves keys into tables of any size
        self._initial[table.name] = initial
        self._table_rows[table.name] = table.table_rows
        if first_entries:
            self._first_entries[table.key] = dict(first_entries)

    def grown(self, stored_tables: Mapping[str, LogicalTable]) -> dict[str, int]:
        """Return the tables that have more rows than a checkpoint, and may: name -> stored rows.

        The answer is the same on all ranks.
        """
        return {
            name: stored_tables[name].rows
            for name in self._initial
            if name in stored_tables and self._table_rows[name] > stored_tables[name].rows
        }

    def look(
        self,
        tables: Sequence[Table],
        optimizers: OptimizerState,
        grown: Mapping[str, int],
        cached: Mapping[str, CachedRows],
    ) -> None:
        """Copy row states as the optimizers have made them, before anything is restored.

        Only the first call does something: later row states have been trained.

        Args:
            tables: tables of this rank.
            optimizers: their optimizers.
            grown: as `grown` returned it.
            cached: `Table.key` -> rows in the cache, for tables that are cached.
        """
        if self._has_looked:
            return
        self._has_looked = True
        for table in tables:
            if table.name not in self._initial or table.key in self._first_entries:
                continue  # not grown, or learned before its row states were trained
            states = optimizers.row_states(table).tensors
            if table.key in cached:
                blank = cached[table.key].slots.blank
                entries = {name: state[blank].clone() for name, state in states.items()}
                self._first_entries[table.key] = dict(entries)
            else:
                first = stored_rows_here(table, grown.get(table.name, 0))
                new = slice(first if first < table.rows else 0, None)
                self._first_entries[table.key] = {
                    name: _common_entry(state[new]) for name, state in states.items()
                }

    def differences(
        self,
        tables: Sequence[Table],
        optimizers: OptimizerState,
        stored_tables: Mapping[str, LogicalTable],
        grown: Mapping[str, int],
    ) -> list[Mismatch]:
        """Return the row states of grown tables whose beginning is not known.

        Args:
            tables, optimizers, grown: as for `look`, which has been called.
            stored_tables: tables of the checkpoint, by name.
        """
        differences = []
        for table in tables:
            if table.maps_ids and table.name in grown:
                text = f"table {table.name!r} has {table.id_map}, and grows by Options(grow=...)"
                differences.append(Mismatch(text, mismatches.TABLE_ROWS))
                continue
            if table.name not in grown or stored_rows_here(table, grown[table.name]) == table.rows:
                continue
            optimizer = _optimizer_of(table, optimizers)
            for state in stored_tables[table.name].row_states:
                entries = self._first_entries.get(table.key, {})
                if state.name in entries:
                    entry = entries[state.name]
                    is_known = entry is not None and _fits(entry, state, table)
                    reason = "whose new rows have another form or different values here"
                else:
                    is_known = begins_with_zeros(optimizer)
                    reason = f"which {type(optimizer).__name__} makes in a step"
                if not is_known:
                    text = f"table {table.name!r} grows, and has the row state {state.name!r}, "
                    differences.append(Mismatch(text + reason, mismatches.STATE_OF_NEW_ROWS))
        return differences

    def whole_state_differences(
        self,
        saved: Sequence[Mapping[str, Any]],
        tables: Sequence[Table],
        grown: Mapping[str, int],
    ) -> list[Mismatch]:
        """Return states of grown tables that are stored whole, so that they cannot grow.

        Args:
            saved: optimizers as `OptimizerState.capture` returned them.
            tables: tables of this rank.
            grown: as `grown` returned it.
        """
        differences = []
        for table in tables:
            for optimizer in saved if table.name in grown else ():
                entry = optimizer["state"].get(table.parameter_name, {"values": {}})
                for state_name, value in entry["values"].items():
                    if not (isinstance(value, Tensor) or are_pieces(value)):
                        continue
                    shape, _ = form_of(value)
                    if shape[:1] == (grown[table.name],):
                        text = (
                            f"table {table.name!r} grows, and its optimizer state {state_name!r}, "
                            f"{list(shape)}, is stored whole and not by row"
                        )
                        differences.append(Mismatch(text, mismatches.WHOLE_STATE_OF_NEW_ROWS))
        return differences

    def try_rules(self, tables: Sequence[Table], grown: Mapping[str, int]) -> None:
        """Compute the values of one new row of each grown table, before anything is restored.

        A rule that raises, or returns something else, then leaves the model as it was.

        Args:
            tables: tables of this rank.
            grown: as `grown` returned it.

        Raises:
            SettingsError: see `first_values`.
        """
        for table in tables:
            if table.name in grown:
                first_values(
                    self._initial[table.name],
                    table.name,
                    torch.tensor([grown[table.name]], dtype=torch.int64, device="cpu"),
                    dim=table.dim if table.columns is None else table.columns.of,
                    dtype=table.weight.dtype,
                    padding_row=None,
                )

    def begin_rows(self, table: Table, row_states: Mapping[str, Tensor], stored_rows: int) -> None:
        """Write values and row states of the new rows of a table that is not cached.

        Args:
            table: a grown table.
            row_states: name -> its row states, [rows, ...], with those of new rows as zeros or as
                the optimizer has left them.
            stored_rows: rows of the whole table in the checkpoint.

        Raises:
            SettingsError: the rule returns another shape.
        """
        first = stored_rows_here(table, stored_rows)
        fill_rows(table, self._initial[table.name], range(first, table.rows))
        entries = self._first_entries.get(table.key, {})
        with torch.no_grad():
            for name, state in row_states.items():
                new, entry = state[first:], entries.get(name)
                if entry is None:
                    new.zero_()
                else:
                    new.copy_(entry.reshape(new.shape[1:]).expand_as(new))

    def begin_at_home(self, table: Table, cached_rows: CachedRows) -> None:
        """Have a cache give the new rows of a table their values when they are first looked up.

        Args:
            table: a grown table.
            cached_rows: its rows in the cache, which has been emptied.
        """
        slots = cached_rows.slots
        cached_rows.initial = partial(
            first_values,
            self._initial[table.name],
            table.name,
            dim=slots.dim,
            dtype=slots.weight.dtype,
            padding_row=slots.padding_row,
        )


def stored_rows_here(table: Table, stored_rows: int) -> int:
    """Return how many of the rows in a table's weight a checkpoint has; they come first."""
    return min(max(stored_rows - table.first_row, 0), table.rows)


def _fits(entry: Tensor, state: LogicalState, table: Table) -> bool:
    """Whether an entry has the dtype and the number of values of a stored row state."""
    values = table.dim if state.by_column else math.prod(state.shape)
    return entry.dtype == torch_dtype(state.dtype) and entry.numel() == values


def _common_entry(state: Tensor) -> Tensor | None:
    """Return the entry that each row has, [...] from [rows, ...]; None: there is no such entry."""
    entry = state[-1].clone()
    parts = state.detach().split(_ROWS_AT_A_TIME)
    return entry if all(bool((part == entry).all()) for part in parts) else None


def _optimizer_of(table: Table, optimizers: OptimizerState) -> Optimizer | None:
    for optimizer in optimizers.optimizers:
        for group in optimizer.param_groups:
            if any(parameter is table.weight for parameter in group["params"]):
                return optimizer
    return None
