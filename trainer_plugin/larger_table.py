"""Gives a table more rows in place: weight, gradient and row states, all or none of them.

The parameter of a plain table stays the same object, because optimizers, hooks, schedulers and
scripts refer to it. Its memory is another one. Everything is allocated and filled before anything
is replaced, so an error leaves the table as it was. Old and new memory exist at the same time.

A keyed table has room for more keys then. Its new rows are zeros, and get values with their keys.

A table in a cache keeps its slots. Its home makes room for the new rows, which get their values and
row states when they are first looked up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.cached_table import CachedTable
from recpoint.embeddings.home.initial import Initial, fill_rows, first_values
from recpoint.embeddings.keyed.embedding import KeyedEmbedding, KeyedEmbeddingBag
from recpoint.embeddings.tables.new_rows import first_entry
from recpoint.embeddings.tables.optimizers import row_states
from recpoint.embeddings.tables.tables import ModuleTable, Table
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.integrations.keyed import KeyedTable
from recpoint.trainer_plugin.state import rng
from recpoint.trainer_plugin.tables import is_piece

__all__ = ["LargerCachedTable", "LargerKeyedTable", "LargerTable", "zeros"]


class LargerTable:
    """A plain table's tensors with more rows, which wait to take the place of those it has.

    Args:
        table: the table.
        optimizers: the optimizers that may have states of it.
        rows: the number of rows that it gets, more than it has.
        initial: computes the first values of the new rows.
        name: name of the table that `initial` is given.

    Attributes:
        table: as given.
        first_entries: name of a row state -> its entry of a new row.

    Raises:
        SettingsError: the table cannot grow, or how new rows begin is not known.
    """

    def __init__(
        self,
        table: Table,
        optimizers: Sequence[Optimizer],
        rows: int,
        *,
        initial: Initial,
        name: str,
    ) -> None:
        _refuse_weight(table)
        _refuse_optimizers(table, optimizers)
        self.table = table
        self.first_entries: dict[str, Tensor] = {}
        self._rows = rows
        weight = table.weight
        with torch.no_grad():
            self._weight = _extended(weight.detach(), rows)
            with rng.untouched():  # the rule may draw
                fill_rows(
                    dataclasses.replace(table, name=name),
                    initial,
                    range(table.rows, rows),
                    into=self._weight,
                )
            gradient = weight.grad
            self._gradient = None if gradient is None else _larger_gradient(gradient, rows)
            self._states: list[tuple[dict[Any, Any], str, Tensor]] = []
            for optimizer, group in _holders(optimizers, weight):
                entry = optimizer.state.get(weight, {})
                for state_name, state in row_states(entry, table.rows).items():
                    value = first_entry(optimizer, group, state_name)
                    assert value is not None  # _refuse_optimizers has looked
                    larger_state = _extended(state.detach(), rows)
                    larger_state[table.rows :] = value
                    self._states.append((entry, state_name, larger_state))
                    self.first_entries[state_name] = larger_state[-1].clone()

    def replace(self) -> None:
        """Put the larger tensors in place. It allocates nothing that can be large, and calls no
        code of the script.
        """
        weight = self.table.weight
        weight.grad = None
        # torch resets the node that gradients arrive at only if dtype or device change. The old
        # node, which a loss that the script still has keeps alive, expects the old shape.
        other_dtype = torch.float32 if weight.dtype is torch.float64 else torch.float64
        weight.data = torch.empty(0, dtype=other_dtype, device=weight.device)
        weight.data = self._weight
        weight.grad = self._gradient
        for entry, state_name, larger_state in self._states:
            entry[state_name] = larger_state
        if isinstance(self.table, ModuleTable):
            self.table.module.num_embeddings = self._rows


class LargerKeyedTable:
    """More slots of a keyed table, which wait to be added.

    Args:
        table: the table.
        optimizers: the optimizers that may have states of it.
        capacity_rows: the number of keys that can have rows then, more than now.

    Attributes:
        first_entries: none: entries begin when a slot gets a key.

    Raises:
        SettingsError: see `LargerTable`.
    """

    first_entries: Mapping[str, Tensor] = {}

    def __init__(
        self, table: KeyedTable, optimizers: Sequence[Optimizer], capacity_rows: int
    ) -> None:
        assert isinstance(table.module, KeyedEmbedding | KeyedEmbeddingBag)
        self._slots = table.module.slots
        self._row_states = self._slots.larger_states(capacity_rows)
        self._rows: LargerHome | LargerTable
        if table.in_cache is None:
            self._rows = LargerTable(
                table, optimizers, capacity_rows + 1, initial=zeros, name=table.name
            )
        else:
            self._rows = LargerHome(
                table, table.in_cache.cache, table.in_cache.name, capacity_rows + 1, initial=zeros
            )

    def replace(self) -> None:
        """Put the larger tensors in place, or add the rows at home.

        Raises:
            HomeError: see `LargerHome.replace`. Nothing has changed.
        """
        if isinstance(self._rows, LargerHome):  # which may refuse
            self._rows.replace()
            self._slots.grow(self._row_states)
        else:
            self._slots.grow(self._row_states)
            self._rows.replace()


def zeros(table: str, ids: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return rows of zeros; see `Initial`."""
    return torch.zeros(len(ids), dim, dtype=dtype, device="cpu")


class LargerHome:
    """More rows of a table in a cache, which wait to be added to its home.

    Args:
        table: the table.
        cache: has the table.
        key: name of the table in the cache.
        rows: the number of rows that it gets, more than it has.
        initial: computes the first values of the new rows.

    Raises:
        SettingsError: the home's tables keep their sizes, or the rule returns another shape.
    """

    def __init__(
        self, table: Table, cache: Cache, key: str, rows: int, *, initial: Initial
    ) -> None:
        home, slots = cache.home, cache.tables[key].slots
        if not home.may_add_rows:
            raise _refused(
                table,
                f"a {type(home).__name__}, whose tables keep their sizes",
                "a home in memory or in files: recpoint.embeddings.local(...)",
                "take a checkpoint, build the model with more rows, and restore it"
                + ("" if table.maps_ids else " with Options(grow=...)"),
            )
        self._cache, self._key, self._rows = cache, key, rows
        self._initial = partial(
            first_values,
            initial,
            table.name,
            dim=slots.dim,
            dtype=slots.weight.dtype,
            padding_row=slots.padding_row,
        )
        with rng.untouched():
            self._initial(torch.tensor([slots.rows], dtype=torch.int64, device="cpu"))

    def replace(self) -> None:
        """Add the rows.

        Raises:
            HomeError: the home has failed, or has no room. Nothing has changed.
        """
        self._cache.add_rows(self._key, self._rows, self._initial)


class LargerCachedTable:
    """More rows of a plain table in a cache, which wait to be added.

    Args:
        table: the table.
        rows: the number of rows that it gets, more than it has.
        initial: computes the first values of the new rows.
        name: name of the table that `initial` is given.

    Attributes:
        table: as given.
        first_entries: name of a row state -> its entry of a new row.

    Raises:
        SettingsError: see `LargerHome`.
    """

    def __init__(self, table: CachedTable, rows: int, *, initial: Initial, name: str) -> None:
        self.table = table
        self._rows = rows
        self._home = LargerHome(
            dataclasses.replace(table, name=name),
            table.cache,
            table.key_in_cache,
            rows,
            initial=initial,
        )
        slots = table.cached_rows.slots
        self.first_entries = {
            state_name: state[slots.blank].detach().clone()
            for state_name, state in slots.states.items()
        }

    def replace(self) -> None:
        """Add the rows; see `LargerHome.replace`."""
        self._home.replace()
        self.table.module.num_embeddings = self._rows


def _refuse_optimizers(table: Table, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers whose states of the table cannot get entries of new rows.

    Raises:
        SettingsError: how a row state begins is not known, or a state is not kept by row.
    """
    for optimizer, group in _holders(optimizers, table.weight):
        entry = optimizer.state.get(table.weight, {})
        by_row = row_states(entry, len(table.weight))
        kind = type(optimizer).__name__
        for state_name in by_row:
            if first_entry(optimizer, group, state_name) is None:
                raise _refused(
                    table,
                    f"the row state {state_name!r} of {kind}, and how it begins for a new row is "
                    "not known",
                    "Adagrad, SparseAdam, or another optimizer of torch whose row states begin "
                    "with zeros",
                    "take a checkpoint, build the model with more rows, and restore it with "
                    "Options(grow=...)",
                )
        whole_state = _whole_state(entry, by_row, len(table.weight))
        if whole_state is not None:
            raise _refused(
                table,
                f"the optimizer state {whole_state!r} of {kind}, which is kept whole and not by "
                "row",
                "optimizer states with one entry for each row",
                "train without that state, such as the momentum of SGD with sparse gradients",
            )


def _whole_state(entry: Mapping[Any, Any], by_row: Mapping[str, Tensor], rows: int) -> str | None:
    """Return the name of a state that has as many rows and is no row state; None: there is none.

    Args:
        entry: the optimizer's state of the table.
        by_row: its row states.
        rows: rows of the table.
    """
    for state_name, state in entry.items():
        if state_name not in by_row and isinstance(state, Tensor) and state.shape[:1] == (rows,):
            return str(state_name)
    return None


def _holders(
    optimizers: Sequence[Optimizer], weight: Tensor
) -> Iterator[tuple[Optimizer, Mapping[str, Any]]]:
    """Yield each optimizer that trains the weight, with the weight's group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(parameter is weight for parameter in group["params"]):
                yield optimizer, group


def _extended(tensor: Tensor, rows: int) -> Tensor:
    """Return a copy with more rows, [rows, ...]; the values of new rows are left undefined."""
    larger = tensor.new_empty((rows, *tensor.shape[1:]))
    larger[: len(tensor)].copy_(tensor)
    return larger


def _larger_gradient(gradient: Tensor, rows: int) -> Tensor:
    """Return the gradient with more rows: no value of it depends on a new row."""
    if gradient.is_sparse:
        return torch.sparse_coo_tensor(
            gradient._indices(),
            gradient._values(),
            (rows, *gradient.shape[1:]),
            dtype=gradient.dtype,
            device=gradient.device,
            check_invariants=False,
            is_coalesced=gradient.is_coalesced(),
        )
    larger = _extended(gradient.detach(), rows)
    larger[len(gradient) :] = 0
    return larger


def _refuse_weight(table: Table) -> None:
    """Refuse a weight that other objects depend on, so that it must keep its memory."""
    weight: Any = table.weight
    if is_piece(weight):
        fault, next_step = "a weight that fully_shard has cut", "shard the dense layers only"
    elif weight.is_meta:
        fault, next_step = "a weight on the meta device", "build the table with more rows"
    elif weight.is_inference():
        fault = "a weight that was made under torch.inference_mode()"
        next_step = "build the model outside it"
    elif hasattr(weight, "_in_backward_optimizers"):
        fault = "an optimizer that steps in the backward pass, by a hook that refers to the weight"
        next_step = "train the table with an optimizer whose step() is called"
    elif weight.is_cpu and weight.is_shared():  # a GPU's memory always counts as shared
        fault = "a weight whose memory other processes share"
        next_step = "train the table in one process"
    elif weight.untyped_storage().nbytes() != weight.nbytes:
        fault = "a weight that is a part of a larger tensor"
        next_step = "give the module a weight of its own: nn.Parameter(weight.detach().clone())"
    else:
        return
    raise _refused(table, fault, "a weight that has its memory for itself", next_step)


def _refused(table: Table, found: str, expected: str, next_step: str) -> SettingsError:
    return SettingsError(
        f"grow(table={table.name!r})", found=found, expected=expected, next_step=next_step
    )
