"""Begins a run with tensors and optimizer state of another tool's checkpoint.

    1  WarmStart.plan   finds an entry for each wanted tensor, and names all that does not fit
    2  WarmStart.load   writes rows in pieces, dense tensors and optimizer state
    3  WarmStart.lines  says what went where, and what was left out

Nothing in the model changes before all of it has been found to fit. Memory is bounded by a piece of
a table, and by the largest dense tensor that is sharded or whose elements share memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from recpoint.catalog.foreign.contents import ForeignCheckpoint, ForeignEntry
from recpoint.catalog.foreign.names import EntryNames, OptimizerEntries, OwnParameter
from recpoint.catalog.restore.in_place import shares_memory
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.tables.tables import Table
from recpoint.errors import IncompatibleModel
from recpoint.trainer_plugin.restore.parts import Parts, Seed, near, rows_without_ids
from recpoint.trainer_plugin.state.training_state import TrainingState
from recpoint.trainer_plugin.tables import can_hold, is_piece

__all__ = ["WarmStart"]

#: The name that TorchRec's checkpoints give to the one row state of fused Adagrad.
_MOMENTUM: Final = {"sum": "momentum1"}
#: Dtypes of a count of steps with which torch's optimizers go on counting.
_STEP_DTYPES: Final = (torch.float32, torch.float64)
#: Largest count of steps that a float64 holds exactly.
_MOST_STEPS: Final = 2**53
#: Most names in one line of the log.
_NAMES_IN_A_LINE: Final = 20


def _adam(group: Mapping[str, Any]) -> list[str]:
    states = ["step", "exp_avg", "exp_avg_sq"]
    return [*states, "max_exp_avg_sq"] if group.get("amsgrad") else states


def _sgd(group: Mapping[str, Any]) -> list[str]:
    return ["momentum_buffer"] if group.get("momentum") else []


#: Optimizers whose state is known: class -> the keys of a parameter's state, by its group.
_KEYS: Final[Mapping[type[Optimizer], Callable[[Mapping[str, Any]], list[str]]]] = {
    torch.optim.Adagrad: lambda _group: ["step", "sum"],
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SparseAdam: lambda _group: ["step", "exp_avg", "exp_avg_sq"],
    torch.optim.SGD: _sgd,
}


@dataclass(kw_only=True)
class _Parameter:
    """One parameter or buffer that is loaded.

    Attributes:
        name: its name in the model; of a table the name of its weight.
        entry: its entry.
        states: key of the optimizer's state -> name of its entry or scalar.
        keys: the keys of a torch optimizer's state, in its order; None: it gets no state.
        is_fresh: the state is that before the first step; only a table in a cache needs it, because
            the layout of its rows at home cannot change later.
    """

    name: str
    entry: ForeignEntry
    states: dict[str, str] = field(default_factory=dict)
    keys: list[str] | None = None
    is_fresh: bool = False


class _PlannedTable(NamedTuple):
    parameter: _Parameter
    pieces: Sequence[Table]


class WarmStart:
    """Loads parts of another tool's checkpoint into a model.

    Args:
        checkpoint: the checkpoint, open until `load` is done.
        seed: what is wanted of it.
        tables: the tables that this rank holds.
        state: the training state outside tables.
        cache: has the rows of cached tables; None: no table is cached.
        elsewhere: names of all tables, over all ranks.
    """

    def __init__(
        self,
        checkpoint: ForeignCheckpoint,
        seed: Seed,
        tables: Sequence[Table],
        state: TrainingState,
        *,
        cache: Cache | None,
        elsewhere: Collection[str],
    ) -> None:
        self._checkpoint = checkpoint
        self._seed = seed
        self._parts: Parts = seed.parts
        self._state = state
        self._cache = cache
        self._elsewhere = frozenset(elsewhere)
        self._pieces: dict[str, list[Table]] = {}
        for table in tables:
            self._pieces.setdefault(table.name, []).append(table)
        self._tables: list[_PlannedTable] = []
        self._dense: list[_Parameter] = []
        self._faults: list[str] = []
        self._names_by_order: Mapping[str, Mapping[str, str]] = {}

    def plan(self) -> None:
        """Find an entry for each wanted tensor, and check that it fits.

        Raises:
            IncompatibleModel: something does not fit; the message names all of it. Nothing has
                changed.
            MalformedObject: the checkpoint is damaged, or rows of it lie too far apart to be read.
        """
        weights = {name: pieces[0].parameter_name for name, pieces in self._pieces.items()}
        live_tensors, saved_names = self._state.model.tensors(), self._state.model.saved_names()
        self._find_entries(weights, saved_names)
        for table, entry in self._wanted_tables(weights).items():
            self._plan_table(table, entry)
        for name, entry in self._wanted_dense(saved_names).items():
            self._plan_dense(name, live_tensors[name], entry)
        self._faults += rows_without_ids(
            {planned.pieces[0].name: planned.parameter.entry.name for planned in self._tables},
            {parameter.name: parameter.entry.name for parameter in self._dense},
            self._state.model.id_tensors(),
        )
        if self._seed.optimizer_states == "carry":
            self._plan_states()
        self._check_cache()
        if not self._faults:
            self._check_stored()
        if self._faults:
            left_out = self._left_out()
            raise IncompatibleModel(
                f"{self._checkpoint.form} {self._checkpoint.path}",
                found="; ".join(dict.fromkeys(self._faults))
                + (f". It also has {_brief(left_out)}" if left_out else ""),
                expected="entries that fit the model",
                next_step="give Seed(names={'OLD.*': 'NEW.*'}) where names differ, and name in "
                "tables= and dense= only what the checkpoint holds: recpoint import PATH lists it",
            )

    def _find_entries(self, weights: Mapping[str, str], saved_names: Mapping[str, str]) -> None:
        """Find the entries of what is wanted, so that only these names say which prefix counts."""
        names, stored_names = [], []
        if not isinstance(self._seed.tables, Mapping):
            names += [weights[t] for t in self._matching_tables(weights) if t in weights]
        if not isinstance(self._seed.dense, Mapping):
            matches = self._expanded(self._seed.dense, saved_names)
            first_names = {saved_names[name] for name in matches}
            names += [alias for alias, name in saved_names.items() if name in first_names]
        for parts in (self._seed.tables, self._seed.dense):
            for old in parts.values() if isinstance(parts, Mapping) else ():
                if not self._checkpoint.entries.keys() & {old, f"{old}.weight"}:
                    stored_names += [old, f"{old}.weight"]
        self._names = EntryNames(self._checkpoint.entries, names, self._seed.names, stored_names)
        self._faults += self._names.faults

    def _matching_tables(self, weights: Mapping[str, str]) -> list[str]:
        """Return the tables, over all ranks, that the names and patterns of the seed match."""
        return self._expanded(
            list(self._seed.tables), {**weights, **dict.fromkeys(self._elsewhere)}
        )

    def _wanted_tables(self, weights: Mapping[str, str]) -> dict[str, str]:
        """Return table here -> name of its entry."""
        if isinstance(self._seed.tables, Mapping):
            named = {
                new: self._named(old, f"table {new!r}") for new, old in self._parts.tables.items()
            }
        else:
            named = {
                table: self._searched(weights[table], f"table {table!r}")
                for table in self._matching_tables(weights)
                if table in weights
            }
        known_names = weights.keys() | self._elsewhere
        for table in named:
            if table not in known_names:
                self._faults.append(f"table {table!r} is not in the model{near(table, weights)}")
        return {t: entry for t, entry in named.items() if entry is not None and t in weights}

    def _wanted_dense(self, saved_names: Mapping[str, str]) -> dict[str, str]:
        """Return dense tensor here, under its first name -> name of its entry."""
        if isinstance(self._seed.dense, Mapping):
            wanted = {}
            for new, old in self._seed.dense.items():
                entry = self._named(old, repr(new))
                if new not in saved_names:
                    self._faults.append(f"{new!r} is not in the model{near(new, saved_names)}")
                elif entry is not None:
                    wanted[saved_names[new]] = entry
            return wanted
        aliases: dict[str, list[str]] = {}
        for alias, name in saved_names.items():
            aliases.setdefault(name, []).append(alias)
        first_names = {
            saved_names[name]: None for name in self._expanded(self._seed.dense, saved_names)
        }
        wanted = {}
        for name in first_names:
            alias = next((a for a in aliases[name] if a in self._names.entry_names), name)
            entry = self._searched(alias, repr(name))
            if entry is not None:
                wanted[name] = entry
        return wanted

    def _expanded(self, patterns: Sequence[str], names: Mapping[str, object]) -> list[str]:
        matches: dict[str, None] = {}
        for pattern in patterns:
            names_of_pattern = (
                [pattern]
                if pattern in names
                else [name for name in names if fnmatchcase(name, pattern)]
            )
            if not names_of_pattern:
                self._faults.append(
                    f"nothing in the model matches {pattern!r}{near(pattern, names)}"
                )
            matches |= dict.fromkeys(names_of_pattern)
        return list(matches)

    def _named(self, old: str, text: str) -> str | None:
        entry = self._names.entry(old)
        if entry is None and self._names.tie is not None:
            self._faults.append(self._names.tie)
        elif entry is None:
            self._faults.append(
                f"{text}: {old!r} is not in the checkpoint{near(old, self._names.names)}"
            )
        return entry

    def _searched(self, name: str, text: str) -> str | None:
        entry = self._names.entry_names.get(name)
        if entry is None and self._names.tie is not None:
            self._faults.append(self._names.tie)
        elif entry is None:
            full_name = f"{self._names.prefix}{name}"
            similar_names = near(full_name, self._names.names)
            self._faults.append(f"{text}: {full_name!r} is not in the checkpoint{similar_names}")
        return entry

    def _plan_table(self, name: str, entry_name: str) -> None:
        pieces = self._pieces[name]
        entry, table = self._checkpoint.entries[entry_name], pieces[0]
        self._compare(f"table {name!r}", entry, (table.table_rows, _dim(table)), table.weight.dtype)
        if table.maps_ids:
            instead = "; seed from a run that recpoint import makes of it" * (
                table.id_map == "keys"
            )
            self._faults.append(
                f"table {name!r} has {table.id_map}, and those of its rows are not read from such "
                f"a checkpoint{instead}"
            )
        self._tables.append(
            _PlannedTable(_Parameter(name=table.parameter_name, entry=entry), pieces)
        )

    def _plan_dense(self, name: str, live: Tensor, entry_name: str) -> None:
        entry = self._checkpoint.entries[entry_name]
        if self._compare(repr(name), entry, tuple(live.shape), live.dtype) and (
            not is_piece(live)
            and shares_memory(live)
            and not can_hold(live, self._checkpoint.whole(entry_name), name=name)
        ):
            self._faults.append(
                f"{name!r} has elements that share memory in the model (expand()), and differ in "
                "the checkpoint"
            )
        self._dense.append(_Parameter(name=name, entry=entry))

    def _compare(
        self, text: str, entry: ForeignEntry, shape: tuple[int, ...], dtype: torch.dtype
    ) -> bool:
        own_form = str(ForeignEntry("", dtype, shape))
        if own_form != str(entry):
            self._faults.append(
                f"{text} is {own_form} in the model and {entry} in the checkpoint ({entry.name!r})"
            )
        return own_form == str(entry)

    def _plan_states(self) -> None:
        trained = self._state.optimizers.trained_by()
        shapes = {name: tuple(t.shape) for name, t in self._state.model.tensors().items()}
        for table, *_ in self._pieces.values():
            shapes[table.parameter_name] = (table.table_rows, _dim(table))
        orders: dict[int, list[OwnParameter]] = {
            id(optimizer): [] for optimizer in self._state.optimizers.optimizers
        }
        for name, (optimizer, group) in trained.items():
            keys = _KEYS[type(optimizer)](group) if type(optimizer) in _KEYS else None
            orders[id(optimizer)].append(OwnParameter(name, shapes.get(name), keys))
        stored = OptimizerEntries(self._checkpoint, list(orders.values()))
        self._names_by_order = stored.names_by_order
        self._faults += stored.faults
        fault_count = len(stored.faults)
        for planned in self._tables:
            table = planned.pieces[0]
            if table.fused:
                self._plan_fused(planned, stored)
            else:
                self._plan_state(planned.parameter, trained, stored)
        for parameter in self._dense:
            self._plan_state(parameter, trained, stored)
        self._faults += stored.faults[fault_count:]

    def _plan_fused(self, planned: _PlannedTable, stored: OptimizerEntries) -> None:
        """Find the row states of a table that something else than a torch optimizer updates."""
        parameter, table = planned.parameter, planned.pieces[0]
        row_states = table.row_states or {}
        if not row_states:
            return
        if "sum" not in row_states:
            self._faults.append(
                f"table {table.name!r} is trained by a fused Adam: TorchRec's checkpoints lack the "
                "count of steps that corrects its bias (optimizer_states='drop')"
            )
            return
        states = stored.of(parameter.name, parameter.entry.name)
        for name, live in row_states.items():
            entry_name = None if states is None else _fused_name(name, states.names)
            text = f"row state {name!r} of table {table.name!r}"
            if entry_name is None or entry_name not in self._checkpoint.entries:
                self._faults.append(f"{text} is not in the checkpoint")
                continue
            per_row = tuple(live.shape[1:])
            if table.columns is not None and per_row == (table.dim,):
                per_row = (table.columns.of,)
            entry = self._checkpoint.entries[entry_name]
            shape = (table.table_rows, *per_row)
            if _values(entry.shape) != _values(shape) or entry.dtype != live.dtype:
                self._compare(text, entry, shape, live.dtype)
            parameter.states[name] = entry_name

    def _plan_state(
        self,
        parameter: _Parameter,
        trained: Mapping[str, tuple[Optimizer, Mapping[str, Any]]],
        stored: OptimizerEntries,
    ) -> None:
        if parameter.name not in trained:
            return  # a buffer, or frozen
        optimizer, group = trained[parameter.name]
        if type(optimizer) not in _KEYS:
            self._faults.append(
                f"{parameter.name!r} is trained by {type(optimizer).__name__}, whose state is not "
                "known (optimizer_states='drop')"
            )
            return
        keys = _KEYS[type(optimizer)](group)
        states = stored.of(parameter.name, parameter.entry.name)
        if not keys or (states is not None and states.is_listed and not states.names):
            return  # it has no state, here or there
        missing = [key for key in keys if states is None or key not in states.names]
        if states is None or missing:
            self._faults.append(
                f"the optimizer state {_brief(missing)} of {parameter.name!r} is not in the "
                "checkpoint (optimizer_states='drop')"
            )
            return
        shape = parameter.entry.shape
        for key in keys:
            parameter.states[key] = states.names[key]
            entry = self._checkpoint.entries.get(states.names[key])
            if key == "step":
                self._check_step(parameter.name, optimizer, states.names[key])
            elif entry is None or entry.shape != shape:
                form = "a number" if entry is None else str(entry)
                self._faults.append(
                    f"the optimizer state {key!r} of {parameter.name!r} is {form} in the "
                    f"checkpoint, and its parameter has the shape {list(shape)}"
                )
        parameter.keys = keys

    def _check_step(self, parameter: str, optimizer: Optimizer, name: str) -> None:
        """Check that a count of steps is one that the optimizer can go on with."""
        entry = self._checkpoint.entries.get(name)
        value: object
        if entry is None:
            value = self._checkpoint.scalars[name]
        elif math.prod(entry.shape) != 1:
            value = str(entry)
        elif entry.dtype not in _STEP_DTYPES and type(optimizer) is not torch.optim.SparseAdam:
            value = str(entry)
        else:
            value = self._checkpoint.whole(name).item()
        if not (
            isinstance(value, int | float) and 0 <= value <= _MOST_STEPS and value == int(value)
        ):
            self._faults.append(
                f"the optimizer state 'step' of {parameter!r} is {value!r:.100} in the checkpoint, "
                "and no whole number of steps that torch counts on (optimizer_states='drop')"
            )

    def _check_cache(self) -> None:
        cached = [name for name, pieces in self._pieces.items() if pieces[0].cached]
        planned_names = {planned.pieces[0].name for planned in self._tables}
        missing = [name for name in cached if name not in planned_names]
        if missing and len(missing) < len(cached):
            self._faults.append(
                f"cached tables {_brief(missing)} are not named: all tables of a cache are loaded, "
                "or none"
            )
        for planned in self._tables:
            table = planned.pieces[0]
            trainer = self._state.optimizers.trained_by().get(table.parameter_name)
            if not table.cached or planned.parameter.keys or trainer is None:
                continue
            optimizer, group = trainer
            if optimizer.state.get(table.weight):
                continue
            if type(optimizer) is torch.optim.SparseAdam:  # it begins with zeros
                planned.parameter.keys = _KEYS[torch.optim.SparseAdam](group)
                planned.parameter.is_fresh = True
            elif type(optimizer) not in _KEYS or _KEYS[type(optimizer)](group):
                self._faults.append(
                    f"table {table.name!r} is cached, and {type(optimizer).__name__} makes its "
                    "state in the first step: carry its state, or load it into a model without a "
                    "cache"
                )

    def _check_stored(self) -> None:
        """Check that what is planned can be read.

        Raises:
            MalformedObject: the rows of a tensor lie too far apart, or a chunk is not what the
                index says.
        """
        for planned in self._tables:
            for name in (planned.parameter.entry.name, *planned.parameter.states.values()):
                for table in planned.pieces if name in self._checkpoint.entries else ():
                    self._checkpoint.check(name, self._held(table))
        for parameter in self._dense:
            live = self._state.model.tensors()[parameter.name]
            name = parameter.entry.name
            self._checkpoint.check(name, in_pieces=not _is_read_whole(live))
            for state in parameter.states.values():
                if state in self._checkpoint.entries:
                    self._checkpoint.check(state, in_pieces=False)

    def _held(self, table: Table) -> range:
        """Return the rows of a table that this rank reads."""
        if self._cache is not None and table.name_in_cache is not None:
            return self._cache.tables[table.name_in_cache].part
        return range(table.first_row, table.first_row + table.rows)

    def _left_out(self) -> list[str]:
        """Return the names of entries that nothing is loaded from, and of what cannot be read."""
        used: set[str] = set()
        for parameter in (*(planned.parameter for planned in self._tables), *self._dense):
            used |= {parameter.entry.name, *parameter.states.values()}
        return [
            *(name for name in self._checkpoint.entries if name not in used),
            *(f"{name} ({what})" for name, what in self._checkpoint.left_out.items()),
        ]

    def load(self) -> None:
        """Write everything that was planned into the model and its optimizers.

        Raises:
            MalformedObject: the checkpoint is damaged; the model may hold a part of it.
        """
        rows: dict[str, dict[str, Tensor]] = {}
        if self._cache is not None and any(p.pieces[0].cached for p in self._tables):
            self._cache.restored()
        with torch.no_grad():
            for planned in self._tables:
                for table in planned.pieces:
                    row_states = self._row_states(planned.parameter, table)
                    rows[table.parameter_name] = row_states
                    if table.cached:
                        self._load_cached(planned.parameter, table, row_states)
                    else:
                        self._load_rows(planned.parameter, table, row_states)
            for parameter in self._dense:
                self._load_dense(parameter)
        parameters = [*(planned.parameter for planned in self._tables), *self._dense]
        carried = [parameter for parameter in parameters if parameter.keys is not None]
        self._state.optimizers.carry(
            [{"class": "", "groups": [], "state": {p.name: self._state_of(p) for p in carried}}],
            {parameter.name: parameter.name for parameter in carried},
            rows,
        )
        for planned in self._tables:
            name_in_cache = planned.pieces[0].name_in_cache
            if self._cache is not None and name_in_cache is not None:
                self._cache.tables[name_in_cache].slots.follow_states(
                    self._state.optimizers.row_states(planned.pieces[0]).tensors
                )

    def _row_states(self, parameter: _Parameter, table: Table) -> dict[str, Tensor]:
        """Return the tensors of row states that are loaded: name -> [rows, …] here."""
        current = self._state.optimizers.row_states(table).tensors
        if table.fused:
            return {name: current[name] for name in parameter.states}
        tensors: dict[str, Tensor] = {}
        if parameter.is_fresh:
            row_keys = [key for key in parameter.keys or () if key != "step"]
            return {key: torch.zeros_like(table.weight) for key in row_keys}
        for name, entry_name in parameter.states.items():
            if name == "step":
                continue
            entry = self._checkpoint.entries[entry_name]
            shape = (len(table.weight), *entry.shape[1:])
            # As Optimizer.load_state_dict does, whatever dtype the state was stored in.
            dtype = table.weight.dtype
            tensor = current.get(name)
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
                tensor = torch.zeros(shape, dtype=dtype, device=table.weight.device)
            tensors[name] = tensor
        return tensors

    def _load_rows(
        self, parameter: _Parameter, table: Table, row_states: Mapping[str, Tensor]
    ) -> None:
        held = self._held(table)
        targets = {parameter.entry.name: table.weight.detach()}
        targets |= {parameter.states[name]: tensor for name, tensor in row_states.items()}
        for entry_name, target in targets.items():
            shape = self._checkpoint.entries[entry_name].shape[1:]
            for piece in self._checkpoint.pieces(entry_name, held):
                own_rows = target[piece.start - held.start : piece.stop - held.start]
                if table.columns is not None and shape == (table.columns.of,):
                    first = table.columns.first
                    values = self._checkpoint.read(entry_name, piece)
                    own_rows.copy_(values[:, first : first + table.dim])
                else:  # one value a row may be [rows] or [rows, 1]
                    self._checkpoint.read_into(entry_name, piece, own_rows.view(-1, *shape))

    def _load_cached(
        self, parameter: _Parameter, table: Table, row_states: Mapping[str, Tensor]
    ) -> None:
        """Write a cached table's rows to its home, with their row states."""
        assert self._cache is not None and table.name_in_cache is not None
        cached_rows = self._cache.tables[table.name_in_cache]
        if row_states:
            cached_rows.slots.states = dict(row_states)
        layout = cached_rows.slots.fix_layout()
        mover = self._cache.mover
        mover.put_at_home(cached_rows)  # also if no row is for this rank
        fields = {layout_field.name: layout_field for layout_field in layout.fields}
        for piece in self._checkpoint.pieces(parameter.entry.name, cached_rows.part):
            values = self._checkpoint.read(parameter.entry.name, piece)
            records = cached_rows.slots.new_records(values)
            for name in parameter.states.keys() & row_states.keys():
                states = self._checkpoint.read(parameter.states[name], piece)
                own_states = states.to(row_states[name].dtype).contiguous()
                layout.put(records, fields[name], own_states)
            ids = torch.arange(piece.start, piece.stop, dtype=torch.int64, device="cpu")
            mover.write_idle(cached_rows.slots.name, ids, records)

    def _load_dense(self, parameter: _Parameter) -> None:
        live, name = self._state.model.tensors()[parameter.name], parameter.entry.name
        if _is_read_whole(live):
            self._state.model.restore_some({parameter.name: self._checkpoint.whole(name)})
            return
        for piece in self._checkpoint.pieces(name):
            self._checkpoint.read_into(name, piece, live.detach()[piece.start : piece.stop])

    def _state_of(self, parameter: _Parameter) -> dict[str, Any]:
        """Return a parameter's state without row states, as `OptimizerState.carry` takes it."""
        is_table = any(parameter is planned.parameter for planned in self._tables)
        optimizer, group = self._state.optimizers.trained_by()[parameter.name]
        values: dict[str, Any] = {"step": 0} if parameter.is_fresh else {}
        for key, name in parameter.states.items():
            if key == "step":
                values[key] = self._step(name, optimizer, group)
            elif not is_table:
                # As Optimizer.load_state_dict does. The entry has the parameter's dtype.
                values[key] = self._checkpoint.whole(name).to(parameter.entry.dtype)
        return {"keys": parameter.keys, "values": values, "on_host": ["step"]}

    def _step(self, name: str, optimizer: Optimizer, group: Mapping[str, Any]) -> int | Tensor:
        """Return a count of steps as the optimizer keeps it once it has loaded its state."""
        if name in self._checkpoint.scalars:
            number = float(self._checkpoint.scalars[name])
            count = _step_count(number)
        else:
            count = self._checkpoint.whole(name).reshape(())
        if type(optimizer) is torch.optim.SparseAdam:
            return int(count)
        on_device = group.get("capturable") or group.get("fused")
        return count.to(torch.float32) if on_device else count

    def lines(self) -> list[str]:
        """Return a line for each table and for all dense tensors: what went where; and the rest."""
        lines = [
            f"table {planned.pieces[0].name!r} from {planned.parameter.entry.name!r}"
            + _with_states(planned.parameter)
            for planned in self._tables
        ]
        if self._dense:
            lines.append(f"dense {_brief([p.name for p in self._dense])}")
        if self._seed.optimizer_states == "carry":
            trained = self._state.optimizers.trained_by()
            parameters = [*(planned.parameter for planned in self._tables), *self._dense]
            fresh = [p.name for p in parameters if not p.states and p.name in trained]
            if fresh:
                lines.append(f"without optimizer state, there or here: {_brief(fresh)}")
        lines += [
            f"optimizer state by order alone, under {container!r}: {_brief_numbers(names, first)}"
            for container, names in self._names_by_order.items()
            for first in range(0, len(names), _NAMES_IN_A_LINE)
        ]
        left_out = self._left_out()
        if left_out:
            lines.append(f"left out: {_brief(left_out)}")
        return lines


def _is_read_whole(live: Tensor) -> bool:
    """Whether a dense tensor is read at once, because pieces of it cannot be written."""
    return is_piece(live) or shares_memory(live) or not live.dim()


def _step_count(number: float) -> Tensor:
    """Return a count of steps as torch's optimizers keep it, whatever the default dtype."""
    is_double = torch.get_default_dtype() is torch.float64
    return torch.tensor(number, dtype=torch.float64 if is_double else torch.float32, device="cpu")


def _with_states(parameter: _Parameter) -> str:
    return f" with {', '.join(parameter.states)}" if parameter.states else ""


def _dim(table: Table) -> int:
    return table.dim if table.columns is None else table.columns.of


def _values(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _fused_name(name: str, names: Mapping[str, str]) -> str | None:
    """Return the name of a row state's entry: its key is the name, alone or after the table's."""
    for own_name in (name, _MOMENTUM.get(name, name)):
        for key, entry_name in names.items():
            if key == own_name or key.endswith(f".{own_name}"):
                return entry_name
    return None


def _brief_numbers(names: Mapping[str, str], first: int) -> str:
    """Return the numbers of a line of the log, each with the parameter that it was given to."""
    items = list(names.items())[first : first + _NAMES_IN_A_LINE]
    return ", ".join(f"{number} is {name!r}" for number, name in items)


def _brief(names: Sequence[str]) -> str:
    text = ", ".join(map(repr, names[:_NAMES_IN_A_LINE]))
    more = len(names) - _NAMES_IN_A_LINE
    return f"{text} and {more} more" if more > 0 else text
