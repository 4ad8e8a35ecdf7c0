"""Restores a keyed table into a plain one, whose rows are those of keys 0 to n - 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recpoint.catalog.restore.keyed_rows import KEY, KEYED_STATES, LAST_USE, used_rows
from recpoint.embeddings.home.initial import Initial, fill_rows
from recpoint.embeddings.tables.new_rows import first_entry
from recpoint.embeddings.tables.tables import Table
from recpoint.errors import IncompatibleModel

__all__ = ["place_rows_of_keys"]


@torch.no_grad()
def place_rows_of_keys(
    table: Table,
    values: Tensor,
    states: Mapping[str, Tensor],
    row_states: Mapping[str, Tensor],
    *,
    rule: Initial | None,
    optimizers: Sequence[Optimizer],
) -> None:
    """Give a plain table the rows of the keys that are its row numbers.

    Args:
        table: the table, whole on this process.
        values: rows of all slots of the checkpoint, [slots, dim].
        states: name -> row state of all slots, [slots, …], those of keys too.
        row_states: name -> row state that the optimizer gets, [rows, …].
        rule: computes rows whose keys the checkpoint does not have; None: there must be none.
        optimizers: one of them may train the table.

    Raises:
        IncompatibleModel: a key is no row of the table; or a row has no key, and how it begins is
            not known.
        SettingsError: the rule returns another shape.
    """
    slots = used_rows(states[LAST_USE])
    keys = states[KEY][slots]
    strays = keys[(keys < 0) | (keys >= table.rows)]
    if strays.numel():
        raise _refused(
            table,
            f"{strays.numel()} keys that are no rows of it, such as {int(strays[0])}",
            f"keys from 0 to {table.rows - 1}",
            "restore into a KeyedEmbedding, and call its to_table(vocabulary)",
        )
    missing_count = table.rows - len(keys)
    if missing_count:
        if rule is None:
            raise _refused(
                table,
                f"no row of {missing_count} of its keys",
                "a row for each of its rows, or a rule for their values",
                f"pass Options(grow={{{table.name!r}: recpoint.embeddings.Uniform(seed=0)}})",
            )
        fill_rows(table, rule, range(table.rows))
    for name, state in row_states.items():
        if name in KEYED_STATES:
            continue
        if missing_count:
            state.fill_(_first_entry(table, name, optimizers))
        state[keys] = states[name][slots].view_as(state[keys])
    table.weight.detach()[keys] = values[slots]


def _first_entry(table: Table, name: str, optimizers: Sequence[Optimizer]) -> float:
    """Return what the table's optimizer begins a row state with.

    Raises:
        IncompatibleModel: that is not known.
    """
    holders: list[tuple[Optimizer, Mapping[str, Any]]] = [
        (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        if any(parameter is table.weight for parameter in group["params"])
    ]
    for optimizer, group in holders:
        value = first_entry(optimizer, group, name)
        if value is not None:
            return value
    raise _refused(
        table,
        f"rows without keys, whose row state {name!r} begins with an unknown value",
        "Adagrad, or an optimizer of torch whose row states begin with zeros",
        "restore into a KeyedEmbedding, and call its to_table(vocabulary)",
    )


def _refused(table: Table, found: str, expected: str, next_step: str) -> IncompatibleModel:
    return IncompatibleModel(
        f"table {table.name!r}, restored from keys",
        found=found,
        expected=expected,
        next_step=next_step,
    )
