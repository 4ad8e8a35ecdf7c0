"""The gradients of one cached table, added up as those of a table without a cache.

Gradients name slots. Where the order of a sparse gradient's entries decides the last bits of their
sums, they are added by the rows' own ids. That is where autograd adds the gradients of several
lookups, where it adds the gradients of several backward passes, and where an optimizer sums the
entries of each row.

Lookups read the weight through one tensor of the same memory, the *entry*. What arrives at the
weight by another way came from code that takes slots for rows, and is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recpoint.embeddings.cache.slots import TableSlots
from recpoint.errors import SettingsError

__all__ = ["SlotGradients"]

#: Returns the slots of rows, int64 [n], from their ids; -1 for the padding row. On the CPU.
SlotsOf = Callable[[Tensor], Tensor]


class SlotGradients:
    """Adds up the gradients of one table's slots.

    Args:
        slots: the slots.
        slots_of: returns the slots of rows.
    """

    def __init__(self, slots: TableSlots, slots_of: SlotsOf) -> None:
        self._slots = slots
        self._slots_of = slots_of
        self._entry: Tensor | None = None
        #: For each backward pass that is running: gradients of lookups, in autograd's order.
        self._parts: dict[int, list[Tensor]] = {}
        #: The sum of the lookups' gradients, on its way from the entry to the weight.
        self._entered: Tensor | None = None
        #: What the weight's gradient becomes in place of torch's sum.
        self._total: Tensor | None = None
        #: The gradient that a step found, while it has sums in its place.
        self._unsummed: Tensor | None = None
        self._version = 0  # of the gradient, when the step began
        #: The last step's gradient, not kept alive by this, and its version.
        self._applied: tuple[weakref.ref[Tensor], int] | None = None
        #: The gradient that all ranks have averaged before the step, and its version.
        self._averaged: tuple[weakref.ref[Tensor], int] | None = None
        self._hooks = hooks = _Hooks(self)
        # A frozen table may be trained later. torch refuses hooks of a tensor that is frozen.
        trained = slots.weight.requires_grad
        slots.weight.requires_grad_(slots.weight.is_floating_point())
        if slots.weight.requires_grad:
            slots.weight.register_hook(hooks.before)
            slots.weight.register_post_accumulate_grad_hook(hooks.after)
        slots.weight.requires_grad_(trained)

    def weight_of_lookup(self, *, sparse: bool) -> Tensor:
        """Return the weight for one lookup whose rows are trained: [slots, dim], the same memory.

        Args:
            sparse: the lookup has a sparse gradient.
        """
        if _backward_pass() < 0:
            self._parts.clear()  # of passes that have failed
        if self._entry is None:
            self._entry = _through(self._slots.weight, self._hooks.enter)
        return _through(self._entry, self._hooks.take) if sparse else self._entry

    def _take(self, gradient: Tensor) -> Tensor:
        """Take the gradient of one lookup."""
        if gradient.is_sparse:
            self._parts.setdefault(_backward_pass(), []).append(gradient)
        return gradient

    def _enter(self, gradient: Tensor) -> Tensor:
        """Return the sum of the gradients of a pass, from the sum that autograd has made."""
        parts = self._parts.pop(_backward_pass(), [])
        # A gradient that has a graph of its own (create_graph=True) has to keep it.
        if len(parts) > 1 and gradient.is_sparse and not torch.is_grad_enabled():
            total = self._slots.by_ids(parts[0])
            for part in parts[1:]:
                total = self._slots.by_ids(part) + total  # in this order, as autograd does
            gradient = self._by_slots(total)
        self._entered = gradient
        return gradient

    def _before(self, gradient: Tensor) -> None:
        """Add a gradient that torch is about to add to the weight's."""
        entered, self._entered = self._entered, None
        self._total = None
        self.refuse_applied()
        if self.is_averaged:
            raise SettingsError(
                f"cached table {self._slots.name!r}",
                found="a backward pass after clip_grad_norm_ and before the step",
                expected="all backward passes of a step before its gradients are clipped",
                next_step="call clip_grad_norm_ right before optimizer.step(), or zero_grad() if "
                "the step is left out",
            )
        self._averaged = None  # it was dropped, and may have been set to zero in place
        if gradient is not entered:
            raise SettingsError(
                f"cached table {self._slots.name!r}",
                found="a gradient that came from another use of the weight than lookups",
                expected="lookups through the module, because the weight has slots and not rows",
                next_step="look rows up by calling the module, or leave the table out of the "
                "cache: capacity_rows={name: slots} for the others",
            )
        present = self._slots.weight.grad
        if gradient.is_sparse and present is not None and present.is_sparse:
            self._total = self._slots.by_ids(present) + self._slots.by_ids(gradient)

    def _after(self, weight: Tensor) -> None:
        """Put the sum in place of torch's."""
        total, self._total = self._total, None
        if total is not None:
            weight.grad = self._by_slots(total)

    def _by_slots(self, gradient: Tensor) -> Tensor:
        """Return a sparse gradient of the table, [rows, dim], as one of the slots."""
        weight = self._slots.weight
        slots = self._slots_of(gradient._indices()[0].cpu())
        if self._slots.padding_row is not None:
            slots[slots < 0] = self._slots.padding
        return torch.sparse_coo_tensor(
            slots[None].to(weight.device),
            gradient._values(),
            weight.shape,
            is_coalesced=gradient.is_coalesced(),
            check_invariants=False,
        )

    def refuse_applied(self) -> None:
        """Refuse to use a gradient once more that a step has applied.

        Its slots may have other rows by now.

        Raises:
            SettingsError: the gradient is there as that step has left it.
        """
        gradient = self._slots.weight.grad
        if self._applied is None or gradient is None:
            return
        if gradient is self._applied[0]() and gradient._version == self._applied[1]:
            raise SettingsError(
                f"cached table {self._slots.name!r}",
                found="a gradient that an earlier step has applied",
                expected="no gradient after a step",
                next_step="call optimizer.zero_grad() between a step and the next backward pass",
            )

    def note_averaged(self) -> None:
        """Take note that the gradient is the average of all ranks."""
        gradient = self._slots.weight.grad
        self._averaged = None if gradient is None else (weakref.ref(gradient), gradient._version)

    @property
    def is_averaged(self) -> bool:
        """Whether the gradient is the average of all ranks, and no step has applied it."""
        gradient = self._slots.weight.grad
        if self._averaged is None or gradient is None or gradient is not self._averaged[0]():
            return False
        version = self._averaged[1]
        return gradient._version == version or not _is_zeroed(gradient, version)

    def begin_step(self, *, summed: bool) -> None:
        """Take note that a step is about to apply the gradient.

        Args:
            summed: the optimizer sums the entries of each row of a sparse gradient. torch sums them
                in the order that its sort leaves them in, and the sort is not stable. The sums
                therefore follow from all ids, and the step is given sums by the rows' own ids.
        """
        weight, self._unsummed = self._slots.weight, None
        assert weight.grad is not None
        if weight.grad.is_sparse and summed:
            self._unsummed = weight.grad
            weight.grad = self._by_slots(self._slots.by_ids(weight.grad).coalesce())
        self._version = weight.grad._version

    def end_step(self) -> None:
        """Take note that a step has applied the gradient, and may have set it to zero."""
        weight = self._slots.weight
        unsummed, self._unsummed = self._unsummed, None
        gradient = weight.grad
        self._applied = self._averaged = None
        # The hooks of an optimizer run before this, and may call zero_grad().
        if gradient is None or _is_zeroed(gradient, self._version):
            return
        if unsummed is not None:
            weight.grad = gradient = unsummed
        self._applied = weakref.ref(gradient), gradient._version

    def forget(self) -> None:
        """Forget the gradient that a step has applied, or that ranks have averaged."""
        self._applied = self._averaged = None


def _is_zeroed(gradient: Tensor, version: int) -> bool:
    """Whether `zero_grad(set_to_none=False)` was called since the gradient had a version."""
    if gradient.is_sparse:
        return gradient._nnz() == 0
    return gradient._version != version and not bool(gradient.any())


def _backward_pass() -> int:
    """Return the number of the backward pass that this thread is in; -1: it is in none."""
    return torch._C._current_graph_task_id()


class _Hooks:
    """What autograd's graph calls; it does not keep the gradients alive, nor their slots."""

    def __init__(self, gradients: SlotGradients) -> None:
        self._gradients = weakref.ref(gradients)

    def _found(self) -> SlotGradients:
        gradients = self._gradients()
        assert gradients is not None
        return gradients

    def take(self, gradient: Tensor) -> Tensor:
        return self._found()._take(gradient)

    def enter(self, gradient: Tensor) -> Tensor:
        return self._found()._enter(gradient)

    def before(self, gradient: Tensor) -> None:
        self._found()._before(gradient)

    def after(self, weight: Tensor) -> None:
        self._found()._after(weight)


class _Through(torch.autograd.Function):
    """Returns a tensor of the same memory, whose gradient passes through a function.

    It is no view for autograd, which would make the graph of a view anew when a step has changed
    the weight.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.act = act
        ctx.set_materialize_grads(False)
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return None if gradient is None else ctx.act(gradient), None


def _through(weight: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    through: Tensor = _Through.apply(weight, act)  # type: ignore[no-untyped-call]  # torch's
    return through
