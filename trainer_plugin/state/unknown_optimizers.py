"""Notices steps of optimizers that train the model but were not given to the Checkpointer.

Such an unknown optimizer's state is in no checkpoint. If a script replaces an optimizer by a new
object during a run, checkpoints would go on storing the old object's state; a restart would use
that state, and nothing in the store would show it. Therefore such steps are noticed, by hooks that
torch calls for each step of any optimizer. No checkpoint is taken until the unknown optimizer is
deleted and the given one has stepped again: then no state in memory can be lost.

Some optimizers that were not given lose nothing:

- An optimizer that shares its state with a given one: the optimizer inside a wrapper (Accelerate's
  or TorchRec's).
- A wrapper around a given optimizer, which steps within each step of the wrapper.
- An optimizer in `extras`: its state is in the checkpoint under that name.
- An optimizer that trains other models, or only parameters that no given optimizer holds. The log
  names those parameters instead (`training_state`), because a script may store that state itself.
  This exception does not hold for tables.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from recpoint.embeddings.tables.tables import Table
from recpoint.errors import SettingsError
from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin.state.grad_scalers import warn_of_scaler
from recpoint.trainer_plugin.state.not_given import within
from recpoint.trainer_plugin.tables import parameter_names

__all__ = ["UnknownOptimizers"]


_MOST_NAMES = 5


class _HeldParameter(NamedTuple):
    """A parameter of the model that an unknown optimizer holds.

    Attributes:
        name: name of the parameter or table, for messages.
        parameter: the parameter.
        group: its group in the unknown optimizer.
        holders: the given optimizers that also hold it.
    """

    name: str
    parameter: Tensor
    group: Mapping[str, Any]
    holders: tuple[Optimizer, ...]


class _Looked(NamedTuple):
    """The parameters of the model that an unknown optimizer holds.

    Attributes:
        optimizer: the unknown optimizer.
        form: identities of its groups and its state; if they change, it is inspected again.
        held: parameters to inspect after each step; empty if its steps cannot lose state.
    """

    optimizer: weakref.ref[Optimizer]
    form: tuple[object, ...]
    held: tuple[_HeldParameter, ...]


class _UnknownOptimizer(NamedTuple):
    """An unknown optimizer that has trained the model.

    Attributes:
        optimizer: the unknown optimizer.
        kind: name of its class.
        names: names of the parameters that it has trained.
        idle: ids of the given optimizers for these parameters that have not stepped since.
    """

    optimizer: weakref.ref[Optimizer]
    kind: str
    names: list[str]
    idle: set[int]


class _StepBegun(NamedTuple):
    """A step of an unknown optimizer that has not ended.

    Attributes:
        optimizer: the unknown optimizer.
        inner: ids of the given optimizers that have stepped since its step began.
    """

    optimizer: weakref.ref[Optimizer]
    inner: set[int]


class UnknownOptimizers:
    """Watches the steps of all optimizers of this process.

    A given optimizer costs two look-ups for each step. Other optimizers are inspected once and
    remembered by weak reference. Only those that hold parameters of the model are inspected after
    each step.

    Args:
        model: the model whose parameters count.
        optimizers: the optimizers that the Checkpointer was given.
        tables: tables of the model.
        extras: the Checkpointer's extras; they may be or hold optimizers, too.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        tables: Sequence[Table],
        extras: Collection[object] = (),
    ) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._known_ids = frozenset(map(id, self._optimizers))  # kept alive by the line above
        #: Ids of the given optimizers whose next step is looked at for a GradScaler.
        self._unlooked = set(self._known_ids)
        self._told_scaler = False
        self._tables = tuple(tables)
        self._extras = tuple(extras)
        # By id of the optimizer. Another optimizer may get the id of a deleted one.
        self._looked: dict[int, _Looked] = {}
        self._unknown: dict[int, _UnknownOptimizer] = {}
        self._open_steps: list[_StepBegun] = []
        self._trained: set[int] = set()
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Hook into the steps of all optimizers; `remove` undoes it."""
        if not self._handles:
            # torch keeps these hooks for the whole process, so they must not keep the model alive.
            weak_self = weakref.ref(self)
            self._handles = [
                register_optimizer_step_pre_hook(_hook(weak_self, UnknownOptimizers._before_step)),
                register_optimizer_step_post_hook(_hook(weak_self, UnknownOptimizers._after_step)),
            ]
            for handle in self._handles:
                weakref.finalize(self, handle.remove)

    def remove(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take_trained(self) -> set[int]:
        """Return `id()` of each parameter that unknown optimizers trained since the last call."""
        for optimizer, inner in self._open_steps:  # steps that raised or were interrupted
            self._judge_step(optimizer(), inner)
        self._open_steps.clear()
        self._looked.clear()  # the model's parameters may have changed, and optimizers may be gone
        if not self._told_scaler:
            self._unlooked.update(self._known_ids)  # a script may begin to use a scaler at any time
        trained, self._trained = self._trained, set()
        return trained

    def refuse(self) -> None:
        """Refuse to store a model that an unknown optimizer trains.

        Raises:
            SettingsError: such an optimizer still exists; or it is deleted, but the given
                optimizers have not stepped since.
        """
        for key, unknown in list(self._unknown.items()):
            if unknown.optimizer() is None and not unknown.idle:
                del self._unknown[key]
                continue
            several = len(unknown.names) > _MOST_NAMES
            names = ", ".join(unknown.names[:_MOST_NAMES]) + (", and others" if several else "")
            raise SettingsError(
                f"an optimizer {unknown.kind}",
                found=f"steps of it that train {names}, although the Checkpointer was not given "
                "it, so that no checkpoint would hold its state",
                expected="steps of the optimizers that the Checkpointer was given",
                next_step="change the given optimizer in place (its param_groups, or "
                "load_state_dict), step it, and delete this one (del); or close() this "
                "Checkpointer, and build another with this optimizer: its restore(fresh=True) "
                "begins a new line with the state in memory",
            )

    def _before_step(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._known_ids:
            self._open_steps.append(_StepBegun(weakref.ref(optimizer), set()))

    def _after_step(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._known_ids:
            if id(optimizer) in self._unlooked:
                self._unlooked.discard(id(optimizer))
                self._look_for_scaler(optimizer)
            for _, inner in self._open_steps:
                inner.add(id(optimizer))
            for unknown in self._unknown.values():
                unknown.idle.discard(id(optimizer))
            return
        # From the end, because a step that calls its base class's step has begun twice.
        for position in range(len(self._open_steps) - 1, -1, -1):
            if self._open_steps[position].optimizer() is optimizer:
                self._judge_step(optimizer, self._open_steps[position].inner)
                del self._open_steps[
                    position
                ]  # last, so that an interrupted step is inspected later
                return

    def _look_for_scaler(self, optimizer: Optimizer) -> None:
        number = next(
            i for i, optimizer_given in enumerate(self._optimizers) if optimizer_given is optimizer
        )
        if warn_of_scaler(optimizer, number, self._extras):
            self._told_scaler = True
            self._unlooked.clear()

    def _judge_step(self, optimizer: Optimizer | None, inner: set[int]) -> None:
        """Inspect a step that is over, in which the given optimizers in `inner` have stepped."""
        if optimizer is None:
            return  # the optimizer is deleted, and its state with it
        try:
            form = _form(optimizer)
            looked = self._looked.get(id(optimizer))
            if looked is None or looked.optimizer() is not optimizer or looked.form != form:
                looked = _Looked(weakref.ref(optimizer), form, self._trained_at_a_loss(optimizer))
                self._looked[id(optimizer)] = looked
            if looked.held:
                self._note_lost(optimizer, looked.held, inner)
        except Exception as error:
            if came_from_handler(error):
                raise
            # A user's optimizer may raise any error on access to its attributes. It is safe to
            # assume that it trains parameters of all given optimizers.
            names = f"parameters that cannot be determined ({type(error).__name__}: {error})"
            self._note_optimizer(optimizer, [names], self._known_ids)

    def _note_optimizer(
        self, optimizer: Optimizer, names: list[str], idle: Collection[int]
    ) -> None:
        kind = type(optimizer).__name__
        self._unknown[id(optimizer)] = _UnknownOptimizer(
            weakref.ref(optimizer), kind, names, set(idle)
        )

    def _trained_at_a_loss(self, optimizer: Optimizer) -> tuple[_HeldParameter, ...]:
        """Return the parameters of the model whose state this optimizer may hold alone."""
        names = {key: repr(name) for key, name in parameter_names(self._model).items()}
        tables = {id(table.weight): f"table {table.name!r}" for table in self._tables}
        names |= tables
        if not any(id(p) in names for group in optimizer.param_groups for p in group["params"]):
            return ()
        if any(extra is optimizer for extra in within(self._extras)):
            return ()
        with_same_state = [
            optimizer_given
            for optimizer_given in self._optimizers
            if optimizer_given.state is optimizer.state
        ]
        holders: dict[int, list[Optimizer]] = {}
        for optimizer_given in self._optimizers:
            for group in optimizer_given.param_groups:
                for parameter in group["params"]:
                    holders.setdefault(id(parameter), []).append(optimizer_given)
        held_parameters = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                own_holders = holders.get(id(parameter), [])
                counts = id(parameter) in names and (own_holders or id(parameter) in tables)
                if counts and not any(
                    holder is optimizer_given
                    for holder in own_holders
                    for optimizer_given in with_same_state
                ):
                    held_parameters.append(
                        _HeldParameter(names[id(parameter)], parameter, group, tuple(own_holders))
                    )
        return tuple(held_parameters)

    def _note_lost(
        self, optimizer: Optimizer, held_parameters: Sequence[_HeldParameter], inner: set[int]
    ) -> None:
        """Note the parameters in `held_parameters` whose state no given optimizer has."""
        lost = [
            parameter
            for parameter in held_parameters
            if not any(id(holder) in inner for holder in parameter.holders)
            and _is_lost(optimizer, parameter)
        ]
        if lost:
            self._trained.update(id(parameter.parameter) for parameter in lost)
            tables = {id(table.weight) for table in self._tables}
            lost.sort(key=lambda parameter: (id(parameter.parameter) not in tables, parameter.name))
            idle = {id(holder) for parameter in lost for holder in parameter.holders}
            self._note_optimizer(optimizer, [parameter.name for parameter in lost], idle)


def _hook(
    weak_optimizers: weakref.ref[UnknownOptimizers],
    judge: Callable[[UnknownOptimizers, Optimizer], None],
) -> Callable[..., None]:
    def hook(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        unknown_optimizers = weak_optimizers()
        if unknown_optimizers is not None:
            judge(unknown_optimizers, optimizer)

    return hook


def _form(optimizer: Optimizer) -> tuple[object, ...]:
    groups = optimizer.param_groups
    return (
        id(optimizer.state),
        *[(id(group), id(group["params"]), len(group["params"])) for group in groups],
    )


def _is_lost(optimizer: Optimizer, one: _HeldParameter) -> bool:
    """Whether the optimizer trains this parameter, and no given optimizer has the same state."""
    state = optimizer.state.get(one.parameter)
    if state is None or (
        isinstance(state, Mapping) and all(value is None for value in state.values())
    ):
        if one.parameter.grad is None:
            return False  # the optimizer skipped it
        # The only state is in the group, which a wrapper shares with the optimizer inside.
        groups = (group for holder in one.holders for group in holder.param_groups)
        return not any(group is one.group for group in groups)
    return not any(holder.state.get(one.parameter) is state for holder in one.holders)
