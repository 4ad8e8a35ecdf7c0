"""Makes an optimizer's step for some rows of a table after its step for all others.

The gradients of rows that the next batch does not look up may arrive while that batch is trained.
Their step is then made with the learning rate and the step count of their own batch. The rows are
gathered into a tensor of their own, and an optimizer of the same class makes the step for it. So
each row gets the bits that it would have got in the step of the whole table.

That optimizer has copies of the settings and of the state, and nothing else. A step that depends on
anything else is not delayed.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizers

from recpoint.embeddings.cache.exchange import Reduced
from recpoint.embeddings.cache.slots import TableSlots
from recpoint.embeddings.tables.optimizers import always_changes_all_rows

__all__ = ["OF_GRAD_SCALER", "LaterStep"]

#: What a GradScaler gives a fused optimizer for one step.
OF_GRAD_SCALER: Final = ("grad_scale", "found_inf")


class LaterStep:
    """The step of one table, as it is when the optimizer is about to make it.

    Args:
        optimizer: the optimizer; it can be delayed (`LaterStep.of`).
        slots: slots of the table.
    """

    def __init__(self, optimizer: Optimizer, slots: TableSlots) -> None:
        self._kind = type(optimizer)
        self._slots = slots
        # Other entries of a group are the script's, and no step reads them.
        self._settings = {
            name: _copied(group[name])
            for group in optimizer.param_groups
            if any(slots.weight is parameter for parameter in group["params"])
            for name in optimizer.defaults
            if name in group
        }
        self._state = {
            name: _copied(value)
            for name, value in optimizer.state.get(slots.weight, {}).items()
            if name not in slots.states
        }

    @classmethod
    def of(cls, optimizer: Optimizer, slots: TableSlots) -> LaterStep | None:
        """Return the step that the optimizer is about to make; None: it cannot be delayed.

        A step can be delayed only if the optimizer is known to train each row by itself, and if no
        hook can change the step or look at the rows after it. A fused step that divides by the
        scale of a GradScaler cannot be delayed, and neither can the first step of SparseAdam,
        because it makes the state.
        """
        if always_changes_all_rows(optimizer, ()) or _has_hooks(optimizer):
            return None
        if any(getattr(optimizer, name, None) is not None for name in OF_GRAD_SCALER):
            return None
        if type(optimizer) is not SGD and not optimizer.state.get(slots.weight):
            return None
        return cls(optimizer, slots)

    @torch.no_grad()
    def make(self, gradient: Reduced) -> None:
        """Make the step for the rows of a gradient. No other thread may use these meanwhile."""
        chosen = gradient.slots[gradient.has_gradient]
        if not chosen.numel():
            return
        (_, weight), *states = self._slots.arrays()
        row_slots = chosen.to(weight.device)
        values = gradient.values[gradient.has_gradient].to(weight.device)
        rows = Parameter(weight.index_select(0, row_slots))
        if gradient.is_sparse:
            places = torch.arange(len(row_slots), dtype=torch.int64, device=weight.device)
            values = torch.sparse_coo_tensor(
                places[None], values, rows.shape, is_coalesced=True, check_invariants=False
            )
        rows.grad = values
        kind: Any = self._kind
        optimizer = kind([rows], lr=self._settings["lr"])
        optimizer.param_groups[0].update(self._settings)
        row_states = {name: state.index_select(0, row_slots) for name, state in states}
        optimizer.state[rows].update({**self._state, **row_states})
        # Without the hooks that watch the optimizers of the training.
        kind.step.__wrapped__(optimizer)
        weight.index_copy_(0, row_slots, rows)
        for name, state in states:
            state.index_copy_(0, row_slots, optimizer.state[rows][name])


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)


def _has_hooks(optimizer: Optimizer) -> bool:
    """Whether steps of the optimizer call hooks beside recpoint's, which change nothing."""
    hooks = chain(
        torch_optimizers._global_optimizer_pre_hooks.values(),
        torch_optimizers._global_optimizer_post_hooks.values(),
        optimizer._optimizer_step_pre_hooks.values(),
        optimizer._optimizer_step_post_hooks.values(),
    )
    return any(not str(getattr(hook, "__module__", "")).startswith("recpoint.") for hook in hooks)
