"""Steps of optimizers that train the model, and that the Checkpointer was not given.

What such an optimizer keeps of a parameter is in no checkpoint. A script that replaces an optimizer
by a new object in mid-run has the states of the old one stored from then on; a restart would go on
with those, and nothing in the store would say so. So such steps are noticed, by hooks that torch
calls for each step of any optimizer, and no checkpoint is taken until that optimizer is gone and
the one that was given trains again: what there is to lose is in memory no more then.

Some optimizers that were not given are no loss:

- One that shares its state with one that was given: the one inside a wrapper (Accelerate's, or
  TorchRec's).
- A wrapper around one that was given, which steps within each step of the wrapper.
- One in `extras`: its state is in the checkpoint under that name.
- One that trains other models, or only parameters that no optimizer was given for: these are named
  in the log instead (`training_state`), since a script may keep that state itself. Tables are not
  among them.
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

from recpoint.embeddings.tables import Table
from recpoint.errors import SettingsError
from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin.state.training_state import within
from recpoint.trainer_plugin.tables import parameter_names

__all__ = ["UnknownOptimizers"]


_MOST_NAMES = 5


class _Held(NamedTuple):
    """A parameter of the model that an unknown optimizer holds.

    Attributes:
        name: for people.
        group: of the unknown optimizer.
        holders: those that were given, and hold it too.
    """

    name: str
    parameter: Tensor
    group: Mapping[str, Any]
    holders: tuple[Optimizer, ...]


class _Looked(NamedTuple):
    """What an unknown optimizer holds of the model.

    Attributes:
        optimizer: which.
        form: its groups and its state, by identity: where they change, it is looked at again.
        held: what is to be looked at after each step; none where no step of it can be a loss.
    """

    optimizer: weakref.ref[Optimizer]
    form: tuple[object, ...]
    held: tuple[_Held, ...]


class _Found(NamedTuple):
    """An unknown optimizer that has trained the model.

    Attributes:
        optimizer: which.
        kind: its class.
        names: of what it has trained.
        idle: ids of the optimizers that were given for that, and have not stepped since.
    """

    optimizer: weakref.ref[Optimizer]
    kind: str
    names: list[str]
    idle: set[int]


class _Begun(NamedTuple):
    """A step of an unknown optimizer that has not ended.

    Attributes:
        optimizer: whose.
        inner: ids of the known ones that have stepped since.
    """

    optimizer: weakref.ref[Optimizer]
    inner: set[int]


class UnknownOptimizers:
    """Watches the steps of all optimizers of this process.

    An optimizer that was given costs two look-ups a step. Others are looked at once, and remembered
    weakly; only those that hold parameters of the model are looked at after each step.

    Args:
        model: whose parameters count.
        optimizers: those that the Checkpointer was given.
        tables: of the model.
        extras: as given; they are, or hold, optimizers too.
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
        self._known = frozenset(map(id, self._optimizers))  # kept alive by the line above
        self._tables = tuple(tables)
        self._extras = tuple(extras)
        # By id of the optimizer; that of one that is gone may be another one's.
        self._looked: dict[int, _Looked] = {}
        self._found: dict[int, _Found] = {}
        self._begun: list[_Begun] = []
        self._trained: set[int] = set()
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Hook into the steps of all optimizers; `remove` undoes it."""
        if not self._handles:
            # These hooks are torch's for the whole process: they must not keep the model alive.
            this = weakref.ref(self)
            self._handles = [
                register_optimizer_step_pre_hook(_hook(this, UnknownOptimizers._before_step)),
                register_optimizer_step_post_hook(_hook(this, UnknownOptimizers._after_step)),
            ]
            for handle in self._handles:
                weakref.finalize(self, handle.remove)

    def remove(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take_trained(self) -> set[int]:
        """ids of the parameters that unknown optimizers have trained since the last call."""
        for optimizer, inner in self._begun:  # those that have raised, or were interrupted
            self._judge_step(optimizer(), inner)
        self._begun.clear()
        self._looked.clear()  # the model may have come to other parameters, and some are gone
        taken, self._trained = self._trained, set()
        return taken

    def refuse(self) -> None:
        """Refuse to store a model that an unknown optimizer trains.

        Raises:
            SettingsError: one does, or did and those that were given have not stepped since.
        """
        for key, found in list(self._found.items()):
            if found.optimizer() is None and not found.idle:
                del self._found[key]
                continue
            several = len(found.names) > _MOST_NAMES
            names = ", ".join(found.names[:_MOST_NAMES]) + (", and others" if several else "")
            raise SettingsError(
                f"an optimizer {found.kind}",
                found=f"steps of it that train {names}, though the Checkpointer was not given it: "
                "what it keeps of them would be in no checkpoint",
                expected="steps of the optimizers that the Checkpointer was given",
                next_step="change the optimizer that was given in place (its param_groups, or "
                "load_state_dict), step that one, and delete this one (del); or close() this "
                "Checkpointer, and build one that is given this optimizer: its "
                "restore(fresh=True) begins a new line with what is in memory",
            )

    def _before_step(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._known:
            self._begun.append(_Begun(weakref.ref(optimizer), set()))

    def _after_step(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._known:
            for _, inner in self._begun:
                inner.add(id(optimizer))
            for found in self._found.values():
                found.idle.discard(id(optimizer))
            return
        # From the end: a step that calls that of its base class has begun twice.
        for position in range(len(self._begun) - 1, -1, -1):
            if self._begun[position].optimizer() is optimizer:
                self._judge_step(optimizer, self._begun[position].inner)
                del self._begun[position]  # last: one that is interrupted is looked at later
                return

    def _judge_step(self, optimizer: Optimizer | None, inner: set[int]) -> None:
        """A step is over, within which the known optimizers in `inner` have stepped."""
        if optimizer is None:
            return  # it is gone, and with it what it kept
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
            # Its attributes are a user's, and may raise whatever they like. What it trains is not
            # known then, which has a safe form.
            what = f"what cannot be found out ({type(error).__name__}: {error})"
            self._note_optimizer(optimizer, [what], self._known)

    def _note_optimizer(
        self, optimizer: Optimizer, names: list[str], idle: Collection[int]
    ) -> None:
        kind = type(optimizer).__name__
        self._found[id(optimizer)] = _Found(weakref.ref(optimizer), kind, names, set(idle))

    def _trained_at_a_loss(self, optimizer: Optimizer) -> tuple[_Held, ...]:
        """The parameters of the model that it may train at a loss."""
        names = {key: repr(name) for key, name in parameter_names(self._model).items()}
        tables = {id(table.weight): f"table {table.name!r}" for table in self._tables}
        names |= tables
        if not any(id(p) in names for group in optimizer.param_groups for p in group["params"]):
            return ()
        if any(thing is optimizer for thing in within(self._extras)):
            return ()
        same = [given for given in self._optimizers if given.state is optimizer.state]
        holders: dict[int, list[Optimizer]] = {}
        for given in self._optimizers:
            for group in given.param_groups:
                for parameter in group["params"]:
                    holders.setdefault(id(parameter), []).append(given)
        held = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                its = holders.get(id(parameter), [])
                counts = id(parameter) in names and (its or id(parameter) in tables)
                if counts and not any(one is other for one in its for other in same):
                    held.append(_Held(names[id(parameter)], parameter, group, tuple(its)))
        return tuple(held)

    def _note_lost(self, optimizer: Optimizer, held: Sequence[_Held], inner: set[int]) -> None:
        """Note what it trains at a loss."""
        lost = [
            one
            for one in held
            if not any(id(holder) in inner for holder in one.holders) and _is_lost(optimizer, one)
        ]
        if lost:
            self._trained.update(id(one.parameter) for one in lost)
            tables = {id(table.weight) for table in self._tables}
            lost.sort(key=lambda one: (id(one.parameter) not in tables, one.name))
            idle = {id(holder) for one in lost for holder in one.holders}
            self._note_optimizer(optimizer, [one.name for one in lost], idle)


def _hook(
    this: weakref.ref[UnknownOptimizers], judge: Callable[[UnknownOptimizers, Optimizer], None]
) -> Callable[..., None]:
    def hook(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        found = this()
        if found is not None:
            judge(found, optimizer)

    return hook


def _form(optimizer: Optimizer) -> tuple[object, ...]:
    groups = optimizer.param_groups
    return (
        id(optimizer.state),
        *[(id(group), id(group["params"]), len(group["params"])) for group in groups],
    )


def _is_lost(optimizer: Optimizer, one: _Held) -> bool:
    """Whether the optimizer trains this parameter, and no holder has what it keeps of it."""
    kept = optimizer.state.get(one.parameter)
    if kept is None or (
        isinstance(kept, Mapping) and all(value is None for value in kept.values())
    ):
        if one.parameter.grad is None:
            return False  # it has passed it over
        # All there is of it is in the group, which a wrapper shares with what it wraps.
        groups = (group for holder in one.holders for group in holder.param_groups)
        return not any(group is one.group for group in groups)
    return not any(holder.state.get(one.parameter) is kept for holder in one.holders)
