"""Sees what training does between two batches: forward passes, backward passes, optimizer steps.

A batch is trained when its optimizer step is done. The signs show that, in whatever order a loop
asks for batches: a plain loop, one that accumulates gradients, or one that takes batches ahead.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Never

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from recpoint.errors import ScriptingRefused
from recpoint.interrupts import came_from_handler

__all__ = ["TrainingSigns"]

#: The search for a tensor with a gradient in a model's output ends after so many values.
_MOST_VALUES: Final = 64


class TrainingSigns:
    """Notes when a model's passes and its optimizers' steps happen, by hooks.

    Each sign has the number of the event, so that two signs can be ordered. A backward pass is seen
    at the model's output, so a model that is called by its parts shows none; its optimizers' steps
    are seen all the same.

    Args:
        model: the model whose passes count: those that build a graph. A forward pass also has to be
            in training mode.
        optimizers: the optimizers that the Checkpointer was given. Their steps count, and those of
            any other optimizer that holds a parameter of the model. If it was given none, each
            backward pass counts as a step too, because fused optimizers update rows in it.

    Attributes:
        now: number of the newest event; 0: none.
        backwards: backward passes that were seen.
        thread: identity of the thread that the newest optimizer step was seen in; None: no step.
        last_forward, last_backward, last_step: number of the newest event of its kind; 0: none.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._handles: list[RemovableHandle] = []
        self._parameters: frozenset[int] = frozenset()
        self._steps: dict[int, int] = {}  # by id of the optimizer
        self._last_steps: dict[int, int] = {}  # number of the event, by id of the optimizer
        #: Called after each step; None: nobody listens.
        self.on_step: Callable[[], None] | None = None
        self.backwards = 0
        self.thread: int | None = None
        self.now = self.last_forward = self.last_backward = self.last_step = 0

    def install(self) -> None:
        """Hook into the model and the optimizers; `remove` undoes it."""
        self.remove()
        self._parameters = frozenset(map(id, self._model.parameters()))
        # torch keeps this hook for the whole process, so it must not keep the model alive.
        steps = register_optimizer_step_post_hook(_after_step(weakref.ref(self)))
        weakref.finalize(self, steps.remove)
        self._handles = [self._model.register_forward_hook(_AfterForward(self)), steps]

    def remove(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def steps(self) -> int:
        """Steps of the optimizer that has stepped most often."""
        return max(self._steps.values(), default=0)

    @property
    def all_steps(self) -> int:
        """Steps of all optimizers together."""
        return sum(self._steps.values())

    def last_step_of(self, optimizer: Optimizer) -> int:
        """Return the number of the event of this optimizer's newest step; 0: it has made none."""
        return self._last_steps.get(id(optimizer), 0)

    def has_trained_since(self, event: int) -> bool:
        """Whether a backward pass or an optimizer step came after the event of that number."""
        return max(self.last_backward, self.last_step) > event

    def changes(self) -> int:
        """Return how often torch has changed parameters in place, to find steps without a hook."""
        parameters = self._trained_parameters()
        return sum(parameter._version for parameter in parameters if not parameter.is_inference())

    def gradients(self) -> tuple[tuple[int, int], ...]:
        """Return what changes when a backward pass that is not seen adds to gradients.

        Returns:
            For each parameter with a gradient: its address, and how often it was changed in place.
            Empty: no parameter has one.
        """
        return tuple(
            (parameter.grad.data_ptr(), parameter.grad._version)
            for parameter in self._trained_parameters()
            if parameter.grad is not None and parameter.grad.layout is torch.strided
        )

    def _trained_parameters(self) -> Iterable[Tensor]:
        return self._model.parameters()

    def after_forward(self, module: nn.Module, output: object) -> None:
        """Note a forward pass, and have its backward pass noted."""
        if not torch.is_grad_enabled():
            return
        self.now += 1
        if module.training:  # an evaluation may build a graph that nobody uses
            self.last_forward = self.now
        differentiable = _differentiable(output)
        if differentiable is not None:
            differentiable.register_hook(self._after_backward)

    def _after_backward(self, _gradient: Tensor) -> None:
        self.now += 1
        self.backwards += 1
        self.last_backward = self.now
        if not self._optimizers:
            self._note_step(id(self._model))

    def after_step(self, optimizer: Optimizer) -> None:
        """Note a step of an optimizer, if it trains the model."""
        if any(optimizer is own_optimizer for own_optimizer in self._optimizers) or self._trains(
            optimizer
        ):
            if not torch.compiler.is_compiling():  # a compiled step runs this hook inside a graph
                self.thread = threading.get_ident()
            self._note_step(id(optimizer))

    def _trains(self, optimizer: Optimizer) -> bool:
        try:
            return any(
                id(parameter) in self._parameters
                for group in optimizer.param_groups
                for parameter in group["params"]
            )
        except Exception as error:
            if came_from_handler(error):
                raise
            return True  # a user's optimizer may raise any error; `UnknownOptimizers` names it

    def _note_step(self, key: int) -> None:
        self._steps[key] = self._steps.get(key, 0) + 1
        self.now += 1
        self.last_step = self._last_steps[key] = self.now
        if self.on_step is not None:
            self.on_step()


class _AfterForward:
    """Tells the signs of a forward pass; does nothing in copies of the model and in graphs."""

    __slots__ = ("_signs",)

    def __init__(self, signs: TrainingSigns | None = None) -> None:
        self._signs = signs

    def __call__(self, module: nn.Module, _args: tuple[Any, ...], output: object) -> None:
        if torch.compiler.is_compiling() or self._signs is None:
            return
        self._signs.after_forward(module, output)

    def __getattr__(self, name: str) -> Never:
        # torch.jit.script reads each hook's __name__ in order to compile the hook.
        if name != "__name__":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise ScriptingRefused(
            "the model of a Checkpointer",
            found="torch.jit.script, which cannot compile the hook that sees forward passes",
            expected="scripting before restore() or after close() of its Checkpointer",
            next_step="build another instance of the model, load this model's state_dict() into "
            "it, and script that instance",
        )

    def __reduce__(self) -> tuple[type[_AfterForward], tuple[()]]:
        return type(self), ()


def _after_step(signs: weakref.ref[TrainingSigns]) -> Callable[..., None]:
    def hook(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        listener = signs()
        if listener is not None:
            listener.after_step(optimizer)

    return hook


def _differentiable(output: object) -> Tensor | None:
    """Return a tensor of a model's output that a backward pass goes through; None: none is seen."""
    waiting: list[object] = [output]
    for _ in range(_MOST_VALUES):
        if not waiting:
            return None
        value = waiting.pop()
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                return value
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, tuple | list):
            waiting += value[:_MOST_VALUES]
        else:
            waiting += _fields(value)
    return None


def _fields(value: object) -> Iterable[object]:
    """Return the values of an object such as a dataclass or a `ModelOutput`."""
    fields = getattr(value, "__dict__", None)
    return fields.values() if isinstance(fields, dict) else ()
