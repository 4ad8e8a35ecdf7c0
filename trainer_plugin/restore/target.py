"""Restores all state of a checkpoint into the training process, checked first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recpoint.catalog.restore.placement import TablePart, map_parts
from recpoint.catalog.restore.rows import LogicalState, LogicalTable, logical_tables
from recpoint.catalog.restore.target import RowSink, StateWanted, TableTarget
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.mover import Mover
from recpoint.embeddings.cache.residents import CachedRows
from recpoint.embeddings.tables.tables import Table
from recpoint.format.dtypes import dtype_name, torch_dtype
from recpoint.format.manifest import Manifest
from recpoint.kernels import dirty_bitmap
from recpoint.trainer_plugin import mismatches
from recpoint.trainer_plugin.mismatches import Mismatch, incompatible
from recpoint.trainer_plugin.policy import Tip
from recpoint.trainer_plugin.restore.growth import Growth, stored_rows_here
from recpoint.trainer_plugin.restore.home_sink import HomeSink, RowsOfTable
from recpoint.trainer_plugin.restore.moved_keys import MovedKeys
from recpoint.trainer_plugin.restore.table_differences import table_differences
from recpoint.trainer_plugin.state.import_note import imported_path
from recpoint.trainer_plugin.state.model import nearest, tree_for
from recpoint.trainer_plugin.state.training_state import OF_ALL_RANKS, OF_TRAINERS, TrainingState

__all__ = ["ModelTarget", "tip_of"]


class ModelTarget:
    """Restores into model, optimizers, schedulers, reader, extras and generators of this process.

    Args:
        tables: tables of the model.
        state: the training state outside tables.
        cache: has the rows of cached tables; None: no table is cached.
        since_full: whether to find the rows that differ from the full of the chain.
        rank: rank of this process.
        count: number of ranks.
        elsewhere: names of tables that other ranks hold; tables that are not here are skipped.
        growth: knows which tables may have more rows than the checkpoint; None: no table may.

    Attributes:
        manifest: manifest of the restored checkpoint; None: nothing was restored yet.
        grown: name -> stored rows of each table that has more rows than the checkpoint; the same on
            all ranks.
        imported: path from which `recpoint import` took the restored checkpoint; None: a trainer
            made it.
        batches_done: batches of the restored checkpoint.
        changed: with `since_full`: `Table.key` -> dirty bitmap of the rows that increments held.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        state: TrainingState,
        *,
        cache: Cache | None = None,
        since_full: bool = False,
        rank: int = 0,
        count: int = 1,
        elsewhere: Collection[str] = (),
        growth: Growth | None = None,
    ) -> None:
        self._tables = tuple(tables)
        self._rank, self._count = rank, count
        self._elsewhere = frozenset(elsewhere)
        self._state = state
        self._cache = cache
        self._rows: dict[str, dict[str, Tensor]] = {}
        self._since_full = since_full
        self._growth = Growth({}, {}) if growth is None else growth
        self.grown: dict[str, int] = {}
        self.changed: dict[str, Tensor] = {}
        self.manifest: Manifest | None = None
        self.imported: str | None = None
        self.batches_done = 0
        self._lacked_states: list[Mismatch] = []
        self._moved = MovedKeys((), {}, self._growth)

    @property
    def keeps_rows(self) -> bool:
        """Whether each row has the number that it has in the checkpoint, and none is new."""
        return not (self.grown or self._moved.names)

    def begin(self, manifest: Manifest) -> Sequence[TableTarget | RowSink | None]:
        """Check tables and row states, and return where rows go; see `RestoreTarget.begin`."""
        stored_tables = logical_tables(manifest.tables)
        self._moved.give_up()  # of a checkpoint that could not be read
        self._moved = MovedKeys(self._tables, stored_tables, self._growth)
        unmoved_tables = {
            name: stored
            for name, stored in stored_tables.items()
            if name not in self._moved.unkeyed
        }
        grown = self.grown = self._growth.grown(unmoved_tables)
        differences = table_differences(
            self._tables,
            stored_tables,
            elsewhere=self._elsewhere,
            resized=grown.keys() | self._moved.names,
        )
        differences += self._moved.differences()
        state_differences = _row_state_differences(self._tables, stored_tables)
        # An import has no row states, and only the state tree tells that it is one.
        may_be_import = not any(table.row_states for table in stored_tables.values())
        self._lacked_states = state_differences if may_be_import else []
        differences += [] if may_be_import else state_differences
        optimizers, cached = self._state.optimizers, self._cached_tables()
        self._growth.look(
            self._tables, optimizers, grown, {table.key: rows for table, rows in cached}
        )
        differences += self._growth.differences(self._tables, optimizers, stored_tables, grown)
        self._refuse(manifest, differences)
        self._growth.try_rules(self._tables, grown)
        self._rows.clear()
        self.changed.clear()
        plain = [table for table in self._tables if not table.cached]
        targets = map_parts(
            manifest, [self._part(table, stored_tables[table.name]) for table in plain]
        )
        if self._cache is not None:
            self._cache.restored()
            for index, sink in self._home_sinks(self._cache.mover, stored_tables):
                targets[index] = sink
        return targets

    def _home_sinks(
        self, mover: Mover, stored_tables: Mapping[str, LogicalTable]
    ) -> Iterator[tuple[int, HomeSink]]:
        """Yield index and sink for each piece of the cached tables."""
        for table, cached_rows in self._cached_tables():
            stored = stored_tables[table.name]
            states = self._row_states(table, stored)
            cached_rows.slots.states = _states_in_slots(table, states)
            layout = cached_rows.slots.fix_layout()
            if table.name in self._moved.names:
                shelf = self._moved.shelf(table)
                for piece in stored.pieces:
                    sink = HomeSink(shelf, shelf.rows, layout, stored, piece, None, shelf.states)
                    yield piece.index, sink
                continue
            if table.name in self.grown:
                self._growth.begin_at_home(table, cached_rows)
            elif self._since_full:
                self.changed[table.key] = dirty_bitmap.new(table.rows)
            changed = self.changed.get(table.key)
            rows_of_table = RowsOfTable(mover, cached_rows)
            for piece in stored.pieces:
                sink = HomeSink(
                    rows_of_table,
                    cached_rows.part,
                    layout,
                    stored,
                    piece,
                    changed,
                    table.own_states,
                )
                yield piece.index, sink

    def _cached_tables(self) -> Iterator[tuple[Table, CachedRows]]:
        for table in self._tables:
            if self._cache is not None and table.name_in_cache is not None:
                yield table, self._cache.tables[table.name_in_cache]

    def state_wanted(self, manifest: Manifest, known_trees: Mapping[int, object]) -> StateWanted:
        """Say which ranks' trees are needed; see `StateChoosingTarget.state_wanted`.

        The tree of rank 0 holds the state that is equal on all ranks. From other ranks, this rank
        needs the readers' states if they must be divided anew, the optimizers of tables that only
        those ranks held, and the trees with pieces that it lacks.
        """
        own_parts = {0, self._rank} & set(range(manifest.ranks))
        saved = self._tree(manifest, known_trees) if own_parts <= known_trees.keys() else None
        if saved is None:
            return StateWanted(whole=own_parts)
        briefly: set[int] = set()
        keys: set[str] = set()
        if self._state.lacks_ranks(saved):
            keys |= set(OF_ALL_RANKS)
        if self._state.lacks_trainers(saved):
            keys |= set(OF_TRAINERS)
        if keys:
            briefly = set(range(manifest.ranks))
        if self._state.lacks_pieces(saved):
            own_parts |= nearest(self._rank, self._count, manifest.ranks, known_trees)
        return StateWanted(whole=own_parts, briefly=briefly, keys=keys)

    def check_state(self, manifest: Manifest, state: dict[int, object]) -> None:
        """Check that the state fits; see `StateCheckingTarget.check_state`."""
        saved, differences = self._adopted(manifest, state)
        differences = differences + self._state.differences(saved)
        self.imported = None if saved is None else imported_path(saved)
        if self.imported is None:
            differences += self._lacked_states
        else:
            differences += self._import_differences(self.imported)
        if not differences and saved is not None:
            differences = self._growth.whole_state_differences(
                saved["optimizers"], self._tables, self.grown
            )
        self._refuse(manifest, differences)

    def _import_differences(self, path: str) -> list[Mismatch]:
        """Return why a job cannot begin with an imported checkpoint."""
        differences = []
        for table in self._tables:
            if table.maps_ids:
                text = f"table {table.name!r} has {table.id_map}, and an import has none"
                differences.append(Mismatch(text, mismatches.TABLE_WITHOUT_IDS))
            elif table.cached:
                text = f"table {table.name!r} is cached, and an import has no row states"
                differences.append(Mismatch(text, mismatches.seeded_with(path)))
        return differences

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """Restore the state, after all rows were written; see `RestoreTarget.finish`."""
        saved, _ = self._adopted(manifest, state)
        assert saved is not None  # check_state has checked it
        for table in self._tables:
            if table.name in self.grown and not table.cached:
                states = self._rows[table.parameter_name]
                self._growth.begin_rows(table, states, self.grown[table.name])
        self._moved.place(self._rows, self._state.optimizers.optimizers)
        # Afterwards, because a rule for first values may draw from the generators.
        self.batches_done = self._state.restore(
            saved, self._rows, ranks=self._count, attempt=manifest.attempt
        )
        for table, cached_rows in self._cached_tables():
            states = self._state.optimizers.row_states(table).tensors
            cached_rows.slots.follow_states(_states_in_slots(table, states))
        self.manifest = manifest

    def _refuse(self, manifest: Manifest, differences: Sequence[Mismatch]) -> None:
        alone = self._count == 1
        otherwise = mismatches.LOAD_BY_NAME if alone else mismatches.LOAD_BY_NAME_OF_RANKS
        if differences:
            raise incompatible(manifest, differences, otherwise=otherwise)

    def _tree(self, manifest: Manifest, state: Mapping[int, object]) -> dict[str, Any] | None:
        return tree_for(state, self._rank, self._count, manifest.ranks)

    def _adopted(
        self, manifest: Manifest, state: Mapping[int, object]
    ) -> tuple[dict[str, Any] | None, list[Mismatch]]:
        elsewhere = self._elsewhere - {table.name for table in self._tables}
        tree = self._tree(manifest, state)
        if tree is not None and "sources" in tree:
            tree = self._moved.adopt(tree)
        return self._state.adopt(tree, elsewhere=elsewhere)

    def _row_states(self, table: Table, stored: LogicalTable) -> dict[str, Tensor]:
        """Return the row states that the optimizer gets: name -> [rows, …]; its own if they fit.

        Those of a cached table have an entry for each slot of the cache, but for its own states.
        """
        current = self._state.optimizers.row_states(table).tensors
        tensors = self._rows[table.parameter_name] = {}
        for state in stored.row_states:
            # Optimizers create state in their first step, so a new optimizer has none yet.
            is_in_slots = table.cached and state.name not in table.own_states
            rows = len(table.weight) if is_in_slots else table.rows
            shape, dtype = (rows, *_entry_shape(state, table)), torch_dtype(state.dtype)
            tensor = current.get(state.name)
            if tensor is None or not _holds(tensor, shape, dtype):
                tensor = torch.zeros(shape, dtype=dtype, device=table.weight.device)
            tensors[state.name] = tensor
        return tensors

    def _part(self, table: Table, stored: LogicalTable) -> TablePart:
        states = self._row_states(table, stored)
        if table.name in self._moved.names:
            return self._moved.part(table)
        rows = stored_rows_here(table, stored.rows)
        row_states = {
            state.name: states[state.name].view(table.rows, *_entry_shape(state, table))[:rows]
            for state in stored.row_states
        }
        if self._since_full and table.name not in self.grown:
            self.changed[table.key] = dirty_bitmap.new(table.rows)
        return TablePart(
            table=table.name,
            values=table.weight.detach()[:rows],
            row_states=row_states,
            first_row=min(table.first_row, stored.rows),
            first_column=0 if table.columns is None else table.columns.first,
            changed=self.changed.get(table.key),
        )


def tip_of(manifest: Manifest) -> Tip:
    """Return the tip of a chain whose next increment is taken after `manifest`."""
    return Tip(
        ref=manifest.ref,
        base=manifest.links.base or manifest.ref,
        chain_length=manifest.links.chain_length,
        tables=manifest.tables,
    )


def _row_state_differences(
    tables: Sequence[Table], stored: Mapping[str, LogicalTable]
) -> list[Mismatch]:
    """Return differences in row states of tables whose source owns them, written in place."""
    differences = []
    for table in tables:
        row_states = table.row_states
        if row_states is None or table.name not in stored:
            continue
        model_states = {
            name: _form(dtype_name(t.dtype), tuple(t.shape[1:])) for name, t in row_states.items()
        }
        stored_states = {
            state.name: _form(state.dtype, _entry_shape(state, table))
            for state in stored[table.name].row_states
        }
        if model_states != stored_states:
            text = (
                f"table {table.name!r} has the row states {model_states} here and {stored_states} "
                "in the checkpoint"
            )
            differences.append(Mismatch(text, mismatches.ROW_STATES))
    return differences


def _entry_shape(state: LogicalState, table: Table) -> tuple[int, ...]:
    """Return the shape of a row's entry here; values by column are cut as the columns are."""
    return (table.dim,) if state.by_column else state.shape


def _holds(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a state has these entries; one value a row may be [rows] or [rows, 1]."""
    return _values(tuple(tensor.shape)) == _values(shape) and tensor.dtype == dtype


def _values(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _states_in_slots(table: Table, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the row states that have an entry for each slot of the table's cache."""
    return {name: state for name, state in states.items() if name not in table.own_states}


def _form(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(_values(shape))}"
