"""Watches the steps of optimizers, which change rows in slots.

Before a step, rows that it changes are marked for checkpoints, and saved for cuts that have not
copied them yet. An optimizer that changes other rows is refused, because those are not in memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from recpoint.embeddings.cache.cuts import Cuts
from recpoint.embeddings.cache.mover import Mover
from recpoint.embeddings.cache.residents import CachedRows
from recpoint.embeddings.cache.trainers import Trainers
from recpoint.embeddings.tables.optimizers import Watched, all_rows_changed, row_states
from recpoint.errors import SettingsError

__all__ = ["Steps", "follow_steps"]


class Steps:
    """The steps of optimizers that train the tables of one cache.

    Args:
        mover: waits for the end of a step that touches all slots.
        trainers: the trainers that share the tables.
        cuts: save rows before they change.
        row_local: optimizer classes that, as the user declares, change only rows looked up.
    """

    def __init__(
        self, mover: Mover, trainers: Trainers, cuts: Cuts, row_local: tuple[type, ...]
    ) -> None:
        self._tables = mover.tables
        self._mover = mover
        self._trainers = trainers
        self._cuts = cuts
        self._row_local = row_local
        self._by_weight = {id(rows.slots.weight): rows for rows in self._tables.values()}
        self._holds_dense = False  # a step holds `Mover.dense`
        # The id of an optimizer may be that of one that is gone: each step sets it anew.
        self._begun_by: set[int] = set()

    def refuse_replaced(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer with a parameter that a module had before its table was cached.

        Raises:
            SettingsError: it has one.
        """
        for rows in self._tables.values():
            replaced = None if rows.replaced is None else rows.replaced()
            if replaced is not None and any(
                parameter is replaced
                for group in optimizer.param_groups
                for parameter in group["params"]
            ):
                raise SettingsError(
                    f"cached table {rows.slots.name!r}",
                    found=f"{type(optimizer).__name__} with the parameter that the module had "
                    "before cached()",
                    expected="an optimizer that trains the slots",
                    next_step="call cached(...) first, then build the optimizer",
                )

    def _trained_by(
        self, optimizer: Optimizer
    ) -> Iterator[tuple[CachedRows, Tensor, Mapping[str, Any]]]:
        """Yield each table that an optimizer trains, with its parameter and the group of that."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                rows = self._by_weight.get(id(parameter))
                if rows is not None and rows.slots.weight is parameter:
                    yield rows, parameter, group

    def begin(self, optimizer: Optimizer) -> bool:
        """Return whether the step that an optimizer begins trains a table of this cache."""
        trains = any(True for _ in self._trained_by(optimizer))
        if trains:
            self._begun_by.add(id(optimizer))
        else:
            self._begun_by.discard(id(optimizer))
        return trains

    def have_begun(self, optimizer: Optimizer) -> bool:
        """Whether the newest step of an optimizer trains a table of this cache.

        The groups of an optimizer that trains none are not read again: they need not be readable
        after its step. A class whose `step` calls that of its base has the hooks called for both.
        """
        return id(optimizer) in self._begun_by

    def before(self, optimizer: Optimizer) -> None:
        """Take note of the rows that a step is about to change."""
        self.end_failed()
        self._trainers.reduce(optimizer)
        touches_all = False
        for rows, parameter, group in self._trained_by(optimizer):
            rows.slots.refuse_other(parameter)
            self._refuse_other_rows(rows, optimizer, group)
            _refuse_other_states(rows, optimizer)
            if parameter.grad is None:
                continue
            rows.gradients.refuse_applied()
            touches_all |= not parameter.grad.is_sparse
            # SGD adds each entry of a sparse gradient to the weight by itself.
            rows.gradients.begin_step(summed=type(optimizer) is not SGD)
            self.will_change(rows, self._trainers.to_change(rows))
        if touches_all:
            # The step reads every slot and writes it again, so that nothing may arrive meanwhile.
            self._mover.dense.acquire()
            self._holds_dense = True

    def will_change(self, rows: CachedRows, slots: Tensor) -> None:
        """Take note that rows in slots, int64 [n], are about to change."""
        self._cuts.save(rows.slots.name, slots)
        rows.slots.changed[slots] = True
        self.note_changed(rows, self._trainers.changed_ids(rows, slots))

    def note_changed(self, rows: CachedRows, ids: Tensor) -> None:
        """Have checkpoints hold rows, int64 [n], which count from the first row of the part."""
        if rows.marker is None:
            rows.is_unmarked = True
        else:
            rows.marker.mark(ids)

    def after(self, optimizer: Optimizer) -> None:
        """Take note that a step has changed the rows."""
        self.end_failed()
        changed = []
        for rows, parameter, _ in self._trained_by(optimizer):
            if parameter.grad is None:
                rows.gradients.end_step()  # a hook of the step may have dropped it
                if not rows.slots.states:
                    self.follow_states(rows, optimizer)
                    self._mover.copy_storage(rows)
                continue
            rows.stepped()
            self.follow_states(rows, optimizer)
            # Not before: the copy lays out records, and an optimizer may make states in its step.
            self._mover.copy_storage(rows)
            changed.append(rows)
        self._trainers.stepped(optimizer, changed)

    def follow_states(self, rows: CachedRows, optimizer: Optimizer) -> None:
        """Look at the row states that an optimizer has for a table now."""
        slots = rows.slots
        slots.follow_states(
            row_states(optimizer.state.get(slots.weight, {}), slots.weight.shape[0])
        )

    def end_failed(self) -> None:
        """Let the home thread go on after a step; see `Cache.end_failed_step`."""
        if self._holds_dense:
            self._holds_dense = False
            self._mover.dense.release()

    def _refuse_other_rows(
        self, rows: CachedRows, optimizer: Optimizer, group: Mapping[str, Any]
    ) -> None:
        watched = rows.watched
        if watched is not None and watched[0] == id(optimizer) and not watched[1].differ(group):
            return
        self.refuse_optimizer(rows, optimizer, group)
        rows.watched = id(optimizer), Watched(group)

    def refuse_optimizer(
        self, rows: CachedRows, optimizer: Optimizer, group: Mapping[str, Any]
    ) -> None:
        """Refuse an optimizer that changes rows that were not looked up.

        Raises:
            SettingsError: it does.
        """
        weight = rows.slots.weight
        sparse = weight.grad.is_sparse if weight.grad is not None else False
        reason = all_rows_changed(
            optimizer, group, sparse=sparse, dtype=weight.dtype, row_local=self._row_local
        )
        if reason is not None:
            raise SettingsError(
                f"cached table {rows.slots.name!r}",
                found=f"{type(optimizer).__name__}: {reason.why}",
                expected="an optimizer that changes only the rows that were looked up, because the "
                "others are not in memory",
                next_step=reason.change.replace(
                    "Options.row_local_optimizers", "cached(row_local_optimizers=...)"
                ),
            )


def _refuse_other_states(rows: CachedRows, optimizer: Optimizer) -> None:
    """Refuse row states that are not those of the rows in slots, as of another training."""
    slots = rows.slots
    state = optimizer.state.get(slots.weight, {})
    slot_count = slots.weight.shape[0]
    states = row_states(state, slot_count)
    if slots.states:
        is_right = all(states.get(name) is state for name, state in slots.states.items())
    elif slots.rows != slot_count and row_states(state, slots.rows):
        is_right = False
    else:
        # Before the first step, rows have the states that the optimizer gives to new ones.
        is_right = all(bool((values == values[slots.blank]).all()) for values in states.values())
    if not is_right:
        raise SettingsError(
            f"cached table {slots.name!r}",
            found=f"row states of {type(optimizer).__name__} that were loaded or replaced "
            "outside of recpoint",
            expected="the states that the optimizer has made for the rows in slots, because "
            "those of all other rows are at home",
            next_step="restore the states with the model from a checkpoint, "
            "Checkpointer.restore(), and use no optimizer.load_state_dict()",
        )


_followed: weakref.WeakSet[Steps] = weakref.WeakSet()
_hooks: list[Any] = []


def follow_steps(steps: Steps) -> None:
    """Tell the steps of a cache of each step of each optimizer."""
    _followed.add(steps)
    if not _hooks:
        # Of all optimizers, because the one of a table is built after the table is cached.
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    for steps in list(_followed):
        steps.refuse_replaced(optimizer)
    trained = [steps for steps in list(_followed) if steps.begin(optimizer)]
    if not trained:
        return None

    def note() -> None:
        for steps in trained:
            steps.before(optimizer)

    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        note()
        return None

    def with_note() -> Any:
        # The gradients are there after it, and the step begins then.
        loss = closure()
        with torch.no_grad():
            note()
        return loss

    if len(args) > 1:
        return (args[0], with_note, *args[2:]), kwargs
    return args, {**kwargs, "closure": with_note}


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for steps in list(_followed):
        if steps.have_begun(optimizer):
            steps.after(optimizer)
