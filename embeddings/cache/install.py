"""Puts the tables of a model into a cache, so that only the rows in use are in memory.

`cached` gives each embedding module a weight of slots, and a hook that replaces the ids of each
lookup with slots. Everything else about the model stays as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recpoint.embeddings.cache.cache import Cache, cache_of_one
from recpoint.embeddings.cache.cached_keys import (
    CachedKeys,
    KeyedLookup,
    keyed_modules,
    rows_of_keyed,
)
from recpoint.embeddings.cache.cached_table import CachedTable
from recpoint.embeddings.cache.data_parallel import leave_out, refuse_wrapped
from recpoint.embeddings.cache.lookup_hooks import CachedLookups
from recpoint.embeddings.cache.residents import CachedRows
from recpoint.embeddings.cache.shared import shared_cache
from recpoint.embeddings.cache.slots import TableSlots
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.home.initial import Initial, first_values, stored_rule
from recpoint.embeddings.home.ranks import rank_and_count
from recpoint.embeddings.tables.optimizers import row_states
from recpoint.embeddings.tables.tables import (
    ModuleTable,
    plain_tables,
    refuse_ids_outside,
    refuse_unstorable,
)
from recpoint.errors import SettingsError

__all__ = [
    "cached",
    "put_in_cache",
    "read_rows",
]


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
            `nn.EmbeddingBag` modules without `max_norm`, and keyed tables. A table on torch's
            `meta` device takes no memory; `initial` gives its first values. The values of any other
            table are copied to the home after the first step. A keyed table has no keys yet, and
            its own `initial`.
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
        leave_out(model, [cached_rows.slots.weight for cached_rows in cache.tables.values()])
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
    keyed = keyed_modules(model)
    tables = _tables_of(model, may_be_none=bool(keyed))
    row_counts = {name: module.capacity_rows + 1 for name, module in keyed.items()}
    slots = _slots_by_table(
        capacity_rows, {name: t.rows for name, t in tables.items()} | row_counts
    )
    slots_device = torch.device(device or "cpu")
    rows: dict[str, CachedRows] = {}
    for name, count in slots.items():
        if name in keyed:
            rows[name] = rows_of_keyed(name, keyed[name], count)
        else:
            rows[name] = _cached_rows(tables[name], count, initial, slots_device)
    cache = new_cache(rows)
    for name, cached_rows in rows.items():
        module = keyed[name] if name in keyed else tables[name].module
        cached_rows.replaced = weakref.ref(module.weight)
        module.weight = cached_rows.slots.weight
        lookups: CachedLookups | CachedKeys
        if isinstance(module, KeyedLookup):
            lookups = CachedKeys.install(cache, name, module)
        else:
            lookups = CachedLookups(cache, name)
            if module.padding_idx is not None:
                module.padding_idx = cached_rows.slots.padding
            module.register_forward_pre_hook(lookups, with_kwargs=True)
        untyped: Any = module
        untyped.register_load_state_dict_pre_hook(lookups.refuse_state)
        # Always: a lookup that fails must not leave the module with rows of its own. First: other
        # hooks may return another output.
        module.register_forward_hook(
            torch.compiler.disable(lookups.looked_up), always_call=True, prepend=True
        )
    return cache


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
    tables_by_name = {table.name: table for table in plain_tables(model).tables}
    read_table = tables_by_name.get(table)
    if read_table is None:
        raise _refused(
            f"read_rows(table={table!r:.200})",
            "no such table",
            f"one of {sorted(tables_by_name)!r:.400}",
            "use the name of the embedding module, as in model.named_modules()",
        )
    if ids is None:
        ids = torch.arange(read_table.table_rows, dtype=torch.int64, device="cpu")
    ids = ids.reshape(-1)
    refuse_ids_outside(table, ids, rows=read_table.table_rows)
    states = (
        {}
        if optimizer is None
        else row_states(optimizer.state.get(read_table.weight, {}), len(read_table.weight))
    )
    if isinstance(read_table, CachedTable):
        slots = read_table.cached_rows.slots
        values, *states_of_rows = read_table.cache.rows_of(read_table.key_in_cache, ids)
        if not slots.states:  # before the first step, all rows have the states of new ones
            new = [state[slots.blank].cpu() for state in states.values()]
            states_of_rows = [state.expand(len(ids), *state.shape).clone() for state in new]
    else:
        arrays = (read_table.weight.detach(), *states.values())
        values, *states_of_rows = (array[ids.to(array.device)].cpu() for array in arrays)
    return {"values": values, **dict(zip(states, states_of_rows, strict=False))}


def _tables_of(model: nn.Module, *, may_be_none: bool) -> dict[str, ModuleTable]:
    if not isinstance(model, nn.Module):
        raise _refused(
            "cached(model)", f"{model!r:.200}", "a torch.nn.Module", "pass the model itself"
        )
    tables: dict[str, ModuleTable] = {}
    for table in plain_tables(model).tables:
        assert isinstance(table, ModuleTable)
        problem = None
        if table.cached:
            problem = "a table that is cached already"
        elif table.module.max_norm is not None:
            problem = "max_norm, with which lookups rewrite rows"
        elif getattr(table.module, "scale_grad_by_freq", False) and table.sparse:
            problem = "scale_grad_by_freq with sparse gradients"
        if problem is not None:
            raise _refused(
                f"cached(model): table {table.name!r}",
                problem,
                "an nn.Embedding or nn.EmbeddingBag without max_norm that is not cached",
                "build the module without it, or leave the table out: "
                "capacity_rows={name: slots} for the others",
            )
        tables[table.name] = table
    if not (tables or may_be_none):
        raise _refused(
            "cached(model)",
            "a model without nn.Embedding, nn.EmbeddingBag and keyed modules",
            "a model with at least one",
            "tables of TorchRec and other libraries cannot be cached; leave cached() out",
        )
    refuse_unstorable([table for table in tables.values() if not table.weight.is_meta])
    return tables


def _slots_by_table(
    capacity_rows: int | Mapping[str, int], rows: Mapping[str, int]
) -> dict[str, int]:
    subject = "cached(capacity_rows=...)"
    if isinstance(capacity_rows, Mapping):
        for name, count in capacity_rows.items():
            if name not in rows:
                raise _refused(
                    subject,
                    f"table {name!r}",
                    f"one of {sorted(rows)!r:.400}",
                    "use the name of the embedding module, as in model.named_modules()",
                )
            _refuse_count(f"{subject}: table {name!r}", count, 1)
        return {name: min(count, rows[name]) for name, count in capacity_rows.items()}
    _refuse_count(subject, capacity_rows, len(rows))
    # Small tables fit wholly; the others share what is left evenly.
    unassigned, slots = capacity_rows, {}
    for number, (name, count) in enumerate(
        sorted(rows.items(), key=lambda item: (item[1], item[0]))
    ):
        slots[name] = min(count, unassigned // (len(rows) - number))
        unassigned -= slots[name]
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
    values_of_new_rows = partial(
        first_values, initial, name, dim=table.dim, dtype=weight.dtype, padding_row=padding
    )
    return CachedRows(slots, values_of_new_rows, None, stored_rule(initial, name))


def _refused(subject: str, found: str, expected: str, next_step: str) -> SettingsError:
    return SettingsError(subject, found=found, expected=expected, next_step=next_step)
