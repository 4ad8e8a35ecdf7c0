"""Hooks into a table's lookups, so that marks learn which rows they read or rewrite.

A module calls `LookupHook` before each lookup. A module with max_norm rewrites the rows that it
reads, so it also calls `AfterLookupHook` after each lookup; `RewritingLookup` then says whether
that one lookup explains the change of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Never, Protocol

import torch
from torch import Tensor, nn

from recpoint.embeddings.tables.tables import Table
from recpoint.errors import ScriptingRefused, SettingsError

__all__ = [
    "AfterLookupHook",
    "LookupHook",
    "LookupMarker",
    "RewritingLookup",
    "SAYS_WHY",
    "changes_of",
    "outside_graphs",
    "refuse_capture",
]

#: Whether `torch.compiler.disable` takes a reason, as it does from torch 2.7 on.
SAYS_WHY: Final = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)


class LookupMarker(Protocol):
    """Receives the lookups of one table; `MarkedLookups` implements it."""

    table: Table

    def before_lookup(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note that a lookup begins."""

    def after_lookup(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note that a lookup has returned."""


class LookupHook:
    """Tells the marker of each lookup before it runs; does nothing in copies of the model."""

    __slots__ = ("_marker",)

    #: Code that refuses models whose hooks change the lookups' inputs can accept this hook.
    reads_only = True

    def __init__(self, marker: LookupMarker | None = None) -> None:
        self._marker = marker

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the marker that a lookup begins; see `LookupMarker.before_lookup`."""
        if self._marker is not None:
            self._marker.before_lookup(module, args, kwargs)

    def __getattr__(self, name: str) -> Never:
        # torch.jit.script reads each hook's __name__ in order to compile the hook.
        if name != "__name__":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        marker = self._marker
        raise ScriptingRefused(
            "a copy of a model" if marker is None else f"table {marker.table.key!r}",
            found="torch.jit.script, which cannot compile the hook that marks the rows of lookups",
            expected="scripting before restore() or after close() of its Checkpointer",
            next_step="build another instance of the model, load this model's state_dict() into "
            "it, and script that instance",
        )

    def __reduce__(self) -> tuple[type[LookupHook], tuple[()]]:
        return type(self), ()


class AfterLookupHook(LookupHook):
    """Tells the marker that a lookup has returned, in a module whose lookups rewrite rows."""

    __slots__ = ()

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any = None
    ) -> None:
        """Tell the marker that a lookup has returned; see `LookupMarker.after_lookup`."""
        if self._marker is not None:
            self._marker.after_lookup(module, args, kwargs)


def _is_capturing() -> bool:
    """Whether the current CUDA stream is being captured.

    torch captures only after it has initialized CUDA. Before that, nothing is asked, because a
    build with CUDA raises an error on a host without a driver.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(what: str) -> None:
    """Refuse the capture of a CUDA graph: its replays would change rows, and nothing marks them.

    Args:
        what: what is being captured.

    Raises:
        SettingsError: the current CUDA stream is being captured.
    """
    if _is_capturing():
        raise SettingsError(
            what,
            found="capture of a CUDA graph, whose replays call no hook",
            expected="a call that Python makes for each batch, so that changed rows are marked",
            next_step="capture dense layers only, and leave the lookups of tables, their backward "
            "passes and the steps of their optimizers out of the graph",
        )


def outside_graphs(
    mark: Callable[..., None], table: str, *, rewritten: bool
) -> Callable[..., None]:
    """Return `mark` for use in compiled lookups: torch ends the graph before it and starts another.

    With fullgraph=True torch refuses to split the graph, at the first batch; its error then gives
    the reason that is built here.

    Args:
        mark: the function that torch must not compile.
        table: key of the table, for the reason.
        rewritten: whether the table's lookups rewrite the rows they read.
    """
    if rewritten:
        cause, remedy = "max_norm rewrites the rows it reads", "build the module without max_norm"
    else:
        cause = "its optimizer may change rows that are not in the gradient"
        remedy = "train it with SGD, Adagrad or SparseAdam of torch.optim"
    reason = (
        f"recpoint must mark the rows of each lookup of table {table!r} outside the graph: "
        f"{cause}. "
        f"Next: compile without fullgraph=True, or {remedy}"
    )
    # This imports nothing new: each torch optimizer has imported the compiler already.
    outside: Callable[..., None] = torch.compiler.disable(
        mark, **({"reason": reason} if SAYS_WHY else {})
    )
    return outside


def changes_of(weight: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for one made in inference mode."""
    return 0 if weight.is_inference() else weight._version


class RewritingLookup(NamedTuple):
    """A lookup of a module with max_norm that has begun.

    Attributes:
        ids: the ids that were marked.
        ids_changes: how often `ids` had been changed in place when the lookup began.
        changes: how often the weight had been changed in place when the lookup began.
        plain: the module's `forward` is torch's own, which rewrites the rows of its ids and counts
            this as one in-place change.
    """

    ids: Tensor
    ids_changes: int
    changes: int
    plain: bool

    @classmethod
    def begun(cls, module: Any, ids: Tensor) -> RewritingLookup:
        """Record the lookup of `ids` that `module` begins."""
        # A `forward` that is not torch's may look up other ids, and write to the weight itself.
        forward = None if "forward" in module.__dict__ else type(module).forward
        plain = forward is nn.Embedding.forward or forward is nn.EmbeddingBag.forward
        return cls(ids, changes_of(ids), changes_of(module.weight), plain)

    def explains_change(self, ids: object, weight: Tensor) -> bool:
        """Whether the weight has changed exactly once since, in the rows that were marked.

        Args:
            ids: the ids of the lookup that has returned; a later hook may have replaced them.
            weight: the weight as it is now.
        """
        return (
            ids is self.ids
            and changes_of(self.ids) == self.ids_changes
            and changes_of(weight) - self.changes == 1
        )
