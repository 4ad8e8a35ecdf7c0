"""Restores into the training process: all state, checked first, or parts that the user names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor

from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.placement import TablePart, map_parts
from recpoint.catalog.restore.restore import dense_tensors, weight_name
from recpoint.catalog.restore.rows import LogicalState, LogicalTable, logical_tables
from recpoint.catalog.restore.target import RowSink, StateWanted, TableTarget
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.mover import Mover
from recpoint.embeddings.cache.residents import CachedRows
from recpoint.embeddings.tables.tables import Table
from recpoint.errors import SettingsError
from recpoint.format.dtypes import dtype_name, torch_dtype
from recpoint.format.manifest import Manifest
from recpoint.kernels import dirty_bitmap
from recpoint.trainer_plugin import mismatches
from recpoint.trainer_plugin.mismatches import Mismatch, incompatible, renamed_table
from recpoint.trainer_plugin.policy import Tip
from recpoint.trainer_plugin.restore.home_sink import HomeSink
from recpoint.trainer_plugin.state.model import nearest, optimizers_for, tree_for
from recpoint.trainer_plugin.state.training_state import OF_ALL_RANKS, OF_TRAINERS, TrainingState
from recpoint.trainer_plugin.tables import can_hold, layout_text

__all__ = [
    "ModelTarget",
    "PartialTarget",
    "Parts",
    "Seed",
    "near",
    "parts_of",
    "resolve_dense",
    "tip_of",
]


#: Whether the optimizer state of loaded parameters is loaded, too.
OptimizerStates = Literal["drop", "carry"]

_NEXT_OF_PARTS = "name what to load: recpoint seed URL lists what a checkpoint holds"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a checkpoint to load.

    Attributes:
        tables: name in the model -> name in the checkpoint.
        dense: dense parameters and buffers: name in the model -> name in the checkpoint; or names
            and patterns that hold for both.
        optimizer_states: "carry": also load their optimizer state.
    """

    tables: Mapping[str, str] = field(default_factory=dict)
    dense: Mapping[str, str] | Sequence[str] = ()
    optimizer_states: OptimizerStates = "drop"


@dataclass(frozen=True)
class Seed:
    """Names the parts of another run's checkpoint from which a new run starts.

        ckpt.restore(seed=Seed("s3://b/ranker", tables={"ads": "items"}, dense=["bottom.*"]))

    Args:
        url: URL of the other run.
        tables: names of tables; or name in this model -> name in the other checkpoint. Several
            tables here may come from the same table there.
        dense: names or patterns (`*`, `?`, `[…]`) of dense parameters and buffers, which must have
            the same names here and there; or name here -> name there.
        optimizer_states: "drop": the optimizers here begin anew. "carry": the optimizer state of
            every loaded parameter is loaded, too; the optimizers must be of the same class.
            Learning rates and other settings of the optimizers here never change.
        step: step of the checkpoint; None: the newest good checkpoint.
        generation: with `step`: the generation of the checkpoint, which need not be on the live
            line.
        validated_only: skip newer checkpoints that nobody has validated.
        validated_within: skip them only if a validated checkpoint is at most this many batches
            older.

    Raises:
        SettingsError: nothing is named, or names have another form; or see `Selection`.
    """

    url: str
    tables: Mapping[str, str] | Sequence[str] = ()
    dense: Mapping[str, str] | Sequence[str] = ()
    optimizer_states: OptimizerStates = "drop"
    step: int | None = None
    generation: int | None = None
    validated_only: bool = False
    validated_within: int | None = None

    def __post_init__(self) -> None:
        _ = self.selection  # raises if the selection is not valid
        if self.optimizer_states not in ("drop", "carry"):
            raise SettingsError(
                "Seed(optimizer_states=...)",
                found=f"{self.optimizer_states!r:.80}",
                expected='"drop" or "carry"',
                next_step="choose one of the two",
            )
        if not (_are_names(self.tables) and _are_names(self.dense) and (self.tables or self.dense)):
            raise SettingsError(
                "Seed(tables=..., dense=...)",
                found=f"{self.tables!r:.200}, {self.dense!r:.200}",
                expected='names, or {"name here": "name there"}, in at least one of the two',
                next_step=_NEXT_OF_PARTS,
            )

    @property
    def selection(self) -> Selection:
        """The selection of a checkpoint of the other run."""
        return Selection(
            step=self.step,
            generation=self.generation,
            validated_only=self.validated_only,
            validated_within=self.validated_within,
        )

    @property
    def parts(self) -> Parts:
        """The parts to load."""
        return Parts(
            tables=_by_name(self.tables), dense=self.dense, optimizer_states=self.optimizer_states
        )


def parts_of(named: object) -> Parts:
    """Return the parts that `restore(partial=...)` names: tables, dense tensors, or both.

    Raises:
        SettingsError: the argument has another form.
    """
    fits = (
        isinstance(named, Mapping)
        and named.keys() <= {"tables", "dense"}
        and any(named.values())
        and all(_are_names(names) for names in named.values())
    )
    if not fits:
        raise SettingsError(
            "partial",
            found=f"{named!r:.200}",
            expected='{"tables": [names], "dense": [names]}, with at least one of the two',
            next_step=_NEXT_OF_PARTS,
        )
    assert isinstance(named, Mapping)
    return Parts(tables=_by_name(named.get("tables", ())), dense=named.get("dense", ()))


def resolve_dense(
    named: Mapping[str, str] | Sequence[str],
    names_here: Collection[str],
    names_stored: Collection[str],
) -> tuple[dict[str, str], list[str]]:
    """Find the dense tensors that names and patterns stand for.

    Args:
        named: names and patterns, or name here -> name in the checkpoint.
        names_here: names of the model's dense tensors.
        names_stored: names of the checkpoint's dense tensors.

    Returns:
        Name here -> name there, for tensors that exist on both sides; and a sentence for each name
        or pattern that does not.
    """
    if isinstance(named, Mapping):
        old_names = dict(named)
        faults: list[str] = []
    else:
        old_names, faults = _expanded(named, names_here, names_stored)
    for new, old in old_names.items():
        if old not in names_stored:
            faults.append(f"{old!r} is not in the checkpoint{near(old, names_stored)}")
        elif new not in names_here:
            faults.append(f"{new!r} is not in the model{near(new, names_here)}")
    return {n: o for n, o in old_names.items() if n in names_here and o in names_stored}, faults


def near(name: str, names: Iterable[str]) -> str:
    """Return names similar to one that does not exist, as the end of a sentence; may be empty."""
    alike = get_close_matches(name, list(names), n=3)
    return f" (near it: {', '.join(map(repr, alike))})" if alike else ""


def _expanded(
    patterns: Sequence[str], names_here: Collection[str], names_stored: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    old_names: dict[str, str] = {}
    faults = []
    for pattern in patterns:
        if (
            pattern in names_here
            or pattern in names_stored
            or not any(sign in pattern for sign in "*?[")
        ):
            old_names[pattern] = pattern
            continue
        matches = [
            name
            for name in {**dict.fromkeys(names_stored), **dict.fromkeys(names_here)}
            if fnmatchcase(name, pattern)
        ]
        if not matches:
            stored_names = ", ".join(map(repr, sorted(names_stored)))
            faults.append(
                f"no dense tensor matches {pattern!r}; the checkpoint has {stored_names:.400}"
            )
        old_names.update((name, name) for name in matches)
    return old_names, faults


def _are_names(names: object) -> bool:
    if isinstance(names, Mapping):
        return all(type(name) is str for name in (*names.keys(), *names.values()))
    return isinstance(names, list | tuple) and all(type(name) is str for name in names)


def _by_name(names: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    return dict(names) if isinstance(names, Mapping) else {name: name for name in names}


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

    Attributes:
        manifest: manifest of the restored checkpoint; None: nothing was restored yet.
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
    ) -> None:
        self._tables = tuple(tables)
        self._rank, self._count = rank, count
        self._elsewhere = frozenset(elsewhere)
        self._state = state
        self._cache = cache
        self._rows: dict[str, dict[str, Tensor]] = {}
        self._since_full = since_full
        self.changed: dict[str, Tensor] = {}
        self.manifest: Manifest | None = None
        self.batches_done = 0

    def begin(self, manifest: Manifest) -> Sequence[TableTarget | RowSink | None]:
        """Check tables and row states, and return where rows go; see `RestoreTarget.begin`."""
        stored_tables = logical_tables(manifest.tables)
        differences = table_differences(self._tables, stored_tables, elsewhere=self._elsewhere)
        differences += _row_state_differences(self._tables, stored_tables)
        self._refuse(manifest, differences)
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
            cached_rows.slots.states = dict(self._row_states(table, stored, len(table.weight)))
            if self._since_full:
                self.changed[table.key] = dirty_bitmap.new(table.rows)
            changed = self.changed.get(table.key)
            for piece in stored.pieces:
                yield piece.index, HomeSink(mover, cached_rows, stored, piece, changed)

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
        self._refuse(manifest, differences + self._state.differences(saved))

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """Restore the state, after all rows were written; see `RestoreTarget.finish`."""
        saved, _ = self._adopted(manifest, state)
        assert saved is not None  # check_state has checked it
        self.batches_done = self._state.restore(
            saved, self._rows, ranks=self._count, attempt=manifest.attempt
        )
        for table, cached_rows in self._cached_tables():
            cached_rows.slots.follow_states(self._state.optimizers.row_states(table).tensors)
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
        return self._state.adopt(self._tree(manifest, state), elsewhere=elsewhere)

    def _row_states(self, table: Table, stored: LogicalTable, rows: int) -> dict[str, Tensor]:
        """Return the row states that the optimizer gets: name -> [rows, …]; its own if they fit."""
        current = self._state.optimizers.row_states(table).tensors
        tensors = self._rows[table.parameter_name] = {}
        for state in stored.row_states:
            # Optimizers create state in their first step, so a new optimizer has none yet.
            shape, dtype = (rows, *_entry_shape(state, table)), torch_dtype(state.dtype)
            tensor = current.get(state.name)
            if tensor is None or not _holds(tensor, shape, dtype):
                tensor = torch.zeros(shape, dtype=dtype, device=table.weight.device)
            tensors[state.name] = tensor
        return tensors

    def _part(self, table: Table, stored: LogicalTable) -> TablePart:
        states = self._row_states(table, stored, table.rows)
        row_states = {
            state.name: states[state.name].view(table.rows, *_entry_shape(state, table))
            for state in stored.row_states
        }
        if self._since_full:
            self.changed[table.key] = dirty_bitmap.new(table.rows)
        return TablePart(
            table=table.name,
            values=table.weight.detach(),
            row_states=row_states,
            first_row=table.first_row,
            first_column=0 if table.columns is None else table.columns.first,
            changed=self.changed.get(table.key),
        )


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
            else:
                differences += _shape_differences(self._tables[new][0], stored_tables[old])
                if self._tables[new][0].cached:
                    text = f"table {new!r} is cached: only a whole checkpoint can be loaded"
                    differences.append(Mismatch(text, mismatches.CACHED_TABLE))
                differences += self._sharded_differences(new, old)
        if differences:
            raise incompatible(manifest, differences, otherwise=mismatches.LIST_PARTS)
        self._rows.clear()
        targets = {
            old: self._tables[new] for new, old in reversed(list(self._parts.tables.items()))
        }
        parts = [
            self._part(stored_tables[old], piece)
            for old, pieces in targets.items()
            for piece in pieces
        ]
        return map_parts(manifest, parts)

    def _sharded_differences(self, new: str, old: str) -> list[Mismatch]:
        """Return why a sharded or fused table cannot be loaded."""
        pieces = self._tables[new]
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

    def _part(self, stored: LogicalTable, table: Table) -> TablePart:
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
        for new, old in self._dense.items():
            model, stored = _dense_form(model_tensors[new]), _dense_form(stored_tensors[old])
            if model != stored:
                text = (
                    f"{_renamed(new, old)} is {model} in the model and {stored} in the checkpoint"
                )
                differences.append(Mismatch(text, mismatches.DENSE_FORM))
            elif not can_hold(model_tensors[new], stored_tensors[old], name=new):
                text = (
                    f"{_renamed(new, old)} has elements that share memory in the model (expand()), "
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
        first: dict[str, Table] = {}
        rows: dict[str, dict[str, Tensor]] = {}
        for new, old in self._parts.tables.items():
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


def tip_of(manifest: Manifest) -> Tip:
    """Return the tip of a chain whose next increment is taken after `manifest`."""
    return Tip(
        ref=manifest.ref,
        base=manifest.links.base or manifest.ref,
        chain_length=manifest.links.chain_length,
        tables=manifest.tables,
    )


def table_differences(
    tables: Sequence[Table],
    stored_tables: Mapping[str, LogicalTable],
    *,
    elsewhere: Collection[str] = (),
) -> list[Mismatch]:
    """Return how the tables of a model and of a checkpoint differ.

    Args:
        tables: tables of the model on this rank.
        stored_tables: tables of the checkpoint, by name.
        elsewhere: names of tables that other ranks hold.
    """
    only_here = {table.name: table for table in tables if table.name not in stored_tables}
    names = {table.name for table in tables} | set(elsewhere)
    only_there = {name: stored for name, stored in stored_tables.items() if name not in names}
    new_names = _new_names(only_here, only_there)
    differences = [
        Mismatch(
            f"table {name!r} is not in the checkpoint",
            renamed_table(name, new_names[name])
            if name in new_names
            else mismatches.TABLE_ONLY_HERE,
        )
        for name in only_here
    ]
    old_names = {old: new for new, old in new_names.items()}
    differences += [
        Mismatch(
            f"table {name!r} is not in the model",
            renamed_table(old_names[name], name)
            if name in old_names
            else mismatches.TABLE_ONLY_THERE,
        )
        for name in only_there
    ]
    for table in tables:
        if table.name in stored_tables:
            differences += _shape_differences(table, stored_tables[table.name])
    return sorted(dict.fromkeys(differences))


def _new_names(
    only_here: Mapping[str, Table], only_there: Mapping[str, LogicalTable]
) -> dict[str, str]:
    """Return tables that were probably renamed: name here -> name in the checkpoint.

    Each of the two is the only table of its shape and dtype that the other side lacks.
    """
    model_names: dict[object, list[str]] = {}
    stored_names: dict[object, list[str]] = {}
    for name, table in only_here.items():
        model_names.setdefault((table.table_rows, _dim(table), table.dtype), []).append(name)
    for name, stored in only_there.items():
        stored_names.setdefault((stored.rows, stored.dim, stored.dtype), []).append(name)
    return {
        names[0]: stored_names[form][0]
        for form, names in model_names.items()
        if len(names) == 1 and len(stored_names.get(form, ())) == 1
    }


def _shape_differences(table: Table, stored: LogicalTable) -> list[Mismatch]:
    return [
        Mismatch(
            f"table {_renamed(table.name, stored.name)}: {label} {model_value} in the model, "
            f"{stored_value} in "
            "the checkpoint",
            next_step,
        )
        for label, model_value, stored_value, next_step in (
            ("rows", table.table_rows, stored.rows, mismatches.TABLE_ROWS),
            ("values a row", _dim(table), stored.dim, mismatches.TABLE_VALUES),
            ("dtype", table.dtype, stored.dtype, mismatches.TABLE_DTYPE),
        )
        if model_value != stored_value
    ]


def _dim(table: Table) -> int:
    """Return the values a row of the whole table."""
    return table.dim if table.columns is None else table.columns.of


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


def _dense_form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}{layout_text(tensor)}"


def _form(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(_values(shape))}"


def _renamed(new: str, old: str) -> str:
    return f"{new!r}" if new == old else f"{new!r} (from {old!r})"


def _optimizers(state: dict[int, object]) -> Sequence[Mapping[str, Any]]:
    trees = {
        n: tree for n, tree in state.items() if isinstance(tree, dict) and "optimizers" in tree
    }
    return optimizers_for(trees, None)


def _dense(state: dict[int, object]) -> dict[str, Tensor]:
    return dense_tensors(state)
