"""Puts the tables of a model into a cache, so that only the rows in use are in memory.

`cached` gives each embedding module a weight of slots, and a hook that replaces the ids of each
lookup with slots. Everything else about the model stays as it is.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recpoint.catalog.restore.state import canonical_name
from recpoint.embeddings.cache.cache import Cache, cache_of_one
from recpoint.embeddings.cache.data_parallel import leave_out, refuse_wrapped
from recpoint.embeddings.cache.residents import CachedRows
from recpoint.embeddings.cache.shared import shared_cache
from recpoint.embeddings.cache.slots import TableSlots
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.home.initial import Initial
from recpoint.embeddings.home.ranks import rank_and_count
from recpoint.embeddings.tables.marks import Tracker
from recpoint.embeddings.tables.optimizers import row_states
from recpoint.embeddings.tables.tables import (
    Lookup,
    ModuleTable,
    Table,
    plain_tables,
    refuse_ids_outside,
    refuse_unstorable,
)
from recpoint.errors import SettingsError
from recpoint.interrupts import held
from recpoint.kernels import dirty_bitmap

__all__ = [
    "CachedTable",
    "CachedTracker",
    "PlannedCache",
    "cache_of",
    "cached",
    "planned_cache",
    "put_in_cache",
    "read_rows",
]

_log = logging.getLogger("recpoint")

#: The homes that have a model.
_homes: weakref.WeakSet[Home] = weakref.WeakSet()


def cached(
    model: nn.Module,
    home: Home,
    capacity_rows: int | Mapping[str, int],
    *,
    initial: Initial | None = None,
    row_local_optimizers: tuple[type, ...] = (),
    device: torch.device | str | None = None,
) -> nn.Module:
    """Keep only the rows in use of a model's tables in memory, and all others in a home.

        home = recpoint.embeddings.local("/nvme/tables")
        model = recpoint.embeddings.cached(model, home, capacity_rows=4_000_000)
        optimizer = torch.optim.Adagrad(model.parameters())
        reader = recpoint.Lookahead(reader, model, window=200)

    Results are those of training without a cache, bit for bit. Call it before the optimizers are
    built, and before DistributedDataParallel wraps the model, because each table gets another
    parameter: its slots.

    A `Lookahead` tells the cache which rows come next, so that they are in slots when they are
    looked up. Other lookups, as in an evaluation, give right results but are slow. Run these under
    `torch.no_grad()`.

    Convert or move the model before. Use a table's weight in lookups alone: it has slots, not rows.

    Call `optimizer.zero_grad()` between a step and the next backward pass: a gradient that a step
    has applied is refused. Row states are restored with a Checkpointer, not by `load_state_dict`
    of the optimizer, which knows only the rows in slots.

    Args:
        model: the model; it is changed in place. Its tables are `nn.Embedding` and
            `nn.EmbeddingBag` modules without `max_norm`. A table on torch's `meta` device takes no
            memory; `initial` gives its first values. The values of any other table are copied to
            the home after the first step.
        home: keeps the rows that have no slot; for this model only.
        capacity_rows: number of slots of all tables together, or name of a table -> its slots.
            Tables that are not named stay as they are. A table never gets more slots than it has
            rows. Row states are kept for each slot, too.
        initial: first values of tables on the `meta` device, by table, row and column.
        row_local_optimizers: further optimizer classes that change only the rows that were looked
            up and keep their state by row.
        device: device of the slots of tables on the `meta` device; None: the CPU.

    Returns:
        The same model.

    Raises:
        SettingsError: a table or a setting does not fit.
    """
    if not isinstance(home, Home):
        raise _refused("cached(home)", f"{home!r:.200}", "a home", "recpoint.embeddings.local()")
    if home in _homes:
        raise _refused(
            "cached(home)",
            "a home that has the rows of another model",
            "a home for this model only",
            "make another home: recpoint.embeddings.local(), or local(another directory)",
        )
    _, ranks = rank_and_count()
    if ranks != home.trainers:
        raise _refused(
            "cached(home)",
            f"{ranks} ranks in the process group, and a home of {home.trainers}",
            "one home that all ranks share",
            "call recpoint.embeddings.servers(count=...) on all ranks after init_process_group",
        )
    refuse_wrapped(model)
    new_cache = shared_cache if home.trainers > 1 else cache_of_one
    cache = put_in_cache(
        model,
        capacity_rows,
        lambda rows: new_cache(home, rows, row_local=row_local_optimizers),
        initial=initial,
        device=device,
    )
    _homes.add(home)
    if home.trainers > 1:
        leave_out(model, [one.slots.weight for one in cache.tables.values()])
    return model


def put_in_cache(
    model: nn.Module,
    capacity_rows: int | Mapping[str, int],
    new_cache: Callable[[Mapping[str, CachedRows]], Cache],
    *,
    initial: Initial | None = None,
    device: torch.device | str | None = None,
) -> Cache:
    """Give each table of a model a weight of slots, and have its lookups ask the cache of these.

    Args:
        model, capacity_rows, initial, device: as for `cached`.
        new_cache: returns the cache of some tables: name -> slots and first values.

    Returns:
        The cache.

    Raises:
        SettingsError: a table or a setting does not fit.
    """
    tables = _tables_of(model)
    slots = _slots_by_table(capacity_rows, {name: t.rows for name, t in tables.items()})
    rows: dict[str, CachedRows] = {}
    for name, count in slots.items():
        rows[name] = _cached_rows(tables[name], count, initial, torch.device(device or "cpu"))
    cache = new_cache(rows)
    for name, one in rows.items():
        module = tables[name].module
        one.replaced = weakref.ref(module.weight)
        module.weight = one.slots.weight
        if module.padding_idx is not None:
            module.padding_idx = one.slots.padding
        hook = CachedLookups(cache, name)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        untyped: Any = module
        untyped.register_load_state_dict_pre_hook(hook.refuse_state)
        # Always: a lookup that fails must not leave the module with rows of its own. First: other
        # hooks may return another output.
        module.register_forward_hook(
            torch.compiler.disable(hook.looked_up), always_call=True, prepend=True
        )
    return cache


def cache_of(model: nn.Module) -> Cache | None:
    """Return the cache of a model's tables; None: no table is cached."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, CachedLookups):
                return hook.cache
    return None


def read_rows(
    model: nn.Module, table: str, optimizer: Optimizer | None = None, ids: Tensor | None = None
) -> dict[str, Tensor]:
    """Read rows of a table as they are now, in a cache or not.

    Args:
        model: the model.
        table: name of the table, as in `model.named_modules()`.
        optimizer: the table's optimizer; None: no row states are wanted.
        ids: int64, any shape, on the CPU; None: all rows, which must fit into memory.

    Returns:
        "values": [n, dim], and with an optimizer each row state that it has by now, by its name:
        [n, …], on the CPU. Some optimizers make row states at their first step only.

    Raises:
        SettingsError: the table does not exist.
        IndexError: an id is out of range.
        HomeError: the home has failed.
    """
    known = {one.name: one for one in plain_tables(model).tables}
    one = known.get(table)
    if one is None:
        raise _refused(
            f"read_rows(table={table!r:.200})",
            "no such table",
            f"one of {sorted(known)!r:.400}",
            "use the name of the embedding module, as in model.named_modules()",
        )
    if ids is None:
        ids = torch.arange(one.table_rows, dtype=torch.int64, device="cpu")
    ids = ids.reshape(-1)
    refuse_ids_outside(table, ids, rows=one.table_rows)
    states = (
        {}
        if optimizer is None
        else row_states(optimizer.state.get(one.weight, {}), len(one.weight))
    )
    if isinstance(one, CachedTable):
        slots = one.cached_rows.slots
        values, *found = one.cache.rows_of(one.key_in_cache, ids)
        if not slots.states:  # before the first step, all rows have the states of new ones
            new = [state[slots.blank].cpu() for state in states.values()]
            found = [state.expand(len(ids), *state.shape).clone() for state in new]
    else:
        arrays = (one.weight.detach(), *states.values())
        values, *found = (array[ids.to(array.device)].cpu() for array in arrays)
    return {"values": values, **dict(zip(states, found, strict=False))}


class PlannedCache:
    """Tells a cache of the batches that are read, under the names that a reader has for tables.

    Each reader has its own. The cache plans the batches of the reader that was asked last: an
    evaluation in mid-epoch has the plans of the training forgotten, and made again afterwards.

    Args:
        cache: the cache.
        names: name of a table for the reader -> its name in the cache.
    """

    def __init__(self, cache: Cache, names: Mapping[str, str]) -> None:
        self.cache = cache
        self._names = dict(names)
        self._has_told = False

    @property
    def ahead(self) -> int:
        """Number of batches that are planned and were not handed out."""
        return self.cache.planned - self.cache.batch

    def plan(self, batches: Sequence[Mapping[str, Tensor]], *, fetched: int, window: int) -> None:
        """Plan batches, as far as there is room.

        Args:
            batches: all that were read and not handed out, in order: table name -> ids.
            fetched: rows of so many of them are fetched now. Rows of the others stay if they are in
                slots. A row that came early would take a slot in which another row could stay.
            window: number of batches that the reader is to hold; the same on all ranks.

        Raises:
            SettingsError: the next batch alone needs more slots than a table has.
            HomeError: the home has failed.
        """
        self.cache.turn_to(self)
        known = self.cache.tell(len(batches), lambda at: self._own(batches[at]), window=window)
        for ids in batches[self.cache.expected - self.cache.batch : known]:
            self.cache.expect(self._own(ids))
        for ids in batches[self.ahead : min(fetched, known)]:
            if not self.cache.plan(self._own(ids), is_next=self.ahead == 0):
                if not self._has_told:
                    self._tell(fetched)
                return

    def _own(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {own: ids[name] for name, own in self._names.items() if name in ids}

    def _tell(self, fetched: int) -> None:
        """Say once that the window has shrunk."""
        self._has_told = True
        _log.warning(
            "cached(capacity_rows=...): the slots have room for the rows of %d batches, and rows "
            "are to be fetched %d batches ahead. Results do not change, and training may wait for "
            "rows. Next: give the tables more slots, or make the Lookahead's window smaller",
            self.ahead,
            fetched,
        )

    def end_batch(self) -> None:
        """See `Cache.end_batch`."""
        self.cache.end_batch()

    def begin_batch(self) -> None:
        """See `Cache.begin_batch`."""
        self.cache.begin_batch()

    def forget(self) -> None:
        """Forget the plans of batches that were not handed out, if they are this reader's."""
        self.cache.turn_from(self)


def planned_cache(model: nn.Module) -> PlannedCache | None:
    """Return what plans batches for the cached tables of a model; None: it has none."""
    hooks = {
        name: hook
        for name, module in model.named_modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, CachedLookups)
    }
    names = {canonical_name(model, name) or "weight": hook.name for name, hook in hooks.items()}
    return PlannedCache(next(iter(hooks.values())).cache, names) if hooks else None


class CachedLookups:
    """Replaces the ids of each lookup of one module with the slots of their rows."""

    #: Code that refuses models whose hooks change the lookups' inputs must refuse this one.
    reads_only = False

    def __init__(self, cache: Cache, name: str) -> None:
        self.cache = cache
        self.name = name
        self._outside_graphs: Callable[..., Any] = torch.compiler.disable(self._with_slots)

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the lookup with slots in place of ids."""
        return self._outside_graphs(module, args, kwargs)

    def _with_slots(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ids = args[0] if args else kwargs["input"]
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
            return args, kwargs  # torch refuses it
        if module.__dict__.pop("weight", None) is not None:
            # A lookup before was interrupted, so that `looked_up` was not called.
            self._reset_padding(module)
        self.cache.tables[self.name].slots.refuse_other(module.weight)
        weights = kwargs.get("per_sample_weights", args[2] if len(args) > 2 else None)
        # The gradient of weights is computed from the rows, so that these must stay, too.
        trains = torch.is_grad_enabled() and any(
            isinstance(one, Tensor) and one.requires_grad for one in (module.weight, weights)
        )
        if trains and isinstance(module, nn.EmbeddingBag) and not module.sparse:
            found = self._own_rows(module, ids)
        else:
            found = self.cache.slots_of(self.name, ids, trains=trains)
            if trains:
                module.__dict__["weight"] = self._weight(module)
        if args:
            return (found, *args[1:]), kwargs
        return args, {**kwargs, "input": found}

    def _own_rows(self, module: nn.EmbeddingBag, ids: Tensor) -> Tensor:
        """Give one lookup a weight of its rows alone, in the order of their ids.

        For dense gradients of bags, torch sorts the ids and sums gradients in that order. The sort
        is not stable, so that sums of slots would differ from sums of rows in their last bits.
        Places among the rows sort as the ids do.

        Returns:
            The place of each id in this weight, of the shape and dtype of `ids`.
        """
        rows, places = torch.unique(ids, return_inverse=True)
        slots = self.cache.slots_of(self.name, rows, trains=True)
        own = self._weight(module).index_select(0, slots)
        padding_row = self.cache.tables[self.name].slots.padding_row
        if padding_row is not None:
            at = torch.nonzero(rows == padding_row).view(-1)
            module.padding_idx = int(at) if at.numel() else None
        module.__dict__["weight"] = own
        found: Tensor = places.to(ids.dtype)
        return found

    def _weight(self, module: Any) -> Tensor:
        """Return the weight for a lookup with gradients on.

        In the module's `__dict__` it is found before the parameter; `looked_up` removes it.
        """
        weight: Tensor = module.weight
        if not weight.requires_grad:  # a frozen table, with trained weights of samples
            return weight
        return self.cache.tables[self.name].gradients.weight_of_lookup(sparse=module.sparse)

    def looked_up(self, module: Any, _args: Any, output: Any) -> None:
        """Take the rows of the lookup out of the module again, and follow its graph."""
        rows = self.cache.tables[self.name]
        rows.made_lookup(output)
        if module.__dict__.pop("weight", None) is not None:
            self._reset_padding(module)

    def _reset_padding(self, module: Any) -> None:
        slots = self.cache.tables[self.name].slots
        if slots.padding_row is not None:
            module.padding_idx = slots.padding

    def refuse_state(self, *_: object) -> None:
        """Refuse `load_state_dict`: a state dict has the rows of slots, or of another model.

        Raises:
            SettingsError: always.
        """
        raise _refused(
            f"cached table {self.name!r}",
            "load_state_dict() of a model whose tables are in a cache",
            "rows that come from a checkpoint, because most of them are not in the model's memory",
            "restore with Checkpointer.restore(), and read rows with "
            "recpoint.embeddings.read_rows()",
        )

    def table(self, name: str, parameter_name: str, module: Lookup) -> CachedTable:
        """Describe the module's table; see `tables.DescribesTable`."""
        return CachedTable(
            name=name,
            parameter_name=parameter_name,
            module=module,
            cache=self.cache,
            key_in_cache=self.name,
        )

    def __getattr__(self, name: str) -> Never:
        if name != "__name__":  # torch.jit.script reads it
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise _refused(
            f"cached table {self.name!r}",
            "torch.jit.script, which cannot compile lookups through a cache",
            "a model whose tables are not cached",
            "restore a checkpoint into such a model, and script that",
        )

    def __reduce__(self) -> Never:
        raise _refused(
            f"cached table {self.name!r}",
            "a copy of the model, which would train the same slots",
            "one model for each cache",
            "take a checkpoint, and restore it into another model",
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedTable(ModuleTable):
    """A table whose rows are in slots or at home.

    `weight` has the slots, and `rows` is the number of rows of this trainer's part of the table.
    """

    cache: Cache
    key_in_cache: str = field(repr=False)

    @property
    def cached_rows(self) -> CachedRows:
        """The slots of the table, and what assigns them."""
        return self.cache.tables[self.key_in_cache]

    @property
    def rows(self) -> int:
        """Rows of this trainer's part of the table."""
        return len(self.cached_rows.part)

    @property
    def first_row(self) -> int:
        """First row of the part."""
        return self.cached_rows.part.start

    @property
    def table_rows(self) -> int:
        """Rows of the whole table."""
        return self.cached_rows.slots.rows

    @property
    def name_in_cache(self) -> str:
        """Name of the table in the cache."""
        return self.key_in_cache

    @property
    def counts_changes(self) -> bool:
        """False: rows that come and go change the weight, too. The cache reports changed rows."""
        return False

    def refuse_optimizer(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Refuse an optimizer that changes rows that were not looked up; follow its row states.

        Raises:
            SettingsError: it does.
        """
        self.cache.refuse_optimizer(self.key_in_cache, optimizer, group)

    def zero_rows(self, ids: Tensor, row_states: Iterable[Tensor]) -> None:
        """Set rows to zero wherever they are, and all their row states.

        Raises:
            SettingsError: rows are in the caches of several trainers.
        """
        with held():
            self.cache.zero_rows(self.key_in_cache, ids.cpu())


class CachedTracker(Tracker):
    """Tracks the dirty rows of a cached table: the cache marks the rows of each step.

    Args:
        table: the table.
        cached_rows: its rows in the cache.
    """

    __slots__ = ("_cached_rows",)

    def __init__(self, table: Table, cached_rows: CachedRows) -> None:
        super().__init__(table)
        self._cached_rows = cached_rows
        if self.bitmap.device.type != "cpu":  # ids and the cache's lists are on the CPU
            self._spare = [dirty_bitmap.new(self.rows, device="cpu")]
            self._use(dirty_bitmap.new(self.rows, device="cpu"))

    def install(self) -> None:
        """Have the cache mark rows here; `remove` undoes it."""
        self._installed = True
        rows = self._cached_rows
        rows.marker = self
        if rows.is_unmarked:
            self.all_rows, rows.is_unmarked = True, False

    def remove(self) -> None:
        """Have the cache mark no rows here."""
        self._installed = False
        self._cached_rows.marker = None

    def choose(self, *, by_gradient: bool, whole: bool = False) -> None:
        """Do nothing: the cache knows which rows a step changes, and refuses other optimizers."""

    def after_step(self) -> Tensor | None:
        """Do nothing: the cache has marked the rows."""
        return None

    def step_failed(self, *, whole: bool) -> None:
        """Do nothing: rows are marked before a step."""

    def follow_weight(self) -> None:
        """Do nothing: the weight has slots."""

    def notice_changes(self, row_states: object = ()) -> None:
        """Do nothing: the cache reports each change."""

    def follow_row_states(self, tensors: object) -> None:
        """Do nothing: the cache follows them."""


def _tables_of(model: nn.Module) -> dict[str, ModuleTable]:
    if not isinstance(model, nn.Module):
        raise _refused(
            "cached(model)", f"{model!r:.200}", "a torch.nn.Module", "pass the model itself"
        )
    found: dict[str, ModuleTable] = {}
    for table in plain_tables(model).tables:
        assert isinstance(table, ModuleTable)
        what = None
        if table.cached:
            what = "a table that is cached already"
        elif table.module.max_norm is not None:
            what = "max_norm, with which lookups rewrite rows"
        elif getattr(table.module, "scale_grad_by_freq", False) and table.sparse:
            what = "scale_grad_by_freq with sparse gradients"
        if what is not None:
            raise _refused(
                f"cached(model): table {table.name!r}",
                what,
                "an nn.Embedding or nn.EmbeddingBag without max_norm that is not cached",
                "build the module without it, or leave the table out: "
                "capacity_rows={name: slots} for the others",
            )
        found[table.name] = table
    if not found:
        raise _refused(
            "cached(model)",
            "a model without nn.Embedding and nn.EmbeddingBag modules",
            "a model with at least one",
            "tables of TorchRec and other libraries cannot be cached; leave cached() out",
        )
    refuse_unstorable([table for table in found.values() if not table.weight.is_meta])
    return found


def _slots_by_table(given: int | Mapping[str, int], rows: Mapping[str, int]) -> dict[str, int]:
    subject = "cached(capacity_rows=...)"
    if isinstance(given, Mapping):
        for name, count in given.items():
            if name not in rows:
                raise _refused(
                    subject,
                    f"table {name!r}",
                    f"one of {sorted(rows)!r:.400}",
                    "use the name of the embedding module, as in model.named_modules()",
                )
            _refuse_count(f"{subject}: table {name!r}", count, 1)
        return {name: min(count, rows[name]) for name, count in given.items()}
    _refuse_count(subject, given, len(rows))
    # Small tables fit wholly; the others share what is left evenly.
    left, slots = given, {}
    for number, (name, count) in enumerate(sorted(rows.items(), key=lambda one: (one[1], one[0]))):
        slots[name] = min(count, left // (len(rows) - number))
        left -= slots[name]
    return {name: slots[name] for name in rows}


def _refuse_count(subject: str, count: object, least: int) -> None:
    if type(count) is not int or count < least:
        raise _refused(
            subject,
            f"{count!r:.200}",
            f"a whole number of at least {least}",
            "give each table at least the rows that one batch looks up in it",
        )


def _cached_rows(
    table: ModuleTable, count: int, initial: Initial | None, device: torch.device
) -> CachedRows:
    weight, name = table.weight, table.name
    padding = table.module.padding_idx
    slots = TableSlots(
        name,
        rows=table.rows,
        capacity=count,
        dim=table.dim,
        dtype=weight.dtype,
        device=device if weight.is_meta else weight.device,
        trained=weight.requires_grad,
        padding_row=padding,
    )
    if not weight.is_meta:
        storage = weight.detach()
        return CachedRows(slots, lambda ids: storage[ids.to(storage.device)].cpu(), storage)
    if initial is None:
        raise _refused(
            f"cached(model): table {name!r}",
            "a table on the meta device, which has no values",
            "initial=, which gives rows their first values",
            "pass initial=recpoint.embeddings.Uniform(seed=0, low=-0.01, high=0.01)",
        )
    given, dim, dtype = initial, table.dim, weight.dtype

    def first_values(ids: Tensor) -> Tensor:
        try:
            values = given(name, ids, dim, dtype)
        except Exception as error:
            error.add_note(f"recpoint called initial(...) for rows of table {name!r}")
            raise
        if tuple(values.shape) != (len(ids), dim):
            raise _refused(
                f"initial(...) of table {name!r}",
                f"shape {tuple(values.shape)}",
                f"{(len(ids), dim)}",
                "return a row for each id",
            )
        if padding is not None:
            values = torch.where((ids == padding)[:, None], torch.zeros_like(values), values)
        return values.to(dtype)

    return CachedRows(slots, first_values, None)


def _refused(subject: str, found: str, expected: str, next_step: str) -> SettingsError:
    return SettingsError(subject, found=found, expected=expected, next_step=next_step)
