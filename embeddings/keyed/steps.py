"""Tells keyed tables of the steps of their optimizers, which are their clock."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from recpoint.embeddings.keyed.key_slots import KeySlots

__all__ = ["follow_optimizers", "has_other_slots"]

_followed: weakref.WeakSet[KeySlots] = weakref.WeakSet()
_hooks: list[Any] = []
#: The tables of each optimizer whose step has begun: after it, its groups may not be readable.
_in_step: weakref.WeakKeyDictionary[Optimizer, list[KeySlots]] = weakref.WeakKeyDictionary()


def follow_optimizers(slots: KeySlots) -> None:
    """Tell the slots of a table of each step of the optimizer that has its weight."""
    _followed.add(slots)
    if not _hooks:
        # Of all optimizers, because that of a table is built after the table.
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def has_other_slots(weight: Parameter, slots: KeySlots) -> bool:
    """Whether another table has its rows in a weight, whose slots it gives to keys of its own."""
    return any(other is not slots and other.rows.weight is weight for other in list(_followed))


def _trained_by(optimizer: Optimizer) -> Iterator[tuple[KeySlots, Mapping[str, Any]]]:
    by_weight = {id(slots.rows.weight): slots for slots in list(_followed)}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            slots = by_weight.get(id(parameter))
            if slots is not None:
                yield slots, group


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    trained = list(_trained_by(optimizer))
    _in_step[optimizer] = [slots for slots, _ in trained]
    for slots, group in trained:
        slots.rows.refuse_written()
        slots.rows.train_with(optimizer, group)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for slots in _in_step.pop(optimizer, ()):
        slots.steps += 1
        slots.rows.loaded.stepped()
        slots.rows.follow_weight()
