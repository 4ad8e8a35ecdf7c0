"""Refuses to train with an optimizer's state of other keys, after a module's state was loaded.

`load_state_dict` of a module that has been trained gives its slots other keys. The optimizer keeps
the entries of those that had the slots, unless its own state of the same moment is loaded, too.
"""

from __future__ import annotations

import weakref

from torch.optim import Optimizer

from recpoint.errors import SettingsError

__all__ = ["LoadedStates"]


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
