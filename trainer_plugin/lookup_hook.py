"""What tells a table's tracker of its lookups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Never

import torch

from recpoint.errors import ScriptingRefused

if TYPE_CHECKING:
    from recpoint.trainer_plugin.tracking import Tracker

__all__ = ["AfterLookupHook", "LookupHook", "outside_graphs"]

#: Since when `torch.compiler.disable` takes a reason.
_SAYS_WHY: Final = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)


class LookupHook:
    """What a module calls before a lookup. In copies and pickles of the model it does nothing."""

    __slots__ = ("_tracker",)

    #: For who would refuse a model whose hooks change what is looked up.
    reads_only = True

    def __init__(self, tracker: Tracker | None = None) -> None:
        self._tracker = tracker

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `Tracker.before_lookup`."""
        if self._tracker is not None:
            self._tracker.before_lookup(module, args, kwargs)

    def __getattr__(self, name: str) -> Never:
        # torch.jit.script asks each hook for its name, in order to compile it.
        if name != "__name__":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        tracker = self._tracker
        raise ScriptingRefused(
            "a copy of a model" if tracker is None else f"table {tracker.table.key!r}",
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
        """See `Tracker.after_lookup`."""
        if self._tracker is not None:
            self._tracker.after_lookup(module, args, kwargs)


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
