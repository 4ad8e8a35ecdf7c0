"""Refuses states of a module that lack its keys, or whose keys the optimizer's state does not have.

`load_state_dict` of a module that has been trained gives its slots other keys. The optimizer keeps
the entries of those that had the slots, unless its own state of the same moment is loaded, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from recpoint.errors import SettingsError

__all__ = ["LoadedStates", "refuse_half_state"]


def refuse_half_state(state_dict: Mapping[str, Any], prefix: str, subject: str) -> None:
    """Refuse rows of keys that are not known, and keys whose rows are not there.

    Args:
        state_dict: what `load_state_dict` was given.
        prefix: of the names of the module's tensors in it.
        subject: the table, as messages name it.

    Raises:
        SettingsError: the state dict has one of both only.
    """
    weight, keys = (f"{prefix}{name}" in state_dict for name in ("weight", "_extra_state"))
    if weight != keys:
        raise SettingsError(
            subject,
            found=f"a state dict with {prefix}weight and no keys"
            if weight
            else f"a state dict with keys and no {prefix}weight",
            expected=f"{prefix}weight, and {prefix}_extra_state, which has the keys of its rows",
            next_step="load all that state_dict() returned of the table, or nothing of it, with "
            "strict=False",
        )


class LoadedStates:
    """What was loaded since the last optimizer step: keys, and an optimizer's state.

    Both are loaded in either order. The state of an optimizer that has just been built, or of a
    copy of the model, belongs to no keys yet.
    """

    def __init__(self) -> None:
        self._has_keys = self._has_states = False

    def __reduce__(self) -> tuple[type[LoadedStates], tuple[()]]:
        return LoadedStates, ()

    def follow(self, optimizer: Optimizer) -> None:
        """Take note that this optimizer trains the table from now on."""
        self.stepped()
        own = weakref.ref(self)

        def note(_optimizer: Optimizer) -> None:
            states = own()
            if states is not None:
                states._has_states, states._has_keys = True, False

        optimizer.register_load_state_dict_post_hook(note)

    def load_keys(self) -> None:
        """Take note that slots got other keys with the state of the module."""
        self._has_keys = not self._has_states

    def stepped(self) -> None:
        """Take note that the optimizer has stepped."""
        self._has_keys = self._has_states = False

    @property
    def has_other_keys(self) -> bool:
        """Whether the entries of the optimizer's state are still those of other keys."""
        return self._has_keys

    def refusal(self, subject: str) -> SettingsError:
        """Return the error for a step with such a state.

        Args:
            subject: the table, as messages name it.
        """
        return SettingsError(
            subject,
            found="a step after load_state_dict() of the module, which gave its slots other keys, "
            "while the optimizer has the state of the keys that had them",
            expected="the optimizer's state of the same moment",
            next_step="call the optimizer's load_state_dict(), too, or build a new optimizer",
        )
