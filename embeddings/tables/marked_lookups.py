"""Marks rows at the lookups of a table's module, and follows lookups that rewrite rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from recpoint.embeddings.tables.counted_lookups import LookupCounts
from recpoint.embeddings.tables.lookups import (
    AfterLookupHook,
    LookupHook,
    RewritingLookup,
    changes_of,
    outside_graphs,
    refuse_capture,
)
from recpoint.embeddings.tables.tables import Table
from recpoint.interrupts import came_from_handler

__all__ = ["FAILED_LOOKUP", "MarkedLookups", "RowMarks"]

#: Why a table is dirty after a lookup that began and never returned.
FAILED_LOOKUP: Final = "a lookup that rewrites its rows (max_norm) ended with an error"

_gradients_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling


class RowMarks(Protocol):
    """Takes the marks of one table; `marks.Tracker` implements it.

    Attributes:
        weight: the table's weight as the tracker follows it.
        set_bits: marks ids.
        unapplied: rows were marked at a lookup and no optimizer step has followed yet.
        is_marked_after_steps: lookups need no mark in a compiled graph.
        counts: counts lookups that train rows; None: nobody needs the counts.
    """

    counts: LookupCounts | None
    weight: Tensor
    set_bits: Callable[[Tensor], None]
    unapplied: bool
    is_marked_after_steps: bool

    def unexplained(self, why: str) -> None:
        """Make all rows dirty."""


class MarkedLookups:
    """Marks the rows of a table at its lookups, for its tracker.

    It refers to the tracker only while it is installed, so that the memory of a tracker that was
    removed is freed with its last reference.

    Args:
        table: the table.

    Attributes:
        table: as given.
    """

    __slots__ = (
        "_after_compiled_lookup",
        "_after_hook",
        "_before_compiled_lookup",
        "_hook",
        "_lookup",
        "_rewrites",
        "_tracker",
        "table",
    )

    _tracker: RowMarks

    def __init__(self, table: Table) -> None:
        self.table = table
        self._hook: RemovableHandle | None = None
        self._after_hook: RemovableHandle | None = None
        self._lookup: RewritingLookup | None = None
        self._rewrites = 0  # marked lookups that changed the weight once each

    def install(self, tracker: RowMarks, *, marks: bool) -> None:
        """Hook into the module; `remove` undoes it.

        Args:
            tracker: takes the marks.
            marks: whether rows are marked at lookups at all.
        """
        if marks and self._hook is None:
            self._tracker = tracker
            self._before_compiled_lookup = outside_graphs(
                self.before_lookup, self.table.key, rewritten=self.table.changed_by_lookup
            )
            self._hook = self.table.before_lookup(LookupHook(self))
        self.follow_rewrites()

    def follow_rewrites(self) -> None:
        """Hook in after each lookup if lookups rewrite rows; take that hook out if they do not."""
        needs_hook = self._hook is not None and self.table.changed_by_lookup
        if needs_hook and self._after_hook is None:
            self._after_compiled_lookup = outside_graphs(
                self.after_lookup, self.table.key, rewritten=True
            )
            self._after_hook = self.table.after_lookup(AfterLookupHook(self))
        elif not needs_hook and self._after_hook is not None:
            self._after_hook.remove()
            self._after_hook = self._lookup = None
            del self._after_compiled_lookup  # as in remove()

    def remove(self) -> None:
        """Take the hooks out of the module."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            del self._before_compiled_lookup  # it refers to this object, and so to the tracker
        self.follow_rewrites()
        if hasattr(self, "_tracker"):
            del self._tracker

    def before_lookup(
        self,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outside_graph: bool = False,
    ) -> None:
        """Mark the ids of a lookup if the lookup or training can change their rows.

        Runs at each lookup.

        Args:
            module: the table's module.
            args, kwargs: what its `forward` was called with.
            outside_graph: torch ended the graph before this call. `torch.compiler.is_compiling`
                may still return True.
        """
        tracker = getattr(self, "_tracker", None)
        if tracker is None:
            return  # the hooks were removed while a lookup in another thread was calling them
        trains = module.training and _gradients_enabled() and tracker.weight.requires_grad
        # A lookup of a module with max_norm rewrites the rows it reads, also in evaluation and
        # without gradients.
        rewritten = module.max_norm is not None
        if not (trains or rewritten):
            return
        if not outside_graph and _is_compiling():
            # Marking here would split the graph, which fullgraph=True refuses. Two kinds of
            # optimizer do not need it. A known optimizer changes only rows of the gradient, which
            # are marked after its step. An optimizer that changes all rows has all of them marked
            # after its step.
            if rewritten or not tracker.is_marked_after_steps:
                self._before_compiled_lookup(module, args, kwargs, True)  # calls this method again
            return
        if rewritten or not tracker.is_marked_after_steps:
            # The rows of the others are marked after steps, which are refused in a capture.
            refuse_capture(f"a lookup of table {self.table.key!r}")
        try:
            ids = args[0] if args else kwargs["input"]
            if rewritten:
                self._rewrites_rows_of(module, ids)
            tracker.set_bits(ids)
            if trains and tracker.counts is not None:
                tracker.counts.add(ids)
        except IndexError:
            return  # nothing was marked; the lookup itself fails, with torch's message
        except Exception as error:
            # No error here may stop training, and it is safe to mark all rows instead.
            tracker.unexplained(f"a lookup could not be marked ({error})")
            if came_from_handler(error):
                raise
        tracker.unapplied = tracker.unapplied or trains

    def _rewrites_rows_of(self, module: Any, ids: Tensor) -> None:
        """Note that a lookup begins that rewrites the rows of `ids`; `after_lookup` must follow."""
        tracker = self._tracker
        if self.forget_unfinished():
            tracker.unexplained(FAILED_LOOKUP)
        if module.weight is not tracker.weight:
            return  # `functional_call` has put another weight in its place
        self._lookup = RewritingLookup.begun(module, ids)

    def after_lookup(
        self,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outside_graph: bool = False,
    ) -> None:
        """Count the one change of the weight that a lookup marked by `before_lookup` explains.

        Runs after each lookup of a table with max_norm that returned. A further change of the
        weight stays unexplained, and so does the change of a lookup that read other ids.

        Args:
            module: the table's module.
            args, kwargs: what its `forward` was called with.
            outside_graph: see `before_lookup`.
        """
        if not outside_graph and _is_compiling():
            self._after_compiled_lookup(module, args, kwargs, True)  # calls this method again
            return
        lookup, self._lookup = self._lookup, None
        if lookup is None or module.max_norm is None:
            return
        tracker = getattr(self, "_tracker", None)
        if tracker is None:
            return  # as in `before_lookup`
        weight = tracker.weight
        if not lookup.plain:
            if changes_of(weight) != lookup.changes:
                tracker.unexplained(
                    "its module has max_norm and a forward that is not torch's, which may rewrite "
                    "any row"
                )
            return
        ids = args[0] if args else kwargs.get("input")  # a later hook may have replaced the ids
        if module.weight is weight and lookup.explains_change(ids, weight):
            self._rewrites += 1

    def forget_unfinished(self) -> bool:
        """Forget a lookup that rewrites rows, began and never returned; return whether one did.

        A lookup that failed may have rewritten some rows, and torch does not count that change.
        """
        lookup, self._lookup = self._lookup, None
        return lookup is not None

    def take_rewrites(self) -> int:
        """Return how many marked lookups changed the weight since the last call, each once."""
        rewrites, self._rewrites = self._rewrites, 0
        return rewrites
