"""Hooks that tell what marks a table's rows of its lookups, and which lookups rewrite rows.

A module calls `LookupHook` before each lookup. A module with max_norm rewrites the rows that it
reads: it calls `AfterLookupHook` too, and `RewritingLookup` says whether that one lookup explains
the change of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Never, Protocol

import torch
from torch import Tensor, nn

from recpoint.embeddings.tables import Table
from recpoint.errors import ScriptingRefused

__all__ = [
    "AfterLookupHook",
    "LookupHook",
    "LookupMarker",
    "RewritingLookup",
    "changes_of",
    "outside_graphs",
]

#: Since when `torch.compiler.disable` takes a reason.
_SAYS_WHY: Final = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)


class LookupMarker(Protocol):
    """What is told of the lookups of one table; `marks.Tracker`."""

    table: Table

    def before_lookup(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A lookup begins."""

    def after_lookup(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A lookup has returned."""


class LookupHook:
    """What a module calls before a lookup. In copies and pickles of the model it does nothing."""

    __slots__ = ("_marker",)

    #: For who would refuse a model whose hooks change what is looked up.
    reads_only = True

    def __init__(self, marker: LookupMarker | None = None) -> None:
        self._marker = marker

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `LookupMarker.before_lookup`."""
        if self._marker is not None:
            self._marker.before_lookup(module, args, kwargs)

    def __getattr__(self, name: str) -> Never:
        # torch.jit.script asks each hook for its name, in order to compile it.
        if name != "__name__":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        marker = self._marker
        raise ScriptingRefused(
            "a copy of a model" if marker is None else f"table {marker.table.key!r}",
            found="torch.jit.script, which cannot compile what marks the rows of its lookups",
            expected="scripting before restore() or after close() of its Checkpointer",
            next_step="script another instance of the model, with load_state_dict() of this one's "
            "state_dict()",
        )

    def __reduce__(self) -> tuple[type[LookupHook], tuple[()]]:
        return type(self), ()


class AfterLookupHook(LookupHook):
    """What a module whose lookups rewrite their rows calls after each, as `LookupHook` before."""

    __slots__ = ()

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any = None
    ) -> None:
        """See `LookupMarker.after_lookup`."""
        if self._marker is not None:
            self._marker.after_lookup(module, args, kwargs)


def outside_graphs(
    mark: Callable[..., None], table: str, *, rewritten: bool
) -> Callable[..., None]:
    """`mark`, for lookups that are compiled: the graph ends before it, and another begins after it.

    With fullgraph=True torch refuses that, at the first batch, and says this as its reason.
    """
    if rewritten:
        why, remedy = "max_norm rewrites the rows it reads", "build the module without max_norm"
    else:
        why = "what its optimizer changes need not be in the gradient"
        remedy = "train it with SGD, Adagrad or SparseAdam of torch.optim"
    reason = (
        f"recpoint marks each lookup of table {table!r}, which no graph can hold: {why}. Next: "
        f"compile without fullgraph=True, or {remedy}"
    )
    # Of any torch.compiler that can say it; any optimizer of torch has imported the compiler.
    found: Callable[..., None] = torch.compiler.disable(
        mark, **({"reason": reason} if _SAYS_WHY else {})
    )
    return found


def changes_of(weight: Tensor) -> int:
    """How often a tensor was changed in place; torch does not count it in inference mode: 0."""
    return 0 if weight.is_inference() else weight._version


class RewritingLookup(NamedTuple):
    """A lookup of a module with max_norm that has begun.

    Attributes:
        ids: that were marked.
        ids_changes, changes: how often they, and the weight, had been changed in place.
        plain: it is torch's own, which rewrites the rows of its ids and counts that once.
    """

    ids: Tensor
    ids_changes: int
    changes: int
    plain: bool

    @classmethod
    def begun(cls, module: Any, ids: Tensor) -> RewritingLookup:
        """The lookup of these ids that `module` begins."""
        # A `forward` that is not torch's may look up other ids, and write to the weight itself.
        forward = None if "forward" in module.__dict__ else type(module).forward
        plain = forward is nn.Embedding.forward or forward is nn.EmbeddingBag.forward
        return cls(ids, changes_of(ids), changes_of(module.weight), plain)

    def explains_change(self, ids: object, weight: Tensor) -> bool:
        """Whether the weight was changed once since, in the rows that were marked.

        Args:
            ids: of the lookup, now that it has returned: a later hook may have replaced them.
            weight: as it is now.
        """
        return (
            ids is self.ids
            and changes_of(self.ids) == self.ids_changes
            and changes_of(weight) - self.changes == 1
        )
