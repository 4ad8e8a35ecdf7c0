"""Defines embedding tables and their sources, finds plain tables, refuses those it cannot store.

`Table` describes one embedding weight to the rest of recpoint. `plain_tables` finds the tables of
plain torch modules. A library that shards embeddings keeps rows in its own kernels, updates them
in backward, and looks them up by ids within the shard; `nn.Embedding` modules and torch optimizers
show none of this. The library's `TableSource` therefore lists the tables, names the modules that
hold them, and tells the trackers which rows change:

    source.modules      modules left out of the dense state and of the search for plain tables
    source.tables       tables, stored like all others, as shards of whole tables
    source.optimizers   the optimizers that remain for the dense state and its optimizer entries
    source.track        called by restore(); untrack() is called at the end
    source.state_dict   state that belongs to no row: learning rates, step counts
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from recpoint.catalog.restore.state import canonical_name
from recpoint.errors import SettingsError
from recpoint.format.manifest import Columns

__all__ = [
    "TABLE_DTYPES",
    "DescribesTable",
    "Lookup",
    "Marker",
    "ModuleTable",
    "PlainTables",
    "Table",
    "TableDtype",
    "TableSource",
    "held_ids",
    "modules_of",
    "plain_tables",
    "refuse_ids_outside",
    "refuse_other_tables",
    "refuse_unstorable",
    "table_key",
]

_MAX_NAME = 1024

Lookup = nn.Embedding | nn.EmbeddingBag

TableDtype = Literal["F64", "F32", "F16", "BF16"]

TABLE_DTYPES: dict[torch.dtype, TableDtype] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def table_key(name: str, columns: Columns | None) -> str:
    """Return the key of a table, or of some of its columns; see `Table.key`."""
    return name if columns is None else f"{name}[:, {columns.first}:]"


@dataclass(frozen=True, kw_only=True, eq=False)
class Table(ABC):
    """Describes the rows of one table, or of some of its columns, that this process holds.

    `ModuleTable` is the table of a plain module. An integration defines its own subclass (see
    `TableSource`), which says where the rows lie in the whole table and where their row states are.

    If several processes list the same rows, as in a replicated model, the rows must be equal in all
    of them; the lowest rank stores them.

    Attributes:
        name: name of the whole table: the full name of its module, as
            `catalog.restore.state.canonical_name` spells it. It is the same in each process, and
            wrappers of the model do not change it.
        parameter_name: name of the weight; the weight's optimizer state is stored under this name.
    """

    name: str
    parameter_name: str

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """The live values: [rows, dim], contiguous, of a dtype in `TABLE_DTYPES`.

        Each call returns the same tensor object until the rows move. Another object, or another
        address, makes all rows dirty.
        """

    @property
    def rows(self) -> int:
        """Number of rows of the weight, that is, of this process alone."""
        return self.weight.shape[0]

    @property
    def dim(self) -> int:
        """Number of values in a row of the weight."""
        return self.weight.shape[1]

    @property
    def dtype(self) -> TableDtype:
        """The weight's dtype by its stored name."""
        return TABLE_DTYPES[self.weight.dtype]

    @property
    def first_row(self) -> int:
        """Position in the whole table of the weight's first row."""
        return 0

    @property
    def table_rows(self) -> int:
        """Number of rows of the whole table, over all processes."""
        return self.rows

    @property
    def columns(self) -> Columns | None:
        """Columns of the whole table that the weight holds; None: all."""
        return None

    @property
    def key(self) -> str:
        """Unique within a model: `name`, plus the first column if the table is cut by columns."""
        return table_key(self.name, self.columns)

    @property
    def trained(self) -> bool:
        """Whether training changes the weight."""
        return self.weight.requires_grad

    @property
    def changes(self) -> bool:
        """Whether training or anything else changes the rows."""
        return self.trained

    @property
    def fused(self) -> bool:
        """Whether something other than a torch optimizer's step updates it, such as backward.

        If so, its source reports each change to the tracker (`TableSource.track`). The tracker
        then looks neither at gradients nor at the count of in-place changes of the weight.
        """
        return False

    @property
    def counts_changes(self) -> bool:
        """Whether torch counts the weight's in-place changes in a counter of the weight alone."""
        return not self.fused

    @property
    def name_in_cache(self) -> str | None:
        """Name of the table in the cache that has its rows; None: no cache has them."""
        return None

    @property
    def cached(self) -> bool:
        """Whether `weight` holds only some rows at a time, in slots; see `CachedTable`.

        Positions in such a weight are slots, not rows.
        """
        return self.name_in_cache is not None

    @property
    def filled_slots(self) -> Tensor | None:
        """Slots that have a row now, int64 [n], ascending; None: the table is in no cache."""
        return None

    @property
    def id_map(self) -> str:
        """What gives rows to ids, by row states, in words; empty: an id is the row's number."""
        return ""

    @property
    def maps_ids(self) -> bool:
        """Whether row states say which id each row belongs to; an id is the row's number if not."""
        return bool(self.id_map)

    @property
    def features(self) -> tuple[str, ...]:
        """Features of jagged batches whose values are ids of the table; none: batches have none."""
        return ()

    @property
    def row_states(self) -> Mapping[str, Tensor] | None:
        """Optimizer state with one entry for each row, [rows, ...]; restored in place.

        None: the row states are those that the Checkpointer's optimizers hold for `weight`, and
        `own_states`. A fused table returns name -> live tensor: contiguous, the same objects in
        each call, allocated from the start.
        """
        return None

    @property
    def own_states(self) -> Mapping[str, Tensor]:
        """Exact row states that the table keeps beside those of its optimizer; most keep none.

        Name -> live tensor, [rows] of int64: the same objects in each call until the table grows,
        restored in place. Whoever changes an entry reports its row to the tracker first.
        """
        return {}

    @property
    def key_counts(self) -> Mapping[str, int] | None:
        """Rows that keys have (`used`), and `inserted`, `evicted` and `refused` keys since training
        began; None: rows do not belong to keys.
        """
        return None

    def begin_entries(  # noqa: B027  # most tables give no row to another id
        self, optimizers: Sequence[Optimizer]
    ) -> None:
        """Give rows of new ids their first entries in row states. It is called before each cut.

        Args:
            optimizers: the optimizers, one of which may have row states of the table.
        """

    @property
    def sparse(self) -> bool:
        """Whether the weight's gradient is sparse."""
        return False

    @property
    def changed_by_lookup(self) -> bool:
        """Whether a lookup rewrites the rows it reads, trained or not."""
        return False

    def refuse_optimizer(  # noqa: B027  # most tables refuse none
        self, optimizer: Optimizer, group: Mapping[str, Any]
    ) -> None:
        """Refuse an optimizer that must not train the table; no optimizer is refused here.

        Args:
            optimizer: the optimizer.
            group: its parameter group that has the weight.

        Raises:
            SettingsError: it changes rows that are not in the weight.
        """

    def rows_of(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, as `held_ids` does; ids that have no row here are left out.

        Raises:
            TypeError, ValueError, IndexError: as `held_ids`.
        """
        return held_ids(self, ids)

    def zero_rows(self, ids: Tensor, row_states: Iterable[Tensor]) -> None:
        """Set rows, and their entries in each row state, to zero.

        Args:
            ids: int64 [n], positions in the table's rows here, as `rows_of` returns them.
            row_states: row states of the table, each [rows, ...].
        """
        with torch.no_grad():
            for tensor in (self.weight, *row_states):
                tensor.index_fill_(0, ids.to(tensor.device), 0)

    def before_lookup(self, hook: Callable[..., None]) -> RemovableHandle | None:
        """Have `hook(module, args, kwargs)` called before each lookup.

        Returns:
            A handle that removes the hook; None if the table cannot call hooks.
        """
        return None

    def after_lookup(self, hook: Callable[..., None]) -> RemovableHandle | None:
        """Have `hook(module, args, kwargs, output)` called after each lookup that returned.

        Returns:
            A handle that removes the hook; None if the table cannot call hooks.
        """
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleTable(Table):
    """The weight of an `nn.Embedding` or `nn.EmbeddingBag`: a whole table."""

    module: Lookup

    @property
    def weight(self) -> Tensor:
        """The weight as it is now: `model.to(device)` may have replaced its storage."""
        return self.module.weight

    @property
    def changes(self) -> bool:
        """Whether training changes rows, or lookups do because the module has max_norm."""
        return self.trained or self.changed_by_lookup

    @property
    def sparse(self) -> bool:
        """Whether the module asks for sparse gradients now."""
        return self.module.sparse

    @property
    def changed_by_lookup(self) -> bool:
        """Whether the module has a max_norm."""
        return self.module.max_norm is not None

    def before_lookup(self, hook: Callable[..., None]) -> RemovableHandle | None:
        """Hook in before each call of the module; see `Table.before_lookup`."""
        handle: RemovableHandle = self.module.register_forward_pre_hook(hook, with_kwargs=True)
        return handle

    def after_lookup(self, hook: Callable[..., None]) -> RemovableHandle | None:
        """Hook in after each call of the module; see `Table.after_lookup`."""
        handle: RemovableHandle = self.module.register_forward_hook(hook, with_kwargs=True)
        return handle


@runtime_checkable
class DescribesTable(Protocol):
    """A forward pre-hook of an embedding module that describes the module's table itself."""

    def table(self, name: str, parameter_name: str, module: Lookup) -> ModuleTable:
        """Return the table; the arguments are those of `ModuleTable`."""


class Marker(Protocol):
    """Receives a source's reports of changes to one table; `marks.Tracker` implements it.

    Ids are positions in the weight: int32 or int64, of any shape, on any device. An id out of range
    raises IndexError.
    """

    def looked_up(self, ids: Tensor) -> None:
        """Report rows that are about to change.

        If a cut comes between this call and `applied`, the rows belong to the checkpoint of that
        cut and to the next one.
        """

    def applied(self) -> None:
        """Report that each row looked up so far has been changed, or will not be changed."""

    def mark(self, ids: Tensor) -> None:
        """Report rows that have changed."""

    def mark_all(self) -> None:
        """Report that any row may have changed."""


class TableSource(Protocol):
    """Supplies the tables of one model that a library keeps in its own form.

    All methods are called from the training thread, between batches. No method may communicate with
    other processes or draw from a random generator.

    Attributes:
        name: name of the library; its state is stored under this name.
        tables: the tables that this process holds, in any order. A table without rows here is not
            listed. Pieces of one table have disjoint rows or columns.
        modules: full names in the model (as in `named_modules`) of the modules that hold the
            tables. Their parameters and buffers, and those of their submodules, are left out of the
            dense state.
        settings_step: what to do where `differences` finds something; the end of a message.
    """

    name: str
    settings_step: str
    tables: Sequence[Table]
    modules: Collection[str]

    def stores_buffer(self, module: nn.Module, name: str) -> bool:
        """Whether this buffer of a module outside `modules` is left out of the dense state, too."""

    def optimizers(self, given: Sequence[Optimizer]) -> Sequence[Optimizer]:
        """Return the given optimizers of the Checkpointer without those that train only `tables`.

        An optimizer that combines several may be replaced by its parts.
        """

    def track(self, markers: Mapping[str, Marker]) -> None:
        """Report row changes to the markers (by `Table.key`) from now on; `untrack` undoes it."""

    def untrack(self) -> None:
        """Take out of the model what `track` put into it; allowed without an earlier `track`."""

    def state_dict(self) -> Any:
        """Return the state that is neither rows nor row states, such as step counts.

        It holds only values that format §3.4 can store. Each rank stores its own.
        """

    def lacks_states(self, states: Sequence[Any]) -> bool:
        """Whether loading may need the `state_dict` of more ranks of the checkpoint than these."""

    def differences(self, states: Sequence[Any]) -> list[str]:
        """Return why `load_state_dicts` cannot load these states, one sentence for each reason."""

    def load_state_dicts(self, states: Sequence[Any]) -> None:
        """Load what `state_dict` returned on the ranks of a checkpoint, in the order of ranks.

        These are the states of all ranks, or of as many as `lacks_states` asked for. The checkpoint
        may have had more or fewer ranks than this run, and they may have held other tables. Rows
        and row states have been loaded before this call.
        """


def modules_of(
    model: nn.Module, sources: Sequence[TableSource] = (), *, every_name: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Yield canonical name and module for each module outside all sources' `modules`.

    Each module is yielded once, or with `every_name` once for each of its names.
    """
    theirs = tuple(name for source in sources for name in source.modules)
    below = tuple(f"{name}." if name else "" for name in theirs)
    answered_for: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=not every_name):
        if name in theirs or name.startswith(below):
            answered_for.add(id(module))
        elif id(module) not in answered_for:
            yield canonical_name(model, name), module


class PlainTables(NamedTuple):
    """The result of `plain_tables`.

    Attributes:
        tables: the tables, in the order of the model's modules.
        parameter_names: id of each parameter outside all sources' modules -> its canonical name.
    """

    tables: list[Table]
    parameter_names: dict[int, str]


def plain_tables(model: nn.Module, sources: Sequence[TableSource] = ()) -> PlainTables:
    """Find the tables of a model's embedding modules, leaving out the sources' modules.

    Raises:
        SettingsError: one table has two names.
    """
    tables: list[Table] = []
    names: dict[int, str] = {}
    for name, module in modules_of(model, sources):
        for parameter_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full_name = f"{name}.{parameter_name}" if name else parameter_name
            earlier = names.setdefault(id(parameter), full_name)
            is_table = isinstance(module, Lookup) and parameter_name == "weight"
            if earlier != full_name and (is_table or any(t.weight is parameter for t in tables)):
                raise SettingsError(
                    f"tables {earlier!r} and {full_name!r}",
                    found="two names for one table (tied weights)",
                    expected="one module for each table",
                    next_step="look rows up through one module, as emb(ids), and use its weight "
                    "elsewhere without giving it to a second one, as F.linear(x, emb.weight) (not "
                    "if the table is in a cache); or give each module its own weight",
                )
            if is_table:
                assert isinstance(module, Lookup)
                tables.append(_table_of(module, name or "weight", full_name))
    return PlainTables(tables, names)


def _table_of(module: Lookup, name: str, parameter_name: str) -> ModuleTable:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, DescribesTable):
            return hook.table(name, parameter_name, module)
    return ModuleTable(name=name, parameter_name=parameter_name, module=module)


def refuse_unstorable(tables: Sequence[Table]) -> None:
    """Refuse tables that cannot be stored, or cannot be stored together.

    Raises:
        SettingsError: a weight has another layout or dtype, no shape or no rows; a name is too
            long, or two tables have it; two weights share memory.
    """
    for table in tables:
        _refuse_weight(table)
    _refuse_one_key(tables)
    _refuse_overlaps(tables)


def _refuse_weight(table: Table) -> None:
    weight = table.weight
    if isinstance(weight, UninitializedParameter):
        found, expected, next_step = "a lazy weight", "a weight with a shape", "run one batch first"
    elif weight.layout is not torch.strided or not weight.is_contiguous() or weight.dim() != 2:
        found = f"a weight with strides {weight.stride()}"
        expected = "a contiguous weight [rows, dim]"
        next_step = "build the module with a contiguous weight"
    elif weight.numel() == 0:
        found, expected = f"shape {tuple(weight.shape)}", "at least one row of at least one value"
        next_step = "remove the module from the model"
    elif len(table.name) > _MAX_NAME:
        found, expected = f"{len(table.name)} characters", f"at most {_MAX_NAME}"
        next_step = "give its module a shorter name"
    elif weight.dtype not in TABLE_DTYPES:
        found, expected = str(weight.dtype), ", ".join(map(str, TABLE_DTYPES))
        next_step = "convert the module to one of these dtypes"
    else:
        return
    raise SettingsError(
        f"table {table.name!r}", found=found, expected=expected, next_step=next_step
    )


def _refuse_one_key(tables: Sequence[Table]) -> None:
    seen: set[str] = set()
    for table in tables:
        if table.key in seen:
            raise SettingsError(
                f"table {table.key!r}",
                found="two tables with this name",
                expected="a different name for each table, also across libraries",
                next_step="rename one of the two modules",
            )
        seen.add(table.key)


def _refuse_overlaps(tables: Sequence[Table]) -> None:
    spans = sorted(
        (
            (table.weight.device.type, table.weight.device.index or 0, table.weight.data_ptr()),
            table.weight.nbytes,
            table.name,
        )
        for table in tables
        if not table.weight.is_meta
    )
    for (place, size, name), (next_place, _, next_name) in zip(spans, spans[1:], strict=False):
        if place[:2] == next_place[:2] and place[2] + size > next_place[2]:
            raise SettingsError(
                f"tables {name!r} and {next_name!r}",
                found="two names for one table (their weights share memory)",
                expected="weights that do not overlap",
                next_step="give each module its own weight",
            )


def refuse_other_tables(lookups: Mapping[str, Tensor], tables: Sequence[Table]) -> None:
    """Refuse to store a model whose tables have changed since the Checkpointer found them.

    A checkpoint of such a model could not be restored into the model that a restart builds.

    Args:
        lookups: name of each plain embedding module of the model -> its weight, as they are now.
        tables: the tables that the Checkpointer found in plain modules.

    Raises:
        SettingsError: an embedding was added, replaced or removed.
    """
    known = {id(table.weight) for table in tables}
    for name, weight in lookups.items():
        if id(weight) not in known:
            raise SettingsError(
                f"table {name or 'weight'!r}",
                found="an embedding that was added, or that replaced another, after the "
                "Checkpointer was built",
                expected="the tables that the model had then: "
                f"{sorted(table.name for table in tables)!r:.400}",
                next_step="build the Checkpointer after the model is complete",
            )
    there = {id(weight) for weight in lookups.values()}
    for table in tables:
        if id(table.weight) not in there:
            raise SettingsError(
                f"table {table.name!r}",
                found="its module is no longer in the model",
                expected="the tables that the model had when the Checkpointer was built",
                next_step="build the Checkpointer after the model is complete",
            )


def refuse_ids_outside(table: str, ids: Tensor, *, rows: int) -> None:
    """Refuse ids outside 0 … `rows` - 1.

    Args:
        table: name of the table, for the message.
        ids: integers of any shape, on any device.
        rows: number of rows of the table.

    Raises:
        IndexError: an id is out of range.
    """
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise IndexError(f"table {table!r}: found a row id outside 0 … {rows - 1}")


def held_ids(table: Table, ids: Tensor) -> Tensor:
    """Select the ids of rows that this process holds.

    Args:
        table: the table that the ids belong to.
        ids: int32 or int64, any shape: positions in the whole table.

    Returns:
        int64 [n], on the weight's device: positions in the weight of the rows held here.

    Raises:
        TypeError: `ids` is not a tensor.
        ValueError: `ids` has another dtype.
        IndexError: an id is out of range.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids: found {type(ids).__name__}, expected a tensor of int32 or int64")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids: found {ids.dtype}, expected int32 or int64")
    flat = ids.reshape(-1).to(device=table.weight.device, dtype=torch.int64)
    refuse_ids_outside(table.name, flat, rows=table.table_rows)
    if table.rows == table.table_rows:
        return flat
    local = flat - table.first_row
    return local[(local >= 0) & (local < table.rows)]
