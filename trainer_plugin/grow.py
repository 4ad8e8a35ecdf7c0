"""Gives a table more rows while it is trained, and tells the Checkpointers that have it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from recpoint.embeddings.cache.cached_table import CachedTable
from recpoint.embeddings.home.initial import Initial
from recpoint.embeddings.home.ranks import rank_and_count
from recpoint.embeddings.tables.tables import ModuleTable, Table, plain_tables
from recpoint.errors import SettingsError
from recpoint.interrupts import held
from recpoint.trainer_plugin.integrations import find_sources, take_apart
from recpoint.trainer_plugin.integrations.keyed import KeyedTable
from recpoint.trainer_plugin.larger_table import (
    LargerCachedTable,
    LargerKeyedTable,
    LargerTable,
    zeros,
)
from recpoint.trainer_plugin.tables import optimizer_list
from recpoint.trainer_plugin.training import CheckpointedTraining, trainings_of

__all__ = ["grow"]

_log = logging.getLogger("recpoint")

_AT_A_RESTART: Final = (
    "take a checkpoint, build the model with more rows, and restore it with Options(grow=...)"
)


def grow(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    table: str,
    rows: int,
    *,
    initial: Initial | None = None,
) -> None:
    """Give a table more rows, between two batches, without a restart.

        for batch in checkpoints.batches(epochs=3):
            rows = int(batch.users.max()) + 1
            if rows > model.users.num_embeddings:
                recpoint.grow(model, optimizer, "users", rows)
            train(batch)

    The parameter stays the same object, and old rows, their optimizer state and a gradient that is
    there keep their values. New rows get the values of `initial`, and the optimizer state that the
    optimizer begins with. Each Checkpointer of this process that has the table follows: its next
    checkpoint is a full. A table that has as many rows already stays as it is, so a loop may
    repeat the call after a restart.

    Old and new memory of a plain table and of its states exist at the same time for a moment. A
    table in a cache keeps its slots, and its new rows get their values when they are first looked
    up. Batches that a `Lookahead` has read before the call bring new rows when they look them up. A
    keyed table has room for more keys afterwards; their rows get the values of its own `initial`.

    Args:
        model: the model.
        optimizers: the optimizers that train the table; an empty list for a table that none trains.
        table: name of the embedding module, as in `model.named_modules()`.
        rows: the rows that the table has afterwards; the `capacity_rows` of a keyed table.
        initial: computes the first values of the new rows, as in `Options.grow`. None: the rule for
            this table in the Checkpointer's `Options.grow`, or of an earlier call; and for a keyed
            table.

    Raises:
        SettingsError: there is no such table; it has more rows; it cannot grow, or not now; how new
            rows begin is not known; or `initial` is another rule than that of the Checkpointer. The
            message says what to do. Nothing has changed.
        HomeError: the home of a cached table has failed, or has no room. Nothing has changed.
    """
    call = f"grow(table={table!r:.200})"
    _refuse_place(model, call)
    grown_table = _table(model, table, call)
    _refuse_rows(grown_table, rows, call)
    trainings = trainings_of(grown_table.weight)
    name = _name(grown_table, trainings, call)
    rule = _rule(grown_table, name, initial, trainings, call)
    rows_before = _rows_of(grown_table)
    if rows == rows_before:
        for training in trainings:
            training.learn_rule(grown_table.weight, rule)
        return
    for training in trainings:
        _refuse_wrapper(training.model, call)
        training.refuse_growth(call)
    trained_by = _optimizers(grown_table, optimizers, trainings, call)
    larger: LargerKeyedTable | LargerCachedTable | LargerTable
    if isinstance(grown_table, KeyedTable):
        larger = LargerKeyedTable(grown_table, trained_by, rows)
    elif isinstance(grown_table, CachedTable):
        larger = LargerCachedTable(grown_table, rows, initial=rule, name=name)
    else:
        larger = LargerTable(grown_table, trained_by, rows, initial=rule, name=name)
    with held():
        for training in trainings:
            training.before_growth()
        larger.replace()
        for training in trainings:
            training.follow_growth(grown_table.weight, rule, larger.first_entries)
    _log.info(
        "table %r has %d rows now, %d before%s",
        name,
        rows,
        rows_before,
        "; the next checkpoint is a full" if trainings else "",
    )


def _refuse_place(model: nn.Module, call: str) -> None:
    """Refuse callers in which a parameter cannot get another shape.

    Raises:
        SettingsError: there are several ranks, or DistributedDataParallel; or this is a call under
            inference mode.
    """
    if not isinstance(model, nn.Module):
        raise _refused(call, f"{model!r:.200}", "a torch.nn.Module", "pass the model itself")
    ranks = rank_and_count()[1]
    if ranks > 1:
        raise _refused(call, f"{ranks} ranks", "one process", _AT_A_RESTART)
    _refuse_wrapper(model, call)
    if torch.is_inference_mode_enabled():
        raise _refused(
            call,
            "a call under torch.inference_mode()",
            "a call outside it, because training cannot change tensors made under it",
            "call it between two batches",
        )


def _refuse_wrapper(model: nn.Module, call: str) -> None:
    """Refuse a model that is wrapped by what keeps the shapes of its parameters.

    Raises:
        SettingsError: a module of it is a DistributedDataParallel.
    """
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise _refused(
            call,
            "DistributedDataParallel, whose buckets have each parameter's old shape",
            "a model without it",
            _AT_A_RESTART,
        )


def _table(model: nn.Module, name: str, call: str) -> ModuleTable | KeyedTable:
    """Return the table of that name.

    Raises:
        SettingsError: there is none, or it is neither a plain table nor a keyed one.
    """
    sources = find_sources(model)
    for source in sources:
        for table in source.tables:
            if table.name != name:
                continue
            if isinstance(table, KeyedTable):
                return table
            raise _refused(
                call,
                f"a table of {source.name}",
                "a plain nn.Embedding or nn.EmbeddingBag, or a keyed table",
                _AT_A_RESTART,
            )
    tables = {table.name: table for table in plain_tables(model, sources).tables}
    plain_table = tables.get(name)
    if not isinstance(plain_table, ModuleTable):
        raise _refused(
            call,
            "no such table in the model",
            f"one of {sorted(tables)!r:.400}",
            "use the name of the embedding module, as in model.named_modules()",
        )
    return plain_table


def _rows_of(table: Table) -> int:
    """Return the rows of a table as users count them: row 0 of a keyed table belongs to no key."""
    return table.table_rows - isinstance(table, KeyedTable)


def _refuse_rows(table: Table, rows: object, call: str) -> None:
    if type(rows) is not int or rows < _rows_of(table):
        raise _refused(
            call,
            f"rows={rows!r:.200}, and a table of {_rows_of(table)} rows",
            f"a whole number of at least {_rows_of(table)}: tables do not shrink",
            "pass the number of rows that the table is to have",
        )


def _optimizers(
    table: Table,
    given: Optimizer | Sequence[Optimizer],
    trainings: Sequence[CheckpointedTraining],
    call: str,
) -> list[Optimizer]:
    """Return the optimizers of torch that train the table.

    Raises:
        SettingsError: an optimizer that trains the table was not given.
    """
    plain, _ = take_apart([_without_wrapper(optimizer) for optimizer in _listed(given)])
    trained_by = [optimizer for optimizer in plain if _trains(optimizer, table.weight)]
    for training in trainings:
        for optimizer in training.optimizers:
            if _trains(optimizer, table.weight) and not any(
                optimizer is given_optimizer for given_optimizer in trained_by
            ):
                raise _refused(
                    call,
                    f"optimizers without the {type(optimizer).__name__} that trains the table",
                    "all optimizers that have states of its rows",
                    "pass the optimizers that the Checkpointer was given",
                )
    if table.trained and not trained_by:
        raise _refused(
            call,
            "a weight that requires gradients, and no optimizer that trains it",
            "the optimizer that trains the table",
            "pass it, or set weight.requires_grad_(False) before",
        )
    return trained_by


def _listed(given: Any) -> list[Any]:
    """Return one or several optimizers, or wrappers around them, as a list."""
    is_wrapper = isinstance(getattr(given, "optimizer", None), Optimizer)
    return [given] if is_wrapper else optimizer_list(given)


def _without_wrapper(optimizer: Any) -> Optimizer:
    """Return the optimizer inside Accelerate's or Lightning's, or the optimizer itself."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def _trains(optimizer: Optimizer, weight: Tensor) -> bool:
    return any(
        parameter is weight for group in optimizer.param_groups for parameter in group["params"]
    )


def _name(table: Table, trainings: Sequence[CheckpointedTraining], call: str) -> str:
    """Return the table's name in checkpoints, by which its first values are computed.

    Raises:
        SettingsError: it has two.
    """
    names = {
        checkpointed_table.name
        for training in trainings
        if (checkpointed_table := training.table_of(table.weight)) is not None
    }
    if len(names) > 1:
        raise _refused(
            call,
            f"Checkpointers that name the table {' and '.join(map(repr, sorted(names)))}",
            "one name, by which new rows get their values",
            "give all Checkpointers the same model",
        )
    return names.pop() if names else table.name


def _rule(
    table: Table,
    name: str,
    initial: Initial | None,
    trainings: Sequence[CheckpointedTraining],
    call: str,
) -> Initial:
    """Return the rule for the first values of new rows.

    Raises:
        SettingsError: there is none, or there are two.
    """
    if isinstance(table, KeyedTable):
        if initial is not None:
            raise _refused(
                call,
                f"initial={initial!r:.200}, and a keyed table, which has a rule of its own",
                "no other rule: a key's row begins with equal values whenever it is inserted",
                "leave initial= out",
            )
        return zeros
    rules = [rule for training in trainings if (rule := training.rule_of(name)) is not None]
    if initial is None:
        if not rules:
            raise _refused(
                call,
                "no rule for the values of new rows",
                "initial=, or the table in the Checkpointer's Options(grow=...)",
                "pass initial=recpoint.embeddings.Uniform(seed=0)",
            )
        return rules[0]
    if not callable(initial):
        raise _refused(
            call,
            f"initial={initial!r:.200}",
            "a rule such as recpoint.embeddings.Uniform(seed=0)",
            "pass a function of table, ids, dim and dtype",
        )
    for rule in rules:
        if not _are_equal(rule, initial):
            raise _refused(
                call,
                f"initial={initial!r:.200}, and the rule {rule!r:.200} of the Checkpointer",
                "one rule, because a restart begins new rows by the Checkpointer's",
                "leave initial= out, or give both the same rule",
            )
    return initial


def _are_equal(rule: Initial, other_rule: Initial) -> bool:
    """Whether two rules are equal; a lambda in a loop is another object each time."""
    code = getattr(rule, "__code__", None)
    return rule == other_rule or (
        code is not None and code == getattr(other_rule, "__code__", None)
    )


def _refused(subject: str, found: str, expected: str, next_step: str) -> SettingsError:
    return SettingsError(subject, found=found, expected=expected, next_step=next_step)
