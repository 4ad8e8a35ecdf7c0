"""What a table is, where tables come from, and which weights cannot be one.

`Table` says what the rest of recpoint needs to know of one embedding weight. `plain_tables` finds
those of plain modules. A library that shards embeddings keeps rows in its own kernels, updates them
in backward, and looks them up by ids of the shard; nothing of that can be seen from `nn.Embedding`
modules and torch optimizers. So a model's `TableSource` brings its tables, answers for the modules
that hold them, and tells the trackers which rows change:

    source.modules      left out of the dense state, and of the search for plain tables
    source.tables       stored like all others, as shards of whole tables
    source.optimizers   what is left for the dense state and its optimizer entries
    source.track        from restore() on; untrack() at the end
    source.state_dict   whatever is no row: learning rates, step counts
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

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
    "zero_rows",
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
    """See `Table.key`."""
    return name if columns is None else f"{name}[:, {columns.first}:]"


@dataclass(frozen=True, kw_only=True, eq=False)
class Table(ABC):
    """The rows of one table, or of some of its columns, that this process holds.

    `ModuleTable` is the one of a plain module. An integration gives its own (see `TableSource`): it
    says where rows lie in the whole table, where their row states are, and which rows change.

    Where another process lists the same rows, as all do with a model that is replicated, they have
    to be equal, and the lowest rank stores them.

    Attributes:
        name: of the whole table, the same in each process and whatever wraps the model: the full
            name of its module, as `catalog.restore.state.canonical_name` spells it.
        parameter_name: of its weight; what an optimizer keeps for it is stored under it.
    """

    name: str
    parameter_name: str

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """[rows, dim], contiguous: the live values. The same tensor object each time, until the
        rows lie elsewhere: another one, or another address, makes all rows dirty."""

    @property
    def rows(self) -> int:
        """Rows of the weight, those of this process alone."""
        return self.weight.shape[0]

    @property
    def dim(self) -> int:
        """Values of a row of the weight."""
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
        """Rows of the whole table, over all processes."""
        return self.rows

    @property
    def columns(self) -> Columns | None:
        """Which columns of the whole table the weight holds; None: all."""
        return None

    @property
    def key(self) -> str:
        """Name of the piece among all of a model: `name`, and its first column where it is cut."""
        return table_key(self.name, self.columns)

    @property
    def trained(self) -> bool:
        """Whether training changes it."""
        return self.weight.requires_grad

    @property
    def changes(self) -> bool:
        """Whether anything changes its rows, training or not."""
        return self.trained

    @property
    def fused(self) -> bool:
        """Whether it is updated in no step of a torch optimizer, but for instance in backward.

        Its source then tells the tracker of each change (`TableSource.track`): neither
        gradients nor how often the weight was changed in place are looked at.
        """
        return False

    @property
    def counts_changes(self) -> bool:
        """Whether in-place changes of the weight are counted, and for it alone."""
        return not self.fused

    @property
    def row_states(self) -> Mapping[str, Tensor] | None:
        """Optimizer state with one entry for each row, [rows, ...]; restored in place.

        None: what the optimizers of the Checkpointer hold for `weight`. Of a fused table: name ->
        live tensor, contiguous, the same objects each time, there from the start.
        """
        return None

    @property
    def sparse(self) -> bool:
        """Whether its gradient is sparse."""
        return False

    @property
    def changed_by_lookup(self) -> bool:
        """Whether a lookup rewrites the rows it reads, trained or not."""
        return False

    def before_lookup(self, hook: Callable[..., None]) -> RemovableHandle | None:
        """Have `hook(module, args, kwargs)` called before each lookup; None: there is no way to."""
        return None

    def after_lookup(self, hook: Callable[..., None]) -> RemovableHandle | None:
        """Have `hook(module, args, kwargs, output)` called after each lookup that returned."""
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
        """max_norm changes rows at each lookup, trained or not."""
        return self.trained or self.changed_by_lookup

    @property
    def sparse(self) -> bool:
        """As the module says now."""
        return self.module.sparse

    @property
    def changed_by_lookup(self) -> bool:
        """Whether the module has a max_norm."""
        return self.module.max_norm is not None

    def before_lookup(self, hook: Callable[..., None]) -> RemovableHandle | None:
        """See `Table.before_lookup`."""
        handle: Any = self.module.register_forward_pre_hook(hook, with_kwargs=True)
        return handle  # type: ignore[no-any-return]

    def after_lookup(self, hook: Callable[..., None]) -> RemovableHandle | None:
        """See `Table.after_lookup`."""
        handle: Any = self.module.register_forward_hook(hook, with_kwargs=True)
        return handle  # type: ignore[no-any-return]


class Marker(Protocol):
    """What a source tells of one table; a `marks.Tracker`. Ids are positions in the weight,
    int32 or int64 of any shape, on any device; those that are out of range raise IndexError."""

    def looked_up(self, ids: Tensor) -> None:
        """These rows will be changed: they belong to the checkpoint before and to the one after a
        cut that comes between this and `applied`."""

    def applied(self) -> None:
        """All rows that were looked up so far have been changed, or will not be."""

    def mark(self, ids: Tensor) -> None:
        """These rows have changed."""

    def mark_all(self) -> None:
        """Any row may have changed."""


class TableSource(Protocol):
    """The tables of one model that a library keeps in its own form.

    All methods are called from the training thread, between batches; none may communicate with
    other processes, and none may draw from a random generator.

    Attributes:
        name: of the library; its state is stored under it.
        tables: what this process holds, in any order; without rows: not listed. Pieces of one
            table have disjoint rows or columns.
        modules: full names in the model (`named_modules`) of modules whose parameters and buffers,
            and those of all modules in them, are no dense state.
    """

    name: str
    tables: Sequence[Table]
    modules: Collection[str]

    def optimizers(self, given: Sequence[Optimizer]) -> Sequence[Optimizer]:
        """Those of the Checkpointer's optimizers, without the ones that train `tables` alone; ones
        that combine several may be taken apart."""

    def track(self, markers: Mapping[str, Marker]) -> None:
        """Tell from now on which rows change, by `Table.key`; `untrack` undoes it."""

    def untrack(self) -> None:
        """Take out what `track` has put into the model; also without a `track` before."""

    def state_dict(self) -> Any:
        """What the next life needs beside rows and row states: step counts, learning rates. Of what
        format §3.4 can store; stored by each rank."""

    def lacks_states(self, states: Sequence[Any]) -> bool:
        """Whether what further ranks of the checkpoint returned may be needed beside these."""

    def differences(self, states: Sequence[Any]) -> list[str]:
        """Why `load_state_dicts` cannot go on from these, one sentence each."""

    def load_state_dicts(self, states: Sequence[Any]) -> None:
        """Go on from what ranks of a checkpoint returned, in the order of ranks: all of them, or
        some that nothing was lacking from. They may be more or fewer than now, and may have held
        other tables. Rows and row states are in place."""


def modules_of(
    model: nn.Module, sources: Sequence[TableSource] = (), *, every_name: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Canonical name and module of all that no source answers for.

    Each module comes once, or with `every_name` once for each of its names.
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
    """What `plain_tables` finds in a model.

    Attributes:
        tables: in the order of the model.
        parameter_names: id of each parameter that no source answers for -> its canonical name.
    """

    tables: list[Table]
    parameter_names: dict[int, str]


def plain_tables(model: nn.Module, sources: Sequence[TableSource] = ()) -> PlainTables:
    """The tables of a model's plain embedding modules, without those that a source answers for.

    Raises:
        SettingsError: two names for one table.
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
                    "elsewhere without giving it to a second one, as F.linear(x, emb.weight); or "
                    "give each module its own weight",
                )
            if is_table:
                assert isinstance(module, Lookup)
                tables.append(
                    ModuleTable(name=name or "weight", parameter_name=full_name, module=module)
                )
    return PlainTables(tables, names)


def refuse_unstorable(tables: Sequence[Table]) -> None:
    """Refuse tables that cannot be stored, or not together.

    Raises:
        SettingsError: a weight of another layout or dtype, or without a shape or rows; a name that
            is too long, or that two tables have; weights that share memory.
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
        found, expected = f"shape {tuple(weight.shape)}", "one row and one value at least"
        next_step = "remove it"
    elif len(table.name) > _MAX_NAME:
        found, expected = f"{len(table.name)} characters", f"at most {_MAX_NAME}"
        next_step = "rename"
    elif weight.dtype not in TABLE_DTYPES:
        found, expected = str(weight.dtype), ", ".join(map(str, TABLE_DTYPES))
        next_step = "change its dtype"
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
                found="two tables of one name",
                expected="one name for each table, whatever library it comes from",
                next_step="rename one of them",
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
    """Refuse to store a model that has come to other tables than when its tables were found.

    It would be built with them when it is restored, and could not be.

    Args:
        lookups: name of each plain embedding module of the model -> its weight, now.
        tables: those that are stored as tables, without those of sources.

    Raises:
        SettingsError: one was added, replaced or removed.
    """
    known = {id(table.weight) for table in tables}
    for name, weight in lookups.items():
        if id(weight) not in known:
            raise SettingsError(
                f"table {name or 'weight'!r}",
                found="an embedding that was added, or put in place of another, after the "
                "Checkpointer was built",
                expected="the tables that there were then: "
                f"{sorted(table.name for table in tables)!r:.400}",
                next_step="build the Checkpointer after the model is complete",
            )
    there = {id(weight) for weight in lookups.values()}
    for table in tables:
        if id(table.weight) not in there:
            raise SettingsError(
                f"table {table.name!r}",
                found="no such module in the model any more",
                expected="the tables that there were when the Checkpointer was built",
                next_step="build the Checkpointer after the model is complete",
            )


def zero_rows(table: Table, row_states: Iterable[Tensor], ids: Tensor) -> None:
    """Set rows, and their entries of each row state, to zero.

    Args:
        table: whose rows.
        row_states: [rows, ...] each.
        ids: int64 [n], positions in the weight, as `held_ids` returns them.
    """
    with torch.no_grad():
        for tensor in (table.weight, *row_states):
            tensor.index_fill_(0, ids.to(tensor.device), 0)


def refuse_ids_outside(table: str, ids: Tensor, *, rows: int) -> None:
    """Refuse ids that are no row of the table of that name, which has `rows` rows.

    Raises:
        IndexError: an id is out of range.
    """
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise IndexError(f"table {table!r}: a row outside 0 … {rows - 1}")


def held_ids(table: Table, ids: Tensor) -> Tensor:
    """Those of some rows that this process holds.

    Args:
        table: whose rows.
        ids: int32 or int64, any shape: positions in the whole table.

    Returns:
        int64 [n], on the weight's device: positions in the weight.

    Raises:
        TypeError: ids are no tensor.
        ValueError: ids are of another dtype.
        IndexError: an id is out of range.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids: found {type(ids).__name__}, expected a tensor of int32 or int64")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids of {ids.dtype}, expected int32 or int64")
    flat = ids.reshape(-1).to(device=table.weight.device, dtype=torch.int64)
    refuse_ids_outside(table.name, flat, rows=table.table_rows)
    if table.rows == table.table_rows:
        return flat
    local = flat - table.first_row
    return local[(local >= 0) & (local < table.rows)]
