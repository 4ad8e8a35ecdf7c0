"""Restores parts of a checkpoint that the user names into the training process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recpoint.catalog.restore.keyed_rows import has_keys
from recpoint.catalog.restore.placement import TablePart, map_parts
from recpoint.catalog.restore.restore import dense_tensors, weight_name
from recpoint.catalog.restore.rows import LogicalTable, logical_tables
from recpoint.catalog.restore.target import RowSink, TableTarget
from recpoint.embeddings.tables.managed_collisions import has_raw_ids
from recpoint.embeddings.tables.tables import Table
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import Manifest
from recpoint.trainer_plugin import mismatches
from recpoint.trainer_plugin.integrations.keyed import KeyedTable
from recpoint.trainer_plugin.mismatches import Mismatch, incompatible
from recpoint.trainer_plugin.restore.keys_of_collisions import KeysOfCollisions
from recpoint.trainer_plugin.restore.parts import Parts, near, resolve_dense, rows_without_ids
from recpoint.trainer_plugin.restore.table_differences import (
    renamed,
    row_count_difference,
    shape_differences,
)
from recpoint.trainer_plugin.state.model import optimizers_for
from recpoint.trainer_plugin.state.training_state import TrainingState
from recpoint.trainer_plugin.tables import can_hold, layout_text

__all__ = ["PartialTarget"]


class PartialTarget:
    """Restores only the tables and dense tensors that were named.

    Args:
        tables: tables of the model.
        state: the training state outside tables.
        parts: the parts to load.

    Attributes:
        manifest: manifest of the checkpoint; None: nothing was restored yet.
    """

    def __init__(self, tables: Sequence[Table], state: TrainingState, parts: Parts) -> None:
        self._tables: dict[str, list[Table]] = {}  # table name -> its pieces on this rank
        for table in tables:
            self._tables.setdefault(table.name, []).append(table)
        self._state = state
        self._parts = parts
        # Name of the table in the checkpoint -> its row states.
        self._rows: dict[str, dict[str, Tensor]] = {}
        self._dense: dict[str, str] = {}
        # Name of the table in the checkpoint -> gives its rows to keys here.
        self._keys: dict[str, KeysOfCollisions] = {}
        self.manifest: Manifest | None = None

    def begin(self, manifest: Manifest) -> Sequence[TableTarget | RowSink | None]:
        """Check tables and row states, and return where rows go; see `RestoreTarget.begin`."""
        stored_tables = logical_tables(manifest.tables)
        differences = []
        for new, old in self._parts.tables.items():
            if old not in stored_tables:
                text = f"table {old!r} is not in the checkpoint{near(old, stored_tables)}"
                differences.append(Mismatch(text, mismatches.NAMES))
            elif new not in self._tables:
                text = f"table {new!r} is not in the model{near(new, self._tables)}"
                differences.append(Mismatch(text, mismatches.NAMES))
            elif self._takes_keys(new, stored_tables[old]):
                differences += self._keyed_differences(new, old, stored_tables[old])
            else:
                piece, stored = self._tables[new][0], stored_tables[old]
                differences += row_count_difference(piece, stored, may_grow=False)
                differences += shape_differences(piece, stored)
                if self._tables[new][0].cached:
                    text = f"table {new!r} is cached: only a whole checkpoint can be loaded"
                    differences.append(Mismatch(text, mismatches.CACHED_TABLE))
                differences += self._sharded_differences(new, old, stored)
        if differences:
            raise incompatible(manifest, differences, otherwise=mismatches.LIST_PARTS)
        self._rows.clear()
        self._keys = {
            old: KeysOfCollisions(table, stored_tables[old])
            for new, old in self._parts.tables.items()
            if isinstance(table := self._tables[new][0], KeyedTable)
        }
        targets = {
            old: self._tables[new] for new, old in reversed(list(self._parts.tables.items()))
        }
        parts = [
            self._part(stored_tables[old], piece)
            for old, pieces in targets.items()
            for piece in pieces
        ]
        return map_parts(manifest, parts)

    def _sharded_differences(self, new: str, old: str, stored: LogicalTable) -> list[Mismatch]:
        """Return why a sharded or fused table cannot be loaded."""
        pieces = self._tables[new]
        id_map = pieces[0].id_map or _stored_id_map(stored)
        if id_map:
            text = (
                f"table {renamed(new, old)} has {id_map}, and its values alone would be rows of "
                "other ids"
            )
            return [Mismatch(text, mismatches.MAPPED_TABLE)]
        whole = pieces[0].rows == pieces[0].table_rows and pieces[0].columns is None
        if whole and not pieces[0].fused:
            return []
        differences = []
        if self._parts.optimizer_states == "carry":
            text = f"table {new!r} is sharded or fused: its state cannot be carried"
            differences.append(Mismatch(text, mismatches.PIECES_OF_STATE))
        if list(self._parts.tables.values()).count(old) > 1:
            text = (
                f"table {new!r} is sharded or fused, but {old!r} is also loaded into another table"
            )
            differences.append(Mismatch(text, mismatches.PIECES_OF_ONE_TABLE))
        return differences

    def _takes_keys(self, new: str, stored: LogicalTable) -> bool:
        """Whether a keyed table here may get the rows of raw ids there."""
        is_keyed = has_keys([state.name for state in stored.row_states])
        return isinstance(self._tables[new][0], KeyedTable) and not is_keyed

    def _keyed_differences(self, new: str, old: str, stored: LogicalTable) -> list[Mismatch]:
        """Return why the rows of raw ids cannot be those of keys, as far as the manifest tells."""
        table = self._tables[new][0]
        differences = shape_differences(table, stored)
        reasons = {
            mismatches.CACHED_TABLE: ("is cached", table.cached),
            mismatches.STATE_OF_KEYS: (
                "has keys, whose optimizer states begin anew",
                self._parts.optimizer_states == "carry",
            ),
            mismatches.PIECES_OF_ONE_TABLE: (
                f"is loaded from {old!r}, as another table is",
                list(self._parts.tables.values()).count(old) > 1,
            ),
        }
        return differences + [
            Mismatch(f"table {renamed(new, old)} {reason}", next_step)
            for next_step, (reason, is_so) in reasons.items()
            if is_so
        ]

    def _part(self, stored: LogicalTable, table: Table) -> TablePart:
        if stored.name in self._keys:
            return self._keys[stored.name].part
        rows: dict[str, Tensor] = {}
        if self._parts.optimizer_states == "carry":
            device = table.weight.device
            rows = self._rows[stored.name] = {
                state.name: torch.empty(
                    (stored.rows, *state.shape), dtype=torch_dtype(state.dtype), device=device
                )
                for state in stored.row_states
            }
        return TablePart(
            table=stored.name,
            values=table.weight.detach(),
            row_states=rows,
            first_row=table.first_row,
            first_column=0 if table.columns is None else table.columns.first,
        )

    def check_state(self, manifest: Manifest, state: dict[int, object]) -> None:
        """Check that the state fits; see `StateCheckingTarget.check_state`."""
        model_tensors, stored_tensors = self._state.model.tensors(), _dense(state)
        self._dense, missing = resolve_dense(self._parts.dense, model_tensors, stored_tensors)
        differences = [Mismatch(text, mismatches.NAMES) for text in missing]
        differences += [
            Mismatch(text, mismatches.ROWS_AND_IDS)
            for text in rows_without_ids(
                self._parts.tables, self._dense, self._state.model.id_tensors()
            )
        ]
        for keys in self._keys.values():
            differences += keys.differences(stored_tensors)
        for new, old in self._dense.items():
            model, stored = _dense_form(model_tensors[new]), _dense_form(stored_tensors[old])
            if model != stored:
                text = f"{renamed(new, old)} is {model} in the model and {stored} in the checkpoint"
                differences.append(Mismatch(text, mismatches.DENSE_FORM))
            elif not can_hold(model_tensors[new], stored_tensors[old], name=new):
                text = (
                    f"{renamed(new, old)} has elements that share memory in the model (expand()), "
                    "and differ in the checkpoint"
                )
                differences.append(Mismatch(text, mismatches.SHARED_MEMORY))
        if self._parts.optimizer_states == "carry":
            differences += self._state.optimizers.carry_differences(
                _optimizers(state), self._parameters()
            )
        if differences:
            raise incompatible(manifest, differences, otherwise=mismatches.LIST_PARTS)

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """Restore the state, after all rows were written; see `RestoreTarget.finish`."""
        stored_tensors = _dense(state)
        self._state.model.restore_some(
            {new: stored_tensors[old] for new, old in self._dense.items()}
        )
        for keys in self._keys.values():
            keys.choose(stored_tensors, state)
        for keys in self._keys.values():
            keys.place()
        first: dict[str, Table] = {}
        rows: dict[str, dict[str, Tensor]] = {}
        for new, old in self._parts.tables.items():
            if old in self._keys:
                continue
            # If row states are wanted, or a table is copied, the table has only one piece.
            table = self._tables[new][0]
            rows[table.parameter_name] = self._rows.get(old, {})
            if old in first:  # a second table from the same one gets its own copies
                with torch.no_grad():
                    table.weight.copy_(first[old].weight)
                carried = self._rows.get(old, {})
                rows[table.parameter_name] = {k: state.clone() for k, state in carried.items()}
            first.setdefault(old, table)
        if self._parts.optimizer_states == "carry":
            self._state.optimizers.carry(_optimizers(state), self._parameters(), rows)
        self.manifest = manifest

    def _parameters(self) -> dict[str, str]:
        """Return all parameters that are loaded: name here -> name in the checkpoint."""
        tables = {
            self._tables[new][0].parameter_name: weight_name(old)
            for new, old in self._parts.tables.items()
        }
        return tables | self._dense


def _dense_form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}{layout_text(tensor)}"


def _stored_id_map(stored: LogicalTable) -> str:
    """Return what gives rows of a stored table to ids; see `Table.id_map`."""
    if has_raw_ids(stored):
        return "managed collisions"
    return "keys" if has_keys([state.name for state in stored.row_states]) else ""


def _optimizers(state: dict[int, object]) -> Sequence[Mapping[str, Any]]:
    trees = {
        n: tree for n, tree in state.items() if isinstance(tree, dict) and "optimizers" in tree
    }
    return optimizers_for(trees, None)


def _dense(state: dict[int, object]) -> dict[str, Tensor]:
    return dense_tensors(state)
