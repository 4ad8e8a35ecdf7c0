"""Notices that row states of a table were replaced, or changed outside the steps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from recpoint.embeddings.tables.lookups import changes_of

__all__ = ["UNCOUNTED", "RowStateVersions"]

#: Why changes of a tensor cannot be followed.
UNCOUNTED = "under torch.inference_mode(), where torch counts no in-place changes"


class RowStateVersions:
    """Remembers the row states of a table as they were last looked at.

    The references are weak: they must not keep tensors that an optimizer has dropped.
    """

    __slots__ = ("_states",)

    def __init__(self) -> None:
        self._states: list[tuple[weakref.ref[Tensor], int]] = []

    def surprise(self, tensors: Sequence[Tensor], *, most_changes: int | None) -> str | None:
        """Return what changed row states and is not explained; None: nothing did.

        Row states that the first step creates are new in the table's spec, so nothing is checked
        about them here.

        Args:
            tensors: the row states as they are now.
            most_changes: how often steps may have changed each; None: it is not known.
        """
        why = None
        for (ref, version), tensor in zip(self._states, tensors, strict=False):
            if ref() is not tensor:
                why = why or "its optimizer has other row states"
            elif tensor.is_inference():
                why = why or f"its row states were made {UNCOUNTED}"
            elif most_changes is not None and changes_of(tensor) - version > most_changes:
                why = why or "its row states were changed outside the steps of its optimizer"
        return why

    def know(self, tensors: Sequence[Tensor]) -> None:
        """Take these row states, and every change of them until now, as explained."""
        self._states = [(weakref.ref(tensor), changes_of(tensor)) for tensor in tensors]

    def know_changes(self) -> None:
        """Take every change until now as explained.

        Row states that are gone stay known: others have taken their place, all rows of which the
        next look makes dirty.
        """
        self._states = [
            (ref, version if (tensor := ref()) is None else changes_of(tensor))
            for ref, version in self._states
        ]
