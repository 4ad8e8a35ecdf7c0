"""Refuses gradients of lookups whose rows have left before the backward pass.

Rows that lookups used since the last optimizer step stay. A loop that computes gradients later,
such as one that looks a batch up before the step of the batch before it, may find its rows given to
other keys. torch would then add the gradient to those.
"""

from __future__ import annotations

import weakref
from typing import Final

import torch
from torch import Tensor

from recpoint.errors import SettingsError

__all__ = ["OpenLookups"]

#: More lookups are kept only if so many are open.
_FEWEST: Final = 8


class OpenLookups:
    """The lookups of one table whose backward pass may still come."""

    def __init__(self) -> None:
        #: Some may have ended. Not in a WeakSet, because each lookup of a batch would wait for it.
        self._lookups: list[weakref.ref[_OpenLookup]] = []
        self._room = _FEWEST

    def __reduce__(self) -> tuple[type[OpenLookups], tuple[()]]:
        # Gradients of lookups of one module never go to a copy of it.
        return OpenLookups, ()

    def follow(self, weight: Tensor, slots: Tensor, steps: int, *, subject: str) -> Tensor:
        """Return the weight for a lookup, whose gradient is refused if its rows leave before.

        Args:
            weight: [capacity_rows + 1, dim].
            slots: int64 [n], those of the lookup, with 0 for keys without one.
            steps: steps of the table's optimizer so far.
            subject: the table, as messages name it.
        """
        lookup = _OpenLookup(slots, steps, subject)
        self._lookups.append(weakref.ref(lookup))
        if len(self._lookups) > self._room:
            self._lookups = list(filter(_open_lookup, self._lookups))
            self._room = max(_FEWEST, 2 * len(self._lookups))
        # Only autograd keeps the lookup: one whose graph is gone has no backward pass.
        followed: Tensor = torch.ops.aten.alias.default(weight)
        assert followed.grad_fn is not None  # the weight requires gradients, and these are enabled
        followed.grad_fn.register_prehook(lookup.check)
        return followed

    def leave(self, slots: Tensor, *, since: int | None = None) -> None:
        """Take note that the rows of slots, int64 [n], leave.

        Args:
            since: no lookup after so many steps used these rows. None: any may have.
        """
        for reference in self._lookups:
            lookup = _open_lookup(reference)
            if lookup is not None and (since is None or lookup.steps < since):
                lookup.has_lost |= bool(torch.isin(slots, lookup.slots).any())


def _open_lookup(reference: weakref.ref[_OpenLookup]) -> _OpenLookup | None:
    """Return a lookup whose backward pass may still come, or None."""
    lookup = reference()
    return lookup if lookup is not None and lookup.is_open else None


class _OpenLookup:
    """A lookup of training.

    Args:
        slots, steps, subject: see `OpenLookups.follow`.
    """

    def __init__(self, slots: Tensor, steps: int, subject: str) -> None:
        self.slots, self.steps, self.subject = slots, steps, subject
        self.is_open, self.has_lost = True, False

    def check(self, gradients: tuple[Tensor, ...]) -> None:
        """Refuse gradients for rows that have left.

        Raises:
            SettingsError: some have.
        """
        # With retain_graph=True, another backward pass may come.
        self.is_open = torch._C._autograd._get_current_graph_task_keep_graph()
        if self.has_lost:
            raise SettingsError(
                self.subject,
                found=f"the backward pass of a lookup at step {self.steps}, after some of its rows "
                "have left",
                expected="the backward pass before the optimizer's next step",
                next_step="call backward() before the step that follows the lookup, and "
                "delete_rows after that step",
            )
